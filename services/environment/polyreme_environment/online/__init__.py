"""Sessions of a running product: the address that opens them, and what samples their turns."""
