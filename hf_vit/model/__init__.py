"""Model code that is saved with every checkpoint: configuration, models, image processors and pipelines."""
