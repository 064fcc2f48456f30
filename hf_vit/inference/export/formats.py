"""The formats: how a program is written in each, and how its runtime runs the file."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from packaging.version import Version
from torch import Tensor

from ...extras import check_packages
from ...model.pretrained import HfViTPreTrainedModel
from .programs import TRACED_BATCH, Bounds, HfViTProgram, Run, example_inputs, open_sizes, output_names, traced_grid


# The first release whose exporters have the form that is used here (they are experimental), and the torch they need
EXPORTERS_SINCE, EXPORTERS_TORCH = Version("5.23.0"), Version("2.11")
# Names of the open sizes of inputs in ONNX files
SIZES = {
    "pixel_values": ("batch", None, "height", "width"),
    "bool_masked_pos": ("batch", None),
    **dict.fromkeys(("input_ids", "attention_mask"), ("text_batch", "length")),
}
MOST_IMAGES = 8  # of a program that plans its memory ahead
MOST_TIMES_NATIVE = 2  # and of the native grid, per side


@dataclass(frozen=True)
class Format:
    """A format of programs.

    Args:
        name: The name, also in `transformers.exporters`.
        file: Name of the program in its folder.
        packages: Packages that write and run it.
        write: Writes a traced program, whose outputs have these names; None if only the library's exporters can.
        open: Returns what runs a file, given the names of the outputs.
        extra: The extra of this package that installs them.
        is_bounded: Whether memory is planned ahead, for a largest batch and image.
    """

    name: str
    file: str
    packages: tuple[str, ...]
    write: Callable[[torch.export.ExportedProgram, Path, tuple[str, ...]], None] | None
    open: Callable[[Path, tuple[str, ...]], Run]
    extra: str = "export"
    is_bounded: bool = False

    def bounds(self, model: HfViTPreTrainedModel) -> Bounds:
        """Returns the largest batch and grid that a program of this format takes."""
        if not self.is_bounded:
            return Bounds()
        rows, columns = (MOST_TIMES_NATIVE * max(side, 8) for side in model.config.grid_size)
        return Bounds(MOST_IMAGES, (rows, columns))


def write_onnx(program: torch.export.ExportedProgram, file: Path, outputs: tuple[str, ...]) -> None:
    """Writes an ONNX file by torch's own exporter."""
    written = torch.onnx.export(program, dynamo=True, output_names=list(outputs), verbose=False)
    assert written is not None  # it is where dynamo is on
    name_sizes(written.model.graph)
    written.save(file, external_data=True)


def name_sizes(graph: Any) -> None:
    """Names the open sizes of an ONNX graph, for which torch has numbers and products such as s99 and 16*s30."""
    whole: dict[str, str] = {}
    parts: dict[str, str] = {}
    for value in graph.inputs:
        for size, name in zip(map(str, value.shape), SIZES[value.name], strict=True):
            if name is not None and (match := re.fullmatch(r"(?:(\d+)\*)?([A-Za-z]\w*)", size)):
                whole[size] = name
                parts[match[2]] = name if match[1] is None else f"({name}//{match[1]})"
    for value in [*graph.inputs, *(output for node in graph for output in node.outputs)]:
        for place, size in enumerate(map(str, value.shape or ())):
            if not size.isdigit() and size != "None":  # which is not known
                named = re.sub(r"[A-Za-z]\w*", lambda part: parts.get(part[0], part[0]), size)
                value.shape[place] = whole.get(size, named)


def write_torch(program: torch.export.ExportedProgram, file: Path, outputs: tuple[str, ...]) -> None:
    """Writes torch's own file."""
    torch.export.save(program, file)


def as_arrays(inputs: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Returns tensors as arrays."""
    return {name: value.numpy() for name, value in inputs.items()}


def open_onnx(file: Path, outputs: tuple[str, ...]) -> Run:
    """Opens an ONNX file on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(names, map(torch.from_numpy, session.run(None, as_arrays(inputs))), strict=True))


