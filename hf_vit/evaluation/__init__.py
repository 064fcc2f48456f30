"""Metrics that are updated image by image on any number of processes, and classification metrics of `evaluate`."""
