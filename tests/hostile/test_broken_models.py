"""Test that prediction functions raise errors for checkpoints without usable weights and for invalid options."""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor, pipeline

import hf_vit
from hf_vit import HfViTForImageClassification, HfViTImageProcessor
from hf_vit.inference.predict import predict_files

from ..helpers.datasets import write_class_folders
from ..helpers.fresh import run_without_package
from ..helpers.image_text_models import build_processor
from ..helpers.models import small_config
from .table import assert_refused, rows, script


Weights = dict[str, torch.Tensor]
TASKS = {
    "image-classification": "HfViTForImageClassification",
    "image-segmentation": "HfViTForSemanticSegmentation",
    "depth-estimation": "HfViTForDepthEstimation",
    "object-detection": "HfViTForObjectDetection",
    "keypoint-detection": "HfViTForKeypointDetection",
}


def spoil(value: float) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        weights["model.encoder.layers.1.mlp.fc1.weight"][3, 4] = value

    return change


def drop_head(weights: Weights) -> None:
    for name in [name for name in weights if not name.startswith("model.")]:
        del weights[name]


DAMAGES: dict[str, tuple[Callable[[Weights], None], str]] = {
    "nan": (spoil(float("nan")), "infinite or NaN | layers.1.mlp.fc1.weight"),
    "infinite": (spoil(-float("inf")), "infinite or NaN | layers.1.mlp.fc1.weight"),
    "headless": (drop_head, "has no weights for classifier.bias, classifier.weight"),
}


def save(
    folder: Path, damage: Callable[[Weights], None] | None = None, kind: str = TASKS["image-classification"]
) -> str:
    """Save a small model with damaged weights, and an image."""
    torch.manual_seed(0)
    model = vars(hf_vit)[kind](small_config())
    model.save_pretrained(folder / "model")
    options = {"do_affine_crop": True} if "Keypoint" in kind else {}
    HfViTImageProcessor(size={"height": 32, "width": 32}, **options).save_pretrained(folder / "model")
    if damage is not None:
        weights = load_file(folder / "model" / "model.safetensors")
        damage(weights)
        save_file(weights, folder / "model" / "model.safetensors", metadata={"format": "pt"})
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "photo.png")
    return str(folder / "model")


def photo_of(model: str) -> str:
    return str(Path(model).with_name("photo.png"))


def evaluate(model: str) -> None:
    with TemporaryDirectory() as folder:
        data = write_class_folders(Path(folder) / "data", [f"LABEL_{number}" for number in range(5)])
        hf_vit.evaluate(model, data, output_dir=f"{folder}/scores", use_cpu=True)


def optimize(model: str) -> None:
    hf_vit.optimize_for_inference(HfViTForImageClassification.from_pretrained(model), compile=False)


def pipeline_of_loaded(model: str) -> None:
    loaded = HfViTForImageClassification.from_pretrained(model)
    pipeline("image-classification", model=loaded, image_processor=HfViTImageProcessor.from_pretrained(model))


CALLS: dict[str, tuple[Callable[[str], Any], type[BaseException]]] = {
    "pipeline": (lambda model: pipeline("image-classification", model=model), ValueError),
    "pipeline-of-a-model": (pipeline_of_loaded, ValueError),
    "predict": (lambda model: hf_vit.predict(model, photo_of(model)), ValueError),
    "predict-script": (lambda model: script("predict")([model, photo_of(model)]), SystemExit),
    "export": (lambda model: hf_vit.export_model(model, f"{model}-exported", "torch"), ValueError),
    "optimize": (optimize, ValueError),
    "evaluate": (evaluate, ValueError),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.thinned(2)
def test_a_broken_checkpoint_does_not_predict(name: str, damage: str, tmp_path: Path) -> None:
    (call, error), (change, words) = CALLS[name], DAMAGES[damage]
    (row,) = rows(call, error, [("", lambda folder: save(folder, change), words)])
    assert_refused(row, tmp_path)


@pytest.mark.parametrize("task", TASKS)
def test_pipelines_refuse_a_checkpoint_without_its_head_or_of_another_task(task: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "headless", drop_head, TASKS[task])
    with pytest.raises(ValueError, match=rf"has no weights for .* of {TASKS[task]}: .* Train it for this task first"):
        pipeline(task, model=folder)
    other = "depth-estimation" if task == "image-classification" else "image-classification"
    folder = save(tmp_path / "other", kind=TASKS[other])
    with pytest.raises(ValueError, match=f"has no weights for .* of {TASKS[task]}"):
        pipeline(task, model=folder)
    # Feature extraction does not need the weights of a head.
    assert len(pipeline("image-feature-extraction", model=folder)(photo_of(folder))[0]) == 17


def test_a_captioner_without_its_head_generates_nothing(tmp_path: Path) -> None:
    folder = save(tmp_path, drop_head, "HfViTForImageTextToText")
    build_processor(["a dog runs", "a cat sleeps"]).save_pretrained(folder)
    with pytest.raises(ValueError, match=r"has no weights for .* of HfViTForImageTextToText: .* Train it"):
        pipeline("image-text-to-text", model=folder)


def test_saved_code_rejects_broken_checkpoints(tmp_path: Path) -> None:
    places = {name: save(tmp_path / name, change) for name, (change, _) in DAMAGES.items()}
    code = """
    import json
    places = json.loads(sys.argv[1])
    def refusal(task, name):
        try:
            transformers.pipeline(task, model=places[name], trust_remote_code=True)
        except ValueError as error:
            return str(error)
    assert "infinite or NaN" in refusal("image-classification", "nan")
    assert "has no weights for classifier.bias" in refusal("image-classification", "headless")
    others = ("image-segmentation", "zero-shot-image-classification", "image-text-to-text")
    for task in ("object-detection", "depth-estimation", *others):
        message = refusal(task, "infinite")
        assert f"was saved as HfViTForImageClassification and has no trained head for '{task}'" in message, message
        assert "\\n" not in message
    transformers.pipeline("image-feature-extraction", model=places["headless"], trust_remote_code=True)
    """
    run_without_package(code, tmp_path / "work", json.dumps(places))


def test_trained_or_loaded_weights_of_a_checkpoint_without_a_head_predict(tmp_path: Path) -> None:
    model = HfViTForImageClassification.from_pretrained(save(tmp_path, drop_head))
    assert model.untrained_weights
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(2, 3, 32, 32), labels=torch.tensor([0, 1])).loss.backward()
    optimizer.step()
    assert not model.eval().untrained_weights
    pipe = pipeline("image-classification", model=model, image_processor=HfViTImageProcessor(size=32))
    assert len(pipe(photo_of(str(tmp_path / "model")))) == 5
    loaded = HfViTForImageClassification.from_pretrained(tmp_path / "model")
    loaded.load_state_dict(HfViTForImageClassification(small_config()).state_dict())
    assert not loaded.untrained_weights


