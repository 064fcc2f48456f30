"""Fine-tuning of a saved backbone: linear probe and stored features of frozen blocks."""
