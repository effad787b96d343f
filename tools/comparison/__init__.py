"""The parts of `tools/compare.py`."""
