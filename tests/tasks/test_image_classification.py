"""The classification script: data, model and Trainer setup, and errors for invalid input before training."""

import logging
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from datasets import DatasetDict
from safetensors.torch import save_file
from torch import nn
from transformers import (
    BitImageProcessor,
    Dinov2Config,
    Dinov2Model,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from hf_vit import HfViTForImageClassification, HfViTImageProcessor
from hf_vit.training import HfViTTrainingArguments, make_trainer
from hf_vit.training.arguments import TaskArguments
from hf_vit.training.models import input_size, load_model
from hf_vit.training.output_folder import checkpoint_to_resume
from hf_vit.training.tasks.image_classification import ClassificationArguments, load_classifier

from ..convert.test_convert_files import drawn, openai, vision_transformer_npz, write_npz
from ..helpers.datasets import load_digits, write_class_folders
from ..scripts.test_demo import load_script


NAMES = ["cat", "dog", "fox"]
SMALL_DATA = ("--train_val_split", "0.5", "--per_device_train_batch_size", "2")
TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "patch_size": 8}


@pytest.fixture
def args(tmp_path: Path) -> HfViTTrainingArguments:
    return HfViTTrainingArguments(
        output_dir=str(tmp_path / "output"), use_cpu=True, per_device_train_batch_size=2, report_to="none"
    )


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_class_folders(tmp_path / "photos", NAMES)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, HfViTForImageClassification]:
    model, processor = load_classifier(TaskArguments(dataset_name="data", image_size=32, config_overrides=TINY), NAMES)
    torch.nn.init.normal_(model.classifier.weight)
    model.save_pretrained(tmp_path / "saved")
    processor.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved", model


@pytest.mark.parametrize("use_distillation_token", [False, True])
@pytest.mark.parametrize("names", [NAMES, ["bird", "cow"]])
def test_the_library_reports_missing_weights_once(
    names: list[str],
    use_distillation_token: bool,
    saved: tuple[Path, HfViTForImageClassification],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved[1].base_model.save_pretrained(saved[0] / "encoder")
    shutil.copy(saved[0] / "preprocessor_config.json", saved[0] / "encoder")
    library, reports = logging.getLogger("transformers.modeling_utils"), []
    monkeypatch.setattr(library, "filters", [lambda record: not reports.append(record.getMessage())])
    arguments = TaskArguments("data", model_name_or_path=str(saved[0] / "encoder"))
    load_model(HfViTForImageClassification, arguments, names, use_distillation_token=use_distillation_token)
    assert sum("LOAD REPORT" in report for report in reports) == 1
    assert library.isEnabledFor(logging.WARNING)


def test_a_new_model_has_the_labels_and_the_size_asked_for() -> None:
    model, processor = load_classifier(TaskArguments(dataset_name="data", image_size=32, config_overrides=TINY), NAMES)
    assert model.config.id2label == dict(enumerate(NAMES))
    assert model.config.label2id == {"cat": 0, "dog": 1, "fox": 2}
    assert (model.config.hidden_size, input_size(processor)) == (16, (32, 32))


def test_a_saved_model_keeps_its_classifier_for_the_same_classes(
    saved: tuple[Path, HfViTForImageClassification],
) -> None:
    folder, expected = saved
    model, _ = load_classifier(TaskArguments(dataset_name="data", model_name_or_path=str(folder)), NAMES)
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in expected.state_dict().items())


def test_a_saved_model_gets_a_fresh_classifier_for_other_classes_and_sees_another_size(
    saved: tuple[Path, HfViTForImageClassification],
) -> None:
    folder, expected = saved
    for names in (["cow", "dog"], ["cat", "fox", "dog"]):  # different number, different order
        model, processor = load_classifier(
            TaskArguments(
                dataset_name="data",
                model_name_or_path=str(folder),
                image_size=48,
                config_overrides={"drop_path_rate": 0.1},
            ),
            names,
        )
        assert model.config.id2label == dict(enumerate(names))
        assert (model.classifier.weight.shape, model.config.drop_path_rate) == ((len(names), 16), 0.1)
        assert 0.1 < float(model.classifier.weight.detach().std()) < 0.5  # 1/4 at initialization, 1 in the saved model
        assert input_size(processor) == (48, 48)
        images = torch.randn(1, 3, 48, 48)
        assert torch.equal(model.eval().model(images)[0], expected.eval().model(images)[0])


