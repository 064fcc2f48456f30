"""Exports a saved model to ONNX, OpenVINO, torch.export or ExecuTorch, with batch and image size left open.

The program is run in its runtime at three batches and three image sizes that were not traced. Unless it is equal to
the model at all of them, nothing is written.

Examples:
    python scripts/export_model.py outputs/photos --format onnx --output_dir outputs/photos-onnx
    python scripts/export_model.py outputs/cells --format openvino --output_dir outputs/cells-openvino
"""

import sys

from hf_vit import cli


def main(arguments: list[str]) -> None:
    """Exports a model."""
    cli.main(["export", *arguments], __doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
