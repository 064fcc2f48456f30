"""Training runs and evaluations from start to end: planning, report, model card and upload."""
