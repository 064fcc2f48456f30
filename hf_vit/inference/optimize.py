"""One call that makes a model fast on the machine at hand: precision, compilation, int8.

Everything is measured here, on the task and the image size of the model, and nothing is kept that is not faster.
"""

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from statistics import median
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..model.adapt_inputs import Size
from ..model.configuration_hf_vit import to_pair
from ..model.pretrained import HfViTPreTrainedModel, check_trained, version_of
from .ahead_of_time import CompilationError, FlatOutputs, compile_flat, first_line
from .int8_linear import quantize_blocks


ModelT = TypeVar("ModelT", bound=HfViTPreTrainedModel)
Run = Callable[[Tensor], Any]

LEAST_GAIN = 1.05  # times as fast: less is not kept
ROUNDS, MIN_SECONDS = 9, 0.1  # of a measurement; in each round either is repeated for that long at least
# What int8 may change: of the likeliest classes, or else of the outputs (root mean square)
MOST_CHANGED, MOST_CHANGED_OUTPUTS = 0.01, 0.05
# Largest difference to the outputs of the model given, as a share of the largest value of each
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Trial:
    """One thing that was tried.

    Args:
        name: What it is.
        seconds: Of a batch, the median; None where it did not come to run.
        ratio: How many times as fast as the model given.
        difference: The largest to the outputs of the model given, as a share of the largest value.
        kept: Whether it was faster than all before it, and its outputs close enough.
        note: Why not, or what is to be known.
    """

    name: str
    seconds: float | None
    ratio: float | None
    difference: float | None
    kept: bool
    note: str = ""


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
        return [trial for trial in self.trials if trial.kept][-1]

    def __str__(self) -> str:
        def cell(value: float | None, form: str) -> str:
            return "-" if value is None else format(value, form)

        rows = [("tried", "milliseconds", "times as fast", "difference", "verdict"), ("---",) * 5]
        for trial in self.trials:
            seconds = None if trial.seconds is None else trial.seconds * 1000
            numbers = (cell(seconds, ".2f"), cell(trial.ratio, ".2f"), cell(trial.difference, ".1e"))
            verdict = "kept" if trial.kept else "left out"
            rows.append((trial.name, *numbers, f"{verdict}: {trial.note}" if trial.note else verdict))
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


