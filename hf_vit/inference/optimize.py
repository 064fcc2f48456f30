"""Optimize a model for inference on the current machine by lower precision, compilation, int8 and other runtimes.

The speed of each variant is measured for the task and image size of the model. Only faster variants are used.
"""

import copy
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from functools import partial, update_wrapper
from pathlib import Path
from statistics import median
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..model.adapt_inputs import Size
from ..model.configuration_hf_vit import to_pair
from ..model.pretrained import HfViTPreTrainedModel, check_trained
from ..model.weight_changes import WeightWatch
from .ahead_of_time import CompilationError, FlatOutputs, compile_flat, first_line
from .export.programs import Bounds, comparison_sizes, example_inputs
from .int8_linear import quantize_blocks
from .runtimes import RuntimeProgram, installed_runtimes


ModelT = TypeVar("ModelT", bound=HfViTPreTrainedModel)
Run = Callable[[Tensor], Any]

MIN_SPEEDUP = 1.02  # Minimum speedup for a variant to be kept.
ROUNDS, MIN_SECONDS = 9, 0.3  # Number of rounds per measurement, and minimum seconds per variant and round.
# Largest accepted changes by int8: the fraction of predicted classes that change (classification and semantic
# segmentation), and the relative root mean square change of the outputs (all other tasks)
MAX_CHANGED_CLASSES, MAX_OUTPUT_CHANGE = 0.01, 0.05
# Largest accepted difference from the outputs of the original model, relative to the largest value of each output
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Trial:
    """Measurement of one variant of a model."""

    name: str  # description of the variant
    seconds: float | None = None  # median time per batch; None if the variant was not timed
    ratio: float | None = None  # speedup compared with the original model: the product of all speedups so far
    difference: float | None = None  # largest difference from the original outputs, relative to the largest value
    kept: bool = False  # whether the variant was the fastest so far and its outputs were within the tolerance
    note: str = ""  # reason why the variant was rejected, or a remark


@dataclass
class OptimizationReport:
    """Measurements of all variants that `optimize_for_inference` tried. `str(report)` is a Markdown table."""

    shape: tuple[int, ...]  # (B, C, H, W) of the images used for timing
    trials: list[Trial] = field(default_factory=list)  # in the order of time, starting with the original model

    @property
    def best(self) -> Trial:
        """The variant that the optimized model uses."""
        return [trial for trial in self.trials if trial.kept][-1]

    def __str__(self) -> str:
        rows = ["| tried | milliseconds | times as fast | difference | verdict |", "|---|---|---|---|---|"]
        for trial in self.trials:
            milliseconds = None if trial.seconds is None else trial.seconds * 1000
            numbers = [(milliseconds, ".2f"), (trial.ratio, ".2f"), (trial.difference, ".1e")]
            cells = ["-" if value is None else format(value, form) for value, form in numbers]
            verdict = ("kept" if trial.kept else "not kept") + (f": {trial.note}" if trial.note else "")
            rows.append(f"| {' | '.join([trial.name, *cells, verdict])} |")
        return "\n".join(rows)


@dataclass(frozen=True)
class CompiledProgram:
    """A program compiled for the current process. It cannot be pickled, and copies of a model share the program."""

    run: Run
    accepts: Callable[[torch.Size], bool]  # whether the program can process images of a shape

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompiledProgram":
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "An optimized model contains a program compiled for this process and cannot be pickled. Pickle the "
            "original model, and call optimize_for_inference after loading it."
        )


