"""x"""
TABLE: dict[str, str] = {}
