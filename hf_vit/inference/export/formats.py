"""Export formats, each with a function that writes a program and a function that opens it in its runtime."""

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
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


# First release of transformers with the (experimental) exporter API that this file uses, and first compatible torch
EXPORTERS_SINCE, EXPORTERS_TORCH = Version("5.23.0"), Version("2.11")
# Names of the dynamic dimensions of inputs in ONNX files
SIZES = {
    "pixel_values": ("batch", None, "height", "width"),
    "bool_masked_pos": ("batch", None),
    **dict.fromkeys(("input_ids", "attention_mask"), ("text_batch", "length")),
}
# Limits for formats that allocate memory ahead of time: batch size, and patch grid relative to the model's native grid
MOST_IMAGES = 8
MAX_GRID_RATIO = 2


@dataclass(frozen=True)
class Format:
    """An export format."""

    name: str  # as in `transformers.exporters`
    file: str  # file name of the program
    packages: tuple[str, ...]  # packages required to write and run the program
    # Function that writes a traced program with the given output names to a file. None selects that of transformers.
    write: Callable[[torch.export.ExportedProgram, Path, tuple[str, ...]], None] | None
    open: Callable[[Path, tuple[str, ...]], Run]  # opens the program in a file and returns a function that runs it
    extra: str = "export"  # extra of hf_vit that installs `packages`
    is_bounded: bool = False  # whether memory is allocated ahead of time, which limits the batch and image size

    def bounds(self, model: HfViTPreTrainedModel) -> Bounds:
        """Returns the largest batch size and patch grid of a program in this format."""
        if not self.is_bounded:
            return Bounds()
        rows, columns = (MAX_GRID_RATIO * max(side, 8) for side in model.config.grid_size)
        return Bounds(MOST_IMAGES, (rows, columns))


def write_onnx(program: torch.export.ExportedProgram, file: Path, outputs: tuple[str, ...]) -> None:
    """Writes an ONNX file with the exporter of torch."""
    written = torch.onnx.export(program, dynamo=True, output_names=list(outputs), verbose=False)
    assert written is not None  # With dynamo=True, the result is never None.
    name_sizes(written.model.graph)
    written.save(file, external_data=True)


def name_sizes(graph: Any) -> None:
    """Gives readable names to the dynamic dimensions of an ONNX graph. torch names them s99, 16*s30, and so on."""
    whole: dict[str, str] = {}
    parts: dict[str, str] = {}
    for value in graph.inputs:
        for size, name in zip(map(str, value.shape), SIZES[value.name], strict=True):
            if name is not None and (match := re.fullmatch(r"(?:(\d+)\*)?([A-Za-z]\w*)", size)):
                whole[size] = name
                parts[match[2]] = name if match[1] is None else f"({name}//{match[1]})"
    for value in [*graph.inputs, *(output for node in graph for output in node.outputs)]:
        for place, size in enumerate(map(str, value.shape or ())):
            if not size.isdigit() and size != "None":  # torch.onnx writes unknown sizes as "None".
                named = re.sub(r"[A-Za-z]\w*", lambda part: parts.get(part[0], part[0]), size)
                value.shape[place] = whole.get(size, named)


def write_torch(program: torch.export.ExportedProgram, file: Path, outputs: tuple[str, ...]) -> None:
    """Writes a `.pt2` file with torch.export."""
    torch.export.save(program, file)


def as_arrays(inputs: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Returns tensors as NumPy arrays."""
    return {name: value.numpy() for name, value in inputs.items()}


def disable_telemetry() -> None:
    """Makes ONNX Runtime and OpenVINO send no telemetry, unless they are already imported."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type] # As if it were not installed


def open_onnx(file: Path, outputs: tuple[str, ...]) -> Run:
    """Opens an ONNX file on the CPU."""
    disable_telemetry()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(names, map(torch.from_numpy, session.run(None, as_arrays(inputs))), strict=True))


