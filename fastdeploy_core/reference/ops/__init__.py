"""The operations of contracts/ops.py in plain tensor code, grouped by what they work on."""
