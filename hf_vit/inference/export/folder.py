"""Exports a model to a folder that holds what running it takes, once its program has proved equal to the model."""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from huggingface_hub import ModelCard, ModelCardData

from ...convert import load_image_processor
from ...convert.model_card import escape_markdown
from ...convert.processors import load_tokenizer
from ...model.configuration_hf_vit import to_pair
from ...model.modeling_hf_vit import HfViTModel
from ...model.pretrained import HfViTPreTrainedModel
from ...model.task_joint_embedding import HfViTForJointEmbedding
from ...model.task_masked_image_modeling import HfViTForMaskedImageModeling
from ...model.task_zero_shot_image_classification import HfViTForZeroShotImageClassification
from ...outputs import check_new_folder, new_folder
from ..ahead_of_time import first_line
from .formats import FORMATS, Format, check_format, write_program
from .programs import TOLERANCE, Difference, compare, example_inputs, least_grid, open_model, output_names


WITH_OTHER_INPUTS = (HfViTForMaskedImageModeling, HfViTForZeroShotImageClassification)
WITHOUT_LABELS = (HfViTModel, HfViTForJointEmbedding, *WITH_OTHER_INPUTS)
RUN = Path(__file__).with_name("run_onnx.py")
TEMPLATE = Path(__file__).with_name("model_card.md")
MEANINGS = {
    "pixel_values": "images (batch, channels, height, width), as the image processor makes them",
    "bool_masked_pos": "(batch, patches), true where a patch is hidden",
    "input_ids": "texts (texts, tokens), as the tokenizer makes them",
    "attention_mask": "the same, 0 where a token is padding",
}
# Steps of an image processor that `run.py` does not know
UNKNOWN_STEPS = ("pad_size", "keep_aspect_ratio", "multiple_rounding")


def export_model(
    model: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    format: Annotated[str, (*FORMATS,)] = "onnx",
    *,
    revision: str = "main",
    report: Callable[[str], None] = print,
    **kwargs: Any,
) -> Path:
    """Exports a saved model, batch and image size left open, as `hf-vit export` does.

    The program is run in its runtime beside the model at three batches and three image sizes that were not traced, and
    nothing is written unless all outputs are equal, up to 1e-4 of the largest value.

    Args:
        model: Folder of a saved model, or its name on the Hub.
        output_dir: New folder.
        format: "onnx", "openvino", "torch" or "executorch".
        revision: Branch, tag or commit on the Hub.
        report: Called with lines of text on how equal it is.
        **kwargs: For `from_pretrained`.

    Returns:
        The folder: the program, config.json, labels.json, preprocessor_config.json, a card, and for ONNX run.py.

    Raises:
        ValueError: if the model cannot be exported to the format, or its program is not equal to it.
        OSError: if there is no such model, or nothing can be written.
        ImportError: if a package is missing.
    """
    chosen, kwargs["revision"] = check_format(format), revision
    check_new_folder(output_dir)
    source = os.fspath(model)
    opened = open_model(source, **kwargs)
    bounds = chosen.bounds(opened)
    with new_folder(output_dir) as folder:
        file = folder / chosen.file
        try:
            write_program(opened, chosen, file)
        except Exception as error:  # each format has its own
            others = " or ".join(name for name in FORMATS if name != format)
            fault = first_line(error).rstrip(".")
            raise ValueError(
                f"The format {format} cannot express {type(opened).__name__} of {source}: {fault}. Choose {others}."
            ) from error
        rows = []
        for row in compare(opened, chosen.open(file, output_names(opened)), bounds):
            rows.append(row)
            report(str(row))
        if wrong := [row for row in rows if not row.is_equal]:
            raise ValueError(
                f"The program is not equal to the model, so nothing was written: {wrong[0]}, more than "
                f"{TOLERANCE:.0e}. Choose another format than {format}."
            )
        write_companions(folder, opened, source, chosen, rows, **kwargs)
    report(f"Saved {output_dir}: equal at {len({row[:3] for row in rows})} sizes that were not traced.")
    return Path(output_dir)


