"""Commands of `hf-vit`, one module per group. The scripts in `scripts/` run the same commands."""
