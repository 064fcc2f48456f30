"""Declare, convert and check options, read and write recipes, and define rules for resumed training runs."""
