"""Dataset loaders for each task, from local files or the Hub."""
