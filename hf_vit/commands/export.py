"""Exports a saved model to ONNX, OpenVINO, torch.export or ExecuTorch, with batch and image size left open.

The program is run in its runtime at three batches and three image sizes that were not traced. Unless it is equal to
the model at all of them, nothing is written.

Examples:
    hf-vit export outputs/photos --format onnx --output_dir outputs/photos-onnx
    hf-vit export outputs/cells --format openvino --output_dir outputs/cells-openvino
"""

from ..inference.export import export_model as export


__all__ = ["export"]