class CompiledProgram:
    """A compiled program, which cannot leave this process; a copy of its model shares it."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __call__(self, pixel_values: Tensor) -> Any:
        """Runs the program."""
        return self.run(pixel_values)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompiledProgram":
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "An optimized model holds a program that is compiled for this process, and cannot be pickled. Pickle the "
            "model that it was made from, and call optimize_for_inference where it is opened."
        )


class WeightWatch:
    """Notices in about 0.1 ms whether the weights or parts of a model have changed since this was made."""

    # Fused optimizers and changes by way of `.data` raise no version counter, so a value of each tensor is compared.

    def __init__(self, model: HfViTPreTrainedModel) -> None:
        self.model = model
        holders = [each for part in model.modules() for each in (part._parameters, part._buffers, part._modules)]
        self.places = [(holder, name, held) for holder in holders for name, held in holder.items()]
        self.tensors = [held for *_, held in self.places if isinstance(held, Tensor) and held.numel()]
        self.samples = [largest_of(own.detach()) for own in self.tensors]
        self.versions, self.values = self.read()

    def __reduce__(self) -> tuple[Any, ...]:
        self.check()
        return type(self), (self.model,)  # copies have counters of their own

    def read(self) -> tuple[list[tuple[int, int]], Tensor]:
        """Returns version and address of each tensor, and its value that was the largest."""
        return [(version_of(own), own.data_ptr()) for own in self.tensors], torch.stack(self.samples)

    def check(self) -> None:
        """Raises `ValueError` if a weight or part of the model has changed."""
        versions, values = self.read()
        is_same = versions == self.versions and torch.equal(values, self.values)
        if not is_same or any(holder.get(name) is not held for holder, name, held in self.places):
            raise ValueError(
                f"The weights of {type(self.model).__name__} have changed since it was optimized, and the optimized "
                "model still has the old ones. Call optimize_for_inference(model) again, or make a new pipeline."
            )


def largest_of(tensor: Tensor) -> Tensor:
    """Returns a view () of the value of the largest magnitude, which almost any change of a tensor changes."""
    return tensor[tuple(map(int, torch.unravel_index(tensor.abs().argmax(), tensor.shape)))]


class FastForward:
    """The forward pass of an optimized model.

    Args:
        given: The forward pass of the model as it was given.
        eager: The model in the precision that was kept; runs images of any shape, and calls with more than images.
        program: What was compiled from it, for images of one shape; None where nothing was.
        images: Images of that shape and of the dtype that the program takes.
        watch: Of the model as it was given.
    """

    def __init__(
        self,
        given: Callable[..., Any],
        eager: HfViTPreTrainedModel,
        program: Run | None,
        images: Tensor,
        watch: WeightWatch,
    ) -> None:
        update_wrapper(self, given)
        self.eager, self.program, self.watch = eager, program, watch
        self.shape, self.dtype, self.device = images.shape, images.dtype, images.device

    def __call__(self, pixel_values: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Takes what `forward` of the model takes, and returns what it returns, without gradients."""
        self.watch.check()
        has_more = any(args) or any(
            value is not None and name != "interpolate_pos_encoding" and (name, value) != ("return_dict", True)
            for name, value in kwargs.items()
        )
        with torch.no_grad():
            is_fitting = isinstance(pixel_values, Tensor) and pixel_values.shape == self.shape
            if self.program is None or has_more or not is_fitting or pixel_values.device != self.device:
                outputs = self.eager(pixel_values, *args, **kwargs)
            else:  # which reads memory as it was compiled for
                outputs = self.program(pixel_values.to(self.dtype).contiguous())
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
    """Makes a model fast on this machine, by trying what may help and keeping what is at least 5 % faster.

    Precision and compilation change outputs by rounding alone, and are left out where it is more: 1e-4 of the largest
    value in float32, 5e-2 in bfloat16. int8 approximates: it is left out where more than 1 % of the likeliest
    classes change, or outputs of other tasks by more than 5 %.

    Args:
        model: In evaluation mode. It stays as it is; the result shares its weights and adds those of its own.
        batch_size: Images per call to be fast at.
        image_size: Height and width in pixels to be fast at, or one for both; by default those of `images`, or else of
            the model.
        dtype: "auto" takes the faster of float32 and bfloat16; a name or a dtype tries that one alone.
        compile: Whether to compile with weights packed for the processor, which needs a C++ compiler.
        int8: Whether to try 8-bit weights and activations too, in what is compiled. Needs `images`.
        max_seconds: Time that each compilation may take. What takes longer is left out. Unbounded on a GPU.
        images: (N, C, H, W) as the image processor returns them, some dozens like those to come, to calibrate int8 and
            to compare answers. Without them noise is compared.

    Returns:
        A model of the same class with the same call, configuration and outputs, for inference alone. Its attribute
        `report` is an `OptimizationReport`. Images of another number or size run uncompiled in the precision that was
        kept, and so do calls with more than images (padding, hidden states). `save_pretrained` saves the
        weights of the model given. If these change, or parts of the model are replaced, calls of the result raise
        `ValueError`, and so does its `train()`. Of a model of images and texts, the image side is optimized.

    Raises:
        TypeError: if the model is none of this package.
        ValueError: if an argument or a weight is not as it must be, or outputs are drawn at random.
    """
    if not is_a(model, "HfViTPreTrainedModel"):
        raise TypeError(f"model must be one of hf_vit's, HfViTFor… or HfViTModel, not {type(model).__name__}.")
    has_texts = is_a(model, "HfViTForZeroShotImageClassification")
    part = cast("HfViTPreTrainedModel", model.model if has_texts else model)
    check_options(part, batch_size, int8, max_seconds, images)
    check_trained(part, part.name_or_path, part.untrained_weights)
    search = Search(part, measured_images(part, batch_size, image_size, images), images)
    for wanted in dtypes_to_try(dtype, part):
        search.compare(name_of(wanted), search.candidate(copy.deepcopy(part).to(wanted)))
    for quantized in [False, True][: 1 + int8] if compile else []:
        search.try_compiling(quantized, max_seconds)
    fast = sharing(part, forward=search.best, report=search.report)
    return sharing(model, _modules={**model._modules, "model": fast}, report=fast.report) if has_texts else fast


