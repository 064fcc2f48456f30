"""Test the setup of image classification: data, model, trainer, and errors before training."""

import itertools
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import DatasetDict
from safetensors.torch import save_file
from torch import nn

from hf_vit import HfViTForImageClassification, HfViTImageProcessor
from hf_vit.runs import make_trainer
from hf_vit.tasks.common.arguments import TaskArguments
from hf_vit.tasks.common.models import input_size, load_model
from hf_vit.tasks.image_classification import ClassificationArguments, load_classifier
from hf_vit.training import HfViTTrainingArguments
from hf_vit.training.output_folder import checkpoint_to_resume

from ..convert.test_convert_files import drawn, openai, vision_transformer_npz, write_npz
from ..helpers.datasets import load_digits, write_class_folders
from ..helpers.models import encoder_shape
from ..helpers.options import call_command


NAMES = ["cat", "dog", "fox"]
SMALL_DATA = ("--train_val_split", "0.5", "--per_device_train_batch_size", "2")
TINY = {**encoder_shape(16, 2, 16), "patch_size": 8}


@pytest.fixture
def args(tmp_path: Path) -> HfViTTrainingArguments:
    return HfViTTrainingArguments(
        output_dir=str(tmp_path / "output"), use_cpu=True, per_device_train_batch_size=2, report_to="none"
    )


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_class_folders(tmp_path / "photos", NAMES)


def arguments_of(source: Path, **options: Any) -> TaskArguments:
    return TaskArguments(dataset_name="data", model_name_or_path=str(source), **options)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, HfViTForImageClassification]:
    model, processor = load_classifier(TaskArguments(dataset_name="data", image_size=32, config_overrides=TINY), NAMES)
    torch.nn.init.normal_(model.classifier.weight)
    model.save_pretrained(tmp_path / "saved")
    processor.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved", model


@pytest.mark.parametrize("use_distillation_token", [False, True])
@pytest.mark.parametrize("names", [NAMES, ["bird", "cow"]])
def test_missing_weights_are_reported_once_and_attention_is_selectable(
    names: list[str],
    use_distillation_token: bool,
    saved: tuple[Path, HfViTForImageClassification],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved[1].base_model.save_pretrained(saved[0] / "encoder")
    shutil.copy(saved[0] / "preprocessor_config.json", saved[0] / "encoder")
    library, reports = logging.getLogger("transformers.modeling_utils"), []
    monkeypatch.setattr(library, "filters", [lambda record: not reports.append(record.getMessage())])
    given = {"names": names, "use_distillation_token": use_distillation_token}
    load_model(HfViTForImageClassification, arguments_of(saved[0] / "encoder"), **given)
    assert sum("LOAD REPORT" in report for report in reports) == 1
    assert library.isEnabledFor(logging.WARNING)
    eager = arguments_of(saved[0], config_overrides={"attn_implementation": "eager"})
    model, _ = load_model(HfViTForImageClassification, eager, **given)
    assert model.config.num_labels == len(names)
    assert model.config._attn_implementation == "eager"


def test_a_new_model_has_the_given_labels_and_the_size_of_its_processor() -> None:
    model, processor = load_classifier(TaskArguments(dataset_name="data", image_size=32, config_overrides=TINY), NAMES)
    assert model.config.id2label == dict(enumerate(NAMES))
    assert model.config.label2id == {"cat": 0, "dog": 1, "fox": 2}
    assert (model.config.hidden_size, input_size(processor)) == (16, (32, 32))
    assert input_size(HfViTImageProcessor(size={"shortest_edge": 64}, do_center_crop=True, crop_size=56)) == (56, 56)
    with pytest.raises(ValueError, match=r"do not form a batch.*--image_size 224"):
        input_size(HfViTImageProcessor(size={"shortest_edge": 64}))


def test_a_saved_classifier_is_kept_for_the_same_classes_only(
    saved: tuple[Path, HfViTForImageClassification],
) -> None:
    folder, expected = saved
    model, _ = load_classifier(arguments_of(folder), NAMES)
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in expected.state_dict().items())
    # Fine-tuning on single-label data must replace the saved problem type.
    expected.config.problem_type = "multi_label_classification"
    expected.save_pretrained(folder)
    tuned, _ = load_classifier(arguments_of(folder), NAMES)
    assert tuned(torch.zeros(2, 3, 32, 32), labels=torch.tensor([0, 2])).loss.isfinite()

    folder, expected = saved
    # The number or the names of classes differ from those of the saved model.
    for names in (["cow", "dog"], ["cat", "dog", "wolf"]):
        arguments = arguments_of(folder, image_size=48, config_overrides={"drop_path_rate": 0.1})
        model, processor = load_classifier(arguments, names)
        assert model.config.id2label == dict(enumerate(names))
        assert (model.classifier.weight.shape, model.config.drop_path_rate) == ((len(names), 16), 0.1)
        # The standard deviation of head weights is 1/4 in a new head and 1 in the saved head.
        assert 0.1 < float(model.classifier.weight.detach().std()) < 0.5
        assert input_size(processor) == (48, 48)
        images = torch.randn(1, 3, 48, 48)
        assert torch.equal(model.eval().model(images)[0], expected.eval().model(images)[0])

    folder, model = saved
    with pytest.raises(ValueError, match="height 20 is not a multiple of the patch height 8"):
        load_classifier(arguments_of(folder, image_size=20), NAMES)
    misfit = r"do not fit: .* is \(1, 1, 16\) in the checkpoint and \(1, 1, 32\) in the model"
    with pytest.raises(ValueError, match=misfit):
        load_classifier(arguments_of(folder, config_overrides={"hidden_size": 32}), NAMES)
    HfViTImageProcessor(size=39).save_pretrained(folder)
    tuned, processor = load_classifier(arguments_of(folder), NAMES)
    assert (tuned.config.image_size, input_size(processor)) == (model.config.image_size, (32, 32))


