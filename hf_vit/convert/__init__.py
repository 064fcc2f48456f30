"""Published checkpoints of other libraries: in, checked, and out again."""
