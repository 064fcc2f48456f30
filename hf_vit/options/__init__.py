"""Options: how a field is declared, how values become dataclasses, recipes, and what must match on resume."""
