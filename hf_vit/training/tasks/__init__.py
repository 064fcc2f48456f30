"""Tasks: what each is told, trains, scores and reports."""
