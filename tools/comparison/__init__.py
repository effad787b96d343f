"""What `tools/compare.py` is made of."""
