"""Test that image processors and configurations either accept random values or raise a clear error."""

import json
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hf_vit import HfViTConfig, HfViTForSemanticSegmentation, HfViTImageProcessor, HfViTImageProcessorPil, HfViTModel
from hf_vit.model.task_configurations import TASK_CONFIGS

from ..helpers.models import MODEL_CLASSES, SMALL, pixels


pytestmark = pytest.mark.slow  # `make quick` excludes slow tests
fuzz = partial(
    settings,
    derandomize=True,  # draw the same random values in every run
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


def mostly(likely: st.SearchStrategy[Any], other: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw from `likely` in 8 of 9 cases, otherwise from `other`. A single invalid value is enough for an error."""
    return st.integers(0, 8).flatmap(lambda number: other if number == 0 else likely)


SIDES = st.integers(1, 21)
CHANNELS = st.sampled_from((1, 3, 4))
SHAPES = mostly(
    st.tuples(SIDES, SIDES) | st.tuples(SIDES, SIDES, CHANNELS) | st.tuples(CHANNELS, SIDES, SIDES),
    st.lists(st.integers(0, 9), max_size=5).map(tuple),
)
TYPES = mostly(
    st.sampled_from(("u1", "u2", ">u2", "f2", ">f4", "f4", "f8", "b1")),
    st.sampled_from(("i1", "i2", "i4", "u4", "i8", "u8", "c8", "M8[s]", "O", "U3")),
)
EXACT = st.fixed_dictionaries({"height": SIDES, "width": SIDES})
ANY_SIZE = st.dictionaries(st.sampled_from(("height", "width", "shortest_edge", "depth")), st.integers(-1, 24))
SIZES = mostly(
    st.one_of(
        SIDES,
        EXACT,
        st.fixed_dictionaries({"shortest_edge": SIDES}),
        st.fixed_dictionaries({"longest_edge": SIDES}),
        st.fixed_dictionaries({"max_height": SIDES, "max_width": SIDES}),
    ),
    st.integers(-1, 0) | ANY_SIZE,
)
PER_CHANNEL = mostly(st.floats(0.1, 2), st.floats() | st.lists(st.floats(-2, 2), max_size=4))
OPTIONS = {
    "size": SIZES,
    "crop_size": mostly(SIDES | EXACT, SIZES),
    "do_resize": st.booleans(),
    "do_center_crop": st.booleans(),
    "do_rescale": st.booleans(),
    "do_normalize": st.booleans(),
    "do_pad": st.booleans(),
    "ensure_multiple_of": mostly(st.none() | st.integers(1, 9), st.integers(-1, 0)),
    "keep_aspect_ratio": st.booleans(),
    "crop_rounding": mostly(st.sampled_from(("down", "half_to_even")), st.just("up")),
    "num_channels": mostly(CHANNELS, st.integers(-1, 5)),
    "do_convert_rgb": st.none() | st.booleans(),
    "resample": mostly(st.integers(0, 5), st.integers(-1, 6)),
    "rescale_factor": mostly(st.just(1 / 255), st.floats()),
    "image_mean": PER_CHANNEL,
    "image_std": PER_CHANNEL,
    "data_format": mostly(st.sampled_from((None, "channels_first", "channels_last")), st.just("sideways")),
    "do_affine_crop": st.booleans(),
    "box_padding": mostly(st.floats(0.5, 2), st.floats()),
}


@st.composite
def options_of_processors(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(OPTIONS)), max_size=4, unique=True))
    return {name: draw(OPTIONS[name]) for name in names}


def made_or_refused(make: Callable[[], Any]) -> tuple[Any, str]:
    """Call a function. Return the result and an empty string, or None and the message of an expected error."""
    try:
        return make(), ""
    except (StrictDataclassError, TypeError, ValueError) as error:
        return None, str(error)


@st.composite
def images(draw: st.DrawFn) -> np.ndarray:
    """Draw arrays of any shape and dtype, including extreme values."""
    kind, shape = np.dtype(draw(TYPES)), draw(SHAPES)
    if kind.kind in "OUM":
        return np.zeros(shape, kind)
    fill = st.nothing() if draw(st.booleans()) else None
    elements = mostly(st.just(st.floats(0, 1, width=16)), st.none()) if kind.kind == "f" else st.none()
    return draw(arrays.arrays(kind, shape, elements=draw(elements), fill=fill))


@fuzz(max_examples=150)
@given(
    backend=st.sampled_from((HfViTImageProcessor, HfViTImageProcessorPil)),
    image=images() | st.lists(images(), max_size=2),
    options=options_of_processors(),
    input_data_format=mostly(st.none(), st.sampled_from(("channels_first", "channels_last", "none"))),
    as_tensor=st.booleans(),
)
def test_an_image_processor_makes_finite_pixels_or_refuses(
    backend: Any, image: Any, options: dict[str, Any], input_data_format: str | None, as_tensor: bool
) -> None:
    try:
        if as_tensor and isinstance(image, np.ndarray):
            image = torch.from_numpy(image)
    except (TypeError, ValueError):
        pass  # torch has no equivalent of this dtype

    def make() -> Any:
        processor = backend(**options)
        return processor, processor(image, input_data_format=input_data_format, return_tensors="pt").pixel_values

    made, message = made_or_refused(make)
    if made is None:
        assert message
        return
    processor, found = made
    channels_last = processor.data_format == "channels_last"
    channels = found.shape[-1] if channels_last else found.shape[1]
    assert found.dtype == torch.float32
    assert channels == processor.num_channels
    assert found.numel() > 0
    assert found.isfinite().all()
    size = found.shape[1:3] if channels_last else found.shape[2:]
    if processor.do_center_crop and not processor.do_pad:
        assert tuple(size) == (processor.crop_size.height, processor.crop_size.width)


NUMBERS = st.integers(-2, 40) | st.floats() | st.sampled_from((8, 16, 24, 32))
MAPPINGS = st.dictionaries(st.text(max_size=3), NUMBERS, max_size=1)
ANYTHING = st.one_of(NUMBERS, st.none(), st.booleans(), st.text(max_size=4), st.lists(NUMBERS, max_size=3), MAPPINGS)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Draw values for a configuration field: mostly of its type, sometimes of other types."""
    choices = [choice for part in (kind, *get_args(kind)) for choice in get_args(part) if isinstance(choice, str)]
    likely: list[st.SearchStrategy[Any]] = [st.sampled_from(choices)] if choices else []
    likely += [st.booleans()] if kind is bool else [st.sampled_from((1, 2, 4, 8)), st.floats(0, 1)]
    return mostly(st.one_of(likely), ANYTHING)


HINTS = HfViTConfig.__annotations__
OWN = [field.name for field in fields(HfViTConfig) if field.name in HINTS and not field.name.startswith("_")]


@st.composite
def backbones(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from([*OWN, "num_labels", "out_indices", "problem_type"]), max_size=3))
    return {name: draw(values_of(HINTS.get(name))) for name in names}


@st.composite
def heads(draw: st.DrawFn) -> dict[str, Any]:
    task = draw(st.sampled_from(sorted(TASK_CONFIGS)))
    hints = TASK_CONFIGS[task].__annotations__
    names = draw(st.lists(st.sampled_from(sorted(hints)), max_size=3, unique=True))
    return {task: {**SMALL.get(task, {}), **{name: draw(values_of(hints[name])) for name in names}}}


@fuzz(max_examples=150)
@given(backbone=backbones(), options=st.just({}) | heads(), model_class=st.sampled_from(MODEL_CLASSES))
def test_configuration_builds_and_reloads_a_model_or_raises(
    backbone: dict[str, Any], options: dict[str, Any], model_class: type[HfViTModel]
) -> None:

    def make() -> Any:
        config = HfViTConfig(**{**SMALL, **options, **backbone})
        with torch.device("meta"):
            return config, model_class(config)

    made, message = made_or_refused(make)
    if made is None:
        names = {*backbone, *(name for given in options.values() for name in given)}
        assert any(name in message for name in names), message
        return
    config, model = made
    again = HfViTConfig.from_dict(json.loads(config.to_json_string()))
    assert json.loads(again.to_json_string()) == json.loads(config.to_json_string())
    assert sum(weight.numel() for weight in model.parameters()) > 0


@fuzz(max_examples=15)
@given(
    options=st.fixed_dictionaries({"patch_size": st.integers(1, 9), "num_channels": st.integers(1, 4)}),
    grid=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_a_model_of_any_patches_and_channels_answers(options: dict[str, int], grid: tuple[int, int]) -> None:
    config = HfViTConfig(**{**SMALL, **options, "image_size": 4 * options["patch_size"]})
    model = HfViTForSemanticSegmentation(config).eval()
    image = pixels(config, grid=grid)
    with torch.no_grad():
        logits = model(image).logits
    assert logits.shape[:2] == (2, config.num_labels)
    assert logits.isfinite().all()
