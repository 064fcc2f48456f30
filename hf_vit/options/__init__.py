"""Options: their declaration, conversion and checks, recipes, and rules for resumed training runs."""
