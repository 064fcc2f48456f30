"""Readers of the files that datasets come in."""
