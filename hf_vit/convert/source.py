"""Published checkpoints as files: configuration and weights."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.utils import cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from ..model.remote_code import check_reachable
from .weights import Weights


# Arguments of `from_pretrained` that say where on the Hub files are.
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
# Names of configurations, and of the weights that go with each, the safest first.
NAMES: Mapping[str, tuple[str, ...]] = {
    "config.json": (
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ),
    "open_clip_config.json": ("open_clip_model.safetensors", "open_clip_pytorch_model.bin"),
}


@dataclass(frozen=True)
class Source:
    """A published checkpoint.

    Args:
        name: Folder, file, or name on the Hub, as the user gave it.
        config: Its configuration; empty for a lone file of weights.
        weights: Its tensors.
        hub: Where on the Hub it is: `HUB_ARGUMENTS`.
    """

    name: str
    config: Mapping[str, Any]
    weights: Weights
    hub: Mapping[str, Any] = field(default_factory=dict)


def open_source(
    name_or_path: str | os.PathLike[str], architecture: str | None = None, dataset_index: int | None = None, **hub: Any
) -> Source:
    """Opens a published checkpoint without reading its tensors.

    Args:
        name_or_path: Folder, file of weights, or name on the Hub. Of the configurations in `NAMES` the first that is
            there counts, also beside a file.
        architecture: timm's name of the model, where no configuration says it.
        dataset_index: Which of several experts is taken, where there is one for each dataset.
        **hub: `HUB_ARGUMENTS`.

    Raises:
        OSError: if there is no such checkpoint, it has no weights, or its files are damaged.
    """
    path, place = Path(name_or_path), str(name_or_path)
    given = {"architecture": architecture, "dataset_index": dataset_index}
    told = {name: value for name, value in given.items() if value is not None}
    if path.is_file():
        beside = next((file for file in map(path.with_name, NAMES) if file.is_file()), None)
        return Source(place, told if beside is None else {**told, **read_json(beside)}, Weights([path]))
    check_reachable(place, **hub)
    for config, weights in NAMES.items():
        config_file = find_file(place, config, **hub)
        if config_file is not None:
            content = {**told, **read_json(config_file)}
            return Source(place, content, Weights(find_weights(place, weights, **hub)), hub)
    raise OSError(f"There is no {' or '.join(NAMES)} in {place!r}. Give the folder or repository of a model.")


def find_file(name_or_path: str, name: str, **hub: Any) -> Path | None:
    """Returns the file `name` of a folder or repository, if there is one."""
    file = cached_file(name_or_path, name, **hub, _raise_exceptions_for_missing_entries=False)
    return None if file is None else Path(file)


def read_image_processor(source: Source) -> dict[str, Any]:
    """Returns the options of the image processor beside a checkpoint; empty if there are none."""
    path = Path(source.name)
    file = find_file(str(path.parent) if path.is_file() else source.name, "preprocessor_config.json", **source.hub)
    return {} if file is None else read_json(file)


def find_weights(name_or_path: str, names: Sequence[str], **hub: Any) -> list[Path]:
    """Returns the files of weights of a folder or repository, all shards of the first of `names` that is there."""
    for name in names:
        file = find_file(name_or_path, name, **hub)
        if file is None:
            continue
        if not name.endswith(".index.json"):
            return [file]
        shards, _ = get_checkpoint_shard_files(name_or_path, str(file), **hub)
        return [Path(shard) for shard in shards]
    raise OSError(f"There are no weights in {name_or_path!r}: none of {', '.join(names)}.")


def read_json(file: Path) -> dict[str, Any]:
    """Returns the dictionary in a JSON file; `OSError` if it holds none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OSError(f"{str(file)!r} is no JSON file: {error}") from error
    if not isinstance(content, dict):
        raise OSError(f"{str(file)!r} must hold a JSON object, not {type(content).__name__}.")
    return content
