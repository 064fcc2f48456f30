"""The commands of `hf-vit`, one file per command."""
