"""Parts that several tasks share: options, default hyperparameters, loading of data and models."""
