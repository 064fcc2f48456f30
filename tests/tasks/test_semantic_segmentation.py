"""Training semantic segmentation: initialization, evaluation, and invalid input."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Dinov2Config, Dinov2Model, pipeline

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTForSemanticSegmentation, HfViTImageProcessor
from hf_vit.evaluation.segmentation import SemanticSegmentationMetric
from hf_vit.training.class_weights import choose_weights
from hf_vit.training.models import load_model, whole_image_processor
from hf_vit.training.tasks.semantic_segmentation import (
    SemanticArguments,
    SemanticEvaluator,
    count_pixels,
    is_better,
    scales_to_try,
)

from ..helpers.dense_trainings import (
    A_FEW_STEPS,
    CONFIG,
    NAMES,
    NUM_VALIDATION,
    arguments_of,
    make_trainer,
    train,
    write_scenes,
)
from ..scripts.test_demo import load_script


TASK = "semantic_segmentation"
BACKBONE = {name: value for name, value in CONFIG.items() if not name.endswith("_config")} | {"image_size": 16}
# A learning rate that float32 rounds to 0. A learning rate of exactly 0 is refused because training would change
# nothing.
NO_CHANGE = ("--learning_rate", "1e-60")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scenes(tmp_path_factory.mktemp("scenes"))


def save(model: torch.nn.Module, folder: Path) -> Path:
    model.save_pretrained(folder)
    HfViTImageProcessor(size=16).save_pretrained(folder)
    return folder


def test_the_naive_baseline_is_the_most_frequent_class_at_each_place() -> None:
    maps = [torch.tensor(rows) for rows in ([[0, 1], [255, 2]], [[0, 1], [255, 2]], [[2, 0], [255, 2]])]
    evaluator = SemanticEvaluator(None, SemanticSegmentationMetric(["road", "sky", "tree"]))
    _, predict = evaluator.naive_baseline(maps)
    expected = torch.tensor([[0, 1], [2, 2]])  # most frequent class overall where undefined
    assert torch.equal(predict(maps[0]), expected)
    larger = torch.zeros(4, 6)
    assert torch.equal(predict(larger), expected.repeat_interleave(2, dim=0).repeat_interleave(3, dim=1))
    enlarged = [labels.repeat_interleave(3, dim=0).repeat_interleave(5, dim=1) for labels in maps]
    _, of_enlarged = evaluator.naive_baseline(enlarged)
    assert torch.equal(of_enlarged(maps[0]), expected)


def test_rare_classes_count_more_and_the_mean_pixel_as_before() -> None:
    # Class 0 has 9 pixels, class 1 has 1 pixel.
    masks = [torch.tensor([[0, 0, 0, 1], [0, 255, 7, 0]]), torch.tensor([[0, 0, 0, 0]])]
    assert choose_weights("none", NAMES, lambda: count_pixels(masks, 3)) == [1.0, 1.0, 1.0]
    weights = choose_weights("sqrt", NAMES, lambda: count_pixels(masks, 3))
    assert weights[1] / weights[0] == pytest.approx(3, abs=1e-3)
    assert 0.9 * weights[0] + 0.1 * weights[1] == pytest.approx(1, abs=1e-3)
    assert weights[2] == 1  # class without pixels
    assert choose_weights("balanced", NAMES[:2], lambda: count_pixels(masks, 2)) == pytest.approx([0.5556, 5])
    with pytest.raises(ValueError, match="class_weights is given twice"):
        SemanticArguments(
            dataset_name="roads",
            class_weights="sqrt",
            config_overrides={"segmentation_config": {"class_weights": [1, 2]}},
        )


def test_a_balanced_loss_is_saved_with_the_model(scenes: Path, tmp_path: Path) -> None:
    train(TASK, scenes, tmp_path / "out", "--class_weights", "sqrt", *A_FEW_STEPS)
    model = HfViTForSemanticSegmentation.from_pretrained(tmp_path / "out")
    masks = [torch.from_numpy(np.array(Image.open(file))) for file in sorted((scenes / "train" / "masks").iterdir())]
    assert model.options.class_weights == choose_weights("sqrt", NAMES, lambda: count_pixels(masks, len(NAMES)))
    assert len(set(model.options.class_weights)) > 1


def test_a_classifier_lends_its_encoder(scenes: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = HfViTForImageClassification(HfViTConfig(**BACKBONE, num_labels=7))
    saved = save(source, tmp_path / "classifier")
    options = ["--model_name_or_path", str(saved), "--head", "linear", *A_FEW_STEPS, *NO_CHANGE]
    train(TASK, scenes, tmp_path / "out", *options)
    (warned,) = (record.getMessage() for record in caplog.records if "is behind" in record.getMessage())
    assert "most frequent class at each place in" in warned
    assert warned in (tmp_path / "out" / "README.md").read_text()
    model = HfViTForSemanticSegmentation.from_pretrained(tmp_path / "out")
    assert model.config.id2label == dict(enumerate(NAMES))
    assert (model.options.head, model.options.norm) == ("linear", "layer")
    expected = source.model.state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in model.model.state_dict().items())


def test_a_published_backbone_is_trained(scenes: Path, tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4, "image_size": 16}
    Dinov2Model(Dinov2Config(**shape, mlp_ratio=1)).save_pretrained(tmp_path / "dinov2")
    scores = train(TASK, scenes, tmp_path / "out", "--model_name_or_path", str(tmp_path / "dinov2"), *A_FEW_STEPS)
    assert 0 < scores["pixel_accuracy"] < 1


def test_a_segmenter_keeps_its_head_for_the_same_classes_and_what_knows_no_class_for_others(
    scenes: Path, tmp_path: Path
) -> None:
    labels = {"id2label": dict(enumerate(NAMES)), "label2id": {name: index for index, name in enumerate(NAMES)}}
    for name, names in (("same", labels), ("other", {"num_labels": 4})):
        config = HfViTConfig(**BACKBONE, segmentation_config={"hidden_size": 16}, **names)
        source = HfViTForSemanticSegmentation(config)
        torch.nn.init.normal_(source.segmentation_head.decoder.classifier.weight)
        saved = save(source, tmp_path / name)
        options = ["--model_name_or_path", str(saved), *A_FEW_STEPS, *NO_CHANGE]
        train(TASK, scenes, tmp_path / f"{name}_trained", *options)
        model = HfViTForSemanticSegmentation.from_pretrained(tmp_path / f"{name}_trained")
        expected = source.state_dict()
        kept = {key for key, weight in model.state_dict().items() if torch.equal(weight, expected[key])}
        fresh = {f"segmentation_head.{source.segmentation_head.name}.classifier.{part}" for part in ("weight", "bias")}
        assert kept == expected.keys() - (fresh if name == "other" else set())


def test_another_head_than_the_saved_one_is_wholly_fresh(
    scenes: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    labels = {"id2label": dict(enumerate(NAMES)), "label2id": {name: index for index, name in enumerate(NAMES)}}
    config = HfViTConfig(**BACKBONE, segmentation_config={"hidden_size": 32, "dice_weight": 0.5}, **labels)
    source = HfViTForSemanticSegmentation(config)
    torch.nn.init.normal_(source.segmentation_head.decoder.classifier.bias)
    saved = save(source, tmp_path / "conv")
    names = NAMES
    for head, options in (("linear", {}), ("conv", {"num_layers": 1}), ("conv", {})):
        overrides = json.dumps({"segmentation_config": options})
        arguments = SemanticArguments(
            dataset_name="roads", model_name_or_path=str(saved), head=head, config_overrides=overrides
        )
        model, _ = load_model(HfViTForSemanticSegmentation, arguments, names)
        is_kept = (head, options) == ("conv", {})
        is_same = torch.equal(
            model.segmentation_head.decoder.classifier.bias, source.segmentation_head.decoder.classifier.bias
        )
        assert is_same is is_kept
        assert ("gets a fresh one" in caplog.text) is not is_kept
        assert (model.options.head, model.options.dice_weight) == (head, 0.5)
        assert torch.equal(model.model.norm.weight, source.model.norm.weight)
        caplog.clear()
    arguments = SemanticArguments(
        dataset_name="roads", model_name_or_path=str(saved), head="linear", config_overrides={"hidden_size": 64}
    )
    with pytest.raises(ValueError, match=r"The weights of .* do not fit"):
        load_model(HfViTForSemanticSegmentation, arguments, names)


def test_windows_and_copies_are_evaluated_as_segment_gives_them(scenes: Path, tmp_path: Path) -> None:
    trainer = make_trainer(TASK, scenes, tmp_path)
    plain = trainer.evaluate()["eval_loss"]
    trainer.evaluator = SemanticEvaluator(
        trainer.processing_class, SemanticSegmentationMetric(NAMES), 8, [1.0, 0.5], True
    )
    found = trainer.evaluate()
    metric, processor = trainer.evaluator.metric, trainer.processing_class
    metric.reset()
    for index in range(NUM_VALIDATION):
        example = trainer.eval_dataset[index]
        pixels = processor(example["image"], return_tensors="pt")["pixel_values"].double()
        outputs = trainer.model.segment(pixels, 8, scales=(1.0, 0.5), flip=True)
        sizes = [example["segmentation_map"].shape]
        (answer,) = processor.post_process_semantic_segmentation(outputs, sizes)
        metric.update([metric.record(answer, example["segmentation_map"])])
    assert {f"eval_{name}": value for name, value in metric.compute().items()}.items() <= found.items()
    assert found["eval_loss"] != pytest.approx(plain)


def test_validation_images_choose_the_scale(scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = ["--max_steps", "60", "--eval_strategy", "no", "--save_strategy", "no", "--learning_rate", "1e-3"]
    module = "hf_vit.training.tasks.semantic_segmentation"
    for name, choices in (("larger", [True]), ("whole", [False])):
        answers = iter(choices)
        monkeypatch.setattr(f"{module}.is_better", lambda *_, answers=answers: next(answers))
        scores = train(TASK, scenes, tmp_path / name, *steps)
        saved = HfViTImageProcessor.from_pretrained(tmp_path / name)
        assert saved.window_scale == (1.25 if name == "larger" else None)  # 1.25 = 20 / 16 pixels
        card = (tmp_path / name / "README.md").read_text()
        chosen = "1.25, in windows" if name == "larger" else "1, the whole image"
        assert re.search(
            rf"scale of images \| {chosen}, by the mean IoU on validation images \(1: 0\.\d+, 1.25: 0\.", card
        )
        metric = SemanticSegmentationMetric(NAMES)
        segment = pipeline("image-segmentation", model=str(tmp_path / name))
        for file in sorted((scenes / "val" / "images").iterdir()):
            target = np.asarray(Image.open(file.parents[1] / "masks" / file.name))
            answer = np.zeros_like(target)
            for part in segment(str(file), subtask="semantic"):
                answer[np.asarray(part["mask"]) > 0] = NAMES.index(part["label"])
            metric.update([metric.record(answer, target)])
        assert scores["mean_iou"] == pytest.approx(metric.compute()["mean_iou"], abs=5e-3)
    evaluated = ["--model_name_or_path", str(tmp_path / "larger"), "--dataset_name", str(scenes), "--use_cpu"]
    places = {name: tmp_path / f"evaluation-{name}" for name in ("chosen", "given")}
    for name, options in (("chosen", []), ("given", ["--eval_scales", "1"])):
        load_script("evaluate_model").main([*evaluated, "--output_dir", str(places[name]), *options])
    chosen, given = (json.loads((place / "validation_scores.json").read_text()) for place in places.values())
    again = json.loads((tmp_path / "larger" / "validation_scores.json").read_text())
    assert chosen["mean_iou"] == again["mean_iou"] != given["mean_iou"]


def test_a_scale_must_be_better_beyond_noise(scenes: Path, tmp_path: Path) -> None:
    metric = SemanticSegmentationMetric(NAMES)
    generator = np.random.default_rng(0)
    target = generator.integers(0, len(NAMES), (40, 40))

    def records(share: float, count: int = 12) -> list[Any]:
        noisy = [np.where(generator.random((40, 40)) < share, 0, target) for _ in range(count)]
        return [metric.record(answer, target) for answer in noisy]

    assert is_better(metric, records(0.1), records(0.3))
    assert not is_better(metric, records(0.3), records(0.1))
    assert not is_better(metric, records(0.2), records(0.202))
    few = [*records(0.0, 1), *records(0.3, 5)], records(0.3, 6)  # only one image improves
    assert not is_better(metric, *few)
    processor = whole_image_processor(HfViTImageProcessor(), HfViTConfig(**BACKBONE | {"image_size": 32}), True)
    assert scales_to_try(processor, [(32, 40)] * 3)[0] == []
    assert scales_to_try(processor, [(60, 60)] * 3) == ([1.5, 1.88], 1 + 4 + 9)
    assert scales_to_try(processor, [(640, 640)] * 3)[0] == [1.5, 2.0, 3.0]


def test_images_lose_nothing_and_keep_their_proportions_if_asked() -> None:
    config = HfViTConfig(**BACKBONE)
    cropping = HfViTImageProcessor(size={"shortest_edge": 20}, do_center_crop=True, crop_size=16, image_mean=0.3)
    for keep_aspect_ratio, shape in ((True, (16, 32)), (False, (16, 16))):
        processor = whole_image_processor(cropping, config, keep_aspect_ratio)
        pixels = processor(torch.zeros(3, 30, 60, dtype=torch.uint8), return_tensors="pt")["pixel_values"]
        assert pixels.shape[-2:] == shape
        assert processor.image_mean == cropping.image_mean


def test_images_lose_nothing_whatever_the_processor_of_the_start_did() -> None:
    config = HfViTConfig(**BACKBONE)
    for options in ({"do_affine_crop": True}, {"do_pad": True, "hide_padding": False, "pad_size": (16, 16)}):
        start = HfViTImageProcessor(size=(16, 16), patch_size=8, **options)
        batch = whole_image_processor(start, config, keep_aspect_ratio=True)(
            torch.zeros(3, 30, 60, dtype=torch.uint8), return_tensors="pt"
        )
        assert batch["pixel_values"].shape[-2:] == (16, 32)
        assert batch["patch_attention_mask"].all()


def test_masks_without_any_class_are_refused(scenes: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(scenes, tmp_path / "empty")
    for file in (folder / "val" / "masks").iterdir():
        Image.fromarray(np.full_like(np.asarray(Image.open(file)), 255)).save(file)
    with pytest.raises(ValueError, match=r"No validation image has annotations: no pixel of any mask has a cla"):
        make_trainer(TASK, folder, tmp_path / "out")
    with pytest.raises(ValueError, match="No validation image has annotations: no mask has a pixel"):
        make_trainer("universal_segmentation", folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset_name", "nowhere"], "There is no file or folder 'nowhere'"),
        (["--class_names", "floor,cat"], "outside the class list"),
        (
            ["--head", "linear", "--config_overrides", '{"segmentation_config": {"head": "conv"}}'],
            "--head is given twice",
        ),
        (["--head", "round"], "The configuration does not fit"),
        (["--load_best_model_at_end", "--metric_for_best_model", "iou"], "There is no score 'iou'"),
        (["--metric_for_best_model", "eval_pq"], "There is no score 'pq'"),
        (["--eval_window_size", "30"], "eval_window_size=30 must be a positive multiple of the patch size (4, 4)"),
        (["--eval_scales", "1", "-1"], "eval_scales=[1.0, -1.0] must be more than 0"),
        (
            ["--config_overrides", '{"patch_size": 4, "segmentation_config": {"semantic_loss_ignore_index": 0}}'],
            "semantic_loss_ignore_index=0 of segmentation_config must be 255",
        ),
        (["--min_scale", "3"], "min_scale=3.0 must not be more than max_scale=2.0"),
        (["--per_device_train_batch_size", "9"], "8 training images do not fill a batch of 9"),
    ],
)
def test_mistakes_are_explained(
    arguments: list[str], message: str, scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit) as stopped:
        load_script("train_semantic_segmentation").main(arguments_of(TASK, scenes, tmp_path / "out", *arguments))
    assert message in str(stopped.value.code)
    assert not (tmp_path / "out").exists()