def test_model_and_image_processor_take_the_same_size_and_channels(
    saved: tuple[Path, HfViTForImageClassification], published: tuple[Path, nn.Module]
) -> None:
    twice = {"image_size": 48, "config_overrides": {"image_size": 48}}
    for folder, sized in itertools.product((saved[0], published[0]), ("image_size", "config_overrides")):
        model, processor = load_classifier(arguments_of(folder, **{sized: twice[sized]}), NAMES)
        assert (model.config.image_size, input_size(processor)) == (48, (48, 48))
    with pytest.raises(ValueError, match="--image_size is given twice"):
        load_classifier(arguments_of(folder, **twice), NAMES)
    model, processor = load_classifier(arguments_of(folder, config_overrides={"num_channels": 1}), NAMES)
    images = processor(torch.zeros(40, 40, 3, dtype=torch.uint8).numpy(), return_tensors="pt").pixel_values
    assert model.eval()(images).logits.shape == (1, 3)


SHAPE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}


@pytest.fixture(params=["vit", "dinov2"])
def published(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, nn.Module]:
    """Save a published architecture with its image processor. Return the folder and the encoder."""
    if request.param == "vit":
        model = transformers.ViTForImageClassification(
            transformers.ViTConfig(**SHAPE, intermediate_size=16, num_labels=3)
        )
        transformers.ViTImageProcessor(size=32).save_pretrained(tmp_path / "published")
    else:
        model = transformers.Dinov2Model(transformers.Dinov2Config(**SHAPE, mlp_ratio=1))
        transformers.BitImageProcessor(size={"shortest_edge": 36}, crop_size=32).save_pretrained(
            tmp_path / "published"
        )
    model.save_pretrained(tmp_path / "published")
    return tmp_path / "published", model.eval().base_model


def test_a_published_model_is_tuned_by_its_folder_or_its_file(published: tuple[Path, nn.Module]) -> None:
    folder, source = published
    model, processor = load_classifier(arguments_of(folder), NAMES)
    assert model.config.id2label == dict(enumerate(NAMES))
    assert (model.classifier.weight.shape, input_size(processor)) == ((3, 16), (32, 32))
    assert 0.1 < float(model.classifier.weight.detach().std()) < 0.5
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model.eval().model(images)[0], source(images)[0], atol=1e-4, rtol=0)
    by_file, same = load_classifier(arguments_of(folder / "model.safetensors"), NAMES)
    assert same.to_dict() == processor.to_dict()
    weights, others = {**model.state_dict()}, {**by_file.state_dict()}
    # The heads are excluded from the comparison: both are initialized at random.
    assert weights.pop("classifier.weight").shape == others.pop("classifier.weight").shape
    assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())


def test_a_lone_file_of_weights_is_tuned(tmp_path: Path) -> None:
    weights = {key: tensor.float() for key, tensor in drawn("vit_base_patch16_224").state_dict().items()}
    torch.save(weights, tmp_path / "vit.pth")
    save_file(weights, tmp_path / "vit.safetensors")
    write_npz(tmp_path / "vit.npz", vision_transformer_npz(weights))
    for name in ("vit.pth", "vit.safetensors", "vit.npz"):
        model, processor = load_classifier(arguments_of(tmp_path / name), NAMES)
        assert (model.config.image_size, input_size(processor)) == (32, (32, 32))
        assert bool(processor.do_center_crop) == (name != "vit.npz")
        assert processor.image_mean[0] == (0.5 if name == "vit.npz" else 0.485)
    # CLIP files from OpenAI do not contain the name of the activation function.
    theirs = drawn("vit_base_patch32_clip_quickgelu_224", num_classes=0).float()
    torch.save(openai(theirs.state_dict()), tmp_path / "clip.pt")
    told = arguments_of(tmp_path / "clip.pt", config_overrides={"hidden_act": "quick_gelu"})
    model, processor = load_classifier(told, NAMES)
    assert (model.config.hidden_act, processor.image_mean[0]) == ("quick_gelu", 0.48145466)


