"""What is left of a training, and its way to the Hub."""
