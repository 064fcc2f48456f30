"""Reports about trained models, model cards, and uploads to the Hub."""
