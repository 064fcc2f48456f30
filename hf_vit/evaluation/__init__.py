"""Metrics that are updated image by image in any number of processes, and classification metrics for `evaluate`."""
