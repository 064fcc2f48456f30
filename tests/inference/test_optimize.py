"""Test optimized models: equal predictions, no slowdown, and a report of unused optimizations."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import pipeline

import hf_vit
from hf_vit.inference import optimize, runtimes
from hf_vit.inference.ahead_of_time import CompilationError, FlatOutputs
from hf_vit.inference.export.programs import min_grid
from hf_vit.inference.int8_linear import Int8Linear
from hf_vit.inference.optimize import FastForward, Trial

from ..helpers.models import small_config
from ..helpers.versions import needs_int8_export


RACE = optimize.race
UNIVERSAL = {"universal_segmentation_config": {"num_queries": 5, "num_blocks": 1}}


def make(kind: type = hf_vit.HfViTForImageClassification, **changes: Any) -> Any:
    torch.manual_seed(0)
    return kind(small_config(num_hidden_layers=1, **{"initializer_range": 0.2, **changes})).eval()


def images_of(batch: int = 2, height: int = 32, width: int = 32) -> Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(1))


def largest_difference(outputs: Tensor, expected: Tensor) -> float:
    return float((outputs - expected).detach().abs().max() / expected.detach().abs().max())


@pytest.fixture(autouse=True)
def always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the time measurement: every candidate appears twice as fast as the previous best."""
    monkeypatch.setattr(optimize, "race", lambda *_: (0.5, 2.0))
    monkeypatch.setattr(runtimes, "RUNTIMES", ())  # Exports take seconds.


@pytest.mark.slow
@pytest.mark.parametrize(
    "quantizes", [False, pytest.param(True, marks=[pytest.mark.nightly, needs_int8_export])], ids=["float32", "int8"]
)
def test_compiled_programs_answer_as_the_model_does(quantizes: bool, tmp_path: Path) -> None:
    model, images = make(), images_of()
    fast = hf_vit.optimize_for_inference(
        model, batch_size=2, dtype="float32", int8=quantizes, images=images, max_seconds=900
    )
    as_given, compiled, *quantized = fast.report.trials
    assert (as_given.kept, compiled.kept, compiled.name) == (True, True, "float32, compiled"), str(fast.report)
    assert compiled.difference < 1e-4
    for int8 in quantized:
        assert int8.difference is not None, str(fast.report)
        # A nonzero difference shows that the less precise int8 model was used.
        assert 1e-6 < int8.difference < 0.1
    assert len(quantized) == quantizes
    assert fast.report.best.name in str(fast.report)
    assert type(fast) is hf_vit.HfViTForImageClassification
    assert fast.config is model.config
    program: FastForward = fast.forward
    assert program.program is not None
    tolerance = 0.1 if any(int8.kept for int8 in quantized) else 1e-4
    assert largest_difference(fast(images).logits, model(images).logits) < tolerance
    swapped = images.contiguous(memory_format=torch.channels_last)
    assert torch.equal(fast(pixel_values=swapped, return_dict=True).logits, fast(images).logits)
    for other in (images_of(3), images_of(2, 16, 48), images_of(1)):
        assert largest_difference(fast(other).logits, model(other).logits) < 1e-4
    fast.save_pretrained(tmp_path)
    saved = hf_vit.HfViTForImageClassification.from_pretrained(tmp_path)
    assert torch.equal(saved(images).logits, model(images).logits)
    assert torch.equal(copy.deepcopy(fast)(images).logits, fast(images).logits)
    for pickles in (pickle.dumps, lambda value: torch.save(value, tmp_path / "model.pt")):
        with pytest.raises(
            TypeError, match=r"compiled for this process and cannot be pickled\. Pickle the original model"
        ):
            pickles(fast)


def optimize_in(runtime: str, model: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, list[Trial]]:
    """Return the optimized model and the trials after that of torch.compile, which is skipped."""

    def skip(*_: Any) -> None:
        raise CompilationError("skipped")

    monkeypatch.setattr(optimize, "compile_here", skip)
    monkeypatch.setattr(runtimes, "RUNTIMES", (runtime,))
    fast = hf_vit.optimize_for_inference(model, batch_size=2, **options)
    names = [trial.name for trial in fast.report.trials]
    return fast, fast.report.trials[1 + names.index(next(name for name in names if name.endswith("compiled"))) :]


