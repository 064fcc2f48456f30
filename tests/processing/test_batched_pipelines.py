"""Test that hf_vit pipelines give the results of transformers pipelines for any batch size, and limit prefetching."""

import sys
import threading
import types
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import nn
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor, pipeline
from transformers.pipelines.pt_utils import KeyDataset

import hf_vit
from hf_vit import HfViTImageProcessor, HfViTProcessor
from hf_vit.model.pipeline_hf_vit import CPU_BATCH, ReadAhead
from hf_vit.tasks import train_tokenizer

from ..helpers.images import noise
from ..helpers.models import small_config
from ..helpers.references import assert_close, draw_weights


TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
SIZES = [(40, 50), (60, 30), (40, 50), (33, 64), (60, 30)]


class Case(NamedTuple):
    """Test case of a pipeline: task name, transformers pipeline class, hf_vit model class, and call options."""

    task: str
    stock: str
    model: str
    options: dict[str, Any] = {}  # noqa: RUF012 - the dictionary is never changed


DETECTION = {"detection_config": {"decoder": "queries", "num_queries": 6}}
PANOPTIC = {"threshold": 0.2, "mask_threshold": 0.3, "overlap_mask_area_threshold": 0.1}
WORDS = {"candidate_labels": ["dog", "red car", "cats"], "hypothesis_template": "a {}"}
CLASSIFY = ("image-classification", "ImageClassification", "ForImageClassification")
EXTRACT = ("image-feature-extraction", "ImageFeatureExtraction", "Model")
SEGMENT = ("image-segmentation", "ImageSegmentation")
CASES = {
    "classes": Case(*CLASSIFY),
    "two classes": Case(*CLASSIFY, {"top_k": 2}),
    "sigmoid": Case(*CLASSIFY, {"function_to_apply": "sigmoid"}),
    "logits": Case(*CLASSIFY, {"function_to_apply": "none"}),
    "features": Case(*EXTRACT),
    "pooled": Case(*EXTRACT, {"pool": True, "return_tensors": True}),
    "at another size": Case(*EXTRACT, {"image_processor_kwargs": {"size": 48}}),
    "words": Case(
        "zero-shot-image-classification", "ZeroShotImageClassification", "ForZeroShotImageClassification", WORDS
    ),
    "semantic": Case(*SEGMENT, "ForSemanticSegmentation", {"subtask": "semantic"}),
    "classes as segments": Case(*SEGMENT, "ForSemanticSegmentation"),
    "panoptic": Case(*SEGMENT, "ForUniversalSegmentation", PANOPTIC),
    "instances": Case(*SEGMENT, "ForUniversalSegmentation", {"threshold": 0.1, "subtask": "instance"}),
    "depth": Case("depth-estimation", "DepthEstimation", "ForDepthEstimation"),
    "objects": Case("object-detection", "ObjectDetection", "ForObjectDetection", {"threshold": 0.1}),
}
KEYPOINTS = Case("keypoint-detection", "", "ForKeypointDetection")  # transformers has no pipeline for keypoints
ROUGH = ("depth", "panoptic", "instances")  # cases in float64, because random models amplify rounding
PREPARATIONS = {
    "one size": {},
    "own sizes": {"size": {"shortest_edge": 24}, "ensure_multiple_of": 8},
    "padded": {"size": {"longest_edge": 32}, "do_pad": True, "ensure_multiple_of": 8},
    "fixed size": {"size": {"longest_edge": 32}, "do_pad": True, "ensure_multiple_of": 8, "pad_size": 32},
    "seen padding": {"size": {"longest_edge": 32}, "do_pad": True, "pad_size": {"height": 32, "width": 32}},
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Return the paths of images of several sizes and formats."""
    folder, files = tmp_path_factory.mktemp("photos"), []
    for seed, size in enumerate(SIZES):
        files.append(str(folder / f"{seed}.{('jpg', 'png')[seed % 2]}"))
        Image.fromarray(noise(5, 5, 3, seed=seed)).resize(size).save(files[-1])
    return files


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["a dog runs on the grass", "two cats", "a red car"] * 3, 400, 40)


def build(case, tokenizer, position_embedding_type="learned", **processing):
    """Return the components of a pipeline, such as the model and the image processor, as keyword arguments."""
    options = {"ForObjectDetection": DETECTION}.get(case.model, {})
    if "ZeroShot" in case.model:
        own = HfViTProcessor(HfViTImageProcessor(), tokenizer).text_options()
        options = {"text_config": {**TEXT, **own}}
    config = small_config(position_embedding_type=position_embedding_type, **options)
    model = getattr(hf_vit, f"HfViT{case.model}")(config)
    draw_weights(model)
    processor = HfViTImageProcessor.for_model(model, **processing)
    parts = {"model": model.eval(), "image_processor": processor}
    return {**parts, "tokenizer": tokenizer} if "ZeroShot" in case.model else parts


def pipelines(name, parts):
    """Return the pipelines of hf_vit and of transformers with the same model."""
    if name in ROUGH:
        parts["model"].double()
    return pipeline(CASES[name].task, **parts), getattr(transformers, f"{CASES[name].stock}Pipeline")(**parts)


def classifier(**options):
    return pipeline("image-classification", **build(CASES["classes"], None), **options)


def assert_same(mine, other):
    """Assert that two results are equal. Numbers may differ by up to 1e-5."""
    if isinstance(other, dict):
        assert mine.keys() == other.keys()
        for name in other:
            assert_same(mine[name], other[name])
    elif isinstance(other, list) and not (other and isinstance(other[0], float)):
        assert len(mine) == len(other)
        for pair in zip(mine, other, strict=True):
            assert_same(*pair)
    elif isinstance(other, Image.Image):
        difference = np.asarray(mine).astype(int) - np.asarray(other)
        assert mine.mode == other.mode
        # Pixels at the border between two segments may differ.
        assert np.abs(difference).max() <= 1 or (difference != 0).mean() < 0.01
    elif isinstance(other, float | list | torch.Tensor):
        torch.testing.assert_close(torch.as_tensor(mine), torch.as_tensor(other), atol=1e-5, rtol=1e-5)
    else:
        assert mine == other


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_the_stock_pipeline(name, photos, tokenizer):
    case = CASES[name]
    parts = build(case, tokenizer)
    ours, stock = pipelines(name, parts)
    assert type(stock).__module__.startswith("transformers.")
    assert type(ours).__name__ == f"HfViT{case.stock}Pipeline"
    assert isinstance(ours, type(stock))
    wanted = stock(photos, **case.options)
    assert any(len(answer) for answer in wanted)
    rows = [{"image": Image.open(file)} for file in photos]
    for found in (
        ours(photos, **case.options),
        ours([Image.open(file) for file in photos], batch_size=2, num_workers=1, **case.options),
        list(ours((file for file in photos), batch_size=3, **case.options)),
        list(ours(KeyDataset(rows, "image"), num_workers=0, **case.options)),
        [ours(file, **case.options) for file in photos],
    ):
        assert_same(found, wanted)


BATCHED = {"classes": ("own sizes", "padded"), "objects": ("padded", "seen padding")}
BATCHED |= {"depth": ("seen padding", "own sizes"), "panoptic": ("one size", "padded", "fixed size")}
BATCHED |= {"semantic": ("fixed size",)}


@pytest.mark.parametrize("name", BATCHED)
def test_images_of_several_sizes_go_into_one_batch(name, photos):
    for preparation in BATCHED[name]:
        # The transformers pipeline, which gives the expected results, processes the images one by one.
        ours, stock = pipelines(name, build(CASES[name], None, **PREPARATIONS[preparation]))
        assert_same(ours(photos, batch_size=4, **CASES[name].options), stock(photos, **CASES[name].options))


@pytest.mark.parametrize("name", ["classes", "features", "words", "semantic", "depth", "objects", "keypoints"])
def test_empty_inputs_give_empty_results(name, photos, tokenizer):
    case = CASES.get(name, KEYPOINTS)
    answer = pipeline(case.task, **build(case, tokenizer))
    for nothing in ([], (), KeyDataset([], "file"), (photo for photo in ())):
        assert list(answer(nothing, **case.options)) == []
    assert answer([], **case.options) == []
    assert answer([], batch_size=2, num_workers=0, **case.options) == []
    if name == "keypoints":
        assert answer([], boxes=[]) == []
    elif name == "objects":
        assert answer(images=[], **case.options) == answer(inputs=[], **case.options) == []
        assert answer(images=photos[:1], **case.options) == answer(photos[:1], **case.options)


# Maps each test case to the half-precision dtype in which it is tested.
HALF = {"classes": "bfloat16", "pooled": "float16", "words": "float16", "semantic": "float16", "panoptic": "bfloat16"}
HALF |= {"instances": "float16", "depth": "bfloat16", "objects": "bfloat16", "keypoints": "float16"}


@pytest.mark.parametrize("name", HALF)
def test_half_precision_with_fixed_positions(name, photos, tokenizer, tmp_path):
    case = CASES.get(name, KEYPOINTS)
    options = {**case.options, **({"threshold": 0.0} if name == "objects" else {})}
    preparation = PREPARATIONS["one size" if name == "keypoints" else "padded"]
    for part in build(case, tokenizer, position_embedding_type="sincos2d", **preparation).values():
        part.save_pretrained(tmp_path)
    whole, half = (
        pipeline(case.task, model=str(tmp_path), dtype=kind)(photos, batch_size=2, **options)
        for kind in ("float32", HALF[name])
    )
    assert len(half) == len(whole) == len(photos)
    for own, expected in zip(half, whole, strict=True):
        if name in ("classes", "words"):  # classes with similar scores may swap places
            scores, wanted = ({entry["label"]: entry["score"] for entry in answer} for answer in (own, expected))
            assert scores == pytest.approx(wanted, abs=0.03)
        elif name == "pooled":
            assert_close(own.float(), expected, 0.05, "features")
        elif name == "depth":
            # The tolerance is absolute; depth values are at most 10.
            assert (own["predicted_depth"] - expected["predicted_depth"]).abs().mean() < 0.3
        elif name == "semantic":
            assert {entry["label"] for entry in own} & {entry["label"] for entry in expected}
        elif name == "keypoints":
            scores = [torch.tensor(answer[0]["scores"]).float() for answer in (own, expected)]
            assert_close(*scores, 0.1, "scores")
        else:
            assert all(0 <= entry["score"] <= 1 for entry in own)


def test_every_kind_of_image_is_read_in_batches_of_the_size_asked_for_or_chosen(photos):
    classify, large, sizes, data = classifier(), classifier(batch_size=3), [], Path(photos[1]).read_bytes()
    pixels = np.array(Image.open(photos[1]))
    kinds = [photos[1], Path(photos[1]), data, bytearray(data), Image.open(photos[1]), pixels, torch.tensor(pixels)]
    first, *others = classify(kinds)
    assert all(found == first for found in others)
    assert_same([classify(kind) for kind in kinds], [first] * len(kinds))
    for model in (classify.model, large.model):
        model.register_forward_pre_hook(
            lambda _, args, inputs: sizes.append(len([*args, *inputs.values()][0])), with_kwargs=True
        )
    for run, files, options, expected in (
        (classify, photos, {"batch_size": 2}, [2, 2, 1]),
        (classify, photos * 7, {}, [CPU_BATCH, CPU_BATCH, 35 - 2 * CPU_BATCH]),
        (large, photos, {}, [3, 2]),
    ):
        run(files, **options)
        assert sizes == expected
        sizes.clear()
    for options, message in (
        ({"batch_size": 0}, 'batch_size=0 must be an integer of at least 1, or "auto"'),
        ({"num_workers": -1}, "num_workers=-1 must be an integer of at least 0"),
        ({"on_error": "skip"}, "on_error='skip' must be one of raise, return"),
    ):
        with pytest.raises(ValueError, match=message):
            classify(photos, **options)


def test_the_words_are_read_once(photos, tokenizer, monkeypatch):
    parts, calls = build(CASES["words"], tokenizer), []
    read = parts["model"].get_text_features
    monkeypatch.setattr(parts["model"], "get_text_features", lambda **texts: calls.append(1) or read(**texts))
    classify = pipeline("zero-shot-image-classification", **parts)
    classify(photos, candidate_labels=["a", "b"], batch_size=1)
    assert len(calls) == 1
    for labels in ([], "dog"):
        with pytest.raises(ValueError, match=r"candidate_labels=.* must be a list of at least one label"):
            classify(photos, candidate_labels=labels)


def test_a_long_generator_is_read_only_a_little_ahead():
    def frames():
        for number in range(10**6):
            taken.append(number)
            yield Image.new("L", (8, 8), number % 256)

    for options in ({}, {"batch_size": 4}, {"num_workers": 0}, {"num_workers": 3}):
        taken = []
        answers = iter(classifier()(frames(), **options))
        for done in range(1, 40):
            next(answers)
            assert len(taken) <= done + 3 * options.get("batch_size", CPU_BATCH), options
        answers.close()


def test_order_is_kept_however_long_reading_takes_and_threads_end_with_it():
    late = threading.Event()

    def read(number):
        if number == 0:
            assert late.wait(30)
        if number == 3:
            late.set()
        return 2 * number

    assert list(ReadAhead(range(20), read, threads=4, limit=6)) == [2 * number for number in range(20)]
    before = {*threading.enumerate()}
    reading = iter(ReadAhead(range(10**9), abs, threads=3, limit=5))
    assert [next(reading) for _ in range(4)] == [0, 1, 2, 3]
    started = {thread for thread in threading.enumerate() if thread.name == "read_ahead"} - before
    assert len(started) == 3
    reading.close()
    for thread in started:
        thread.join(30)
        assert not thread.is_alive()


def test_a_source_may_wait_for_the_answer_raise_or_be_another_pipeline(photos):
    classify, questions = classifier(), Queue[Any]()

    def frames():
        while (frame := questions.get(timeout=60)) is not None:
            yield frame

    questions.put(Image.new("L", (8, 8)))
    answers = []
    for answer in classify(frames()):
        answers.append(answer)
        questions.put(Image.new("L", (8, 8)) if len(answers) < 4 else None)
    assert len(answers) == 4

    def tape():
        yield from photos[:3]
        raise KeyError("the end of the tape")

    answers.clear()
    with pytest.raises(KeyError, match="the end of the tape"):
        answers.extend(classify(tape(), batch_size=1, on_error="return"))
    assert len(answers) == 3
    # The results of one pipeline can be the inputs of another pipeline.
    rows = KeyDataset([{"file": file} for file in photos], "file")
    answers = pipeline("depth-estimation", **build(CASES["depth"], None))(rows)
    assert len(answers) == len(photos)
    found = list(classify(KeyDataset([{"depth": answer["depth"]} for answer in answers], "depth")))
    assert len(found) == len(photos)
    with pytest.raises(TypeError):
        len(classify(file for file in photos))


def test_an_image_that_cannot_be_read_raises_or_has_an_entry(photos, tmp_path):
    (tmp_path / "broken.jpg").write_bytes(b"no photo")
    files = [photos[0], str(tmp_path / "broken.jpg"), photos[1], "nowhere.png", 5, photos[2]]
    for num_workers in (0, 2):
        classify = classifier(num_workers=num_workers)
        with pytest.raises(OSError, match=r"broken\.jpg'\) is not an image"):
            classify(files)
        answers = classify(files, on_error="return", batch_size=2)
        assert_same([answers[index] for index in (0, 2, 5)], classify(photos[:3]))
        for index, words in ((1, "broken.jpg') is not an image"), (3, "nowhere.png"), (4, "of type int")):
            assert words in answers[index]["error"]
    assert classify("nowhere.png", on_error="return").keys() == {"error"}


def other_model():
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return ViTForImageClassification(ViTConfig(**shape, image_size=32, patch_size=8)).eval()


def test_models_and_image_processors_of_others_are_left_to_the_stock_pipeline(photos):
    processor = ViTImageProcessor(size={"height": 32, "width": 32})
    stock = pipeline("image-classification", model=other_model(), image_processor=processor, batch_size=2)
    assert type(stock) is transformers.ImageClassificationPipeline
    model = build(CASES["classes"], None)["model"]
    wanted = transformers.ImageClassificationPipeline(model=model, image_processor=processor)
    ours = pipeline("image-classification", model=model, image_processor=processor)
    assert_same(ours(photos, batch_size=2), wanted(photos))
    assert_same(ours(photos[0]), wanted(photos[0]))
    with pytest.raises(ValueError, match=r"on_error='return' requires an image processor of hf_vit, but .* ViTIm"):
        ours(photos, on_error="return")


class Faster(nn.Module):
    """Stand-in for an optimized model."""

    def __init__(self, model, **options):
        super().__init__()
        self.model, self.options = model, options

    def forward(self, *args, **kwargs):
        outputs = self.model(*args, **kwargs)
        outputs["logits"] = outputs["logits"] * 2
        return outputs


@pytest.mark.parametrize(("options", "batch_size"), [({}, 1), ({"int8": True}, 4)])
def test_the_model_is_made_fast_on_request(options, batch_size, photos, monkeypatch):
    stand_in = types.ModuleType("hf_vit.inference.optimize")
    stand_in.optimize_for_inference = Faster
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    with pytest.raises(ValueError, match="optimize supports only hf_vit models, not ViTForImageClassification"):
        pipeline("image-classification", model=other_model(), image_processor=ViTImageProcessor(), optimize=True)
    classify = classifier(optimize=options or True, **({} if batch_size == 1 else {"batch_size": batch_size}))
    assert classify.fast_model.options == {"batch_size": batch_size, **options}
    plain = pipeline("image-classification", model=classify.model, image_processor=classify.image_processor)
    logits, faster = (
        [{one["label"]: one["score"] for one in own} for own in pipe(photos, function_to_apply="none")]
        for pipe in (plain, classify)
    )
    for own, fast in zip(logits, faster, strict=True):
        assert fast == pytest.approx({label: 2 * score for label, score in own.items()}, abs=1e-5)
