"""What training from a saved backbone needs: a linear probe, and stored features of frozen blocks."""
