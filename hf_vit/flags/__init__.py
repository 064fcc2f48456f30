"""Options as people write them: parsers, help pages, and recipes by name."""
