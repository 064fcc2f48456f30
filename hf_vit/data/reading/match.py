"""Recognize the format of a data source: every format of a task is asked, and exactly one must fit."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from transformers.utils import logging

from ..layouts import Layout, find_layout
from .columns import SourceOptions
from .files import Ignored, in_lines


logger = logging.get_logger(__name__)
# Kinds of targets; each has a table of formats in `hf_vit/data/formats/__init__.py`
Target = Literal["classes", "masks", "instances", "depth", "boxes", "points", "captions", "images"]


@dataclass(frozen=True)
class Match:
    """A format that fits a data source.

    Args:
        files: Files that the format found. Their type depends on the format.
        evidence: Names of files or folders that show the format, for messages.
        doubt: End of the error message if no other format fits and `data_format` does not confirm this one; empty if
            it is certain.
        ignored: Files and folders that the format does not read.
        rank: The lowest rank has priority: 0 for annotations, 1 for class folders, and more for formats that fit
            almost any folder.
        layout: Published dataset or export that was recognized, if it describes classes or units.
        name: Name of the format, a key of the table of its target.
        target: Kind of targets to read.
        options: Location of the data, and names of columns.
    """

    files: Any
    evidence: str
    doubt: str = ""
    ignored: Ignored = ()
    rank: int = 0
    layout: Layout | None = None
    name: str = ""
    target: Target = "classes"
    options: SourceOptions = SourceOptions("")

    @property
    def path(self) -> Path:
        """Path of the data source."""
        return self.options.path


class Format(Protocol):
    """A module in `hf_vit/data/formats/` that reads a format."""

    def detect(self, path: Path, target: Target) -> Match | None:
        """Return what the format found at an existing path, or `None` if it does not fit."""

    def read(self, match: Match) -> Any:
        """Read the files of a match."""


def recognize(options: SourceOptions, target: Target, formats: Mapping[str, Format], problem: str) -> Match | None:
    """Return the only format that fits a path, or `None` for the name of a dataset on the Hub.

    Args:
        options: Location of the data. `options.data_format` selects a format if several fit.
        target: Kind of targets to read.
        formats: Formats of this target by name.
        problem: Text that follows the path in the error message if no format fits.

    Raises:
        ValueError: if no or several formats fit.
    """
    given, path = options.data_format, options.path
    if given is not None and given not in formats:
        raise ValueError(f"data_format={given!r} is unknown for this task. Use one of {', '.join(formats)}.")
    if not path.exists():
        return None
    options.check_no_hub_options()
    matches = [
        replace(match, name=name, target=target, options=options)
        for name, own in formats.items()
        if given in (None, name) and (match := own.detect(path, target))
    ]
    clear = [match for match in matches if given or not match.doubt]
    found = [match for match in clear if match.rank == min(other.rank for other in clear)]
    if len(found) > 1:
        lines = in_lines([f"{match.name}: {match.evidence}" for match in found])
        raise ValueError(
            f"{path} fits {len(found)} formats:{lines}\nSet data_format (--data_format) to one of these names."
        )
    for match in clear:
        if match.rank == 1 and match not in found:
            logger.warning(
                "%s fits several formats. Read: %s. Ignored: %s. To read these instead, set data_format to %r.",
                *(path, found[0].evidence, match.evidence, match.name),
            )
    if found:
        return found[0]
    if layout := find_layout(path):
        raise ValueError(f"{path} is {layout.name}. {layout.advice}")
    raise ValueError(" ".join([str(path), *(match.doubt for match in matches)]) if matches else f"{path} {problem}")
