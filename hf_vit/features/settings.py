"""What features are of, in a small file beside them, so that a folder never holds those of two models."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import BaseImageProcessor, PreTrainedModel

from ..data.formats.files import listed


SETTINGS_NAME = "features.json"
PLACES = ("model", "dataset")  # where things lay, which says nothing about what they are


@dataclass(frozen=True)
class FeatureSettings:
    """What decides about the features in a folder.

    Args:
        model: Where the model was.
        dataset: Where the images were.
        weights: Digest of its weights.
        image_processor: Digest of what is done to images.
        files: Digest of what the images are called.
        images: Number of images of each split.
        features: What was asked for.
        dtype: Type of the numbers.
        rows_per_shard: Number of images of a full file.
    """

    model: str
    dataset: str
    weights: str
    image_processor: str
    files: str
    images: dict[str, int]
    features: list[str]
    dtype: str
    rows_per_shard: int

    @classmethod
    def read(cls, folder: Path) -> "FeatureSettings":
        """Reads what stands in a folder.

        Raises:
            OSError: if the folder holds no features.
        """
        file = folder / SETTINGS_NAME
        if not file.is_file():
            raise OSError(f"{folder} holds no features, as there is no {file}. Make some: extract_features.py.")
        return cls(**json.loads(file.read_text(encoding="utf-8")))

    def begin(self, folder: Path) -> None:
        """Writes the settings into a new folder, or compares them with those of the features that stand there.

        Raises:
            ValueError: if the folder holds other features, or other files.
        """
        file = folder / SETTINGS_NAME
        if file.is_file():
            self._check_same(FeatureSettings.read(folder), folder)
            return
        if folder.exists() and (found := sorted(path.name for path in folder.iterdir())):
            raise ValueError(f"{folder} holds {listed(found)}, which are no features. Give another --output_dir.")
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".part")
        unfinished.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        unfinished.replace(file)

    def _check_same(self, begun: "FeatureSettings", folder: Path) -> None:
        then, now = asdict(begun), asdict(self)
        if changed := [name for name in now if name not in PLACES and then[name] != now[name]]:
            differences = "; ".join(f"{name}: {then[name]} then, {now[name]} now" for name in changed)
            raise ValueError(
                f"{folder} holds features of {begun.model} on {begun.dataset}, made with other settings "
                f"({differences}). Go on with these, or give another --output_dir."
            )

    def check_comparable(self, other: "FeatureSettings") -> None:
        """Raises `ValueError` if other features are of another model, or were made in another way."""
        for name in ("weights", "image_processor"):
            if vars(self)[name] != vars(other)[name]:
                raise ValueError(
                    f"The features are of two models: their {name} differ ({self.model} and {other.model}). Extract "
                    "both with the same one."
                )


def digest(parts: Iterable[str | bytes]) -> str:
    """Returns 16 letters that are others for other contents."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part if isinstance(part, bytes) else part.encode())
    return found.hexdigest()[:16]


def digest_weights(model: PreTrainedModel) -> str:
    """Returns the digest of all weights of a model."""
    return digest(
        part
        for name, weight in sorted(model.state_dict().items())
        for part in (f"{name} {weight.dtype} {tuple(weight.shape)}", _bytes_of(weight))
    )


def _bytes_of(weight: Tensor) -> bytes:
    flat: bytes = weight.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return flat


def digest_processor(processor: BaseImageProcessor) -> str:
    """Returns the digest of what an image processor does."""
    return digest([processor.to_json_string()])
