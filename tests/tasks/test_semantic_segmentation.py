"""Test the training of semantic segmentation: initial models, evaluation, and errors."""

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

from hf_vit import (
    HfViTConfig,
    HfViTForImageClassification,
    HfViTForSemanticSegmentation,
    HfViTImageProcessor,
    evaluate,
)
from hf_vit.convert.model_card import read_card_data
from hf_vit.evaluation.segmentation import SemanticSegmentationMetric
from hf_vit.tasks.common.class_weights import choose_weights
from hf_vit.tasks.common.models import load_model
from hf_vit.tasks.semantic_segmentation import (
    SemanticArguments,
    SemanticEvaluator,
    count_pixels,
    is_better,
    scales_to_try,
)
from hf_vit.training import whole_image_processor

from ..helpers.dense_trainings import (
    A_FEW_STEPS,
    CONFIG,
    NAMES,
    NUM_VALIDATION,
    arguments_of,
    make_trainer,
    train,
)
from ..helpers.options import call_command


TASK = "semantic_segmentation"
BACKBONE = {name: value for name, value in CONFIG.items() if not name.endswith("_config")} | {"image_size": 16}
# In float32, this learning rate is rounded to 0, so weights do not change. The option rejects a value of 0.
NO_CHANGE = ("--learning_rate", "1e-60")
LABELS = {"id2label": dict(enumerate(NAMES)), "label2id": {name: index for index, name in enumerate(NAMES)}}


def save(model: torch.nn.Module, folder: Path) -> Path:
    model.save_pretrained(folder)
    HfViTImageProcessor(size=16).save_pretrained(folder)
    return folder


def test_the_naive_baseline_is_the_most_frequent_class_at_each_place() -> None:
    maps = [torch.tensor(rows) for rows in ([[0, 1], [255, 2]], [[0, 1], [255, 2]], [[2, 0], [255, 2]])]
    evaluator = SemanticEvaluator(None, SemanticSegmentationMetric(["road", "sky", "tree"]))
    _, predict = evaluator.naive_baseline(maps)
    # Pixels that have no label in any mask get the most frequent class of all masks.
    expected = torch.tensor([[0, 1], [2, 2]])
    assert torch.equal(predict(maps[0]), expected)
    larger = torch.zeros(4, 6)
    assert torch.equal(predict(larger), expected.repeat_interleave(2, dim=0).repeat_interleave(3, dim=1))
    enlarged = [labels.repeat_interleave(3, dim=0).repeat_interleave(5, dim=1) for labels in maps]
    _, of_enlarged = evaluator.naive_baseline(enlarged)
    assert torch.equal(of_enlarged(maps[0]), expected)


def test_rare_classes_count_more_and_the_mean_pixel_as_before() -> None:
    # These masks have 9 pixels of class 0 and 1 pixel of class 1.
    masks = [torch.tensor([[0, 0, 0, 1], [0, 255, 7, 0]]), torch.tensor([[0, 0, 0, 0]])]
    assert choose_weights("none", NAMES, lambda: count_pixels(masks, 3)) == [1.0, 1.0, 1.0]
    weights = choose_weights("sqrt", NAMES, lambda: count_pixels(masks, 3))
    assert weights[1] / weights[0] == pytest.approx(3, abs=1e-3)
    assert 0.9 * weights[0] + 0.1 * weights[1] == pytest.approx(1, abs=1e-3)
    assert weights[2] == 1  # no mask contains class 2
    assert choose_weights("balanced", NAMES[:2], lambda: count_pixels(masks, 2)) == pytest.approx([0.5556, 5])
    given = {"segmentation_config": {"class_weights": [1, 2]}}
    with pytest.raises(ValueError, match="class_weights is given twice"):
        SemanticArguments(dataset_name="roads", class_weights="sqrt", config_overrides=given)


def test_a_published_backbone_is_trained_and_its_balanced_loss_saved(scenes: Path, tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4, "image_size": 16}
    Dinov2Model(Dinov2Config(**shape, mlp_ratio=1)).save_pretrained(tmp_path / "dinov2")
    options = ["--model_name_or_path", str(tmp_path / "dinov2"), "--class_weights", "sqrt"]
    scores = train(TASK, scenes, tmp_path / "out", *options, *A_FEW_STEPS)
    assert 0 < scores["pixel_accuracy"] < 1
    model = HfViTForSemanticSegmentation.from_pretrained(tmp_path / "out")
    masks = [torch.from_numpy(np.array(Image.open(file))) for file in sorted((scenes / "train" / "masks").iterdir())]
    assert model.options.class_weights == choose_weights("sqrt", NAMES, lambda: count_pixels(masks, len(NAMES)))
    assert len(set(model.options.class_weights)) > 1


