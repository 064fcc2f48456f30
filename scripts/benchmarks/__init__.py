"""Benchmarks run by `scripts/benchmark.py`, one file per subject, and the harness that they share."""
