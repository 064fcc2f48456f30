"""Text in the files of datasets: UTF-8, JSON without repeated keys, and flags."""

import json
from collections import Counter
from pathlib import Path
from typing import Any


# Files of VOC have "Unspecified" for what nobody has decided.
FALSE, TRUE = {"", "0", "0.0", "false", "no", "none", "unspecified"}, {"1", "1.0", "true", "yes"}


def flag_of(value: object, name: str) -> bool:
    """Returns whether a number, a truth value or a text ("0", "True", "yes") means true; errors begin with `name`."""
    text = str(value).strip().lower()
    if text not in FALSE | TRUE:
        raise ValueError(f"{name} is {value!r}, which is neither true nor false. Write 1 or 0.")
    return text in TRUE


def read_text(file: Path) -> str:
    """Returns the content of a text file in UTF-8; raises `ValueError` for other encodings."""
    try:
        return file.read_text(encoding="utf-8-sig")  # spreadsheets put a mark in front
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no UTF-8 text: {error}. Save it as UTF-8.") from error


def parse_json(text: str) -> Any:
    """Parses JSON; raises `ValueError` if an object has a key twice, of which `json` keeps the last."""
    return json.loads(text, object_pairs_hook=_without_repeats)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(content := dict(pairs)) < len(pairs):
        ((key, count),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key!r} occurs {count} times in one object; keep one of them")
    return content
