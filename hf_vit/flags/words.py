"""Words of a command line that stand alone, before its options."""

from collections.abc import Sequence


def name_words(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns a command line whose first words have names: `photos --seed 1` with "data" is `--data photos --seed 1`.

    Args:
        arguments: The command line. It may start with as many words, or fewer.
        names: The options that these words are values of, in their order.

    Returns:
        The command line, with options alone.
    """
    options: list[str] = []
    rest = list(arguments)
    for name in names:
        if not rest or rest[0].startswith("-"):
            break
        options += [f"--{name}", rest.pop(0)]
    return [*options, *rest]
