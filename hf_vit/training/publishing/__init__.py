"""Reports on trained models, their cards, and their upload to the Hub."""
