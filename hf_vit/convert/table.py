"""The families that go in, as a table for people."""

from .families import FAMILIES


def families_table() -> str:
    """Returns a Markdown table of what goes in and what is equal to the source."""
    rows = [("family", "source", "equal to the source"), ("---",) * 3]
    rows += [(family.name, family.source, family.outputs) for family in FAMILIES]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
