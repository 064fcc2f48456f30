"""Commands of `hf-vit`, one module per group."""
