"""The operations of contracts/ops/ in plain tensor code, grouped by what they work on."""