@pytest.mark.parametrize("names", [NAMES, ["bird", "cow"]])
@pytest.mark.parametrize("use_distillation_token", [False, True])
def test_a_saved_model_attends_as_it_is_told(
    use_distillation_token: bool, names: list[str], saved: tuple[Path, HfViTForImageClassification]
) -> None:
    arguments = TaskArguments(
        "data", model_name_or_path=str(saved[0]), config_overrides={"attn_implementation": "eager"}
    )
    model, _ = load_model(HfViTForImageClassification, arguments, names, use_distillation_token=use_distillation_token)
    assert model.config.num_labels == len(names)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    "sized", [{"image_size": 48}, {"config_overrides": {"image_size": 48}}], ids=["argument", "override"]
)
def test_model_and_image_processor_take_the_same_size(
    sized: dict[str, Any], saved: tuple[Path, HfViTForImageClassification], published: tuple[Path, nn.Module]
) -> None:
    for folder in (saved[0], published[0]):
        model, processor = load_classifier(
            TaskArguments(dataset_name="data", model_name_or_path=str(folder), **sized), NAMES
        )
        assert (model.config.image_size, input_size(processor)) == (48, (48, 48))
    twice = TaskArguments(
        dataset_name="data", model_name_or_path=str(folder), image_size=48, config_overrides={"image_size": 48}
    )
    with pytest.raises(ValueError, match="--image_size is given twice"):
        load_classifier(twice, NAMES)


def test_model_and_image_processor_take_the_same_channels(published: tuple[Path, nn.Module]) -> None:
    arguments = TaskArguments(
        dataset_name="data", model_name_or_path=str(published[0]), config_overrides={"num_channels": 1}
    )
    model, processor = load_classifier(arguments, NAMES)
    images = processor(torch.zeros(40, 40, 3, dtype=torch.uint8).numpy(), return_tensors="pt").pixel_values
    assert model.eval()(images).logits.shape == (1, 3)


def test_images_of_a_saved_model_get_whole_patches(saved: tuple[Path, HfViTForImageClassification]) -> None:
    folder, model = saved
    HfViTImageProcessor(size=39).save_pretrained(folder)
    tuned, processor = load_classifier(TaskArguments(dataset_name="data", model_name_or_path=str(folder)), NAMES)
    assert (tuned.config.image_size, input_size(processor)) == (model.config.image_size, (32, 32))


def test_overrides_that_change_shapes_of_a_saved_model_are_refused(
    saved: tuple[Path, HfViTForImageClassification],
) -> None:
    arguments = TaskArguments(
        dataset_name="data", model_name_or_path=str(saved[0]), config_overrides={"hidden_size": 32}
    )
    with pytest.raises(
        ValueError, match=r"do not fit: .* is \(1, 1, 16\) in the checkpoint and \(1, 1, 32\) in the model"
    ):
        load_classifier(arguments, NAMES)


PUBLISHED_SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}


@pytest.fixture(params=["vit", "dinov2"])
def published(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, nn.Module]:
    """Return a classifier and a headless model of transformers, each with its own image processor."""
    if request.param == "vit":
        model = ViTForImageClassification(ViTConfig(**PUBLISHED_SHAPE, intermediate_size=16, num_labels=3))
        ViTImageProcessor(size=32).save_pretrained(tmp_path / "published")
    else:
        model = Dinov2Model(Dinov2Config(**PUBLISHED_SHAPE, mlp_ratio=1))
        BitImageProcessor(size={"shortest_edge": 36}, crop_size=32).save_pretrained(tmp_path / "published")
    model.save_pretrained(tmp_path / "published")
    return tmp_path / "published", model.eval().base_model


def test_a_published_model_is_tuned(published: tuple[Path, nn.Module]) -> None:
    folder, source = published
    model, processor = load_classifier(TaskArguments(dataset_name="data", model_name_or_path=str(folder)), NAMES)
    assert model.config.id2label == dict(enumerate(NAMES))
    assert (model.classifier.weight.shape, input_size(processor)) == ((3, 16), (32, 32))
    assert 0.1 < float(model.classifier.weight.detach().std()) < 0.5
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model.eval().model(images)[0], source(images)[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["vit.pth", "vit.safetensors", "vit.npz"])
def test_a_lone_file_of_weights_is_tuned(name: str, tmp_path: Path) -> None:
    weights = {key: tensor.float() for key, tensor in drawn("vit_base_patch16_224").state_dict().items()}
    file = tmp_path / name
    match file.suffix:
        case ".pth":
            torch.save(weights, file)
        case ".safetensors":
            save_file(weights, file)
        case ".npz":
            write_npz(file, vision_transformer_npz(weights))
    model, processor = load_classifier(TaskArguments(dataset_name="data", model_name_or_path=str(file)), NAMES)
    assert (model.config.image_size, input_size(processor)) == (32, (32, 32))
    assert bool(processor.do_center_crop) == (name != "vit.npz")
    assert processor.image_mean[0] == (0.5 if name == "vit.npz" else 0.485)


