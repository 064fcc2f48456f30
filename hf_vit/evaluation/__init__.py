"""Metrics of predictions image by image, on any number of processes, and of classifiers as `evaluate.Metric`."""
