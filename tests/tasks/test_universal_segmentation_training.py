"""Test the training of universal segmentation: annealing of masked attention, things and stuff."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from hf_vit import HfViTForUniversalSegmentation, HfViTImageProcessor
from hf_vit.evaluation.segmentation import UniversalMetric
from hf_vit.model.task_universal_segmentation import mask_probabilities
from hf_vit.tasks.universal_segmentation import UniversalEvaluator, UniversalSegmentation

from ..helpers.dense_trainings import A_FEW_STEPS, NAMES, arguments_of, make_trainer, train
from ..helpers.options import call_command


TASK = "universal_segmentation"
PROBABILITIES = "universal_segmentation_head.mask_probabilities"


def test_masked_attention_is_annealed_and_the_processor_stores_stuff_classes(scenes: Path, tmp_path: Path) -> None:
    options = ["--max_steps", "4", "--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "9"]
    train(TASK, scenes, tmp_path, *options, "--eval_strategy", "no")
    files = [tmp_path / f"checkpoint-{step}" / "model.safetensors" for step in (1, 2, 3, 4)]
    chances = [load_file(file)[PROBABILITIES] for file in files]
    for step, chance in enumerate(chances, start=1):
        torch.testing.assert_close(chance, torch.tensor(mask_probabilities(step / 4, 1)))
    assert 0 < chances[1] < 1
    model = HfViTForUniversalSegmentation.from_pretrained(tmp_path)
    assert not model.universal_segmentation_head.mask_probabilities.any()
    assert list(HfViTImageProcessor.from_pretrained(tmp_path).label_ids_to_fuse) == [NAMES.index("floor")]
    assert "| things | cat, dog |" in (tmp_path / "README.md").read_text()


def test_thing_classes_are_required_and_written_to_the_card(scenes: Path, tmp_path: Path) -> None:
    arguments = arguments_of(TASK, scenes, tmp_path / "out", *A_FEW_STEPS)
    place = arguments.index("--thing_classes")
    with pytest.raises(SystemExit, match=r'contain classes but no instances\. .* --thing_classes "dog"'):
        call_command(f"train {TASK}", arguments[:place] + arguments[place + 2 :])
    assert not (tmp_path / "out").exists()
    train(TASK, scenes, tmp_path / "out", *A_FEW_STEPS, "--thing_classes", "")
    assert "| things | none, all are stuff |" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("given", "head"),
    [
        ([], "queries"),
        (["--head", "mask"], "mask"),
        (["--trainable_blocks", "0"], "mask"),
        (["--trainable_blocks", "0", "--head", "queries"], "queries"),
    ],
)
def test_a_frozen_backbone_has_the_mask_head_by_default(
    given: list[str], head: str, scenes: Path, tmp_path: Path
) -> None:
    model = make_trainer(TASK, scenes, tmp_path / "out", *given).model
    assert model.options.head == head
    if not given:  # a saved model keeps its head
        model.save_pretrained(tmp_path / "saved")
        HfViTImageProcessor.for_model(model).save_pretrained(tmp_path / "saved")
        saved = ["--model_name_or_path", str(tmp_path / "saved"), "--trainable_blocks", "0"]
        assert make_trainer(TASK, scenes, tmp_path / "again", *saved).model.options.head == "queries"


def perfect(target: dict) -> dict:
    """Return the predictions of a perfect model for each kind of segmentation."""
    masks, labels = target["masks"], target["class_labels"].tolist()
    ids = torch.full(masks.shape[1:], -1)
    for number, mask in enumerate(masks):
        ids[mask] = number
    classes = torch.tensor([*labels, 0])[ids]
    info = [{"id": number, "label_id": label, "score": 1.0} for number, label in enumerate(labels)]
    return {
        "panoptic": {"segmentation": ids, "segments_info": info},
        "semantic": classes,
        "instance": {"masks": masks, "class_labels": labels, "scores": np.ones(len(labels))},
    }


def assert_perfect(scores: dict[str, float]) -> None:
    assert {scores[name] for name in ("pq", "sq", "rq", "pq_things", "pq_stuff", "mean_iou")} == {1.0}
    assert scores["mask_ap"] == pytest.approx(1)


def test_the_naive_baseline_and_right_answers_score_one(scenes: Path, tmp_path: Path) -> None:
    metric = UniversalMetric(["floor", "cat"], [1], can_overlap=False)
    often, once = torch.tensor([[True, False], [False, False]]), torch.tensor([[False, True], [True, True]])
    labels = torch.tensor([1, 0])
    common, rare = (
        {"masks": torch.stack(masks), "class_labels": labels} for masks in ((often, ~often), (once, ~once))
    )
    _, predict = UniversalEvaluator(None, metric).naive_baseline([common, rare, common])
    metric.update([metric.record(predict(common), common)])
    assert_perfect(metric.compute())
    larger = {**rare, "masks": torch.ones(2, 4, 4, dtype=torch.bool)}
    assert predict(larger)["semantic"].tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]

    examples = make_trainer(TASK, scenes, tmp_path).eval_dataset
    metric = UniversalMetric(NAMES, [1, 2], can_overlap=False)
    targets = [{name: examples[index][name] for name in ("masks", "class_labels")} for index in range(len(examples))]
    metric.update([metric.record(perfect(target), target) for target in targets])
    assert_perfect(metric.compute())
    assert set(metric.per_class()["cat"]) == {"pq", "sq", "rq", "iou", "accuracy", "dice", "ap", "ap_50"}


def write_coco_instances(scenes: Path, folder: Path) -> Path:
    """Write the scenes in the COCO instance format, with polygons of the animals only."""
    for split in ("train", "val"):
        images, annotations = [], []
        (folder / split).mkdir(parents=True)
        for file in sorted((scenes / split / "images").iterdir()):
            image, number = Image.open(file), len(images) + 1
            image.save(folder / split / file.name)
            mask = np.asarray(Image.open(scenes / split / "masks" / file.name))
            (rows, columns), label = np.nonzero((mask == 1) | (mask == 2)), int(mask[(mask == 1) | (mask == 2)][0])
            left, top, right, bottom = (int(v) for v in (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1))
            polygon = [left, top, right, top, right, bottom, left, bottom]
            images.append({"id": number, "file_name": file.name, "width": image.width, "height": image.height})
            annotation = {"id": number, "image_id": number, "category_id": label, "iscrowd": 0, "area": 90}
            annotations.append({**annotation, "segmentation": [polygon]})
        categories = [{"id": label, "name": NAMES[label]} for label in (1, 2)]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (folder / split / "annotations.json").write_text(json.dumps(content))
    return folder


def test_a_missing_package_is_named_before_data_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UniversalSegmentation, "packages", (*UniversalSegmentation.packages, "no_such_package"))
    message = r"needs no_such_package\. Install: pip install \"\.\[train\]\" \(in a checkout"
    with pytest.raises(ImportError, match=message):
        make_trainer(TASK, tmp_path / "nowhere", tmp_path)


def test_instances_of_coco_are_trained_and_have_average_precision(scenes: Path, tmp_path: Path) -> None:
    coco = write_coco_instances(scenes, tmp_path / "coco")
    evaluated = [*A_FEW_STEPS, "--eval_strategy", "steps", "--eval_steps", "3"]
    scores = train(TASK, coco, tmp_path / "out", *evaluated, "--thing_classes", "")
    assert {"loss", "mask_ap", "mask_ap_50"} <= set(scores)
    assert "pq" not in scores
    assert 0 <= scores["mask_ap"] <= 1
    assert (tmp_path / "out" / "validation_examples.png").is_file()
