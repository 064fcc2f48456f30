"""Fine-tuning of a saved backbone: linear probes, and stored features of frozen blocks."""
