"""Run a model in OpenVINO or ONNX Runtime in the current process, with the outputs of the model.

Both open the same ONNX file. Shapes: B batch, C channels, H W pixels.
"""

import copy
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from ..model.configuration_hf_vit import to_pair
from ..model.pretrained import HfViTPreTrainedModel
from .ahead_of_time import CompilationError, first_line
from .export.formats import FORMATS, open_onnx, open_openvino, write_program
from .export.programs import Run, min_grid


RUNTIMES = ("openvino", "onnxruntime")  # names of packages
WRITERS = ("onnx", "onnxscript")  # packages that write ONNX files


def installed_runtimes() -> list[str]:
    """Returns the installed runtimes, or an empty list if ONNX files cannot be written."""
    return [name for name in RUNTIMES if all(map(find_spec, (name, *WRITERS)))]


class RuntimeProgram:
    """A model in another runtime, on the CPU. It accepts any batch size, and images of any number of whole patches.

    OpenVINO additionally compiles a program for the shape (B, C, H, W) of `images` only, which is faster. `dtype` is
    the precision of OpenVINO, float32 or bfloat16; ONNX Runtime computes in float32. The ONNX file in `folder` is
    written if it does not exist.

    Raises:
        CompilationError: if the runtime does not support the model, its outputs or the image size.
    """

    def __init__(
        self, model: HfViTPreTrainedModel, images: Tensor, folder: Path, runtime: str, dtype: torch.dtype
    ) -> None:
        with torch.no_grad():
            template = model(pixel_values=images)
        self.channels, self.patch, self.least = images.shape[1], to_pair(model.config.patch_size), min_grid(model)
        if not self.accepts(images.shape) or not all(isinstance(value, Tensor) for value in template.values()):
            raise CompilationError("the image size is not supported, or an output is not a tensor")
        self.kind, self.names, self.lock = type(template), tuple(template.keys()), Lock()
        self.shape, file = images.shape, folder / FORMATS["onnx"].file
        self.fixed: Run | None = None  # program for images of this shape
        try:
            if not file.exists():
                write_program(copy.deepcopy(model).float(), FORMATS["onnx"], file, self.names)
            if runtime == "openvino":
                self.open = open_openvino(file, self.names, dtype)
                self.fixed = open_openvino(file, self.names, dtype, {"pixel_values": images.shape})
            else:
                self.open = open_onnx(file, self.names)
        except Exception as error:  # Exporters and runtimes raise errors of many types.
            raise CompilationError(first_line(error)) from error

    def accepts(self, shape: torch.Size) -> bool:
        """Returns whether the program can process images of a shape."""
        if len(shape) != 4 or shape[0] == 0 or shape[1] != self.channels:
            return False
        sides = zip(shape[2:], self.patch, self.least, strict=True)
        return all(side % patch == 0 and side >= least * patch for side, patch, least in sides)

    def __call__(self, pixel_values: Tensor) -> Any:
        """Returns the outputs for images (B, C, H, W) in the class of the model output, with float32 tensors."""
        run = self.fixed if self.fixed is not None and pixel_values.shape == self.shape else self.open
        with self.lock:  # A program of OpenVINO has one set of buffers.
            found = run({"pixel_values": pixel_values.float().contiguous()})
        return self.kind(**{name: found[name] for name in self.names})
