"""The subjects of `scripts/benchmark.py`, a file each, and their harness."""
