"""Turns published ViT checkpoints into ours, checked against the library they are from, and ours into theirs.

Examples:
    python scripts/convert_checkpoint.py facebook/dinov2-base outputs/dinov2-base
    python scripts/convert_checkpoint.py path/to/weights.npz outputs/vit --skip_parity
    python scripts/convert_checkpoint.py facebook/vit-mae-base outputs/mae-384 --config_overrides '{"image_size": 384}'
    python scripts/convert_checkpoint.py outputs/digits outputs/digits-vit --to vit
    python scripts/convert_checkpoint.py --list
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from hf_vit import HfViTForImageClassification, HfViTImageProcessor, HfViTModel, convert


TASKS = {"features": HfViTModel, "image-classification": HfViTForImageClassification}


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", help="folder, file of weights, or name on the Hub")
    parser.add_argument("output", nargs="?", type=Path, help="new folder")
    parser.add_argument("--to", choices=list(convert.LAYOUTS), help="layout to export one of our own models to")
    parser.add_argument("--task", choices=list(TASKS), help="what to save it for (default: what it was trained for)")
    parser.add_argument("--config_overrides", type=json.loads, default={}, help="fields that differ, as JSON")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of the weights (default: as is)")
    parser.add_argument("--revision", help="branch, tag or commit on the Hub")
    parser.add_argument("--skip_parity", action="store_true", help="do not run the source implementation beside it")
    parser.add_argument("--write_anyway", action="store_true", help="write although outputs differ")
    parser.add_argument("--list", action="store_true", help="print the families that are known, and end")
    return parser


def report_parity(source: convert.Source, converted: convert.Converted) -> list[convert.OutputParity]:
    """Prints how every output compares with the source implementation, if there is one to run."""
    rows = []
    try:
        for row in convert.compare_with_source(source, converted):
            rows.append(row)
            errors = f"absolute {row.absolute:.1e}  relative {row.relative:.1e}"
            verdict = "equal" if row.is_equal else "DIFFERENT"
            print(f"{row.size[0]}x{row.size[1]}  {row.output:<20} {errors}  {verdict}", flush=True)
    except ImportError as error:
        print(f"No parity report: {error}")
    return rows


def bring_in(args: argparse.Namespace) -> None:
    """Converts a published checkpoint, checks it and saves it with its image processor, code and card."""
    hub = {} if args.revision is None else {"revision": args.revision}
    before = convert.peak_memory()
    source = convert.open_source(args.source, **hub)
    converted = convert.convert_checkpoint(source, **args.config_overrides)
    print(f"{args.source}: {converted.family.name} ({converted.family.source}), {len(converted.weights)} tensors")
    rows = [] if args.skip_parity else report_parity(source, converted)
    if not all(row.is_equal for row in rows) and not args.write_anyway:
        raise ValueError("Outputs differ from the source, so nothing was written. --write_anyway writes all the same.")
    model_class = converted.model_class if args.task is None else TASKS[args.task]
    options: dict[str, Any] = hub | args.config_overrides
    if args.dtype is not None:
        options["dtype"] = getattr(torch, args.dtype)
    with convert.new_folder(args.output) as folder:
        model = model_class.from_pretrained(args.source, **options)
        model.save_pretrained(folder)
        sizes = {name: args.config_overrides.get(name) for name in ("image_size", "num_channels")}
        convert.load_image_processor(args.source, **sizes, **hub).save_pretrained(folder)
        convert.write_conversion_card(folder, args.output.name, model, converted, rows, args.config_overrides)
    what, peak = "conversion" if not rows else "conversion and parity", convert.peak_memory()
    print(f"Saved {args.output}. Peak memory of {what}: {peak} MiB, {before} MiB of it before the start.")


def take_out(args: argparse.Namespace) -> None:
    """Exports one of our models."""
    is_classifier = "ForImageClassification" in convert.open_source(args.source).config["architectures"][0]
    model = TASKS["image-classification" if is_classifier else "features"].from_pretrained(args.source)
    convert.export_checkpoint(model, args.output, args.to, HfViTImageProcessor.from_pretrained(args.source))
    print(f"Saved {args.output} in the layout {args.to!r}.")


def main(arguments: list[str] | None = None) -> None:
    """Converts in one direction or the other."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    if args.list:
        print(convert.families_table())
        return
    if args.source is None or args.output is None:
        parser.error("say what to convert and where to: SOURCE OUTPUT")
    try:
        take_out(args) if args.to is not None else bring_in(args)
    except (ValueError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()
