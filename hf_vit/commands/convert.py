"""Turns published ViT checkpoints into ours, checked against the library they are from, and ours into theirs.

Examples:
    hf-vit convert facebook/dinov2-base outputs/dinov2-base
    hf-vit convert facebook/vit-mae-base outputs/mae-384 --config_overrides '{"image_size": 384}'
    hf-vit convert outputs/digits outputs/digits-vit --to vit
    hf-vit convert --list
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from .. import HfViTImageProcessor
from .. import convert as conversion
from ..convert.loading import Converted, peak_memory
from ..convert.parity import OutputParity
from ..convert.source import Source
from ..model.configuration_hf_vit import check_fields
from ..model.pretrained import read_config
from ..outputs import check_new_folder, new_folder


def convert(
    source: str | None = None,
    output: Path | None = None,
    *,
    to: Annotated[str | None, (*conversion.LAYOUTS,)] = None,
    task: Annotated[str | None, (*conversion.TASKS,)] = None,
    config_overrides: dict[str, Any] | None = None,
    architecture: str | None = None,
    dataset_index: int | None = None,
    dtype: Annotated[str | None, ("float32", "bfloat16", "float16")] = None,
    revision: str = "main",
    skip_parity: bool = False,
    write_anyway: bool = False,
    list: bool = False,
    report: Callable[[str], None] = print,
) -> None:
    """Converts a published checkpoint into one of ours, or exports one of ours to the layout of another library.

    Args:
        source: Folder, file of weights, or name on the Hub.
        output: New folder.
        to: Layout to export one of our own models to.
        task: What to save it for; by default what it was trained for.
        config_overrides: Fields of the configuration that differ, as JSON.
        architecture: timm's name of the model, for a file of its weights alone.
        dataset_index: Which expert of ViTPose+ is taken; by default the first.
        dtype: Type of the weights; by default as they are.
        revision: Branch, tag or commit on the Hub.
        skip_parity: Do not compare the outputs with the source implementation.
        write_anyway: Write although outputs differ.
        list: Print the known families, and end.
        report: Prints a line.

    Raises:
        ValueError: if the checkpoint cannot be converted or its outputs differ, or an option does not fit.
        OSError: if there is no such checkpoint, or nothing can be written.
    """
    if list:
        report(conversion.families_table())
        return
    if source is None or output is None:
        raise ValueError("Name what to convert and where to: SOURCE OUTPUT. --help lists the options.")
    check_fields(config_overrides or {})
    check_new_folder(output)
    config = read_config(source, revision=revision)
    is_ours = config.get("model_type") == "hf_vit"
    if is_ours == (to is None):
        cure = "Choose with --to what to export it to" if is_ours else "Bring it in first: the same without --to"
        raise ValueError(f"{source} is {'already' if is_ours else 'not'} one of ours. {cure}.")
    options = {"config_overrides": config_overrides, "architecture": architecture, "dataset_index": dataset_index}
    options |= {"dtype": dtype, "task": task}
    given = {name: value for name, value in options.items() if value is not None}
    if to is None:
        convert_published(source, output, revision, given, skip_parity, write_anyway, report)
        return
    if given:
        raise ValueError(f"--to exports a model as it is. Leave out {', '.join(f'--{name}' for name in given)}.")
    export_ours(source, output, to, revision, "HfViTForImageClassification" in config["architectures"])
    report(f"Saved {output} in the layout {to!r}.")


def export_ours(source: str, output: Path, layout: str, revision: str, is_classifier: bool) -> None:
    """Exports one of our models to the layout of another library."""
    model_class = conversion.TASKS["image-classification" if is_classifier else "features"]
    model = model_class.from_pretrained(source, revision=revision)
    image_processor = HfViTImageProcessor.from_pretrained(source, revision=revision)
    conversion.export_checkpoint(model, output, layout, image_processor)


def report_parity(source: Source, converted: Converted, report: Callable[[str], None]) -> list[OutputParity]:
    """Reports how every output compares with the source implementation, if there is one to run."""
    rows = []
    try:
        for row in conversion.compare_with_source(source, converted):
            rows.append(row)
            errors = f"absolute {row.absolute:.1e}  relative {row.relative:.1e}"
            verdict = "equal" if row.is_equal else "DIFFERENT"
            report(f"{row.size[0]}x{row.size[1]}  {row.output:<20} {errors}  {verdict}")
    except conversion.NoReferenceError as error:
        report(f"No parity report: {error}")
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
    """Converts a published checkpoint, checks it and saves it with its image processor, code and card.

    Args:
        source: Folder, file of weights, or name on the Hub.
        output: New folder.
        revision: Branch, tag or commit on the Hub.
        given: The options on the model that are given, see `convert`.
        skip_parity: Whether outputs are not compared.
        write_anyway: Whether to write although outputs differ.
        report: Prints a line.
    """
    before, hub, fields = peak_memory(), {"revision": revision}, given.get("config_overrides", {})
    opened = conversion.open_source(source, given.get("architecture"), given.get("dataset_index"), **hub)
    converted = conversion.convert_checkpoint(opened, **fields)
    report(f"{source}: {converted.family.name} ({converted.family.source}), {len(converted.weights)} tensors")
    rows = [] if skip_parity else report_parity(opened, converted, report)
    if not all(row.is_equal for row in rows) and not write_anyway:
        raise ValueError("Outputs differ from the source, so nothing was written. --write_anyway writes all the same.")
    converted.weights.clear()  # the model below has its own
    options = {name: given[name] for name in ("architecture", "dataset_index", "dtype") if name in given}
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
    memory = f"{peak_memory()} MiB, {before} MiB of it before the start"
    report(f"Saved {output}. Peak memory of {what}: {memory}.")
