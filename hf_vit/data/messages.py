"""How errors and warnings list things that may be many."""

from collections.abc import Collection
from itertools import islice


MAX_LISTED = 20
MAX_NAMED = 10  # of those whose lines are long


def listed(items: Collection[object]) -> str:
    """Returns the first items, quoted, in one line, and how many more there are."""
    more = f", and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    return ", ".join(map(repr, islice(items, MAX_LISTED))) + more


def in_lines(items: Collection[object], limit: int = MAX_LISTED) -> str:
    """Returns the first items, each on a new line of its own, and how many more there are."""
    more = f"\n  and {len(items) - limit} more" if len(items) > limit else ""
    return "".join(f"\n  {item}" for item in islice(items, limit)) + more
