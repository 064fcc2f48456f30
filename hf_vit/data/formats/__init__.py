"""Readers of dataset file formats."""