class Search:
    """Tries one thing after the other on the best model so far.

    Args:
        model: As it was given.
        images: (B, C, H, W) to measure on.
        samples: (N, C, H, W) to compare answers on, of the same size; None if there are none.
    """

    def __init__(self, model: HfViTPreTrainedModel, images: Tensor, samples: Tensor | None) -> None:
        self.model, self.images, self.samples = model, images, samples
        self.report, self.watch = OptimizationReport(tuple(images.shape)), WeightWatch(model)
        self.best = self.candidate(model)
        self.expected = self.best(images)
        if not difference_of(self.best(images), self.expected) <= TOLERANCES[torch.float32]:
            raise ValueError(
                f"{type(model).__name__} gives other outputs for the same images each time, or none that are numbers, "
                "so nothing can be compared to them. Optimize the model of a task."
            )
        self.seconds, _ = race(self.best, self.best, images)
        self.report.trials.append(Trial(f"as given, {name_of(model.dtype)}", self.seconds, 1.0, 0.0, True))

    def candidate(self, eager: HfViTPreTrainedModel, program: Run | None = None) -> FastForward:
        """Returns the forward pass of a candidate; see `FastForward`."""
        program = None if program is None else CompiledProgram(program)
        return FastForward(self.model.forward, eager, program, self.images, self.watch)

    def try_compiling(self, quantized: bool, max_seconds: float) -> None:
        """Tries to compile the best that there is, as it is or with the blocks in 8 bits."""
        eager = self.best.eager
        name = f"{'int8 and ' if quantized else ''}{name_of(eager.dtype)}, compiled"
        try:
            if quantized and self.images.device.type != "cpu":
                raise CompilationError("int8 is for CPUs")
            source = copy.deepcopy(eager) if quantized else eager
            if quantized:  # by the ranges that values have on the samples
                quantize_blocks(source, lambda: self.answers(source))
            program = compile_here(source, self.images, max_seconds)
        except CompilationError as error:
            self.report.trials.append(Trial(name, None, None, None, False, str(error)))
        else:
            self.compare(name, self.candidate(eager, program), approximates=quantized)

    def answers(self, run: Run) -> list[Any]:
        """Returns the outputs for all samples, a batch each."""
        assert self.samples is not None
        with torch.no_grad():
            return [run(batch) for batch in self.samples.to(self.images).split(self.images.shape[0])]

    def compare(self, name: str, candidate: FastForward, approximates: bool = False) -> None:
        """Keeps a candidate if it is faster than the best so far, and its outputs are close enough to the given's."""
        difference = difference_of(candidate(self.images), self.expected)
        if approximates:
            note, is_close = self.judge_answers(candidate)
        else:
            tolerance = max(TOLERANCES[candidate.eager.dtype], TOLERANCES[self.model.dtype])
            is_close = difference <= tolerance  # not where it is NaN
            note = "" if is_close else f"outputs differ by more than {tolerance:g}"
        seconds = ratio = None
        if is_close:
            seconds, gain = race(candidate, self.best, self.images)
            ratio = self.seconds / seconds
            if gain >= LEAST_GAIN:
                self.best = candidate
            else:
                note = f"{gain:.2f} times as fast as the best so far, less than {LEAST_GAIN}"
        self.report.trials.append(Trial(name, seconds, ratio, difference, self.best is candidate, note))

    def judge_answers(self, candidate: FastForward) -> tuple[str, bool]:
        """Returns in words how much an approximation changes, and whether that is little enough."""
        pairs = zip(self.answers(candidate), self.answers(self.model), strict=True)
        if has_classes(self.model):
            changed = torch.cat([(own.logits.argmax(1) != other.logits.argmax(1)).flatten() for own, other in pairs])
            share, most, what = changed.float().mean().item(), MOST_CHANGED, "of the answers change"
        else:
            share = max(difference_of(own, other, order=2) for own, other in pairs)
            most, what = MOST_CHANGED_OUTPUTS, "change of the outputs"
        is_little = share <= most
        return f"{share:.1%} {what}" + ("" if is_little else f", more than {most:.0%}"), is_little


def is_a(model: Any, *names: str) -> bool:
    """Return whether a model is of a class of one of these names: of ours, or of the copy that a checkpoint brings."""
    return not {base.__name__ for base in type(model).__mro__}.isdisjoint(names)


def sharing(model: ModelT, **attributes: Any) -> ModelT:
    """Returns a model of the same parts, and so the same weights, with other attributes."""
    # Not by copy.copy, which installs hooks in the parts a second time.
    other = type(model).__new__(type(model))
    other.__dict__.update(vars(model), _is_optimized=True, **attributes)
    return other


