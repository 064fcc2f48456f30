"""Training with a teacher."""
