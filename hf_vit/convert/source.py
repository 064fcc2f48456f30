"""Where a published checkpoint is: its configuration and its files of weights."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.utils import cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from .weights import Weights


# Arguments of `from_pretrained` that say where on the Hub files are.
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
# What may stand beside a file of weights.
CONFIGS = ("config.json", "open_clip_config.json")
# Names of weights in a folder or repository, the safest first.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class Source:
    """A published checkpoint.

    Args:
        name: Folder, file, or name on the Hub, as the user gave it.
        config: Its config.json; empty for a lone file of weights.
        weights: Its tensors.
        hub: Where on the Hub it is: `HUB_ARGUMENTS`.
    """

    name: str
    config: Mapping[str, Any]
    weights: Weights
    hub: Mapping[str, Any] = field(default_factory=dict)


def open_source(name_or_path: str | os.PathLike[str], **hub: Any) -> Source:
    """Opens a published checkpoint without reading its tensors.

    Args:
        name_or_path: Folder, file of weights, or name on the Hub. Beside a file, `CONFIGS` are looked for.
        **hub: `HUB_ARGUMENTS`.

    Raises:
        OSError: if there is no such checkpoint, it has no weights, or its files are damaged.
    """
    path = Path(name_or_path)
    if path.is_file():
        beside = next((file for file in map(path.with_name, CONFIGS) if file.is_file()), None)
        return Source(str(name_or_path), {} if beside is None else read_json(beside), Weights([path]))
    config_file = cached_file(str(name_or_path), "config.json", **hub)
    if config_file is None:
        raise OSError(f"There is no config.json in {str(name_or_path)!r}. Give the folder or repository of a model.")
    weights = Weights(find_weights(str(name_or_path), **hub))
    return Source(str(name_or_path), read_json(Path(config_file)), weights, hub)


def find_weights(name_or_path: str, **hub: Any) -> list[Path]:
    """Returns the files of weights of a folder or repository, all shards of them.

    Raises:
        OSError: if there are none, or a shard is missing.
    """
    options = {**hub, "_raise_exceptions_for_missing_entries": False}
    for name in WEIGHTS:
        file = cached_file(name_or_path, name, **options)
        if file is None:
            continue
        if not name.endswith(".index.json"):
            return [Path(file)]
        shards, _ = get_checkpoint_shard_files(name_or_path, file, **hub)
        return [Path(shard) for shard in shards]
    raise OSError(f"There are no weights in {name_or_path!r}: none of {', '.join(WEIGHTS)}.")


def read_json(file: Path) -> dict[str, Any]:
    """Returns the dictionary in a JSON file.

    Raises:
        OSError: if it holds none.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OSError(f"{str(file)!r} is no JSON file: {error}") from error
    if not isinstance(content, dict):
        raise OSError(f"{str(file)!r} must hold a JSON object, not {type(content).__name__}.")
    return content
