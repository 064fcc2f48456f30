"""Programs for other runtimes: ONNX, OpenVINO, torch.export and ExecuTorch, checked against the model."""

from .folder import export_model
from .formats import FORMATS


__all__ = ["FORMATS", "export_model"]
