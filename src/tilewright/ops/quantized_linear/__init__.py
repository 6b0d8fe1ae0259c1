"""Linear layers with weights of 8 or 4 bits; see `op.py`."""