@dataclass(eq=False)
class FastForward:
    """The forward pass of an optimized model.

    The uncompiled model is used for images that the program does not accept, and for calls with further arguments.
    """

    given: InitVar[Run]  # forward pass of the original model
    eager: HfViTPreTrainedModel  # uncompiled model in the selected precision
    program: CompiledProgram | None  # program compiled from `eager`; None if nothing was compiled
    images: InitVar[Tensor]  # example images with the dtype and device that the program accepts
    watch: WeightWatch  # detector of changes of the original model

    def __post_init__(self, given: Run, images: Tensor) -> None:
        update_wrapper(self, given)
        self.dtype, self.device = images.dtype, images.device

    def __call__(self, pixel_values: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Runs the optimized forward pass without gradients. Arguments and outputs are those of the original model."""
        self.watch.check()
        has_more = any(value is not None for value in args) or any(
            value is not None and name != "interpolate_pos_encoding" and (name, value) != ("return_dict", True)
            for name, value in kwargs.items()
        )
        with torch.no_grad():
            is_fitting = isinstance(pixel_values, Tensor) and pixel_values.device == self.device
            if self.program is None or has_more or not is_fitting or not self.program.accepts(pixel_values.shape):
                outputs = self.eager(pixel_values, *args, **kwargs)
            else:  # The compiled program requires contiguous memory and a fixed dtype.
                outputs = self.program.run(pixel_values.to(self.dtype).contiguous())
        return pytree.tree_map_only(
            Tensor, lambda value: value.to(self.dtype) if value.is_floating_point() else value, outputs
        )


def optimize_for_inference(
    model: ModelT,
    *,
    batch_size: int = 1,
    image_size: Size | None = None,
    dtype: str | torch.dtype = "auto",
    compile: bool = True,
    int8: bool = False,
    max_seconds: float = 120.0,
    images: Tensor | None = None,
) -> ModelT:
    """Optimizes a model for inference on this machine. Variants are tried, and kept if they are at least 2 % faster.

    A change of precision or a compilation is rejected if outputs differ by more than 1e-4 (float32) or 5e-2 (bfloat16)
    of the largest value. int8 is rejected if more than 1 % of the predicted classes change or, for models that
    do not predict classes, if outputs change by more than 5 %.

    Args:
        model: Model in evaluation mode. The model is not changed. The result shares the weights of the
            model and may have additional weights.
        batch_size: Number of images per call to optimize for.
        image_size: Height and width in pixels to optimize for, or one number for both. The default is the size of
            `images` if given, else the image size of the model.
        dtype: "auto" tries bfloat16 and, on a CPU, float32. If a dtype or its name is given, only this dtype is tried.
        compile: Whether to compile the model with weights packed for the processor, which requires a C++ compiler on a
            CPU, and to try OpenVINO and ONNX Runtime on a CPU if they are installed (extra `export`).
        int8: Whether to try 8-bit weights and activations when compiling. Requires `images`.
        max_seconds: Time limit in seconds for each compilation on a CPU. A compilation that exceeds the limit is
            rejected. On a GPU, there is no limit.
        images: A few dozen typical images (N, C, H, W), as returned by the image processor. They are used
            to calibrate int8 and to compare predictions. By default, the outputs for random noise are compared.

    Returns:
        A model of the same class for inference only, with the same call signature, configuration and outputs. Its
        attribute `report` is an `OptimizationReport`. Calls with further arguments (padding, hidden states) run
        uncompiled in the selected precision, and so do calls with other batch or image sizes unless another runtime
        was the fastest variant. `save_pretrained` saves the weights of the
        original model. Calling the result raises `ValueError` if weights or modules of the original model have
        changed. `train()` always raises `ValueError`. In an image-text model, only the image tower is optimized.

    Raises:
        TypeError: if the model is not a model of hf_vit.
        ValueError: if an argument is invalid, weights are untrained or non-finite, or outputs are not deterministic.
    """
    if not is_a(model, "HfViTPreTrainedModel"):
        raise TypeError(f"model must be an HfViTModel or HfViTFor… of hf_vit, not {type(model).__name__}.")
    has_texts = is_a(model, "HfViTForZeroShotImageClassification")
    part = cast("HfViTPreTrainedModel", model.model if has_texts else model)
    check_options(part, batch_size, int8, max_seconds, images)
    check_trained(part, part.name_or_path, part.untrained_weights)
    search = Search(part, measured_images(part, batch_size, image_size, images), images)
    for wanted in dtypes_to_try(dtype, part):
        search.compare(get_name(wanted), search.candidate(copy.deepcopy(part).to(wanted)))
    for quantized in [False, True][: 1 + int8] if compile else []:
        search.try_compiling(quantized, max_seconds)
    with tempfile.TemporaryDirectory(prefix="hf_vit_") as folder:
        for runtime in installed_runtimes() if compile and part.device.type == "cpu" else []:
            search.try_runtime(runtime, Path(folder))
    fast = sharing(part, forward=search.best, report=search.report)
    return sharing(model, _modules={**model._modules, "model": fast}, report=fast.report) if has_texts else fast


class Search:
    """Search for the fastest variant of a model. Each compiled variant is based on the best variant so far.

    Variants are timed on `images` (B, C, H, W). Predictions for `samples` (N, C, H, W), if available, are compared.
    """

    def __init__(self, model: HfViTPreTrainedModel, images: Tensor, samples: Tensor | None) -> None:
        self.model, self.images, self.samples = model, images, samples
        self.report, self.watch = OptimizationReport(tuple(images.shape)), WeightWatch(model)
        self.best = self.candidate(model)
        self.expected = self.best(images)
        if not difference_of(self.best(images), self.expected) <= TOLERANCES[torch.float32]:
            raise ValueError(
                f"{type(model).__name__} returns random outputs or NaN, so variants cannot be compared with it. "
                "Optimize a model with deterministic outputs, such as a task model."
            )
        seconds, _ = race(self.best, self.best, images)
        self.report.trials.append(Trial(f"as given, {get_name(model.dtype)}", seconds, 1.0, 0.0, True))

    def candidate(self, eager: HfViTPreTrainedModel, program: CompiledProgram | None = None) -> FastForward:
        """Returns the forward pass of a candidate: a model, and a program compiled from it, if any."""
        return FastForward(self.model.forward, eager, program, self.images, self.watch)

    def try_compiling(self, quantized: bool, max_seconds: float) -> None:
        """Compiles the best variant so far, with 8-bit blocks if `quantized`, and keeps the result if it is faster."""
        eager = self.best.eager
        name = f"{'int8 and ' if quantized else ''}{get_name(eager.dtype)}, compiled"
        try:
            if quantized and self.images.device.type != "cpu":
                raise CompilationError("int8 is supported on CPUs only")
            source = copy.deepcopy(eager) if quantized else eager
            if quantized:  # The samples are used as calibration images.
                quantize_blocks(source, lambda: self.answers(source))
            program = CompiledProgram(compile_here(source, self.images, max_seconds), self.images.shape.__eq__)
        except CompilationError as error:
            self.report.trials.append(Trial(name, note=str(error)))
        else:
            self.compare(name, self.candidate(eager, program), approximates=quantized)

    @torch.no_grad()
    def try_runtime(self, runtime: str, folder: Path) -> None:
        """Opens the model in another runtime, and keeps the program if it is faster and equal at another size."""
        eager = self.best.eager if runtime == "openvino" else self.model
        name = f"{get_name(eager.dtype) if runtime == 'openvino' else 'float32'}, {runtime}"
        batch, (rows, columns) = comparison_sizes(self.model, Bounds())[1]
        other = example_inputs(self.model, batch, (rows, columns))["pixel_values"].to(self.images)
        try:
            program = RuntimeProgram(self.model, self.images, folder, runtime, eager.dtype)
            candidate = self.candidate(eager, CompiledProgram(program, program.accepts))
            if not difference_of(candidate(other), self.model(other)) <= self.tolerance(candidate):
                raise CompilationError(f"outputs differ for {batch} images of another size")
        except (CompilationError, RuntimeError) as error:
            self.report.trials.append(Trial(name, note=str(error)))
        else:
            self.compare(name, candidate)

    def answers(self, run: Run) -> list[Any]:
        """Returns the outputs of a variant for all samples, one entry per batch."""
        assert self.samples is not None
        with torch.no_grad():
            return [run(batch) for batch in self.samples.to(self.images).split(self.images.shape[0])]

    def compare(self, name: str, candidate: FastForward, approximates: bool = False) -> None:
        """Keeps a candidate if it is faster than the best one so far and its outputs are within the tolerance."""
        difference = difference_of(candidate(self.images), self.expected)
        if approximates:
            note, is_close = self.judge_predictions(candidate)
        else:
            tolerance = self.tolerance(candidate)
            is_close = difference <= tolerance  # False if the difference is NaN
            note = "" if is_close else f"outputs differ by more than {tolerance:g}"
        seconds = ratio = None
        if is_close:
            seconds, gain = race(candidate, self.best, self.images)
            ratio = gain * (self.report.best.ratio or 1.0)
            if gain >= MIN_SPEEDUP:
                self.best = candidate
            else:
                note = f"speedup {gain:.2f} over the best so far, below {MIN_SPEEDUP}"
        self.report.trials.append(Trial(name, seconds, ratio, difference, self.best is candidate, note))

    def tolerance(self, candidate: FastForward) -> float:
        """Returns the largest accepted difference of a candidate from the original model."""
        return max(TOLERANCES[candidate.eager.dtype], TOLERANCES[self.model.dtype])

    def judge_predictions(self, candidate: FastForward) -> tuple[str, bool]:
        """Returns a note on how much an approximation changes predictions, and whether the change is acceptable."""
        pairs = zip(self.answers(candidate), self.answers(self.model), strict=True)
        if has_classes(self.model):
            changed = torch.cat([(own.logits.argmax(1) != other.logits.argmax(1)).flatten() for own, other in pairs])
            share, most, what = changed.float().mean().item(), MAX_CHANGED_CLASSES, "of the answers change"
        else:
            share = max(difference_of(own, other, order=2) for own, other in pairs)
            most, what = MAX_OUTPUT_CHANGE, "change of the outputs"
        is_little = share <= most
        return f"{share:.1%} {what}" + ("" if is_little else f", more than {most:.0%}"), is_little


def is_a(model: Any, *names: str) -> bool:
    """Returns whether the class of a model, or one of its base classes, has one of the given names.

    Names are compared because the classes of a model loaded with remote code are copies.
    """
    return not {base.__name__ for base in type(model).__mro__}.isdisjoint(names)


def sharing(model: ModelT, **attributes: Any) -> ModelT:
    """Returns a shallow copy of a model with the given attributes. Modules and weights are shared with the model."""
    # copy.copy is not used because it would register hooks on the shared modules a second time.
    other = type(model).__new__(type(model))
    other.__dict__.update(vars(model), _is_optimized=True, **attributes)
    return other


def check_options(
    model: HfViTPreTrainedModel, batch_size: int, int8: bool, max_seconds: float, images: Tensor | None
) -> None:
    """Raises `ValueError` if an option of `optimize_for_inference` is invalid."""
    shape = None if images is None else tuple(images.shape)
    checks = [
        (model.training, "The model is in training mode, in which outputs are random. Call model.eval() first."),
        (batch_size < 1, f"batch_size={batch_size} must be at least 1: the number of images per call."),
        (not max_seconds > 0, f"max_seconds={max_seconds} must be positive. To skip compilation, use compile=False."),
        (
            shape is not None and (len(shape) != 4 or shape[0] < batch_size),
            f"images must be (N, channels, height, width) with N at least batch_size={batch_size}, not {shape}.",
        ),
        (
            int8 and shape is None,
            "int8=True needs calibration images. Pass a few dozen processed images as images=.",
        ),
    ]
    for is_wrong, message in checks:
        if is_wrong:
            raise ValueError(message)


def measured_images(
    model: HfViTPreTrainedModel, batch_size: int, image_size: Size | None, images: Tensor | None
) -> Tensor:
    """Returns the images (B, C, H, W) for timing: the first B in `images`, or noise if `images` is None."""
    if images is not None:
        if image_size is not None and to_pair(image_size) != tuple(images.shape[2:]):
            raise ValueError(f"image_size={image_size} must be the size of images, {tuple(images.shape[2:])}.")
        return images[:batch_size].to(model.device, model.dtype).contiguous()
    size = to_pair(model.config.image_size if image_size is None else image_size)
    noise = torch.randn(batch_size, model.config.num_channels, *size, generator=torch.Generator().manual_seed(0))
    return noise.to(model.device, model.dtype)


def dtypes_to_try(dtype: str | torch.dtype, model: HfViTPreTrainedModel) -> list[torch.dtype]:
    """Returns the dtypes to try, without the dtype of the model; raises `ValueError` if `dtype` is invalid."""
    wanted = [known for known in TOLERANCES if dtype in (known, get_name(known))]
    if dtype == "auto":
        wanted = [torch.bfloat16] if model.device.type != "cpu" else [torch.float32, torch.bfloat16]
    if not wanted:
        names = ", ".join(repr(get_name(known)) for known in TOLERANCES)
        raise ValueError(f"dtype={dtype!r} must be 'auto' or one of {names}.")
    return [each for each in wanted if each != model.dtype]


def has_classes(model: HfViTPreTrainedModel) -> bool:
    """Returns whether a model predicts one class per image or per pixel."""
    is_classifier = is_a(model, "HfViTForImageClassification", "HfViTForSemanticSegmentation")
    several_or_values = model.config.problem_type in ("multi_label_classification", "regression")
    return is_classifier and model.config.num_labels > 1 and not several_or_values


def compile_here(model: HfViTPreTrainedModel, images: Tensor, max_seconds: float) -> Run:
    """Compiles a model for images of one shape; raises `CompilationError` if the compilation fails.

    On a CPU, the model is compiled ahead of time. On a GPU, it is compiled with CUDA graphs, without a time limit.
    """
    if images.device.type == "cpu":
        with torch.no_grad():
            _, form = pytree.tree_flatten(model(pixel_values=images))
        program = compile_flat(FlatOutputs(model), images, max_seconds)
        return lambda pixel_values: pytree.tree_unflatten(program(pixel_values), form)
    compiled = torch.compile(model, mode="reduce-overhead", dynamic=False)

    def run(pixel_values: Tensor) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        # Outputs are copied because the next call overwrites their memory.
        return pytree.tree_map_only(Tensor, torch.clone, compiled(pixel_values=pixel_values))

    try:
        run(images)
    except Exception as error:  # Compilers raise many types of errors.
        raise CompilationError(first_line(error)) from error
    return run


def race(candidate: Run, other: Run, images: Tensor) -> tuple[float, float]:
    """Returns the median seconds per call of a candidate, and the median speedup compared with another variant."""

    def seconds(run: Run, repeats: int = 1) -> float:
        synchronize = torch.cuda.synchronize if images.is_cuda else int
        if repeats > 1:  # The first call is slower: threads of the other variant may still spin.
            run(images)
        synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            run(images)
        synchronize()
        return (time.perf_counter() - start) / repeats

    runs = (candidate, other)
    repeats = max(1, round(MIN_SECONDS / max(min(min(seconds(run), seconds(run)) for run in runs), 1e-6)))
    rounds = []
    for number in range(ROUNDS):
        order = runs if number % 2 else runs[::-1]
        taken = {run: seconds(run, repeats) for run in order}
        rounds.append((taken[candidate], taken[other]))
    return median(own for own, _ in rounds), median(theirs / own for own, theirs in rounds)


def difference_of(outputs: Any, expected: Any, order: float = math.inf) -> float:
    """Returns the largest relative difference between the tensors of two outputs.

    The relative difference is the vector norm of the difference divided by the vector norm of the expected tensor.
    Both norms have the given order.
    """
    norm = partial(torch.linalg.vector_norm, ord=order)
    differences = [
        (norm(own.float() - other.float()) / norm(other.float()).clamp_min(1e-12)).item()
        for own, other in zip(pytree.tree_leaves(outputs), pytree.tree_leaves(expected), strict=True)
    ]
    return max(differences, key=lambda value: math.inf if math.isnan(value) else value)


def get_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype without the prefix "torch."."""
    return str(dtype).removeprefix("torch.")
