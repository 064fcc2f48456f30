"""Export a saved model to ONNX, OpenVINO, torch.export or ExecuTorch, with dynamic batch and image sizes.

The exported program is compared with the model at three batch sizes and three image sizes that were not used for
tracing. If any output differs, nothing is written.

Examples:
    hf-vit export outputs/photos --format onnx --output_dir outputs/photos-onnx
    hf-vit export outputs/cells --format openvino --output_dir outputs/cells-openvino
"""

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
from .programs import TOLERANCE, Difference, compare, example_inputs, min_grid, open_model, output_names


WITH_OTHER_INPUTS = (HfViTForMaskedImageModeling, HfViTForZeroShotImageClassification)
WITHOUT_LABELS = (HfViTModel, HfViTForJointEmbedding, *WITH_OTHER_INPUTS)
RUN = Path(__file__).with_name("run_onnx.py")
TEMPLATE = Path(__file__).with_name("model_card.md")
MEANINGS = {
    "pixel_values": "images (batch, channels, height, width) from the image processor",
    "bool_masked_pos": "mask (batch, patches), true for masked patches",
    "input_ids": "texts (texts, tokens) from the tokenizer",
    "attention_mask": "mask (texts, tokens), 0 for padding, 1 for other tokens",
}
# Image processor options that the exported script `run.py` does not support
UNSUPPORTED_OPTIONS = ("pad_size", "keep_aspect_ratio", "multiple_rounding")


def export_model(
    model: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    format: Annotated[str, (*FORMATS,)] = "onnx",
    *,
    revision: str = "main",
    head: str | None = None,
    report: Callable[[str], None] = print,
    **kwargs: Any,
) -> Path:
    """Exports a saved model with dynamic batch and image size. Equivalent to `hf-vit export`.

    The program is run at three batch sizes and three image sizes that were not traced. The folder is written only if
    all outputs are equal to those of the model, within 1e-4 of the largest value.

    Args:
        model: Folder of a saved model, or its name on the Hub.
        output_dir: New folder.
        format: "onnx", "openvino", "torch" or "executorch".
        revision: Branch, tag or commit on the Hub.
        head: Head of a multi-task model; by default all heads.
        report: Called with lines of text that report the differences.
        **kwargs: Arguments of `from_pretrained`.

    Returns:
        The folder, which contains the program, config.json, labels.json, preprocessor_config.json, a model card and,
        for ONNX, run.py.

    Raises:
        ValueError: if the model cannot be exported to the format, or outputs differ.
        OSError: if there is no such model, or the folder cannot be written.
        ImportError: if a package is missing.
    """
    chosen, kwargs = check_format(format), {**kwargs, "revision": revision, **({} if head is None else {"head": head})}
    check_new_folder(output_dir)
    source = os.fspath(model)
    opened = open_model(source, **kwargs)
    bounds = chosen.bounds(opened)
    with new_folder(output_dir) as folder:
        file = folder / chosen.file
        try:
            write_program(opened, chosen, file)
        except Exception as error:  # Exporters raise errors of different types.
            others = " or ".join(name for name in FORMATS if name != format)
            fault = first_line(error).rstrip(".")
            raise ValueError(
                f"The format {format} does not support {type(opened).__name__} of {source}: {fault}. Choose {others}."
            ) from error
        rows = []
        for row in compare(opened, chosen.open(file, output_names(opened)), bounds):
            rows.append(row)
            report(str(row))
        if wrong := [row for row in rows if not row.is_equal]:
            raise ValueError(
                f"The outputs of the program differ from those of the model, so nothing was written: {wrong[0]}, more "
                f"than {TOLERANCE:.0e}. Choose a format other than {format}."
            )
        write_companions(folder, opened, source, chosen, rows, **kwargs)
    report(f"Saved {output_dir}. Outputs are equal at {len({row[:3] for row in rows})} sizes that were not traced.")
    return Path(output_dir)


def write_companions(
    folder: Path, model: HfViTPreTrainedModel, source: str, chosen: Format, rows: Sequence[Difference], **kwargs: Any
) -> None:
    """Writes the files that accompany a program: config, labels, image processor, tokenizer, script and model card."""
    model.config.to_json_file(folder / "config.json")
    of_heads = {name: model.config.for_head(name).id2label for name in model.config.heads}
    labels = {} if isinstance(model, WITHOUT_LABELS) else of_heads or model.config.id2label
    (folder / "labels.json").write_text(json.dumps(labels, indent=2) + "\n", encoding="utf-8")
    image_processor = load_image_processor(source, **kwargs)
    image_processor.to_json_file(folder / "preprocessor_config.json")
    if isinstance(model, HfViTForZeroShotImageClassification):
        load_tokenizer(model, source, **kwargs).save_pretrained(folder)
    options = json.loads(image_processor.to_json_string())
    missing = missing_script_reason(model, chosen.name, options)
    if missing is None:
        shutil.copy(RUN, folder / "run.py")
    write_card(folder, model, source, chosen, rows, missing, options.get("window_scale"))


def missing_script_reason(model: HfViTPreTrainedModel, format: str, options: Mapping[str, Any]) -> str | None:
    """Returns the reason why `run.py` does not support a program, or None. `options` are of the image processor."""
    if format != "onnx":
        return "it supports ONNX only"
    if isinstance(model, WITH_OTHER_INPUTS):
        return "the model has inputs other than images"
    if steps := [name for name in UNSUPPORTED_OPTIONS if options.get(name) not in (None, False, "nearest")]:
        return f"it does not support the image processor option {steps[0]}"
    size = {name: value for name, value in options["size"].items() if value is not None}
    if options["do_resize"] and {*size} not in ({"height", "width"}, {"shortest_edge"}):
        return f"it does not support the image processor size {size}"
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
    """Writes the model card, README.md.

    `missing` is the reason why `run.py` was not written. `window_scale` is the image processor option for sliding
    windows, which programs do not support.
    """
    name, least = Path(source).name, min_grid(model)
    inputs, bounds, patch = example_inputs(model, 1, least), chosen.bounds(model), to_pair(model.config.patch_size)
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
        least=[side * size for side, size in zip(least, patch, strict=True)],
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
    """Returns the opset version of an ONNX file."""
    import onnx

    return next(entry.version for entry in onnx.load(file, load_external_data=False).opset_import if not entry.domain)