def test_segmentation_starts_from_the_encoder_of_a_classifier(
    scenes: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = HfViTForImageClassification(HfViTConfig(**BACKBONE, num_labels=7))
    saved = save(source, tmp_path / "classifier")
    options = ["--model_name_or_path", str(saved), "--head", "linear", *A_FEW_STEPS, *NO_CHANGE]
    train(TASK, scenes, tmp_path / "out", *options)
    behind, failed, short = warnings = read_card_data(str(tmp_path / "out")).get("warnings")
    assert "This model is behind most frequent class of each pixel in" in behind
    assert re.fullmatch(r"IoU is 0 for [12] of 3 classes: '.*'\.", failed)
    assert short == "3 steps are too few to train a new head. Set --max_steps 100, or increase --minutes."
    assert [record.getMessage() for record in caplog.records][-3:] == warnings
    assert "\n\n".join(warnings) in (tmp_path / "out" / "README.md").read_text()
    lines: list[str] = []
    evaluate(tmp_path / "out", scenes, report=lines.append, output_dir=tmp_path / "scores", use_cpu=True)
    assert lines[0].startswith(f"{failed}\n5 validation images: loss")
    model = HfViTForSemanticSegmentation.from_pretrained(tmp_path / "out")
    assert model.config.id2label == dict(enumerate(NAMES))
    assert (model.options.head, model.options.norm) == ("linear", "layer")
    expected = source.model.state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in model.model.state_dict().items())


def test_a_saved_head_is_kept_for_the_same_classes_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, names in (("same", LABELS), ("other", {"num_labels": 4})):
        config = HfViTConfig(**BACKBONE, segmentation_config={"hidden_size": 16}, **names)
        source = HfViTForSemanticSegmentation(config)
        torch.nn.init.normal_(source.segmentation_head.decoder.classifier.weight)
        arguments = SemanticArguments(dataset_name="roads", model_name_or_path=str(save(source, tmp_path / name)))
        model, _ = load_model(HfViTForSemanticSegmentation, arguments, NAMES)
        expected = source.state_dict()
        kept = {key for key, weight in model.state_dict().items() if torch.equal(weight, expected[key])}
        fresh = {f"segmentation_head.{source.segmentation_head.name}.classifier.{part}" for part in ("weight", "bias")}
        assert kept == expected.keys() - (fresh if name == "other" else set())

    config = HfViTConfig(**BACKBONE, segmentation_config={"hidden_size": 32, "dice_weight": 0.5}, **LABELS)
    source = HfViTForSemanticSegmentation(config)
    torch.nn.init.normal_(source.segmentation_head.decoder.classifier.bias)
    given = {"dataset_name": "roads", "model_name_or_path": str(save(source, tmp_path / "conv"))}
    for head, options in (("linear", {}), ("conv", {"num_layers": 1}), ("conv", {})):
        arguments = SemanticArguments(**given, head=head, config_overrides={"segmentation_config": options})
        model, _ = load_model(HfViTForSemanticSegmentation, arguments, NAMES)
        is_kept = (head, options) == ("conv", {})
        ours, theirs = (one.segmentation_head.decoder.classifier.bias for one in (model, source))
        assert torch.equal(ours, theirs) is is_kept
        assert ("is replaced by a new head" in caplog.text) is not is_kept
        assert (model.options.head, model.options.dice_weight) == (head, 0.5)
        assert torch.equal(model.model.norm.weight, source.model.norm.weight)
        caplog.clear()
    arguments = SemanticArguments(**given, head="linear", config_overrides={"hidden_size": 64})
    with pytest.raises(ValueError, match=r"The weights of .* do not fit"):
        load_model(HfViTForSemanticSegmentation, arguments, NAMES)


