"""Default hyperparameters and time budgets of training runs."""
