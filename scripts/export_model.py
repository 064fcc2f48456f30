"""Exports a saved model to ONNX, OpenVINO, torch.export or ExecuTorch, with batch and image size left open.

The program is run in its runtime at three batches and three image sizes that were not traced. Unless it is equal to
the model at all of them, nothing is written.

Examples:
    python scripts/export_model.py outputs/photos --format onnx --output_dir outputs/photos-onnx
    python scripts/export_model.py outputs/cells --format openvino --output_dir outputs/cells-openvino
"""

import sys
from collections.abc import Sequence
from functools import partial

from hf_vit.commands import export


def main(arguments: Sequence[str]) -> None:
    """Exports a model."""
    export.main(arguments, __doc__, report=partial(print, flush=True))


if __name__ == "__main__":
    main(sys.argv[1:])
