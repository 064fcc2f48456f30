"""Concerns of a training that hang on its events."""
