"""What travels with every checkpoint: configuration, models, image processors, pipelines."""
