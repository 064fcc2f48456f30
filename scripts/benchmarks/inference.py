"""Image classifiers eager, compiled, in 8 bits and in other runtimes; times as fast as the better peer.

The better peer is the faster of transformers and timm, in float32 or bfloat16, uncompiled. Weights are random: int8
is calibrated by noise: its speed does not depend on that. `--product` adds the linear layers of the blocks as bare
matrix products of packed weights, which nothing can beat by much.
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
    """What to measure."""

    presets: list[str] = field(default_factory=lambda: ["tiny", "small", "base"], metadata={"help": "sizes"})
    batch_sizes: list[int] = field(default_factory=lambda: [1, 8], metadata={"help": "images per step"})
    image_size: int = field(default=224, metadata={"help": "height and width of the images in pixels"})
    extras: list[str] = field(
        default_factory=lambda: ["int8", "compiled_peers", "onnxruntime", "openvino"],
        metadata={"help": "beside eager and optimized models: int8, compiled_peers, onnxruntime, openvino"},
    )
    product: bool = field(default=False, metadata={"help": "also the blocks as bare matrix products in bfloat16"})
    rounds: int = field(default=9, metadata={"help": "rounds; each runs everything, in random order"})


def main(args: Arguments) -> None:
    """Compiles what is to be compared, and measures it at each size and batch."""
    run, rows = describe_run(args, transformers, timm), list[dict[str, Any]]()
    print_header("preset", "batch", "what", "images/s", "times as fast as the better peer")
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
            rows.append({"preset": preset, "batch_size": batch_size, "what": name, "images/s": speed, "ratio": ratio})
        print(report, flush=True)
    save({**run, "rows": rows}, args.output)


def make_steps(config: HfViTConfig, images: Tensor, args: Arguments) -> tuple[dict[str, Callable[[], object]], object]:
    """Returns what is to be timed, by name, and the report of what was optimized."""
    steps: dict[str, Callable[[], object]] = {}
    for library, make in EAGER.items():
        for name in ("float32", "bfloat16"):
            steps[f"{library}, {name}"] = partial(make(config).eval().to(DTYPES[name]), images.to(DTYPES[name]))
    model, half = HfViTForImageClassification(config).eval(), images.bfloat16()
    fast = optimize_for_inference(model, batch_size=len(images), max_seconds=600)
    steps["hf_vit, optimized"] = partial(fast, images)
    if "int8" in args.extras:
        quantized = copy.deepcopy(model).bfloat16()
        quantize_blocks(quantized, partial(quantized, half))
        steps["hf_vit, int8"] = partial(compile_flat(FlatOutputs(quantized), images, 600), images)
    for library, make in PEERS.items() if "compiled_peers" in args.extras else ():
        peer = make(config).eval().bfloat16()
        named = NamedInput(peer) if library == "timm" else peer
        steps[f"{library}, bfloat16, compiled alike"] = partial(compile_flat(FlatOutputs(named), half, 600), half)
    for name, make_runtime in RUNTIMES.items():
        if name in args.extras:
            steps[f"hf_vit in {name}"] = make_runtime(model, images)
    if args.product:
        steps["products of the blocks, bfloat16"] = product_step(config, len(images))
    return steps, fast.report


class NamedInput(nn.Module):
    """A model of timm that takes its images by our name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(B, C, H, W) to (B, K)."""
        return self.model(pixel_values)


def product_step(config: HfViTConfig, batch_size: int) -> Callable[[], object]:
    """Returns the products of packed weights that the linear layers of all blocks amount to, in the shape of fc1."""
    num_tokens, width = config.num_prefix_tokens + config.grid_size[0] * config.grid_size[1], config.hidden_size
    rows = torch.randn(batch_size * num_tokens, width, dtype=torch.bfloat16)
    weight = torch.randn(4 * width, width, dtype=torch.bfloat16)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows.shape[0])

    def step() -> None:
        for _ in range(3 * config.num_hidden_layers):  # query, key, value and projection are one, the MLP two
            torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")

    return step


def onnx_file(model: nn.Module, images: Tensor, folder: str) -> str:
    """Writes a model for images of one shape to an ONNX file."""
    file = str(Path(folder) / "model.onnx")
    torch.onnx.export(FlatOutputs(copy.deepcopy(model)), (images,), file, dynamo=True, verbose=False)
    return file


def onnxruntime_step(model: nn.Module, images: Tensor) -> Callable[[], object]:
    """Returns a run in onnxruntime, in float32, the precision that its CPU products have."""
    onnxruntime = import_module("onnxruntime")
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(onnx_file(model, images, folder), options, ["CPUExecutionProvider"])
    return partial(session.run, None, {session.get_inputs()[0].name: images.numpy()})


def openvino_step(model: nn.Module, images: Tensor) -> Callable[[], object]:
    """Returns a run in OpenVINO, in the precision that it chooses for the processor."""
    openvino = import_module("openvino")
    with tempfile.TemporaryDirectory() as folder:
        network = openvino.Core().read_model(onnx_file(model, images, folder))
        settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        compiled = openvino.Core().compile_model(network, "CPU", settings)
    return partial(compiled, [images.numpy()])


RUNTIMES = {"onnxruntime": onnxruntime_step, "openvino": openvino_step}
