"""Convert a published ViT checkpoint to an hf_vit model, or export an hf_vit model to the layout of another library.

After a conversion the outputs are compared with those of the original implementation. If they differ, nothing is
written.

Examples:
    hf-vit convert facebook/dinov2-base outputs/dinov2-base
    hf-vit convert facebook/vit-mae-base outputs/mae-384 --config_overrides '{"image_size": 384}'
    hf-vit convert outputs/digits outputs/digits-vit --to vit
    hf-vit convert notebook.pth outputs/mine --num_attention_heads 8 --hidden_act gelu --norm_first true
    hf-vit convert --list
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from .. import convert as conversion
from ..model.configuration_hf_vit import check_fields
from ..model.image_processing_hf_vit import HfViTImageProcessor
from ..model.pretrained import read_config
from ..outputs import check_new_folder, new_folder
from .loading import Converted, peak_memory
from .parity import OutputParity
from .source import Source


def convert_model(
    source: str | Path | None = None,
    output: str | Path | None = None,
    *,
    to: Annotated[str | None, (*conversion.LAYOUTS,)] = None,
    task: Annotated[str | None, (*conversion.TASKS,)] = None,
    config_overrides: dict[str, Any] | None = None,
    architecture: str | None = None,
    dataset_index: int | None = None,
    num_attention_heads: int | None = None,
    hidden_act: str | None = None,
    norm_first: bool | None = None,
    dtype: Annotated[str | None, ("float32", "bfloat16", "float16")] = None,
    revision: str = "main",
    skip_parity: bool = False,
    write_anyway: bool = False,
    list: bool = False,
    report: Callable[[str], None] = print,
) -> None:
    """Convert a published checkpoint, or export an hf_vit model to another layout. Equivalent to `hf-vit convert`.

    Args:
        source: Checkpoint to convert or export: a folder, a weights file, or a name on the Hub.
        output: New folder for the result.
        to: Export an hf_vit model to this layout, instead of converting a published checkpoint.
        task: Task of the converted model; by default the task that the checkpoint was trained for.
        config_overrides: Configuration fields to change, as a JSON object.
        architecture: timm name of the architecture, for a timm weights file without a configuration.
        dataset_index: Index of the ViTPose+ expert to convert; by default the first.
        num_attention_heads: Number of attention heads, for a weights file of a ViT on nn.TransformerEncoder.
        hidden_act: Activation of the MLPs, such as gelu or relu, for a weights file of a ViT on nn.TransformerEncoder.
        norm_first: Argument norm_first of the layers, for a weights file of a ViT on nn.TransformerEncoder.
        dtype: Data type of the saved weights; by default the data type of the checkpoint.
        revision: Branch, tag or commit on the Hub.
        skip_parity: Do not compare the outputs with the original implementation.
        write_anyway: Write the model even if its outputs differ from the original implementation.
        list: List the supported model families and exit.
        report: Function that receives progress messages.

    Raises:
        ValueError: if the checkpoint cannot be converted, its outputs differ, or an option does not apply.
        OSError: if the checkpoint does not exist, or the output cannot be written.
    """
    if list:
        report(conversion.families_table())
        return
    if source is None or output is None:
        raise ValueError("Source and output are required: hf-vit convert SOURCE OUTPUT. --help lists the options.")
    fields = given_options(num_attention_heads=num_attention_heads, hidden_act=hidden_act) | (config_overrides or {})
    check_fields(fields)
    check_new_folder(Path(output))
    config = read_convertible(str(source), revision, to)
    options = {"architecture": architecture, "dataset_index": dataset_index, "norm_first": norm_first, "task": task}
    given = given_options(config_overrides=fields or None, dtype=dtype, **options)
    if to is None:
        convert_published(str(source), Path(output), revision, given, skip_parity, write_anyway, report)
    elif given:
        raise ValueError(f"--to exports a model unchanged. Remove {', '.join(f'--{name}' for name in given)}.")
    else:
        export_hf_vit_model(str(source), Path(output), to, revision, config["architectures"], report)


def given_options(**options: Any) -> dict[str, Any]:
    """Return the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def read_convertible(source: str, revision: str, layout: str | None) -> Mapping[str, Any]:
    """Return the configuration of a model to convert (`layout` is None) or to export; empty for a file of weights.

    Raises `ValueError` if the model to convert is already an hf_vit model, or the model to export is not one.
    """
    config = read_config(source, revision=revision)
    is_ours = config.get("model_type") == "hf_vit"
    if is_ours == (layout is None):
        cure = "Choose an export layout with --to" if is_ours else "Convert it first, without --to"
        raise ValueError(f"{source} is {'already' if is_ours else 'not'} an hf_vit model. {cure}.")
    return config


