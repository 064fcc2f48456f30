"""One call that makes a model fast on the machine at hand: precision, compilation, int8, fewer tokens.

Everything is measured here, on the task and the image size of the model, and nothing is kept that is not faster.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .adapt_inputs import Size
from .ahead_of_time import CompilationError, FlatOutputs, compile_flat, first_line
from .configuration_hf_vit import to_pair
from .pretrained import HfViTPreTrainedModel


ModelT = TypeVar("ModelT", bound=HfViTPreTrainedModel)
Run = Callable[[Tensor], Any]

KEPT = "kept"
LEAST_GAIN = 1.05  # times as fast: less is not kept
ROUNDS, MIN_SECONDS = 9, 0.1  # of a measurement; in each round either is repeated for that long at least
# Largest difference to the outputs of the model given, as a share of the largest value of each
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# Arguments of `forward` that change no value of the outputs
NEUTRAL = {"interpolate_pos_encoding"}


@dataclass(frozen=True)
class Trial:
    """One thing that was tried.

    Args:
        name: What it is.
        seconds: Of a batch, the median; None where it did not come to run.
        ratio: How many times as fast as the model given.
        difference: The largest to the outputs of the model given, as a share of the largest value.
        verdict: "kept", or why not.
    """

    name: str
    seconds: float | None
    ratio: float | None
    difference: float | None
    verdict: str


@dataclass
class OptimizationReport:
    """What `optimize_for_inference` tried, in order; printed, it is a table.

    Args:
        shape: (B, C, H, W) of the images that it was measured on.
        trials: The first is the model as it was given.
    """

    shape: tuple[int, ...]
    trials: list[Trial] = field(default_factory=list)

    @property
    def best(self) -> Trial:
        """What the optimized model runs."""
        return [trial for trial in self.trials if trial.verdict == KEPT][-1]

    def __str__(self) -> str:
        def cell(value: float | None, form: str) -> str:
            return "-" if value is None else format(value, form)

        rows = [("tried", "milliseconds", "times as fast", "difference", "verdict"), ("---",) * 5]
        for trial in self.trials:
            seconds = None if trial.seconds is None else trial.seconds * 1000
            numbers = (cell(seconds, ".2f"), cell(trial.ratio, ".2f"), cell(trial.difference, ".1e"))
            rows.append((trial.name, *numbers, trial.verdict))
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


class FastForward:
    """The forward pass of an optimized model.

    Args:
        given: The forward pass of the model as it was given.
        eager: The model in the precision that was kept.
        program: What was compiled from it, for images of one shape; None where nothing was.
        images: Images of that shape and of the dtype that the program takes.
    """

    def __init__(self, given: Callable[..., Any], eager: HfViTPreTrainedModel, program: Run | None, images: Tensor):
        update_wrapper(self, given)
        self.eager, self.program = eager, program
        self.shape, self.dtype, self.device = images.shape, images.dtype, images.device

    def __call__(self, pixel_values: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Takes what `forward` of the model takes, and returns what it returns, without gradients."""
        is_plain = not args and all(
            value is None or name in NEUTRAL or (name == "return_dict" and value is True)
            for name, value in kwargs.items()
        )
        with torch.no_grad():
            if self.program is not None and is_plain and self.fits(pixel_values):
                # The program reads memory as it was compiled for.
                outputs = self.program(pixel_values.to(self.dtype).contiguous())  # type: ignore[union-attr]
            else:
                outputs = self.eager(pixel_values, *args, **kwargs)
        return pytree.tree_map(partial(_cast, dtype=self.dtype), outputs)

    def fits(self, pixel_values: Any) -> bool:
        """Whether images have the shape that was compiled for."""
        return isinstance(pixel_values, Tensor) and (pixel_values.shape, pixel_values.device) == (
            self.shape,
            self.device,
        )