def test_windows_and_copies_are_evaluated_as_segment_gives_them(scenes: Path, tmp_path: Path) -> None:
    trainer = make_trainer(TASK, scenes, tmp_path)
    plain = trainer.evaluate()["eval_loss"]
    metric, processor = SemanticSegmentationMetric(NAMES), trainer.processing_class
    trainer.evaluator = SemanticEvaluator(processor, metric, 8, [1.0, 0.5], True)
    found = trainer.evaluate()
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
    module = "hf_vit.tasks.semantic_segmentation"
    for name, choices in (("larger", [True]), ("whole", [False])):
        answers = iter(choices)
        monkeypatch.setattr(f"{module}.is_better", lambda *_, answers=answers: next(answers))
        scores = train(TASK, scenes, tmp_path / name, *steps)
        saved = HfViTImageProcessor.from_pretrained(tmp_path / name)
        # The scale is 20 / 16, because most images have sides of 20 pixels and the model has an image size of 16.
        assert saved.window_scale == (1.25 if name == "larger" else None)
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
        call_command("evaluate", [*evaluated, "--output_dir", str(places[name]), *options])
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
    # One image with a better score is too little evidence of an improvement.
    few = [*records(0.0, 1), *records(0.3, 5)], records(0.3, 6)
    assert not is_better(metric, *few)
    processor = whole_image_processor(HfViTImageProcessor(), HfViTConfig(**BACKBONE | {"image_size": 32}), True)
    assert scales_to_try(processor, [(32, 40)] * 3)[0] == []
    assert scales_to_try(processor, [(60, 60)] * 3) == ([1.5, 1.88], 1 + 4 + 9)
    assert scales_to_try(processor, [(640, 640)] * 3)[0] == [1.5, 2.0, 3.0]


def test_whole_image_processor_never_crops_and_may_keep_the_aspect_ratio() -> None:
    config, image = HfViTConfig(**BACKBONE), torch.zeros(3, 30, 60, dtype=torch.uint8)
    cropping = HfViTImageProcessor(size={"shortest_edge": 20}, do_center_crop=True, crop_size=16, image_mean=0.3)
    for keep_aspect_ratio, shape in ((True, (16, 32)), (False, (16, 16))):
        processor = whole_image_processor(cropping, config, keep_aspect_ratio)
        assert processor(image, return_tensors="pt")["pixel_values"].shape[-2:] == shape
        assert processor.image_mean == cropping.image_mean
    for options in ({"do_affine_crop": True}, {"do_pad": True, "hide_padding": False, "pad_size": (16, 16)}):
        start = HfViTImageProcessor(size=(16, 16), patch_size=8, **options)
        batch = whole_image_processor(start, config, keep_aspect_ratio=True)(image, return_tensors="pt")
        assert batch["pixel_values"].shape[-2:] == (16, 32)
        assert batch["patch_attention_mask"].all()


def test_mistakes_are_explained(scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    window = "eval_window_size=30 must be a positive multiple of the patch size (4, 4)"
    ignored = '{"patch_size": 4, "segmentation_config": {"semantic_loss_ignore_index": 0}}'
    twice = ["--head", "linear", "--config_overrides", '{"segmentation_config": {"head": "conv"}}']
    for arguments, message in (
        (["--dataset_name", "nowhere"], "There is no file or folder 'nowhere'"),
        (["--class_names", "floor,cat"], "outside the class list"),
        (twice, "--head is given twice"),
        (["--head", "round"], "The configuration is invalid"),
        (["--load_best_model_at_end", "--metric_for_best_model", "iou"], "metric_for_best_model='iou' is not a score"),
        (["--metric_for_best_model", "eval_pq"], "metric_for_best_model='pq' is not a score"),
        (["--eval_window_size", "30"], window),
        (["--eval_scales", "1", "-1"], "eval_scales=[1.0, -1.0] must be more than 0"),
        (["--config_overrides", ignored], "semantic_loss_ignore_index=0 of segmentation_config must be 255"),
        (["--min_scale", "3"], "min_scale=3.0 must not exceed max_scale=2.0"),
        (["--per_device_train_batch_size", "9"], "8 training images do not fill a batch of 9"),
    ):
        with pytest.raises(SystemExit, match=re.escape(message)):
            call_command("train semantic-segmentation", arguments_of(TASK, scenes, tmp_path / "out", *arguments))
        assert not (tmp_path / "out").exists()

    folder = shutil.copytree(scenes, tmp_path / "empty")
    for file in (folder / "val" / "masks").iterdir():
        Image.fromarray(np.full_like(np.asarray(Image.open(file)), 255)).save(file)
    with pytest.raises(ValueError, match=r"No validation image has annotations: no pixel of any mask has a cla"):
        make_trainer(TASK, folder, tmp_path / "out")
    with pytest.raises(ValueError, match="No validation image has annotations: no mask has a pixel"):
        make_trainer("universal_segmentation", folder, tmp_path / "out")