def test_weights_of_the_library_and_predictions_that_json_cannot_hold_are_refused(tmp_path: Path) -> None:
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = ViTForImageClassification(ViTConfig(**shape, image_size=32, patch_size=8))
    model.classifier.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "vit")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "vit")
    save(tmp_path)
    with pytest.raises(ValueError, match=r"infinite or NaN .*classifier.weight"):
        hf_vit.predict(tmp_path / "vit", tmp_path / "photo.png")

    def enlarge(weights: Weights) -> None:
        weights["classifier.weight"].fill_(3e38)

    folder = save(tmp_path, enlarge)
    with pytest.raises(ValueError, match=r"The prediction for .*photo.png is infinite or NaN"):
        list(predict_files(folder, [tmp_path / "photo.png"]))


NO_PROBABILITIES = [float("nan"), 5, -0.1, "0.5"]


@pytest.mark.parametrize("task", ["object-detection", "image-segmentation", "keypoint-detection"])
def test_predictions_refuse_thresholds_that_are_no_probabilities(task: str, tmp_path: Path) -> None:
    model = save(tmp_path, kind=TASKS[task])
    pipe, photo = pipeline(task, model=model, device="cpu"), photo_of(model)
    for value in NO_PROBABILITIES:
        for call in (
            lambda value=value: pipe(photo, threshold=value),
            lambda value=value: pipeline(task, pipe.model, image_processor=pipe.image_processor, threshold=value),
            lambda value=value: hf_vit.predict(model, photo, threshold=value),
        ):
            with pytest.raises(ValueError, match=rf"threshold={value!r} must lie in \[0, 1\]"):
                call()


@pytest.mark.parametrize("value", [float("nan"), 5])
def test_post_processing_rejects_invalid_thresholds(value: float) -> None:
    processor = HfViTImageProcessor(size=32, do_affine_crop=True)
    masks = {"class_queries_logits": torch.zeros(1, 4, 3), "masks_queries_logits": torch.zeros(1, 4, 8, 8)}
    objects = {"probabilities": torch.rand(1, 4, 3), "pred_boxes": torch.rand(1, 4, 4)}
    refused: list[Callable[[], Any]] = [
        lambda: processor.post_process_object_detection(objects, threshold=value),
        lambda: processor.post_process_object_detection(objects, nms_threshold=value),
        lambda: processor.post_process_keypoint_detection(
            {"heatmaps": torch.rand(1, 3, 8, 8)}, target_sizes=[(40, 40)], threshold=value
        ),
    ]
    for method in (processor.post_process_panoptic_segmentation, processor.post_process_instance_segmentation):
        refused += [lambda method=method: method(masks, threshold=value)]
        refused += [lambda method=method: method(masks, mask_threshold=value)]
    for call in refused:
        with pytest.raises(ValueError, match=rf"threshold={value!r} must lie in \[0, 1\]"):
            call()


def test_optimize_is_a_switch_or_options(tmp_path: Path) -> None:
    folder = save(tmp_path)
    for value in ("yes", 1, "False"):
        with pytest.raises(ValueError, match=f"optimize={value!r} must be True, False or options"):
            hf_vit.predict(folder, photo_of(folder), optimize=value)
        with pytest.raises(ValueError, match=f"optimize={value!r} must be True, False or options"):
            pipeline("image-classification", model=folder, optimize=value)
