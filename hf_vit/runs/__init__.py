"""Work on saved models after a training run: calibration, description and upload."""
