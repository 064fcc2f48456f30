"""Data sets for a task, from wherever a user has them."""
