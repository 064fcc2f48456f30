"""Errors for unknown names, which suggest the closest valid one. Needs the standard library only."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


# Options of other libraries that have no counterpart here, and the error that answers them
ANSWERS = {
    **{
        name: f"{name} has nothing to switch on: evaluation follows training by itself, and a saved model is "
        "evaluated or predicts by a command of its own. Leave it out."
        for name in ("do_train", "do_eval", "do_predict")
    },
    "device": "A GPU is used if there is one. Leave device out, or set use_cpu.",
}


def unknown_option(name: str, synonyms: Mapping[str, str], prefix: str = "--") -> str:
    """Return the error for an unknown option.

    Args:
        name: The option, without the dashes before it.
        synonyms: The names that other libraries give to each valid option, separated by spaces.
        prefix: Text before each name that the error suggests.
    """
    wanted = name.replace("-", "_").lower()
    if wanted in ANSWERS:
        return ANSWERS[wanted]
    meant = [option for option, words in synonyms.items() if wanted in words.split()]
    question = f" Did you mean {' or '.join(prefix + option for option in meant)}?" if meant else ""
    return f"There is no option {prefix}{name}.{question or nearest(wanted, synonyms, prefix)}"


def nearest(wanted: str, names: Iterable[str], prefix: str = "") -> str:
    """Return a question that suggests the closest of some names, empty if none is close."""
    meant = get_close_matches(wanted, sorted(names), n=3, cutoff=0.7)
    return f" Did you mean {' or '.join(prefix + name for name in meant)}?" if meant else ""
