"""Compare the speed of eager, compiled and 8-bit image classifiers with other libraries and runtimes.

Speeds are relative to the fastest uncompiled transformers or timm model in float32 or bfloat16. Weights are
random. int8 is calibrated on noise, which does not affect its speed. `--product` adds a lower bound of the time: the
time of the matrix products of all linear layers with packed weights.
"""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from torch import Tensor, nn

from hf_vit import HfViTConfig, HfViTForImageClassification, optimize_for_inference
from hf_vit.inference.ahead_of_time import FlatOutputs, compile_flat
from hf_vit.inference.int8_linear import quantize_blocks

from .classification import make_timm_model, make_transformers_model
from .harness import (
    DTYPES,
    StepArguments,
    describe_run,
    median_of,
    median_ratio,
    print_header,
    print_row,
    save,
    time_steps,
)


Make = Callable[[HfViTConfig], nn.Module]
PEERS: dict[str, Make] = {"transformers": make_transformers_model, "timm": make_timm_model}
EAGER: dict[str, Make] = {"hf_vit": HfViTForImageClassification, **PEERS}


@dataclass(kw_only=True)
class Arguments(StepArguments):
    """Options of the benchmark."""

    presets: list[str] = field(
        default_factory=lambda: ["tiny", "small", "base"], metadata={"help": "sizes of the model"}
    )
    batch_sizes: list[int] = field(default_factory=lambda: [1, 8], metadata={"help": "images per step"})
    image_size: int = field(default=224, metadata={"help": "height and width of the images in pixels"})
    extras: list[str] = field(
        default_factory=lambda: ["int8", "compiled_peers", "onnxruntime", "openvino"],
        metadata={"help": "additional candidates: int8, compiled_peers, onnxruntime, openvino"},
    )
    dtypes: list[str] = field(
        default_factory=lambda: ["float32", "bfloat16"],
        metadata={"help": "precisions of uncompiled models; compiled peers use the last one"},
    )
    product: bool = field(default=False, metadata={"help": "also time the matrix products of the blocks in bfloat16"})
    rounds: int = field(default=9, metadata={"help": "number of rounds; each runs all candidates in random order"})


def main(args: Arguments) -> None:
    """Measure all candidates for each preset and batch size."""
    run, rows = describe_run(args, transformers, timm), list[dict[str, Any]]()
    print_header("preset", "batch", "candidate", "images/s", "speed relative to the fastest peer")
    for preset, batch_size in product(args.presets, args.batch_sizes):
        torch.manual_seed(0)
        config = HfViTConfig.from_preset(preset, num_labels=1000, image_size=args.image_size)
        images = torch.randn(batch_size, 3, args.image_size, args.image_size)
        with torch.no_grad():
            steps, report = make_steps(config, images, args)
        with torch.inference_mode():
            rounds = time_steps(steps, args)
        peers = [name for name in steps if name.split(", ")[0] in PEERS and "compiled" not in name]
        best = min(peers, key=partial(median_of, rounds))
        for name in steps:
            speed, ratio = batch_size / median_of(rounds, name), median_ratio(rounds, best, to=name)
            print_row(preset, batch_size, name, speed, ratio)
            rows.append(
                {"preset": preset, "batch_size": batch_size, "candidate": name, "images/s": speed, "ratio": ratio}
            )
        print(report, flush=True)
    save({**run, "rows": rows}, args.output)


def make_steps(config: HfViTConfig, images: Tensor, args: Arguments) -> tuple[dict[str, Callable[[], object]], object]:
    """Return the functions to time, by name, and the report of `optimize_for_inference`."""
    steps: dict[str, Callable[[], object]] = {}
    for library, make in EAGER.items():
        for name in args.dtypes:
            steps[f"{library}, {name}"] = partial(make(config).eval().to(DTYPES[name]), images.to(DTYPES[name]))
    model, half = HfViTForImageClassification(config).eval(), images.bfloat16()
    last, chosen = args.dtypes[-1], images.to(DTYPES[args.dtypes[-1]])
    fast = optimize_for_inference(model, batch_size=len(images), max_seconds=600)
    steps["hf_vit, optimized"] = partial(fast, images)
    if "int8" in args.extras:
        quantized = copy.deepcopy(model).bfloat16()
        quantize_blocks(quantized, partial(quantized, half))
        steps["hf_vit, int8"] = partial(compile_flat(FlatOutputs(quantized), images, 600), images)
    for library, make in PEERS.items() if "compiled_peers" in args.extras else ():
        peer = make(config).eval().to(chosen.dtype)
        named = NamedInput(peer) if library == "timm" else peer
        steps[f"{library}, {last}, compiled"] = partial(compile_flat(FlatOutputs(named), chosen, 600), chosen)
    for name, make_runtime in RUNTIMES.items():
        if name in args.extras:
            steps[f"hf_vit in {name}"] = make_runtime(model, images)
    if args.product:
        steps["products of the blocks, bfloat16"] = product_step(config, len(images))
    return steps, fast.report


class NamedInput(nn.Module):
    """Wrapper of a timm model that names the model input `pixel_values`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the logits (B, K) for images (B, C, H, W)."""
        return self.model(pixel_values)


def product_step(config: HfViTConfig, batch_size: int) -> Callable[[], object]:
    """Return a function that computes matrix products (of the shape of fc1) as costly as those of all blocks."""
    num_tokens, width = config.num_prefix_tokens + config.grid_size[0] * config.grid_size[1], config.hidden_size
    rows = torch.randn(batch_size * num_tokens, width, dtype=torch.bfloat16)
    weight = torch.randn(4 * width, width, dtype=torch.bfloat16)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows.shape[0])

    def step() -> None:
        for _ in range(
            3 * config.num_hidden_layers
        ):  # products per block: 1 for query, key, value and projection, 2 for the MLP
            torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")

    return step


def onnx_file(model: nn.Module, images: Tensor, folder: str) -> str:
    """Export a model for images of one shape to an ONNX file; return the path of the file."""
    file = str(Path(folder) / "model.onnx")
    torch.onnx.export(FlatOutputs(copy.deepcopy(model)), (images,), file, dynamo=True, verbose=False)
    return file


def onnxruntime_step(model: nn.Module, images: Tensor) -> Callable[[], object]:
    """Return a function that runs a model in onnxruntime in float32, the precision of the onnxruntime CPU kernels."""
    onnxruntime = import_module("onnxruntime")
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(onnx_file(model, images, folder), options, ["CPUExecutionProvider"])
    return partial(session.run, None, {session.get_inputs()[0].name: images.numpy()})


def openvino_step(model: nn.Module, images: Tensor) -> Callable[[], object]:
    """Return a function that runs a model in OpenVINO, in the precision that OpenVINO selects for the CPU."""
    openvino = import_module("openvino")
    with tempfile.TemporaryDirectory() as folder:
        network = openvino.Core().read_model(onnx_file(model, images, folder))
        settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        compiled = openvino.Core().compile_model(network, "CPU", settings)
    return partial(compiled, [images.numpy()])


RUNTIMES = {"onnxruntime": onnxruntime_step, "openvino": openvino_step}