def export_hf_vit_model(
    source: str, output: Path, layout: str, revision: str, architectures: Sequence[str], report: Callable[[str], None]
) -> None:
    """Export an hf_vit model to the layout of another library."""
    is_classifier = "HfViTForImageClassification" in architectures
    model_class = conversion.TASKS["image-classification" if is_classifier else "features"]
    model = model_class.from_pretrained(source, revision=revision)
    image_processor = HfViTImageProcessor.from_pretrained(source, revision=revision)
    conversion.export_checkpoint(model, output, layout, image_processor)
    report(f"Saved {output} in the layout {layout!r}.")


def report_parity(source: Source, converted: Converted, report: Callable[[str], None]) -> list[OutputParity]:
    """Compare all outputs with the source implementation and report the differences.

    If the source implementation cannot be run, report the reason and return an empty list.
    """
    rows = []
    try:
        for row in conversion.compare_with_source(source, converted):
            rows.append(row)
            errors = f"absolute {row.absolute:.1e}  relative {row.relative:.1e}"
            verdict = "equal" if row.is_equal else "DIFFERENT"
            report(f"{row.size[0]}x{row.size[1]}  {row.output:<20} {errors}  {verdict}")
    except conversion.NoReferenceError as error:
        report(f"Outputs were not compared: {error}")
    return rows


def convert_published(
    source: str,
    output: Path,
    revision: str,
    given: Mapping[str, Any],
    skip_parity: bool,
    write_anyway: bool,
    report: Callable[[str], None],
) -> None:
    """Convert a published checkpoint, compare its outputs, and save it with its image processor, code and card.

    `given` are the options of `convert_model` that change the model. For the other arguments, see there.
    """
    before, hub, fields = peak_memory(), {"revision": revision}, given.get("config_overrides", {})
    opened = conversion.open_source(source, given.get("architecture"), given.get("dataset_index"), **hub)
    converted = conversion.convert_checkpoint(opened, **fields, norm_first=given.get("norm_first"))
    report(f"{source}: {converted.family.name} ({converted.family.source}), {len(converted.weights)} tensors")
    rows = [] if skip_parity else report_parity(opened, converted, report)
    if not all(row.is_equal for row in rows) and not write_anyway:
        raise ValueError(
            "Outputs differ from those of the source, so nothing was written. Use --write_anyway to save the model."
        )
    converted.weights.clear()  # frees memory: from_pretrained loads the weights again
    names = ("architecture", "dataset_index", "norm_first", "dtype")
    options = {name: given[name] for name in names if name in given}
    changes = fields | {name: given[name] for name in ("task", "dataset_index", "dtype") if name in given}
    model_class = conversion.TASKS[given["task"]] if "task" in given else converted.model_class
    with new_folder(output) as folder:
        model = model_class.from_pretrained(source, **hub, **fields, **options)
        model.save_pretrained(folder)
        sizes = {name: fields.get(name) for name in ("image_size", "num_channels")}
        sizes |= {"patch_size": model.config.patch_size, "given": fields | options}
        conversion.load_processor(model, source, **sizes, **hub).save_pretrained(folder)
        conversion.write_conversion_card(folder, output.name, model, converted, rows, changes)
    what = "conversion and parity" if rows else "conversion"
    memory = f"{peak_memory()} MiB, including {before} MiB before the start"
    report(f"Saved {output}. Peak memory of {what}: {memory}.")
