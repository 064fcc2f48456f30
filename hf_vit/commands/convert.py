"""Turns published ViT checkpoints into ours, checked against the library they are from, and ours into theirs.

Examples:
    hf-vit convert facebook/dinov2-base outputs/dinov2-base
    hf-vit convert facebook/vit-mae-base outputs/mae-384 --config_overrides '{"image_size": 384}'
    hf-vit convert outputs/digits outputs/digits-vit --to vit
    hf-vit convert --list
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import HfViTImageProcessor, convert
from ..convert.export import check_new_folder, new_folder
from ..convert.loading import Converted, peak_memory
from ..convert.parity import OutputParity
from ..convert.source import Source
from ..flags.parser import OneLineParser, exit_in_one_line
from ..model.configuration_hf_vit import check_fields
from ..model.pretrained import read_config


def make_parser(description: str | None) -> OneLineParser:
    """Returns the parser of the command line."""
    parser = OneLineParser(description, "convert")
    parser.add_argument("source", nargs="?", help="folder, file of weights, or name on the Hub")
    parser.add_argument("output", nargs="?", type=Path, help="new folder")
    parser.add_argument("--to", choices=list(convert.LAYOUTS), help="layout to export one of our own models to")
    parser.add_argument(
        "--task", choices=list(convert.TASKS), help="what to save it for (default: what it was trained for)"
    )
    parser.add_argument("--config_overrides", type=fields, default={}, help="fields that differ, as JSON")
    parser.add_argument("--architecture", help="timm's name of the model, for a file of its weights alone")
    parser.add_argument("--dataset_index", type=int, help="which expert of ViTPose+ is taken (default: the first)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of the weights (default: as is)")
    parser.add_argument("--revision", default="main", help="branch, tag or commit on the Hub (default: main)")
    parser.add_argument("--skip_parity", action="store_true", help="do not run the source implementation beside it")
    parser.add_argument("--write_anyway", action="store_true", help="write although outputs differ")
    parser.add_argument("--list", action="store_true", help="print the families that are known, and end")
    return parser


def fields(text: str) -> dict[str, Any]:
    """Reads fields of the configuration from the command line."""
    try:
        given = json.loads(text)
        if not isinstance(given, dict):
            raise ValueError(f"it holds a {type(given).__name__}")
        check_fields(given)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object of fields: {error}") from error
    return given


def report_parity(source: Source, converted: Converted, report: Callable[[str], None]) -> list[OutputParity]:
    """Reports how every output compares with the source implementation, if there is one to run."""
    rows = []
    try:
        for row in convert.compare_with_source(source, converted):
            rows.append(row)
            errors = f"absolute {row.absolute:.1e}  relative {row.relative:.1e}"
            verdict = "equal" if row.is_equal else "DIFFERENT"
            report(f"{row.size[0]}x{row.size[1]}  {row.output:<20} {errors}  {verdict}")
    except convert.NoReferenceError as error:
        report(f"No parity report: {error}")
    return rows


def convert_published(args: argparse.Namespace, report: Callable[[str], None]) -> None:
    """Converts a published checkpoint, checks it and saves it with its image processor, code and card."""
    before, hub = peak_memory(), {"revision": args.revision}
    source = convert.open_source(args.source, args.architecture, args.dataset_index, **hub)
    converted = convert.convert_checkpoint(source, **args.config_overrides)
    report(f"{args.source}: {converted.family.name} ({converted.family.source}), {len(converted.weights)} tensors")
    rows = [] if args.skip_parity else report_parity(source, converted, report)
    if not all(row.is_equal for row in rows) and not args.write_anyway:
        raise ValueError("Outputs differ from the source, so nothing was written. --write_anyway writes all the same.")
    converted.weights.clear()  # the model below has its own
    given = {name: value for name, value in vars(args).items() if value is not None}
    options = {name: given[name] for name in ("architecture", "dataset_index", "dtype") if name in given}
    changes = args.config_overrides | {
        name: given[name] for name in ("task", "dataset_index", "dtype") if name in given
    }
    model_class = converted.model_class if args.task is None else convert.TASKS[args.task]
    with new_folder(args.output) as folder:
        model = model_class.from_pretrained(args.source, **hub, **args.config_overrides, **options)
        model.save_pretrained(folder)
        sizes = {name: args.config_overrides.get(name) for name in ("image_size", "num_channels")}
        sizes |= {"patch_size": model.config.patch_size, "given": args.config_overrides | options}
        convert.load_processor(model, args.source, **sizes, **hub).save_pretrained(folder)
        convert.write_conversion_card(folder, args.output.name, model, converted, rows, changes)
    what = "conversion and parity" if rows else "conversion"
    memory = f"{peak_memory()} MiB, {before} MiB of it before the start"
    report(f"Saved {args.output}. Peak memory of {what}: {memory}.")


def export_ours(args: argparse.Namespace, config: dict[str, Any], report: Callable[[str], None]) -> None:
    """Exports one of our models to a layout."""
    if given := [
        f"--{name}"
        for name in ("config_overrides", "architecture", "dataset_index", "dtype", "task")
        if vars(args)[name]
    ]:
        raise ValueError(f"--to exports a model as it is. Leave out {', '.join(given)}.")
    task = "image-classification" if "ForImageClassification" in config["architectures"][0] else "features"
    model = convert.TASKS[task].from_pretrained(args.source, revision=args.revision)
    image_processor = HfViTImageProcessor.from_pretrained(args.source, revision=args.revision)
    convert.export_checkpoint(model, args.output, args.to, image_processor)
    report(f"Saved {args.output} in the layout {args.to!r}.")


def main(arguments: Sequence[str], description: str | None, report: Callable[[str], None]) -> None:
    """Converts in one direction or the other, and exits with one line about what is wrong.

    Args:
        arguments: The command line without the program's name.
        description: Beginning of `--help`.
        report: Prints a line.
    """
    with exit_in_one_line(ValueError, OSError):
        args = make_parser(description).parse_args(arguments)
        if args.list:
            report(convert.families_table())
            return
        if args.output is None:
            raise ValueError("Name what to convert and where to: SOURCE OUTPUT. --help lists the options.")
        check_new_folder(args.output)
        config = read_config(args.source, revision=args.revision)
        is_ours = config.get("model_type") == "hf_vit"
        if is_ours == (args.to is None):
            cure = "Choose with --to what to export it to" if is_ours else "Bring it in first: the same without --to"
            raise ValueError(f"{args.source} is {'already' if is_ours else 'not'} one of ours. {cure}.")
        if is_ours:
            export_ours(args, config, report)
        else:
            convert_published(args, report)
