"""Show the installed versions, hardware and recipes, or describe a saved or published model.

Examples:
    hf-vit info
    hf-vit info outputs/photos
    hf-vit info facebook/dinov2-small --image 224x160
"""

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from .. import __version__
from ..convert.model_card import read_card_data
from ..extras import install_command
from ..flops import Stage, describe_stages
from ..model.configuration_hf_vit import HfViTConfig, to_pair
from ..model.modeling_hf_vit import HfViTModel
from ..model.pretrained import HfViTPreTrainedModel, read_config
from ..options.names import PACKAGE, named_recipes
from ..tasks import TASKS
from ..training.errors import format_bytes
from ..training.lora import count_parameters


# Possible paths of the file with the tested versions: in an installed package and in a git checkout
CONSTRAINTS = (PACKAGE / "constraints.txt", PACKAGE.parent / ".ci" / "constraints.txt")
MOST_NAMES = 12  # Maximum number of listed class names


def info(model: str | Path | None = None, *, image: str | None = None, report: Callable[[str], None] = print) -> None:
    """Describe the installation or a model. Equivalent to `hf-vit info`.

    Args:
        model: Folder or weights file of a saved model, or name on the Hub; by default the installation is described.
        image: Height and width of an image in pixels, such as 224x160, to also print the shape, parameters and
            operations of each stage of the model.
        report: Function that receives lines of text.

    Raises:
        OSError: if the model does not exist.
        ValueError: if the model cannot be opened, or does not accept the image size.
    """
    model = None if model is None else str(model)
    for line in describe_installation() if model is None else describe_model(model):
        report(line)
    if image is not None:
        if model is None:
            raise ValueError(
                "--image describes the stages of a model. Give a model: hf-vit info MODEL --image 224x160"
            )
        for line in stage_table(read_config(model), image):
            report(line)


def stage_table(content: dict[str, Any], image: str) -> list[str]:
    """Return the lines of a table with all stages of a model, given its config.json and an image size."""
    if content.get("model_type") != "hf_vit":
        raise ValueError(
            f"--image {image} requires an hf_vit model. Convert the model first: hf-vit convert SOURCE OUTPUT"
        )
    height, _, width = image.partition("x")
    if not (height.isdecimal() and width.isdecimal()):
        raise ValueError(f"--image {image} must be height and width in pixels, such as 224x160.")
    model = empty_model(HfViTConfig.from_dict(content))
    stages = describe_stages(model, int(height), int(width))
    parameters, operations = (sum(column) for column in zip(*(stage[2:] for stage in stages), strict=True))
    rows = [("stage", "output shape", "parameters", "GFLOPs")]
    rows += [
        (name, shape, f"{size:,}", f"{count / 1e9:.3f}")
        for name, shape, size, count in [*stages, Stage("total", "", parameters, operations)]
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}" for row in rows
    ]


def describe_installation() -> Iterator[str]:
    """Yield lines with installed versions, hardware, extras and recipes."""
    yield f"hf-vit {__version__}, Python {platform.python_version()}, {platform.platform()}"
    libraries = requirements()
    yield "Libraries: " + ", ".join(f"{name} {version_of(name)}" for name in libraries)
    yield from untested_versions(libraries)
    memory = format_bytes(psutil.virtual_memory().total)
    yield f"Hardware: {os.cpu_count()} CPU cores, {memory} memory, {', '.join(accelerators()) or 'no GPU'}"
    for extra in sorted(metadata.metadata("hf-vit").get_all("Provides-Extra") or []):
        versions = {name: version_of(name) for name in requirements(extra)}
        missing = [name for name, found in versions.items() if found is None]
        state = [f"{name} {found}" for name, found in versions.items() if found is not None]
        state += [f"missing {', '.join(missing)}: {install_command(extra)}"] * bool(missing)
        yield f"Extra {extra}: {', '.join(state)}"
    yield f"Recipes for hf-vit train TASK DATA --recipe NAME: {', '.join(named_recipes())}"


def requirements(extra: str = "") -> dict[str, SpecifierSet]:
    """Return the packages that hf-vit requires, or that one of its extras adds, with the allowed versions."""
    found = map(Requirement, metadata.requires("hf-vit") or [])
    return {r.name: r.specifier for r in found if (r.marker.evaluate({"extra": extra}) if r.marker else not extra)}


def untested_versions(libraries: Mapping[str, SpecifierSet]) -> Iterator[str]:
    """Yield a line for each library that is older than required or newer than the latest tested minor version."""
    file = next(filter(Path.is_file, CONSTRAINTS))
    pins = [line.split("==") for line in file.read_text(encoding="utf-8").splitlines() if "==" in line]
    tested = {canonicalize_name(name): Version(text) for name, text in pins}
    for name, allowed in libraries.items():
        installed, newest = version_of(name), tested[canonicalize_name(name)]
        if installed and (installed not in allowed or installed.release[:2] > newest.release[:2]):
            yield f"Outside of the tested versions ({allowed}, up to {newest}, see {file}): {name} {installed}"


def version_of(name: str) -> Version | None:
    """Return the installed version of a package, or None if it is not installed."""
    try:
        return Version(metadata.version(name))
    except metadata.PackageNotFoundError:
        return None


def accelerators() -> list[str]:
    """Return the names of the GPUs."""
    if torch.cuda.is_available():
        return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return ["Apple GPU"] if torch.backends.mps.is_available() else []


def describe_model(name_or_path: str) -> Iterator[str]:
    """Yield lines with the architecture, task, size, classes and scores of a model."""
    content = read_config(name_or_path)
    architecture = (content.get("architectures") or ["unknown architecture"])[0]
    yield f"{name_or_path}: {architecture} ({content.get('model_type', 'no type')})"
    if content.get("model_type") == "hf_vit":
        yield from describe_hf_vit_model(content)
    names = list((content.get("id2label") or {}).values())
    if names:
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        yield f"Classes: {len(names)}: {', '.join(map(str, names[:MOST_NAMES]))}{more}"
    yield from describe_scores(name_or_path)
    if (file := Path(name_or_path) / "recipe.yaml").is_file():
        yield f"Training options: {file}"


def describe_hf_vit_model(content: dict[str, Any]) -> Iterator[str]:
    """Yield lines with the task, size and geometry of an hf_vit model, given the content of its config.json."""
    config = HfViTConfig.from_dict(content)
    model = empty_model(config)
    task = next((name for name, task in TASKS.items() if task.model_class is type(model)), None)
    if task is not None:
        yield f"Task: {task}"
    image, patch = ("{}x{} pixels".format(*to_pair(size)) for size in (config.image_size, config.patch_size))
    yield (
        f"Size: {count_parameters(model):,} parameters, {config.num_hidden_layers} layers, hidden size "
        f"{config.hidden_size}, images of {image}, patches of {patch}"
    )


def empty_model(config: HfViTConfig) -> HfViTPreTrainedModel:
    """Return a model for a configuration, on the meta device without weights."""
    architecture = str((config.architectures or ["HfViTModel"])[0])
    classes = (task.model_class for task in TASKS.values())
    model_class = next((found for found in classes if found.__name__ == architecture), HfViTModel)
    with torch.device("meta"):
        return model_class(config)


def describe_scores(name_or_path: str) -> Iterator[str]:
    """Yield a line with the evaluation scores in a model card, or nothing if there is no card or no score."""
    data = read_card_data(name_or_path)
    results = [f"{result.metric_type} {result.metric_value:.4g}" for result in data.eval_results or []]
    if results:
        yield f"Scores: {', '.join(results)}, on {data.eval_results[0].dataset_name}"
