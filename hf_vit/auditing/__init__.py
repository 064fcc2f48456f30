"""Audit of datasets: wrong labels, duplicates, and selection of images to label."""
