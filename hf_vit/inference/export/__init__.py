"""Export of models to ONNX, OpenVINO, torch.export and ExecuTorch, with a comparison of the outputs."""

from .folder import export_model
from .formats import FORMATS


__all__ = ["FORMATS", "export_model"]