def optimize_for_inference(
    model: ModelT,
    *,
    batch_size: int = 1,
    image_size: Size | None = None,
    dtype: str | torch.dtype = "auto",
    compile: bool = True,
    int8: bool = False,
    token_merging: int | None = None,
    max_seconds: float = 120.0,
    images: Tensor | None = None,
) -> ModelT:
    """Makes a model fast on this machine, by trying what may help and keeping what is at least 5 % faster.

    Args:
        model: In evaluation mode. It stays as it is; the result shares its weights and adds those of its own.
        batch_size: Images per call to be fast at.
        image_size: Height and width in pixels to be fast at, or one for both; by default those of the model.
        dtype: "auto" takes the fastest of float32 and bfloat16; "float32", "bfloat16" or "float16" takes that one.
        compile: Whether to compile with weights packed for the processor, which needs a C++ compiler.
        int8: Whether to try 8-bit weights and activations too.
        token_merging: Number of tokens that each block merges into others; None merges none.
        max_seconds: Time that compiling may take in all. What takes longer is left out.
        images: (N, C, H, W) as the image processor returns them, some dozens that look like those to come. int8 is
            calibrated by them. By default differences are measured on noise.

    Returns:
        A model of the same class with the same call, configuration and outputs. Its attribute `report` is an
        `OptimizationReport`. Calls with another batch size, image size, or further inputs run uncompiled in the
        precision that was kept. `save_pretrained` saves the weights of the model given.

    Raises:
        TypeError: if the model is none of this package.
        ValueError: if an argument is out of range, or the model draws its outputs at random.
    """
    if not isinstance(model, HfViTPreTrainedModel):
        raise TypeError(f"model must be one of hf_vit's, HfViTFor… or HfViTModel, not {type(model).__name__}.")
    check_options(model, batch_size, max_seconds)
    size = to_pair(model.config.image_size if image_size is None else image_size)
    noise = torch.randn(batch_size, model.config.num_channels, *size, generator=torch.Generator().manual_seed(0))
    search = Search(model, noise.to(model.device, model.dtype))
    for wanted in dtypes_to_try(dtype, model):
        search.try_dtype(wanted)
    if compile:
        search.try_compiling(max_seconds)
    return search.result()


class Search:
    """Tries one thing after the other on the best model so far.

    Args:
        model: As it was given.
        images: To measure on.
    """

    def __init__(self, model: HfViTPreTrainedModel, images: Tensor) -> None:
        self.model, self.images = model, images
        self.report = OptimizationReport(tuple(images.shape))
        self.best = FastForward(model.forward, model, None, images)
        self.expected = self.best(images)
        if not difference_of(self.best(images), self.expected) <= TOLERANCES[torch.float32]:
            raise ValueError(
                f"{type(model).__name__} gives other outputs for the same images each time, or none that are numbers, "
                "so nothing can be compared to them. Optimize the model of a task."
            )
        self.seconds, _ = race(self.best, self.best, images)
        self.report.trials.append(Trial(f"as given, {name_of(model.dtype)}", self.seconds, 1.0, 0.0, KEPT))

    def try_dtype(self, dtype: torch.dtype) -> None:
        """Tries the weights in another precision."""
        eager = copy.deepcopy(self.model).to(dtype)
        candidate = FastForward(self.model.forward, eager, None, self.images)
        self.try_candidate(name_of(dtype), candidate, self.tolerance(dtype))

    def try_compiling(self, max_seconds: float) -> None:
        """Tries to compile the best precision."""
        eager = self.best.eager
        name = f"{name_of(eager.dtype)}, compiled"
        make = compile_on_cpu if self.images.device.type == "cpu" else compile_on_gpu
        try:
            program = make(eager, self.images, max_seconds)
        except CompilationError as error:
            self.report.trials.append(Trial(name, None, None, None, f"left out: {error}"))
            return
        candidate = FastForward(self.model.forward, eager, program, self.images)
        self.try_candidate(name, candidate, self.tolerance(eager.dtype))

    def tolerance(self, dtype: torch.dtype) -> float:
        """Returns by how much outputs in a precision may differ from those of the model given."""
        return max(TOLERANCES[dtype], TOLERANCES[self.model.dtype])

    def try_candidate(self, name: str, candidate: FastForward, tolerance: float) -> None:
        """Keeps a candidate if it is faster than the best one, and its outputs differ by no more than `tolerance`."""
        difference = difference_of(candidate(self.images), self.expected)
        if not difference <= tolerance:  # also where it is NaN
            verdict = f"left out: the outputs differ by more than {tolerance:g}"
            self.report.trials.append(Trial(name, None, None, difference, verdict))
            return
        seconds, gain = race(candidate, self.best, self.images)
        kept = gain >= LEAST_GAIN
        verdict = KEPT if kept else f"left out: {gain:.2f} times as fast as the best so far, {LEAST_GAIN} is the least"
        self.report.trials.append(Trial(name, seconds, self.seconds / seconds, difference, verdict))
        if kept:
            self.best = candidate

    def result(self) -> HfViTPreTrainedModel:
        """Returns the model given with the best forward pass."""
        fast = copy.copy(self.model)  # has the same parts, and so the same weights
        fast.forward, fast.report = self.best, self.report
        return fast