def write_companions(
    folder: Path, model: HfViTPreTrainedModel, source: str, chosen: Format, rows: Sequence[Difference], **kwargs: Any
) -> None:
    """Writes what a program needs beside it: config, labels, image processor, tokenizer, a script and a card."""
    model.config.to_json_file(folder / "config.json")
    labels = {} if isinstance(model, WITHOUT_LABELS) else model.config.id2label
    (folder / "labels.json").write_text(json.dumps(labels, indent=2) + "\n", encoding="utf-8")
    image_processor = load_image_processor(source, **kwargs)
    image_processor.to_json_file(folder / "preprocessor_config.json")
    if isinstance(model, HfViTForZeroShotImageClassification):
        load_tokenizer(model, source, **kwargs).save_pretrained(folder)
    options = json.loads(image_processor.to_json_string())
    missing = why_no_script(model, chosen.name, options)
    if missing is None:
        shutil.copy(RUN, folder / "run.py")
    write_card(folder, model, source, chosen, rows, missing, options.get("window_scale"))


def why_no_script(model: HfViTPreTrainedModel, format: str, options: Mapping[str, Any]) -> str | None:
    """Returns why there is no `run.py` for a model with an image processor of such options; None if there is one."""
    if format != "onnx":
        return "it is written for ONNX alone"
    if isinstance(model, WITH_OTHER_INPUTS):
        return "the model takes more than images"
    if steps := [name for name in UNKNOWN_STEPS if options.get(name) not in (None, False, "nearest")]:
        return f"it does not know the step {steps[0]} of the image processor"
    size = {name: value for name, value in options["size"].items() if value is not None}
    if options["do_resize"] and {*size} not in ({"height", "width"}, {"shortest_edge"}):
        return f"it does not know the size {size} of the image processor"
    return None


def write_card(
    folder: Path,
    model: HfViTPreTrainedModel,
    source: str,
    chosen: Format,
    rows: Sequence[Difference],
    missing: str | None,
    window_scale: float | None,
) -> None:
    """Writes README.md.

    Args:
        folder: Where the program is.
        model: Of which it is the program.
        source: Folder or name that the model was opened from.
        chosen: The format.
        rows: How equal program and model are.
        missing: Why there is no `run.py`; None if there is one.
        window_scale: That of the image processor, which a program does not follow.
    """
    name = Path(source).name
    inputs = example_inputs(model, 1, least_grid(model))
    bounds, patch = chosen.bounds(model), to_pair(model.config.patch_size)
    card = ModelCard.from_template(
        ModelCardData(tags=["vision", "hf_vit", chosen.name], base_model=None if Path(source).exists() else source),
        template_path=str(TEMPLATE),
        name=escape_markdown(name),
        source=(name if Path(source).exists() else source).replace("`", "'"),
        architecture=type(model).__name__,
        format=chosen.name,
        chosen=chosen,
        inputs={name: (value.dtype, MEANINGS[name]) for name, value in inputs.items()},
        outputs=[row.output for row in rows if row[:3] == rows[0][:3]],
        rows=rows,
        patch=patch,
        least=[side * size for side, size in zip(least_grid(model), patch, strict=True)],
        largest=None if bounds.grid is None else [side * size for side, size in zip(bounds.grid, patch, strict=True)],
        most_images=bounds.batch,
        megabytes=sum(file.stat().st_size for file in folder.iterdir()) / 1e6,
        versions={name: version(name) for name in ("torch", "transformers", *chosen.packages)},
        opset=opset_of(folder / chosen.file) if chosen.name == "onnx" else None,
        missing=missing,
        window_scale=window_scale,
    )
    card.save(folder / "README.md")


def opset_of(file: Path) -> int:
    """Returns the opset of an ONNX file."""
    import onnx

    return next(entry.version for entry in onnx.load(file, load_external_data=False).opset_import if not entry.domain)
