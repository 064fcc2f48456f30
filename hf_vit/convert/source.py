"""Read the configuration and weights of published checkpoints in several file formats."""

import argparse
import json
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from ..model.remote_code import check_reachable


# Arguments of `from_pretrained` that locate files on the Hub
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
# Maps each configuration file name to the possible names of weight files, safest format first
NAMES: Mapping[str, tuple[str, ...]] = {
    "config.json": (
        *("model.safetensors", "model.safetensors.index.json"),
        *("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ),
    "open_clip_config.json": ("open_clip_model.safetensors", "open_clip_pytorch_model.bin"),
}
# Keys under which training scripts store the weights in a checkpoint dictionary. They may be nested in this order.
WRAPPERS = ("model", "state_dict", "model_state_dict", "teacher")


class Weights:
    """Tensors of a checkpoint by name, read lazily from one file or from several shards of the same format.

    Supported formats are `.safetensors`, `.npz`, and torch pickle files (`.pth`, `.pt`, `.bin`). Pickle files are
    loaded with `weights_only=True`, so code in these files is not executed.

    Raises:
        OSError: if a file is damaged or truncated, or is not a weight file.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        self._tensors: dict[str, Any] = {}
        self._file_of: dict[str, Path] = {}
        self._temporary_files: dict[Path, Any] = {}
        self._stored_name: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in self.files:
            for name, shape, tensor in _open(file):
                self._file_of[name], self.shapes[name], self._tensors[name] = file, shape, tensor

    def file_of(self, name: str) -> Path:
        """Returns the file that contains a tensor, or the first file if no file contains the tensor."""
        return self._file_of.get(name, self.files[0])

    def read(self, name: str) -> Tensor:
        """Returns a tensor by name. Tensors in safetensors files are memory-mapped, not copied."""
        return self._tensors[name][...]

    def read_temporary(self, names: Sequence[str]) -> list[Tensor]:
        """Returns tensors that must not be used after a call of `release`, such as inputs of a conversion.

        Tensors in safetensors files come from a separate memory mapping, so `release` can free their memory while
        tensors returned by `read` stay valid.
        """
        if self.files[0].suffix != ".safetensors":
            return [self.read(name) for name in names]
        for file in map(self.file_of, names):
            if file not in self._temporary_files:
                self._temporary_files[file] = _open_safetensors(file)
        stored = [self._stored_name.get(name, name) for name in names]
        return [
            self._temporary_files[self.file_of(name)].get_tensor(other)
            for name, other in zip(names, stored, strict=True)
        ]

    def rename(self, names: Mapping[str, str]) -> None:
        """Renames tensors; `names` maps old to new names."""
        for name, new in names.items():
            self._stored_name[new] = name
            self._file_of[new] = self._file_of.pop(name)
            self.shapes[new] = self.shapes.pop(name)
            self._tensors[new] = self._tensors.pop(name)

    def release(self) -> None:
        """Frees the memory of the tensors returned by `read_temporary`."""
        self._temporary_files.clear()


@dataclass(frozen=True)
class Source:
    """A published checkpoint.

    Args:
        name: Folder, file, or name on the Hub, as given by the user.
        config: Configuration of the checkpoint; empty for a file of weights without a configuration.
        weights: Tensors of the checkpoint.
        hub: Arguments that locate the checkpoint on the Hub, see `HUB_ARGUMENTS`.
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
        name_or_path: Folder, file of weights, or name on the Hub. The configuration is the first existing file of
            `NAMES` in the folder or next to the file of weights.
        architecture: Model name in timm, for timm checkpoints whose configuration does not contain the name.
        dataset_index: Index of the expert to use, for models with one expert per dataset (ViTPose+).
        **hub: Arguments that locate the checkpoint on the Hub, see `HUB_ARGUMENTS`.

    Raises:
        OSError: if the checkpoint does not exist, has no weights, or contains a damaged file.
    """
    path, place = Path(name_or_path), str(name_or_path)
    given = {"architecture": architecture, "dataset_index": dataset_index}
    report_lines = {name: value for name, value in given.items() if value is not None}
    if path.is_file():
        beside = next((file for file in map(path.with_name, NAMES) if file.is_file()), None)
        return Source(
            place, report_lines if beside is None else {**report_lines, **read_json(beside)}, Weights([path])
        )
    check_reachable(place, **hub)
    for config, weights in NAMES.items():
        config_file = find_file(place, config, **hub)
        if config_file is not None:
            content = {**report_lines, **read_json(config_file)}
            return Source(place, content, Weights(find_weights(place, weights, **hub)), hub)
    raise OSError(f"{place!r} contains no {' or '.join(NAMES)}. Pass the folder or repository of a model.")


def find_file(name_or_path: str, name: str, **hub: Any) -> Path | None:
    """Returns the path of the file `name` in a folder or repository, or None if the file does not exist."""
    file = cached_file(name_or_path, name, **hub, _raise_exceptions_for_missing_entries=False)
    return None if file is None else Path(file)


def read_image_processor(source: Source) -> dict[str, Any]:
    """Returns the content of preprocessor_config.json, or an empty dictionary if the checkpoint has no such file."""
    path = Path(source.name)
    file = find_file(str(path.parent) if path.is_file() else source.name, "preprocessor_config.json", **source.hub)
    return {} if file is None else read_json(file)


def find_weights(name_or_path: str, names: Sequence[str], **hub: Any) -> list[Path]:
    """Returns the weight files in a folder or repository: all shards of the first file in `names` that exists."""
    for name in names:
        file = find_file(name_or_path, name, **hub)
        if file is None:
            continue
        if not name.endswith(".index.json"):
            return [file]
        shards, _ = get_checkpoint_shard_files(name_or_path, str(file), **hub)
        return [Path(shard) for shard in shards]
    raise OSError(f"{name_or_path!r} contains no weights: none of the files {', '.join(names)} exists.")


def read_json(file: Path) -> dict[str, Any]:
    """Returns the dictionary in a JSON file; raises `OSError` if the file is not JSON or not a dictionary."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OSError(f"{str(file)!r} is not a JSON file: {error}") from error
    if not isinstance(content, dict):
        raise OSError(f"{str(file)!r} must contain a JSON object, not {type(content).__name__}.")
    return content


def _open(file: Path) -> Iterator[tuple[str, tuple[int, ...], Any]]:
    """Yields the name, shape and data of each tensor in a file. The data is a tensor or a lazy, indexable object."""
    if not file.is_file():
        raise OSError(f"There is no file {str(file)!r}.")
    match file.suffix:
        case ".safetensors":
            with _open_safetensors(file) as handle:
                for name in handle.keys():  # noqa: SIM118 - the handle is not a dictionary
                    tensor = handle.get_slice(name)
                    yield name, tuple(tensor.get_shape()), tensor
        case ".npz":
            yield from _open_npz(file)
        case ".pth" | ".pt" | ".bin":
            for name, tensor in _open_pickled(file).items():
                yield name, tuple(tensor.shape), tensor
        case _:
            raise OSError(
                f"{str(file)!r} is not a file of weights. Pass a .safetensors, .npz, .pth, .pt or .bin file."
            )


def _open_safetensors(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise OSError(
            f"{str(file)!r} is damaged or truncated: {error}. Download it again (force_download=True)."
        ) from error


@dataclass(frozen=True)
class _NpzArray:
    """An array in a `.npz` file that is read when it is indexed."""

    file: Path
    name: str

    def __getitem__(self, index: Any) -> Tensor:
        with _readable(self.file), np.load(self.file, allow_pickle=False) as arrays:
            return torch.from_numpy(np.ascontiguousarray(arrays[self.name]))[index]


def _open_npz(file: Path) -> Iterator[tuple[str, tuple[int, ...], Any]]:
    with _readable(file), zipfile.ZipFile(file) as archive:
        for entry in archive.namelist():
            with archive.open(entry) as stream:
                is_first = np.lib.format.read_magic(stream) == (1, 0)
                read = np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(stream)
            name = entry.removesuffix(".npy")
            if dtype.kind not in "fiub":
                raise OSError(f"{str(file)!r} contains {name!r} with dtype {dtype}, which torch does not support.")
            yield name, shape, _NpzArray(file, name)


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError) as error:
        raise OSError(f"{str(file)!r} is damaged or truncated: {error}. Download it again.") from error


def _open_pickled(file: Path) -> dict[str, Tensor]:
    content = _unpickle(file)
    for wrapper in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise OSError(f"{str(file)!r} does not contain a dictionary of tensors. Save the model's state_dict().")
    return content


def _unpickle(file: Path) -> Any:
    check_pickled(file)
    try:
        # argparse.Namespace is safe plain data. Many checkpoints use it to store the options of their training run.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except UnpicklingError as error:  # The message of torch is left out, because it suggests running the code.
        code = re.search(r"GLOBAL (\S+)", str(error))
        if code is None:
            raise OSError(f"{str(file)!r} is damaged or truncated. Download it again.") from None
        raise OSError(
            f"{str(file)!r} contains objects other than weights ({code[1]}). Loading them could run code in the file, "
            "which is not allowed. Save only the model's state_dict()."
        ) from None
    except Exception as error:  # For damaged files, the unpickler may raise any type of exception.
        raise OSError(
            f"{str(file)!r} is damaged or truncated: {type(error).__name__}: {error}. Download it again."
        ) from error


def check_pickled(file: Path) -> None:
    """Raises `OSError` if a file is a TorchScript archive or does not start like a file written by `torch.save`."""
    if zipfile.is_zipfile(file):
        with _readable(file), zipfile.ZipFile(file) as archive:
            names = archive.namelist()
        if any(name.endswith("/constants.pkl") for name in names):
            raise OSError(
                f"{str(file)!r} is a TorchScript archive, which contains code in addition to weights. Use the model "
                "from the Hub (OpenAI's ViT-B-32.pt is openai/clip-vit-base-patch32), or save its state_dict() to a "
                "file."
            )
        return
    with file.open("rb") as stream:
        start = stream.read(16)
    if not start.startswith((b"PK", b"\x80")):  # first bytes of zip archives and pickles
        raise OSError(f"{str(file)!r} begins with {start!r}, so it is not a file of weights. Download it again.")