def check_options(model: HfViTPreTrainedModel, batch_size: int, max_seconds: float) -> None:
    """Raises `ValueError` where an option of `optimize_for_inference` is out of range."""
    if model.training:
        raise ValueError("The model is in training mode, where it drops out at random. Call model.eval() first.")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1: the number of images per call.")
    if not max_seconds > 0:
        raise ValueError(f"max_seconds={max_seconds} must be more than 0. compile=False leaves compiling out.")


def dtypes_to_try(dtype: str | torch.dtype, model: HfViTPreTrainedModel) -> list[torch.dtype]:
    """Returns the precisions that `dtype` names beside that of the model; `ValueError` if it names none."""
    names = {name_of(known): known for known in TOLERANCES}
    if dtype == "auto":
        wanted = [torch.bfloat16] if model.device.type != "cpu" else [torch.float32, torch.bfloat16]
    else:
        known = dtype if isinstance(dtype, torch.dtype) else names.get(dtype)
        if known not in TOLERANCES:
            raise ValueError(f"dtype={dtype!r} must be 'auto' or one of {', '.join(map(repr, names))}.")
        wanted = [known]
    return [each for each in wanted if each != model.dtype]


def compile_on_cpu(model: HfViTPreTrainedModel, images: Tensor, max_seconds: float) -> Run:
    """Compiles a model for images of one shape ahead of time; `CompilationError` if that fails."""
    with torch.no_grad():
        _, form = pytree.tree_flatten(model(pixel_values=images))
    program = compile_flat(FlatOutputs(model), images, max_seconds)
    return lambda pixel_values: pytree.tree_unflatten(program(pixel_values), form)


def compile_on_gpu(model: HfViTPreTrainedModel, images: Tensor, max_seconds: float) -> Run:
    """Compiles a model for images of one shape at the first call, with CUDA graphs; not bounded in time."""
    compiled = torch.compile(model, mode="reduce-overhead", dynamic=False)

    def run(pixel_values: Tensor) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return pytree.tree_map(_own, compiled(pixel_values=pixel_values))

    try:
        run(images)
    except Exception as error:  # compilers fail in many ways
        raise CompilationError(first_line(error)) from error
    return run


def race(candidate: Run, other: Run, images: Tensor) -> tuple[float, float]:
    """Returns the median seconds of a candidate, and the median of how many times as fast as another one it is."""

    def seconds(run: Run, repeats: int = 1) -> float:
        synchronize = torch.cuda.synchronize if images.is_cuda else int
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


def difference_of(outputs: Any, expected: Any) -> float:
    """Returns the largest difference of two outputs, as a share of the largest value of each of their tensors."""
    differences = [
        ((own.float() - other.float()).abs().max() / other.float().abs().max().clamp_min(1e-12)).item()
        for own, other in zip(pytree.tree_leaves(outputs), pytree.tree_leaves(expected), strict=True)
    ]
    return max(differences, key=lambda value: float("inf") if value != value else value)


def name_of(dtype: torch.dtype) -> str:
    """Returns the name of a precision without that of torch."""
    return str(dtype).removeprefix("torch.")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _own(value: Any) -> Any:
    """Returns a tensor that the next call does not write to."""
    return value.clone() if isinstance(value, Tensor) else value