def test_a_published_model_is_trained(
    published: tuple[Path, nn.Module], photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photos.parent)
    arguments = ["--dataset_name", "photos", "--use_cpu"]
    training = ["--model_name_or_path", "published", "--output_dir", "output", "--max_steps", "2"]
    call_command("train image-classification", [*arguments, *SMALL_DATA, *training])
    call_command("evaluate", [*arguments, "--model_name_or_path", "output"])
    model = HfViTForImageClassification.from_pretrained("output")
    assert model.config.id2label == dict(enumerate(NAMES))
    assert model.classifier.bias.any()  # the bias of a new head would be zero


def test_a_file_of_weights_is_trained_and_evaluated(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(photos.parent)
    weights = drawn("vit_base_patch16_224", num_classes=len(NAMES)).float().state_dict()
    torch.save(weights, "vit.pth")
    arguments = ["--dataset_name", "photos", "--use_cpu", "--model_name_or_path", "vit.pth"]
    call_command("train image-classification", [*arguments, *SMALL_DATA, "--output_dir", "output", "--max_steps", "1"])
    assert HfViTForImageClassification.from_pretrained("output").config.id2label == dict(enumerate(NAMES))
    with pytest.raises(SystemExit, match="LABEL_0"):  # the saved model has no class names
        call_command("evaluate", arguments)


def test_too_few_images_and_used_output_folders_are_refused(args: HfViTTrainingArguments) -> None:
    options = TaskArguments(dataset_name="data", preset="mnist", config_overrides={**TINY, "patch_size": 4})
    model, processor = load_classifier(options, list("0123456789"))
    images = DatasetDict({"train": load_digits()["train"].select(range(20))})
    args.load_best_model_at_end = True
    with pytest.raises(ValueError, match=r"require validation images. Set --train_val_split 0.1"):
        make_trainer(model, processor, images, ClassificationArguments("data"), args)
    args.load_best_model_at_end, args.per_device_train_batch_size = False, 21
    with pytest.raises(ValueError, match=r"20 training images do not fill a batch of 21. Reduce --per_device_train"):
        make_trainer(model, processor, images, ClassificationArguments("data"), args)

    assert checkpoint_to_resume(args) is None
    (Path(args.output_dir) / "checkpoint-5").mkdir(parents=True)
    with pytest.raises(
        ValueError, match=r"already contains a training run. Resume it with --resume_from_checkpoint l"
    ):
        checkpoint_to_resume(args)
    args.resume_from_checkpoint = "last"
    with pytest.raises(ValueError, match="contains no training run to resume"):
        checkpoint_to_resume(args)
    (Path(args.output_dir) / "recipe.yaml").write_text("seed: 0\n")
    assert checkpoint_to_resume(args) is None  # no checkpoint is complete
    args.resume_from_checkpoint = str(Path(args.output_dir) / "checkpoint-5")
    with pytest.raises(ValueError, match=r"Cannot resume from .*checkpoint-5: it has no SHA256SUMS"):
        checkpoint_to_resume(args)


def test_mistakes_are_explained(
    photos: Path, monkeypatch: pytest.MonkeyPatch, saved: tuple[Path, HfViTForImageClassification]
) -> None:
    monkeypatch.chdir(photos.parent)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    best = ["--dataset_name", "photos", "--load_best_model_at_end", "--metric_for_best_model", "acc"]
    for arguments, message in (
        (["--dataset_name", "photo"], "There is no file or folder 'photo'"),
        (best, "metric_for_best_model='acc' is not a score of this task. Choose from accuracy, loss, macro_f1"),
        ([], "Set the location of the images"),
    ):
        with pytest.raises(SystemExit, match=message):
            call_command(
                "train image-classification", [*SMALL_DATA, *arguments, "--output_dir", "output", "--use_cpu"]
            )
        assert not (photos.parent / "output" / "model.safetensors").exists()

    model = ["--model_name_or_path", str(saved[0])]
    for arguments, message in (
        ([], "No model is given. Set --model_name_or_path"),
        (model, "Set the location of the images"),
        ([*model, "--dataset_name", str(photos), "--split", "val"], "has no split 'val'"),
    ):
        with pytest.raises(SystemExit, match=message):
            call_command("evaluate", [*arguments, "--use_cpu"])