def open_openvino(
    file: Path,
    outputs: tuple[str, ...],
    dtype: torch.dtype = torch.float32,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Run:
    """Opens an OpenVINO program on the CPU, for inputs of the given shapes only if there are any.

    Without `dtype`, float32 or bfloat16, OpenVINO would choose the precision.
    """
    disable_telemetry()
    import openvino

    core, precision = openvino.Core(), "bf16" if dtype == torch.bfloat16 else "f32"
    network = core.read_model(file)
    if shapes is not None:
        network.reshape({name: list(shape) for name, shape in shapes.items()})
    settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = core.compile_model(network, "CPU", {**settings, "PERFORMANCE_HINT": "LATENCY"})

    def run(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        results = compiled(as_arrays(inputs))
        return {output.any_name: torch.from_numpy(results[output].copy()) for output in compiled.outputs}

    return run


def open_torch(file: Path, outputs: tuple[str, ...]) -> Run:
    """Opens a `.pt2` file with torch.export."""
    module = torch.export.load(file).module()
    return lambda inputs: module(**inputs)


def open_executorch(file: Path, outputs: tuple[str, ...]) -> Run:
    """Opens an ExecuTorch file."""
    from executorch.runtime import Runtime

    method = Runtime.get().load_program(file).load_method("forward")

    def run(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # Outputs are copied because `method` owns their memory.
        results = [value.clone() for value in method.execute(list(inputs.values()))]
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
    """Returns a format by name.

    Raises:
        ValueError: if the format is unknown.
        ImportError: if a required package is missing or too old.
    """
    if name not in FORMATS:
        raise ValueError(f"Unknown export format {name!r}. Choose one of {', '.join(FORMATS)}.")
    chosen = FORMATS[name]
    check_packages(f"The format {name}", *chosen.packages, extra=chosen.extra)
    if chosen.write is None and not has_exporters():
        raise ImportError(
            f"The format {name} needs transformers {EXPORTERS_SINCE} and torch {EXPORTERS_TORCH} or newer, not "
            f"{transformers.__version__} and {torch.__version__}. Upgrade them, or choose onnx."
        )
    return chosen


def has_exporters() -> bool:
    """Returns whether the installed versions of transformers and torch have the required exporters."""
    return Version(transformers.__version__) >= EXPORTERS_SINCE and Version(torch.__version__) >= EXPORTERS_TORCH


def write_program(
    model: HfViTPreTrainedModel, chosen: Format, file: Path, outputs: tuple[str, ...] | None = None
) -> None:
    """Traces a model and writes the program, with dynamic batch and image size.

    The model must be in evaluation mode, in float32 on the CPU. Some formats write the weights to a second file in the
    same folder. By default, the outputs are those of `output_names`. If the format does not support the model,
    exporters raise errors of different types.
    """
    if chosen.write is not None:
        chosen.write(trace(model, chosen, outputs), file, outputs or output_names(model))
        return
    disable_telemetry()
    from transformers.exporters.auto import get_exporter_class

    program, inputs, sizes = tracing_inputs(model, chosen, outputs)
    exporter = get_exporter_class(chosen.name)
    config = exporter.config_class(dynamic=True, dynamic_shapes=sizes)
    written, _ = exporter().export_program(program, inputs, config)
    exporter.save_program(written, file)


def tracing_inputs(
    model: HfViTPreTrainedModel, chosen: Format, outputs: tuple[str, ...] | None = None
) -> tuple[HfViTProgram, dict[str, Tensor], dict[str, dict[int, Any]]]:
    """Returns the program to trace, its example inputs, and the dynamic dimensions of these inputs."""
    inputs = example_inputs(model, TRACED_BATCH, traced_grid(model))
    return HfViTProgram(model, outputs).eval(), inputs, open_sizes(model, chosen.bounds(model))


@torch.no_grad()
def trace(
    model: HfViTPreTrainedModel, chosen: Format, outputs: tuple[str, ...] | None = None
) -> torch.export.ExportedProgram:
    """Traces a model with `torch.export`."""
    program, inputs, sizes = tracing_inputs(model, chosen, outputs)
    return torch.export.export(program, (), inputs, dynamic_shapes=sizes)