def open_openvino(file: Path, outputs: tuple[str, ...]) -> Run:
    """Opens OpenVINO's files on the CPU, in float32: where it can, it would infer in bfloat16 unless told."""
    import openvino

    compiled = openvino.Core().compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        results = compiled(as_arrays(inputs))
        return {output.any_name: torch.from_numpy(results[output].copy()) for output in compiled.outputs}

    return run


def open_torch(file: Path, outputs: tuple[str, ...]) -> Run:
    """Opens torch's own file."""
    module = torch.export.load(file).module()
    return lambda inputs: module(**inputs)


def open_executorch(file: Path, outputs: tuple[str, ...]) -> Run:
    """Opens an ExecuTorch file."""
    from executorch.runtime import Runtime

    method = Runtime.get().load_program(file).load_method("forward")

    def run(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        results = [value.clone() for value in method.execute(list(inputs.values()))]  # it owns their memory
        return dict(zip(outputs, results, strict=True))

    return run


KNOWN = (
    Format("onnx", "model.onnx", ("onnx", "onnxscript", "onnxruntime"), write_onnx, open_onnx),
    Format("openvino", "openvino_model.xml", ("openvino",), None, open_openvino),
    Format("torch", "model.pt2", (), write_torch, open_torch),
    Format("executorch", "model.pte", ("executorch",), None, open_executorch, extra="executorch", is_bounded=True),
)
FORMATS = {chosen.name: chosen for chosen in KNOWN}


def check_format(name: str) -> Format:
    """Returns the format of a name; `ValueError` if there is none, `ImportError` if what it needs is missing."""
    if name not in FORMATS:
        raise ValueError(f"There is no format {name!r}. Choose one of {', '.join(FORMATS)}.")
    chosen = FORMATS[name]
    check_packages(f"The format {name}", *chosen.packages, extra=chosen.extra)
    if chosen.write is None and not has_exporters():
        raise ImportError(
            f"The format {name} needs transformers {EXPORTERS_SINCE} and torch {EXPORTERS_TORCH} or newer, not "
            f"{transformers.__version__} and {torch.__version__}. Upgrade them, or choose onnx."
        )
    return chosen


def has_exporters() -> bool:
    """Returns whether the installed transformers has the exporters that are used here."""
    return Version(transformers.__version__) >= EXPORTERS_SINCE and Version(torch.__version__) >= EXPORTERS_TORCH


def write_program(model: HfViTPreTrainedModel, chosen: Format, file: Path) -> None:
    """Traces a model and writes the program, its batch and image size open.

    Args:
        model: In evaluation mode, in float32 on the CPU.
        chosen: The format.
        file: To be written; some formats write the weights beside it.

    Raises:
        RuntimeError: if the format cannot express the model.
    """
    if chosen.write is not None:
        chosen.write(trace(model, chosen), file, output_names(model))
        return
    from transformers.exporters.auto import get_exporter_class

    program, inputs, sizes = what_is_traced(model, chosen)
    exporter = get_exporter_class(chosen.name)
    config = exporter.config_class(dynamic=True, dynamic_shapes=sizes)
    written, _ = exporter().export_program(program, inputs, config)
    exporter.save_program(written, file)


def what_is_traced(
    model: HfViTPreTrainedModel, chosen: Format
) -> tuple[HfViTProgram, dict[str, Tensor], dict[str, dict[int, Any]]]:
    """Returns a model as it is traced, the inputs to trace it with, and which of their dimensions stay open."""
    inputs = example_inputs(model, TRACED_BATCH, traced_grid(model))
    return HfViTProgram(model).eval(), inputs, open_sizes(model, chosen.bounds(model))


@torch.no_grad()
def trace(model: HfViTPreTrainedModel, chosen: Format) -> torch.export.ExportedProgram:
    """Traces a model by torch alone."""
    program, inputs, sizes = what_is_traced(model, chosen)
    return torch.export.export(program, (), inputs, dynamic_shapes=sizes)