def test_a_lone_file_that_needs_to_be_told_more_is_tuned(tmp_path: Path) -> None:
    theirs = drawn("vit_base_patch32_clip_quickgelu_224", num_classes=0).float()
    torch.save(openai(theirs.state_dict()), tmp_path / "clip.pt")
    arguments = TaskArguments(
        dataset_name="data",
        model_name_or_path=str(tmp_path / "clip.pt"),
        config_overrides={"hidden_act": "quick_gelu"},
    )
    model, processor = load_classifier(arguments, NAMES)
    assert (model.config.hidden_act, processor.image_mean[0]) == ("quick_gelu", 0.48145466)


def test_a_file_of_weights_in_a_folder_is_tuned_as_the_folder(published: tuple[Path, nn.Module]) -> None:
    folder, _ = published
    (by_folder, processor), (by_file, same) = (
        load_classifier(TaskArguments(dataset_name="data", model_name_or_path=str(place)), NAMES)
        for place in (folder, folder / "model.safetensors")
    )
    assert same.to_dict() == processor.to_dict()
    weights, others = ({**model.state_dict()} for model in (by_folder, by_file))
    assert weights.pop("classifier.weight").shape == others.pop("classifier.weight").shape  # randomly initialized
    assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())


def test_a_published_model_is_trained_and_evaluated_by_the_scripts(
    published: tuple[Path, nn.Module], photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photos.parent)
    arguments = ["--dataset_name", "photos", "--use_cpu"]
    training = ["--model_name_or_path", "published", "--output_dir", "output", "--max_steps", "2"]
    load_script("train_image_classification").main([*arguments, *SMALL_DATA, *training])
    load_script("evaluate_model").main([*arguments, "--model_name_or_path", "output"])
    model = HfViTForImageClassification.from_pretrained("output")
    assert model.config.id2label == dict(enumerate(NAMES))
    assert model.classifier.bias.any()  # initialized with zeros


def test_a_lone_file_of_weights_is_trained_and_evaluated_by_the_scripts(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photos.parent)
    weights = drawn("vit_base_patch16_224", num_classes=len(NAMES)).float().state_dict()
    torch.save(weights, "vit.pth")
    arguments = ["--dataset_name", "photos", "--use_cpu", "--model_name_or_path", "vit.pth"]
    load_script("train_image_classification").main(
        [*arguments, *SMALL_DATA, "--output_dir", "output", "--max_steps", "1"]
    )
    assert HfViTForImageClassification.from_pretrained("output").config.id2label == dict(enumerate(NAMES))
    with pytest.raises(SystemExit, match="LABEL_0"):  # a weight file has no class names
        load_script("evaluate_model").main(arguments)


def test_a_saved_model_sees_whole_patches_only(saved: tuple[Path, HfViTForImageClassification]) -> None:
    with pytest.raises(ValueError, match="height 20 is not a multiple of the patch height 8"):
        load_classifier(TaskArguments(dataset_name="data", model_name_or_path=str(saved[0]), image_size=20), NAMES)


def test_a_saved_model_of_several_labels_per_image_is_tuned_for_one(
    saved: tuple[Path, HfViTForImageClassification], tmp_path: Path
) -> None:
    folder, model = saved
    model.config.problem_type = "multi_label_classification"
    model.save_pretrained(folder)
    tuned, _ = load_classifier(TaskArguments(dataset_name="data", model_name_or_path=str(folder)), NAMES)
    assert tuned(torch.zeros(2, 3, 32, 32), labels=torch.tensor([0, 2])).loss.isfinite()


def test_a_processor_that_keeps_the_aspect_ratio_needs_a_size() -> None:
    assert input_size(HfViTImageProcessor(size={"shortest_edge": 64}, do_center_crop=True, crop_size=56)) == (56, 56)
    with pytest.raises(ValueError, match=r"images of several sizes make no batch.*--image_size 224"):
        input_size(HfViTImageProcessor(size={"shortest_edge": 64}))


