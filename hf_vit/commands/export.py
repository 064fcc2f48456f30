"""Exports a saved model to ONNX, OpenVINO, torch.export or ExecuTorch, with batch and image size left open.

The program is run in its runtime at three batches and three image sizes that were not traced. Unless it is equal to
the model at all of them, nothing is written.

Examples:
    hf-vit export outputs/photos --format onnx --output_dir outputs/photos-onnx
    hf-vit export outputs/cells --format openvino --output_dir outputs/cells-openvino
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from ..flags.parser import OneLineParser, exit_in_one_line
from ..inference.export import FORMATS, export_model


def make_parser(description: str | None) -> OneLineParser:
    """Returns the parser of the command line."""
    parser = OneLineParser(description, "export")
    parser.add_argument("model", help="folder of a saved model, or its name on the Hub")
    parser.add_argument("--format", choices=list(FORMATS), default="onnx", help="what to write (default: onnx)")
    parser.add_argument("--output_dir", type=Path, required=True, help="new folder")
    parser.add_argument("--revision", default="main", help="branch, tag or commit on the Hub (default: main)")
    return parser


def main(arguments: Sequence[str], description: str | None, report: Callable[[str], None]) -> None:
    """Exports, and exits with one line about what is wrong.

    Args:
        arguments: The command line without the program's name.
        description: Beginning of `--help`.
        report: Prints a line.
    """
    with exit_in_one_line(ImportError, OSError, ValueError):
        args = vars(make_parser(description).parse_args(arguments))
        export_model(args.pop("model"), report=report, **args)