def check_options(
    model: HfViTPreTrainedModel, batch_size: int, int8: bool, max_seconds: float, images: Tensor | None
) -> None:
    """Raises `ValueError` where an option of `optimize_for_inference` is out of range or does not fit the model."""
    shape = None if images is None else tuple(images.shape)
    checks = [
        (model.training, "The model is in training mode, where dropout is random. Call model.eval() first."),
        (batch_size < 1, f"batch_size={batch_size} must be at least 1: the number of images per call."),
        (not max_seconds > 0, f"max_seconds={max_seconds} must be more than 0. compile=False skips compilation."),
        (
            shape is not None and (len(shape) != 4 or shape[0] < batch_size),
            f"images must be (N, channels, height, width) with N at least batch_size={batch_size}, not {shape}.",
        ),
        (int8 and shape is None, "int8=True needs images=, some dozens from the image processor, to measure ranges."),
    ]
    for is_wrong, message in checks:
        if is_wrong:
            raise ValueError(message)


def measured_images(
    model: HfViTPreTrainedModel, batch_size: int, image_size: Size | None, images: Tensor | None
) -> Tensor:
    """Returns the images (B, C, H, W) to measure on: the first of those given, or noise."""
    if images is not None:
        if image_size is not None and to_pair(image_size) != tuple(images.shape[2:]):
            raise ValueError(f"image_size={image_size} must be that of images, {tuple(images.shape[2:])}.")
        return images[:batch_size].to(model.device, model.dtype).contiguous()
    size = to_pair(model.config.image_size if image_size is None else image_size)
    noise = torch.randn(batch_size, model.config.num_channels, *size, generator=torch.Generator().manual_seed(0))
    return noise.to(model.device, model.dtype)


def dtypes_to_try(dtype: str | torch.dtype, model: HfViTPreTrainedModel) -> list[torch.dtype]:
    """Returns the precisions that `dtype` names beside that of the model; `ValueError` if it names none."""
    wanted = [known for known in TOLERANCES if dtype in (known, name_of(known))]
    if dtype == "auto":
        wanted = [torch.bfloat16] if model.device.type != "cpu" else [torch.float32, torch.bfloat16]
    if not wanted:
        names = ", ".join(repr(name_of(known)) for known in TOLERANCES)
        raise ValueError(f"dtype={dtype!r} must be 'auto' or one of {names}.")
    return [each for each in wanted if each != model.dtype]


def has_classes(model: HfViTPreTrainedModel) -> bool:
    """Whether the answers of a model are the likeliest classes, of images or of pixels."""
    is_classifier = is_a(model, "HfViTForImageClassification", "HfViTForSemanticSegmentation")
    several_or_values = model.config.problem_type in ("multi_label_classification", "regression")
    return is_classifier and model.config.num_labels > 1 and not several_or_values


def compile_here(model: HfViTPreTrainedModel, images: Tensor, max_seconds: float) -> Run:
    """Compiles a model for images of one shape; `CompilationError` if that fails.

    For a CPU, it is compiled ahead of time; for a GPU at the first call, with CUDA graphs and not bounded in time.
    """
    if images.device.type == "cpu":
        with torch.no_grad():
            _, form = pytree.tree_flatten(model(pixel_values=images))
        program = compile_flat(FlatOutputs(model), images, max_seconds)
        return lambda pixel_values: pytree.tree_unflatten(program(pixel_values), form)
    compiled = torch.compile(model, mode="reduce-overhead", dynamic=False)

    def run(pixel_values: Tensor) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        # copies, as the next call writes to the same memory
        return pytree.tree_map_only(Tensor, torch.clone, compiled(pixel_values=pixel_values))

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


def difference_of(outputs: Any, expected: Any, order: float = math.inf) -> float:
    """Returns the norm of the difference of two outputs, relative to that of each of their tensors: the largest."""
    norm = partial(torch.linalg.vector_norm, ord=order)
    differences = [
        (norm(own.float() - other.float()) / norm(other.float()).clamp_min(1e-12)).item()
        for own, other in zip(pytree.tree_leaves(outputs), pytree.tree_leaves(expected), strict=True)
    ]
    return max(differences, key=lambda value: math.inf if math.isnan(value) else value)


def name_of(dtype: torch.dtype) -> str:
    """Returns the name of a precision without that of torch."""
    return str(dtype).removeprefix("torch.")