@pytest.mark.parametrize(
    ("runtime", "kind", "dtype", "tolerance"),
    [
        ("onnxruntime", hf_vit.HfViTForImageClassification, "float32", 1e-4),
        ("openvino", hf_vit.HfViTModel, "bfloat16", 5e-2),
        pytest.param("openvino", hf_vit.HfViTForUniversalSegmentation, "float32", 1e-4, marks=pytest.mark.nightly),
    ],
)
def test_other_runtimes_return_the_outputs_of_the_model(
    runtime: str, kind: type, dtype: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip(runtime)
    model = make(kind, **UNIVERSAL)
    fast, (trial,) = optimize_in(runtime, model, monkeypatch, dtype=dtype)
    assert (trial.name, trial.kept) == (f"{dtype}, {runtime}", True), str(fast.report)
    assert fast.report.best is trial
    fast.forward.eager = None  # fails if the program is not used
    for images in (images_of(), images_of(3), images_of(1, 16, 48), images_of(2).transpose(2, 3)):
        outputs, expected = fast(images), model(images)
        assert type(outputs) is type(expected)
        assert outputs.keys() == expected.keys()
        for name, value in expected.items():
            assert outputs[name].dtype == value.dtype
            assert largest_difference(outputs[name], value) < tolerance, (name, tuple(images.shape))


def test_a_model_of_another_runtime_falls_back_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    model = make()
    fast, _ = optimize_in("onnxruntime", model, monkeypatch, dtype="float32")
    outputs = fast(images_of(), output_hidden_states=True)
    assert len(outputs.hidden_states) == len(model(images_of(), output_hidden_states=True).hidden_states)
    least = min_grid(model)[0] * 8
    for images in (images_of(1, 8, 8), images_of(1, least, least)):
        assert largest_difference(fast(images).logits, model(images).logits) < 1e-4


@pytest.mark.parametrize(
    ("gain", "reason"), [(1.01, "speedup 1.01"), (2.0, "outputs differ by"), (2.0, "another size")]
)
def test_a_slower_or_unequal_runtime_is_not_used(gain: float, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Program:
        """A program with errors at one image size."""

        def __init__(self, model: Any, images: Tensor, *_: Any) -> None:
            self.model, self.shape, self.is_fitting = model, images.shape, "size" not in reason

        def accepts(self, shape: torch.Size) -> bool:
            return True

        def __call__(self, images: Tensor) -> Any:
            outputs = self.model(images)
            is_wrong = gain == 2 and (images.shape == self.shape) == self.is_fitting
            return type(outputs)(logits=outputs.logits * (1 + is_wrong))

    monkeypatch.setattr(optimize, "race", lambda *_: (0.5, gain))
    monkeypatch.setattr(optimize, "RuntimeProgram", Program)
    fast, (trial,) = optimize_in("onnxruntime", make(), monkeypatch, dtype="float32")
    assert not trial.kept
    assert reason in trial.note
    assert fast.report.best.name == "as given, float32"


def test_a_missing_or_failing_runtime_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise NotImplementedError("unknown operator")

    monkeypatch.setattr(runtimes, "write_program", fail)
    fast, (trial,) = optimize_in("onnxruntime", make(), monkeypatch, dtype="float32")
    assert (trial.kept, trial.note) == (False, "NotImplementedError: unknown operator")
    monkeypatch.setattr(runtimes, "find_spec", lambda _: None)
    fast, trials = optimize_in("onnxruntime", make(), monkeypatch, dtype="float32")
    assert not trials
    assert torch.equal(fast(images_of()).logits, make()(images_of()).logits)


def test_what_torch_compiles_is_pickled_without_its_program() -> None:
    for compiles in (torch.compile, lambda model, backend: model.compile(backend=backend) or model):
        model, images = make(), images_of()
        expected = model(images).logits
        compiled = compiles(model, backend="aot_eager")
        for called in (compiled, pickle.loads(pickle.dumps(compiled))):
            assert largest_difference(called(images).logits, expected) < 1e-5


def test_a_program_of_one_size_takes_positions_as_they_are() -> None:
    program = torch.export.export(FlatOutputs(make()), (images_of(),), strict=False)
    operators = [str(node.target) for node in program.graph.nodes]
    assert any("linear" in name for name in operators)
    assert not [name for name in operators if "arange" in name or "upsample" in name]


@pytest.mark.parametrize(
    "kind", [hf_vit.HfViTForImageClassification, hf_vit.HfViTModel, hf_vit.HfViTForSemanticSegmentation]
)
def test_bfloat16_answers_in_the_precision_of_the_model(kind: type) -> None:
    model, images = make(kind), images_of()
    fast = hf_vit.optimize_for_inference(model, compile=False)
    assert [trial.name for trial in fast.report.trials] == ["as given, float32", "bfloat16"]
    assert fast.report.best.name == "bfloat16"
    assert model.dtype == torch.float32
    outputs, expected = fast(images, output_hidden_states=True), model(images, output_hidden_states=True)
    assert type(outputs) is type(expected)
    assert outputs.keys() == expected.keys()
    for own, other in zip(outputs.hidden_states, expected.hidden_states, strict=True):
        assert own.dtype == torch.float32
        assert 0 < largest_difference(own, other) < 5e-2
    assert largest_difference(outputs.to_tuple()[0], expected.to_tuple()[0]) < 5e-2


def test_arguments_can_be_given_by_position() -> None:
    model, images, labels = make(), images_of(), torch.tensor([0, 1])
    fast = hf_vit.optimize_for_inference(model, compile=False, dtype="float32")
    assert torch.equal(fast(images, labels).loss, model(images, labels).loss)


@pytest.mark.parametrize(("share", "kept"), [(1.5, False), (0.9921875, False), (0.96875, True)])
def test_only_what_is_faster_is_kept(monkeypatch: pytest.MonkeyPatch, share: float, kept: bool) -> None:
    model, now = make(), [0.0]

    def advance(module: nn.Module, *_: Any) -> None:
        now[0] += 1.0 if module.dtype == torch.float32 else share

    model.register_forward_hook(advance)
    monkeypatch.setattr(optimize, "race", RACE)
    monkeypatch.setattr(optimize.time, "perf_counter", lambda: now[0])
    fast = hf_vit.optimize_for_inference(model, compile=False)
    as_given, half = fast.report.trials
    assert (as_given.seconds, as_given.ratio) == (1.0, 1.0)
    assert (half.kept, half.seconds) == (kept, share)
    assert half.ratio == pytest.approx(1 / share)
    assert fast.forward.eager.dtype == (torch.bfloat16 if kept else torch.float32)


def test_reasons_why_an_optimization_is_left_out_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(optimize.TOLERANCES, torch.bfloat16, 1e-6)
    _, half = hf_vit.optimize_for_inference(make(), compile=False).report.trials
    assert not half.kept
    assert half.seconds is None
    assert half.note == "outputs differ by more than 0.0001"
    *_, last = hf_vit.optimize_for_inference(make(), dtype="float32", max_seconds=0.01).report.trials
    assert last == Trial("float32, compiled", None, None, None, False, last.note)
    assert last.note.startswith("compilation exceeded max_seconds")
    monkeypatch.setenv("PATH", "")
    fast = hf_vit.optimize_for_inference(make(), dtype="float32")
    *_, last = fast.report.trials
    assert "no C++ compiler found" in last.note
    assert not last.kept
    assert fast(images_of()).logits.shape == (2, 5)


def test_8_bits_are_close_where_channels_of_the_input_are_uneven() -> None:
    torch.manual_seed(0)
    linear, inputs = nn.Linear(64, 48), torch.randn(4, 7, 64) * torch.logspace(-1, 1, 64) + 1
    low, high = inputs.flatten(0, 1).aminmax(dim=0)
    expected = linear(inputs)
    with torch.no_grad():
        assert 0 < largest_difference(Int8Linear(linear, low, high)(inputs), expected) < 0.02


def test_of_images_and_texts_the_image_side_is_optimized_and_watched() -> None:
    model = make(hf_vit.HfViTForZeroShotImageClassification)
    images, texts = images_of(), torch.randint(1, 9, (3, 6))
    fast = hf_vit.optimize_for_inference(model, compile=False)
    assert fast.report.best.name == "bfloat16"
    own, other = fast(input_ids=texts, pixel_values=images), model(input_ids=texts, pixel_values=images)
    assert 0 < largest_difference(own.image_embeds, other.image_embeds) < 5e-2
    assert torch.equal(own.text_embeds, other.text_embeds)
    fast.load_state_dict({name: weight + 1 for name, weight in model.state_dict().items()})
    with pytest.raises(ValueError, match="weights of HfViTModel have changed"):
        fast.get_image_features(images)


def test_options_that_do_not_fit_and_models_that_cannot_be_compared_are_refused() -> None:
    for options, message in (
        ({"batch_size": 0}, "batch_size=0"),
        ({"dtype": "int8"}, "dtype='int8' must be 'auto' or one of 'float32'"),
        ({"max_seconds": 0}, "max_seconds=0 must be positive"),
        ({"image_size": 20}, "20 is not a multiple"),
        ({"int8": True}, "int8=True needs calibration images"),
        ({"images": images_of(1), "batch_size": 2}, r"not \(1, 3, 32, 32\)"),
        ({"images": images_of(1), "image_size": 16}, "image_size=16 must be the size of images"),
    ):
        with pytest.raises(ValueError, match=message):
            hf_vit.optimize_for_inference(make(hf_vit.HfViTModel), **options)

    with pytest.raises(ValueError, match="returns random outputs or NaN"):
        hf_vit.optimize_for_inference(make(hf_vit.HfViTForMaskedImageModeling), compile=False)
    with pytest.raises(ValueError, match=r"Call model.eval\(\) first"):
        hf_vit.optimize_for_inference(make().train())
    with pytest.raises(TypeError, match="not Linear"):
        hf_vit.optimize_for_inference(nn.Linear(2, 2))  # type: ignore[type-var]


def step(model: Any) -> None:
    """Take an optimizer step with fused AdamW, which does not increase the version counters of the weights."""
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    torch.optim.AdamW(model.parameters(), fused=True).step()


CHANGES: dict[str, Callable[[Any], object]] = {
    "loaded": lambda model: model.load_state_dict(make(initializer_range=0.5).state_dict()),
    "assigned": lambda model: model.load_state_dict(make(initializer_range=0.5).state_dict(), assign=True),
    "in place": lambda model: nn.init.normal_(model.classifier.bias),
    "one value": lambda model: model.classifier.weight.requires_grad_(False)[0, 0].add_(1),
    "by way of data": lambda model: model.classifier.weight.data.mul_(2),
    "other data": lambda model: setattr(model.classifier.weight, "data", torch.ones(5, 32)),
    "other weight": lambda model: setattr(model.classifier, "weight", nn.Parameter(torch.ones(5, 32))),
    "other head": lambda model: setattr(model, "classifier", nn.Linear(32, 5)),
    "other encoder": lambda model: setattr(model, "model", make(hf_vit.HfViTModel)),
    "fused step": step,
    "other precision": lambda model: model.to(torch.bfloat16),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_optimized_models_notice_other_weights(change: Callable[[Any], object]) -> None:
    for of_given in (False, True):
        model, images = make(), images_of()
        fast = hf_vit.optimize_for_inference(model, compile=False)
        assert torch.isfinite(fast.eval()(images).logits).all()
        change(model if of_given else fast)
        with pytest.raises(ValueError, match="weights of HfViTForImageClassification have changed since it was"):
            fast(images)


def test_copies_of_optimized_models_answer_and_notice() -> None:
    fast = hf_vit.optimize_for_inference(make(), compile=False)
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert torch.equal(other(images_of()).logits, fast(images_of()).logits)
        other.classifier.weight.data.mul_(2)
        fast(images_of())
        with pytest.raises(ValueError, match="have changed"):
            other(images_of())


@pytest.mark.parametrize("kind", [hf_vit.HfViTForImageClassification, hf_vit.HfViTForZeroShotImageClassification])
def test_optimized_models_do_not_train(kind: type) -> None:
    model = make(kind)
    fast = hf_vit.optimize_for_inference(model, compile=False)
    with pytest.raises(ValueError, match=f"{kind.__name__} was made by optimize_for_inference and cannot be trained"):
        fast.train()
    assert not fast.eval().training
    assert model.train().training


def test_pipelines_notice_other_models() -> None:
    options = {"image_processor": hf_vit.HfViTImageProcessor(size=32), "optimize": {"compile": False}}
    photo = Image.new("RGB", (40, 40))
    for change, message in [
        (lambda pipe: setattr(pipe, "model", make(initializer_range=0.5)), "model of this pipeline was replaced"),
        (lambda pipe: pipe.model.load_state_dict(make(initializer_range=0.5).state_dict()), "have changed since"),
    ]:
        pipe = pipeline("image-classification", model=make(), **options)
        assert len(pipe(photo)) == 5
        change(pipe)
        for images in (photo, [photo, photo]):
            with pytest.raises(ValueError, match=message):
                pipe(images)