def digits_trainer(args: HfViTTrainingArguments, *splits: str) -> None:
    digits = load_digits()
    model, processor = load_classifier(
        TaskArguments(dataset_name="data", preset="mnist", config_overrides={**TINY, "patch_size": 4}),
        list("0123456789"),
    )
    chosen = DatasetDict({split: digits["train"].select(range(20)) for split in splits})
    make_trainer(model, processor, chosen, ClassificationArguments("data"), args)


def test_choosing_the_best_model_needs_validation_images(args: HfViTTrainingArguments) -> None:
    args.load_best_model_at_end = True
    with pytest.raises(ValueError, match=r"need validation images. Set --train_val_split 0.1"):
        digits_trainer(args, "train")


def test_a_batch_must_be_filled(args: HfViTTrainingArguments) -> None:
    args.per_device_train_batch_size = 21
    with pytest.raises(ValueError, match=r"20 training images do not fill a batch of 21. Set --per_device_train"):
        digits_trainer(args, "train")


def test_a_new_training_does_not_write_over_an_earlier_one(args: HfViTTrainingArguments) -> None:
    assert checkpoint_to_resume(args) is None
    (Path(args.output_dir) / "checkpoint-5").mkdir(parents=True)
    with pytest.raises(
        ValueError, match=r"already contains a training run. Resume it with --resume_from_checkpoint last"
    ):
        checkpoint_to_resume(args)
    args.resume_from_checkpoint = "last"
    with pytest.raises(ValueError, match="holds no training to resume"):
        checkpoint_to_resume(args)
    (Path(args.output_dir) / "recipe.yaml").write_text("seed: 0\n")
    assert checkpoint_to_resume(args) is None  # the checkpoint is incomplete
    args.resume_from_checkpoint = str(Path(args.output_dir) / "checkpoint-5")
    with pytest.raises(ValueError, match=r"checkpoint-5 cannot be resumed from: it has no SHA256SUMS"):
        checkpoint_to_resume(args)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("train_image_classification")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset_name", "photo"], "There is no file or folder 'photo'"),
        (["--dataset_name", "photos", "--model_name_or_path", "nowhere"], "No model can be read from 'nowhere'"),
        (["--dataset_name", "photos", "--preset", "giant"], "There is no preset 'giant'"),
        (
            ["--dataset_name", "photos", "--auto_augment", "some"],
            "argument --auto_augment/--auto-augment: invalid choice: 'some'",
        ),
        (["--dataset_name", "photos", "--config_overrides", "patch_size=8"], "is not a JSON object"),
        (
            ["--dataset_name", "photos", "--image_size", "30"],
            "The image height 30 is not a multiple of the patch height 16",
        ),
        (
            ["--dataset_name", "photos", "--image_size", "32", "--config_overrides", '{"image_size": 32}'],
            "--image_size is given twice",
        ),
        (["--dataset_name", "photos", "--config_overrides", '{"patch_size": "8"}'], "The configuration does not fit"),
        (["--dataset_name", "photos", "--config_overrides", '{"patches": 8}'], "HfViTConfig has no field patches"),
        (
            ["--dataset_name", "photos", "--load_best_model_at_end", "--metric_for_best_model", "acc"],
            "There is no score 'acc' to choose the best model by. Choose accuracy, loss, macro_f1",
        ),
        (
            ["--dataset_name", "photos", "--preset", "tiny", "--model_name_or_path", "nowhere"],
            "--preset tiny is the size of a new model",
        ),
        ([], "Set the location of the images"),
    ],
)
def test_training_explains_mistakes(
    arguments: list[str],
    message: str,
    script: ModuleType,
    photos: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(photos.parent)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit) as stopped:
        script.main([*SMALL_DATA, *arguments, "--output_dir", "output", "--use_cpu"])
    assert message in str(stopped.value.code)
    assert not (photos.parent / "output" / "model.safetensors").exists()


def test_evaluation_explains_mistakes(photos: Path, saved: tuple[Path, HfViTForImageClassification]) -> None:
    script = load_script("evaluate_model")
    for arguments, message in (
        ([], "Say what to evaluate: --model_name_or_path"),
        (["--model_name_or_path", str(saved[0])], "Set the location of the images"),
        (
            ["--model_name_or_path", str(saved[0]), "--dataset_name", str(photos), "--split", "val"],
            "has no split 'val'",
        ),
    ):
        with pytest.raises(SystemExit, match=message):
            script.main([*arguments, "--use_cpu"])
