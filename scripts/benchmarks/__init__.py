"""Subjects of `scripts/benchmark.py`, one file per subject, and their shared harness."""
