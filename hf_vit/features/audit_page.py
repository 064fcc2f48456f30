"""Write the result of an audit as an HTML page that needs no other files."""

import base64
import os
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from PIL import Image

from ..outputs import write_atomically


if TYPE_CHECKING:
    from .audit import Audit

MAX_TILES = 60  # maximum number of pictures of each kind
TILE_SIDE = 180  # longer side of pictures in pixels
BAR_WIDTH = 300  # width of the longest bar in pixels
# Title and explanation of each kind of issue, in the order of the page
TEXTS = {
    "wrong_label": (
        "Labels that may be wrong",
        "A linear probe that was trained without the image predicts another class: given → suggested.",
    ),
    "wrong_boxes": (
        "Boxes that the model contradicts",
        "Green: given boxes. Red: no box given. Magenta: another class. Cyan: the model finds no such object there.",
    ),
    "wrong_mask": ("Masks that the model contradicts", "Red: pixels whose given class is unlikely."),
    "duplicate": ("Identical images", "Each image has the same pixels as the image next to it."),
    "near_duplicate": (
        "Near duplicates",
        "Resized, compressed, mirrored, cropped or brighter copies, or frames of the same scene.",
    ),
    "outlier": ("Images unlike the rest", "Features far from those of all other images."),
    "broken": ("Images that cannot be read", ""),
    "dark": ("Dark images", ""),
    "blank": ("Images without content", "Nearly the same brightness everywhere."),
    "tiny": ("Tiny images", "The shorter side is below a quarter of the median."),
}


def write_page(audit: "Audit", file: Path) -> None:
    """Write the page of an audit."""
    sections = [_section(audit, kind) for kind in TEXTS if kind in audit.scores]
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(
        Path(__file__).with_name("audit.html").read_text(encoding="utf-8")
    )
    sizes = ", ".join(f"{len(rows):,} {name}" for name, rows in audit.splits.items())
    page = template.render(
        data=audit.data,
        model=audit.model,
        summary=f"{len(audit.files):,} images ({sizes}).",
        notes=audit.notes,
        sections=sections,
        splits=list(audit.splits),
        balance=_balance(audit.counts, list(audit.splits)),
    )
    write_atomically(file, page)


def _section(audit: "Audit", kind: str) -> dict[str, Any]:
    title, text = TEXTS[kind]
    (found,) = np.nonzero(audit.found[kind])
    shown = found[np.argsort(-audit.scores[kind][found], kind="stable")][:MAX_TILES]
    is_wide = kind in ("wrong_boxes", "wrong_mask")
    tiles = [_tile(audit, kind, int(number), is_wide) for number in shown]
    return {"kind": kind, "title": title, "text": text, "count": len(found), "tiles": tiles, "is_wide": is_wide}


def _tile(audit: "Audit", kind: str, number: int, is_wide: bool) -> dict[str, Any]:
    numbers = [number, int(audit.copy_of[number])] if "duplicate" in kind else [number]
    if kind == "wrong_label":
        text = f"{audit.labels[number]} → {audit.suggestions[number]}"
    elif is_wide or kind == "broken":
        text = audit.texts[number]
    else:
        text = " / ".join(dict.fromkeys(audit.labels[n] or "" for n in numbers))
    pictures = [audit.pictures.get(number)] if is_wide else [audit.open(n) for n in numbers]
    files = [f"{audit.split_of[n]}: {os.path.relpath(audit.files[n], audit.root)}" for n in numbers]
    shown = [encode_picture(picture) for picture in pictures if picture is not None]
    return {"pictures": shown, "text": text, "score": f"{audit.scores[kind][number]:.2f}", "files": files}


def encode_picture(picture: Image.Image, side: int = TILE_SIDE) -> str:
    """Return a small JPEG copy of a picture as a data URL."""
    small, stream = picture.convert("RGB"), BytesIO()
    small.thumbnail((2 * side, 2 * side))
    small.save(stream, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"


def _balance(counts: Mapping[str, Mapping[str, int]], splits: Sequence[str]) -> list[dict[str, Any]]:
    most = max((sum(own.values()) for own in counts.values()), default=1)
    return [
        {
            "name": name,
            "counts": [own.get(split, 0) for split in splits],
            "width": round(BAR_WIDTH * sum(own.values()) / most),
        }
        for name, own in sorted(counts.items(), key=lambda item: -sum(item[1].values()))
    ]
