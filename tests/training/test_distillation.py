"""Test distillation: its losses, the inputs of teachers, and training with the command and the Trainer."""

import json
import logging
import math
import re
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    BaseImageProcessor,
    EfficientNetImageProcessor,
    MobileViTImageProcessor,
    SwinConfig,
    SwinModel,
    ViTImageProcessor,
)

from hf_vit import HfViTForImageClassification, HfViTImageProcessor
from hf_vit.model.task_image_classification import classification_loss
from hf_vit.tasks import ImageClassification
from hf_vit.tasks.common.arguments import TaskArguments
from hf_vit.tasks.image_classification import load_classifier
from hf_vit.training.distillation import (
    PROJECTION_NAME,
    Distillation,
    DistillationArguments,
    TokenDistillation,
    check_distillation,
    cosine_loss,
    hard_loss,
    load_teacher,
    make_distillation,
    resample_patches,
    soft_loss,
)
from hf_vit.training.teacher import TeacherPreprocessing, match_classes, read_features

from ..helpers.datasets import write_class_folders
from ..helpers.dense_trainings import A_FEW_STEPS, ALL_TASKS, TASKS, make_trainer, run_task, write_scenes
from ..helpers.distributed import finish, start
from ..helpers.models import pixels, small_config
from ..helpers.object_trainings import write_figures, write_objects
from ..helpers.options import call_command, run
from ..helpers.references import assert_close, assert_identical
from ..helpers.teachers import DISTILLED_CASES, TEACHER_LOSSES, save_teacher, small_distillation, small_teacher
from ..helpers.trainings import build, model_and_batch, splits, train_case, training_arguments


NAMES = ["cat", "dog", "fox"]


def drawn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_hard_loss_is_the_float32_cross_entropy_of_the_teacher_predictions() -> None:
    loss = hard_loss(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[9.0, 8.0], [0.1, 0.0]]))
    assert loss.item() == pytest.approx((math.log(1 + math.exp(-2)) + math.log(1 + math.exp(1))) / 2)
    half, other = drawn(2, 3).half(), drawn(2, 3).half().flip(0)
    for loss in (hard_loss(half, other), soft_loss(half, other, 1.0), cosine_loss(half[None], other[None])):
        assert loss.dtype == torch.float32


def test_soft_loss_is_the_divergence_at_a_temperature_times_its_square() -> None:
    # At a temperature of 2, the student predicts the probabilities (1/2, 1/2) and the teacher (3/4, 1/4).
    # Without the temperature, the teacher predicts (9/10, 1/10).
    loss = soft_loss(torch.zeros(1, 2), torch.tensor([[2 * math.log(3), 0.0]]), temperature=2.0)
    assert loss.item() == pytest.approx(4 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5)))
    ours, theirs = drawn(4, 7), drawn(4, 7).flip(0)
    p, q = ((values / 3).softmax(dim=1) for values in (theirs, ours))
    expected = 9 * (p * (p / q).log()).sum(dim=1).mean()
    torch.testing.assert_close(soft_loss(ours, theirs, 3.0), expected, rtol=1e-12, atol=0)
    assert soft_loss(ours, ours, 3.0).abs() < 1e-12


def test_cosine_loss_counts_images_alike_and_padding_not_at_all() -> None:
    tokens = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[3.0, 3.0], [1.0, 0.0]]])
    targets = torch.tensor([[[5.0, 0.0], [1.0, 0.0]], [[-1.0, -1.0], [0.0, 1.0]]])
    assert cosine_loss(tokens, targets).item() == pytest.approx(((0 + 1) / 2 + (2 + 1) / 2) / 2)
    visible = torch.tensor([[True, True], [True, False]])
    assert cosine_loss(tokens, targets, visible).item() == pytest.approx(((0 + 1) / 2 + 2) / 2)


def test_patches_are_resampled_to_another_grid() -> None:
    patches = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert resample_patches(patches, (4, 4)) is patches
    finer = resample_patches(patches, (8, 8))
    assert finer[0, 0, 0].tolist() == [0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3]
    coarser = resample_patches(patches, (4, 2))[0, 0]
    torch.testing.assert_close(coarser.mean(dim=1), patches[0, 0].mean(dim=1))
    assert resample_patches(torch.ones(1, 2, 5, 3), (2, 7)).sub(1).abs().max() < 1e-6


def test_the_teacher_sees_the_pixels_that_its_own_image_processor_makes() -> None:
    image, size = np.random.default_rng(0).integers(0, 256, (3, 24, 24), dtype=np.uint8), {"height": 24, "width": 24}
    student = HfViTImageProcessor(size=24, image_mean=(0.1, 0.5, 0.9), image_std=(0.2, 0.3, 0.4))
    for options in (
        {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.3, 0.2, 0.1]},
        {"do_normalize": False},
        {"do_rescale": False, "do_normalize": False},
    ):
        teacher = ViTImageProcessor(size=size, **options)
        seen = TeacherPreprocessing(student, teacher, 3)(student(image, return_tensors="pt").pixel_values)
        expected = teacher(image, return_tensors="pt").pixel_values.float()
        torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-5 * float(expected.max()))
    student, image = HfViTImageProcessor(size=24, image_mean=0.2, image_std=0.3), torch.rand(1, 3, 24, 24)
    resized = torch.nn.functional.interpolate(image, (12, 16), mode="bilinear", antialias=True)
    teacher = HfViTImageProcessor(size={"height": 12, "width": 16}, image_mean=0.4, image_std=0.5)
    seen = TeacherPreprocessing(student, teacher, 3)((image - 0.2) / 0.3)
    torch.testing.assert_close(seen, (resized - 0.4) / 0.5)
    cropping = HfViTImageProcessor(size={"shortest_edge": 20}, do_center_crop=True, crop_size=16)
    assert TeacherPreprocessing(student, cropping, 3)(image).shape == (1, 3, 16, 16)
    assert TeacherPreprocessing(student, HfViTImageProcessor(do_resize=False), 3)(image).shape == image.shape


@pytest.fixture
def student() -> HfViTForImageClassification:
    config = small_config("registers", id2label=dict(enumerate(NAMES)), num_labels=3, hidden_dropout_prob=0.1)
    return build(HfViTForImageClassification, config)


def distillation_of(student: HfViTForImageClassification, teacher: Path, **options: str) -> Distillation:
    """Return the distillation module of a student, configured in the same way as in a training run."""
    args, processor = DistillationArguments(str(teacher), **options), HfViTImageProcessor.for_model(student.config)
    return make_distillation(args, student, processor, load_teacher(args, type(student)))


@pytest.mark.parametrize("kind", ["ours", "vit", "resnet"])
def test_a_teacher_answers_in_the_order_of_the_students_classes(
    kind: str, student: HfViTForImageClassification, tmp_path: Path
) -> None:
    distillation = distillation_of(student, save_teacher(kind, tmp_path, ["fox", "cat", "dog"]))
    teacher = distillation.teacher
    assert [teacher.model.config.id2label[number] for number in distillation.order] == NAMES
    assert teacher.logits(pixels(student.config)).shape == (2, 3)


@pytest.mark.parametrize(
    ("kind", "grid", "has_cls"),
    [
        ("ours", (6, 6), True),
        ("vit", (6, 6), True),
        ("beit", (6, 6), True),
        ("resnet", (4, 4), False),
        ("swin", (6, 6), False),
        ("uneven_swin", (3, 3), False),
        ("levit", (2, 2), False),
    ],
)
def test_features_of_any_encoder_are_patches_and_maybe_a_cls_token(
    kind: str, grid: tuple[int, int], has_cls: bool, student: HfViTForImageClassification, tmp_path: Path
) -> None:
    teacher = distillation_of(student, save_teacher(kind, tmp_path, NAMES), distillation_type="features").teacher
    cls, patches = teacher.features(pixels(student.config))
    assert patches.shape == (2, 16, *grid)
    assert (cls is not None) == has_cls
    if has_cls:
        tokens = teacher(pixels(student.config))[0].last_hidden_state
        assert torch.equal(cls, tokens[:, 0])
        assert torch.equal(patches[:, :, 1, 2], tokens[:, 1 + 1 * 6 + 2])


def test_merged_patches_are_located_or_raise() -> None:
    sizes = {"image_size": 32, "patch_size": 4, "window_size": 3}
    model = SwinModel(SwinConfig(**sizes, embed_dim=4, depths=[1, 1], num_heads=[1, 1]))
    tokens = drawn(1, 1 + 3 * 3, 8)  # the first token is the CLS token
    cls, patches = read_features(model, tokens, torch.zeros(1, 3, 20, 20))
    assert torch.equal(cls, tokens[:, 0])
    assert torch.equal(patches.flatten(2).mT, tokens[:, 1:])
    image = torch.zeros(1, 3, 18, 18)  # the model pads this image to 5 x 5 patches
    tokens = model(image).last_hidden_state
    assert tokens.shape[1] == 3 * 3
    with pytest.raises(ValueError, match=r"Unknown patch grid of the 9 tokens of SwinModel for an image of size \(18"):
        read_features(model, tokens, image)


@pytest.mark.parametrize("processor", [MobileViTImageProcessor(), EfficientNetImageProcessor()])
def test_a_teacher_whose_colors_are_not_only_scaled_is_refused(
    processor: BaseImageProcessor, student: HfViTForImageClassification, tmp_path: Path
) -> None:
    processor.save_pretrained(save_teacher("resnet", tmp_path, NAMES))
    with pytest.raises(ValueError, match=f"The teacher's {type(processor).__name__} converts the color .* to"):
        distillation_of(student, tmp_path, distillation_type="features")


def test_duplicate_class_names_match_only_in_the_same_order() -> None:
    assert match_classes(["crane", "dog", "crane"], ["crane", "dog", "crane"], "it") == [0, 1, 2]
    with pytest.raises(ValueError, match="differ from the classes of the data"):
        match_classes(["crane", "dog", "crane"], ["dog", "crane", "crane"], "it")


def test_teachers_in_half_precision_and_as_wide_as_the_student_teach(
    student: HfViTForImageClassification, tmp_path: Path
) -> None:
    save_teacher("vit", tmp_path, NAMES)
    for kind in ("soft", "features"):
        distillation = distillation_of(student, tmp_path, distillation_type=kind, teacher_dtype="bfloat16")
        assert {weight.dtype for weight in distillation.teacher.parameters()} == {torch.bfloat16}
        loss = loss_of(student.train(), distillation)
        assert loss.dtype == torch.float32
        assert loss.isfinite()
    classifier = HfViTForImageClassification(small_config(hidden_size=16))
    distillation = distillation_of(classifier, tmp_path, distillation_type="features")
    assert distillation.projection is None  # no projection is needed if student and teacher have the same width
    assert loss_of(classifier.train(), distillation).isfinite()


def loss_of(student: HfViTForImageClassification, distillation: TokenDistillation) -> Tensor:
    with distillation.attached(student):
        return student(pixel_values=pixels(student.config), labels=torch.tensor([0, 2])).loss


@pytest.mark.parametrize(("kind", "temperature"), [("hard", None), ("soft", 2.0)])
def test_two_heads_learn_from_labels_and_teacher(kind: str, temperature: float | None) -> None:
    student = build(HfViTForImageClassification, small_config(use_distillation_token=True, num_labels=3)).train()
    teacher, order, images = small_teacher(student, kind), [4, 0, 1], pixels(student.config)
    outputs = student(pixel_values=images)
    ours, theirs = outputs.distillation_logits, teacher.model(teacher.view(images)).logits[:, order]
    expected = soft_loss(ours, theirs, temperature) if temperature else hard_loss(ours, theirs)
    own = classification_loss(outputs.cls_logits, torch.tensor([0, 2]), None)
    distillation = TokenDistillation(teacher, order, alpha=0.3, temperature=temperature)
    torch.testing.assert_close(loss_of(student, distillation), 0.7 * own + 0.3 * expected)
    torch.testing.assert_close(distillation.take_parts(), {f"{kind}_loss": expected.detach()})


@pytest.mark.parametrize("name", [name for name, kind in DISTILLED_CASES if kind == "features"] + ["deformable"])
def test_tokens_of_every_student_learn_from_those_of_the_teacher(name: str) -> None:
    student, batch = model_and_batch(name, 3)
    distillation, plain = small_distillation("features", student.train()), student(**batch).loss
    with distillation.attached(student):
        loss = student(**batch).loss
    # The expected loss is computed from the tokens of the encoder alone, because the task head does not change them.
    images, mask = batch["pixel_values"], batch["patch_attention_mask"]
    theirs, parts = distillation.teacher.features(images), distillation.take_parts()
    if name in ("semantic", "keypoints"):
        tokens = student.model(images, patch_attention_mask=mask).last_hidden_state
    else:
        tokens = student(**batch).last_hidden_state
    tokens = distillation.projection(tokens)
    targets = resample_patches(theirs.patches, (4, 4)).flatten(2).mT
    cosine = torch.nn.functional.cosine_similarity(tokens[:, 1:17], targets, dim=2)
    patches = torch.stack([(1 - own[real]).mean() for own, real in zip(cosine, mask.flatten(1), strict=True)]).mean()
    cls = (1 - torch.nn.functional.cosine_similarity(tokens[:, 0], theirs.cls)).mean()
    torch.testing.assert_close(parts, {"patch_feature_loss": patches, "cls_feature_loss": cls})
    torch.testing.assert_close(loss, 0.5 * plain + 0.5 * (patches + cls) / 2)


def test_distillation_does_not_change_evaluation_and_the_saved_student(student: HfViTForImageClassification) -> None:
    before = {name: weight.clone() for name, weight in student.state_dict().items()}
    images, labels = pixels(student.config), torch.tensor([0, 2])
    expected = student.eval()(pixel_values=images, labels=labels).loss
    for kind in ("hard", "features"):
        distillation = small_distillation(kind, student)
        with distillation.attached(student):
            assert torch.equal(student.eval()(pixel_values=images, labels=labels).loss, expected)
            assert student.state_dict().keys() == before.keys()
            assert distillation.projection is None or "distillation_projection" in dict(student.named_children())
        assert not any("distillation_projection" in name for name, _ in student.named_modules())
        assert not student._forward_hooks
        assert not student.model._forward_hooks
        student.load_state_dict(before)
        # No gradients flow into the teacher.
        student.zero_grad()
        loss_of(student.train(), distillation).backward()
        teacher = distillation.teacher
        assert not any(module.training for module in teacher.modules())
        assert all(weight.grad is None and not weight.requires_grad for weight in teacher.parameters())
        assert student.model.embeddings.cls_token.grad.any()
        assert not {*map(id, teacher.parameters())} & {*map(id, student.parameters())}


def test_tokens_of_a_student_are_not_kept_for_longer_than_a_step(student: HfViTForImageClassification) -> None:
    kept: list[weakref.ref[Tensor]] = []
    student.model.register_forward_hook(lambda *given: kept.append(weakref.ref(given[-1].last_hidden_state)))
    distillation, images = small_distillation("features", student), pixels(student.config)
    with distillation.attached(student), torch.no_grad():
        student.eval()(pixel_values=images, labels=torch.tensor([0, 2]))
        assert kept.pop()() is None
        student.train()(pixel_values=images)  # without labels, the student returns no loss
    assert kept.pop()() is None


@pytest.mark.parametrize("kind", ["soft", "features"])
def test_a_compiled_student_learns_the_same_and_compiles_once(kind: str) -> None:
    config = small_config(use_distillation_token=True, num_hidden_layers=1)
    student = build(HfViTForImageClassification, config).train()
    distillation, results = small_distillation(kind, student), []
    torch.compiler.reset()
    for model in (student, torch.compile(student, backend="aot_eager", dynamic=False)):
        student.zero_grad()
        with distillation.attached(student):
            # The sums of teacher losses must be graph inputs: as constants, they would cause recompilation.
            for stance in ("default", "fail_on_recompile"):
                with torch.compiler.set_stance(stance):
                    model(pixel_values=pixels(config), labels=torch.tensor([0, 2])).loss.backward()
        results.append(distillation.take_parts() | {name: weight.grad for name, weight in student.named_parameters()})
    torch.testing.assert_close(results[1], results[0])


TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "patch_size": 8}
SCRIPT = ["--dataset_name", "photos", "--use_cpu", "--train_val_split", "0.5", "--report_to", "none", "--disable_tqdm"]
SCRIPT += ["true", "--choose_defaults", "false", "--per_device_train_batch_size", "2", "--logging_steps", "1"]
SCRIPT = ["--dataset_name", "photos", "--use_cpu", "--train_val_split", "0.5", "--report_to", "none", "--disable_tqdm"]
SCRIPT += ["true", "--choose_defaults", "false", "--per_device_train_batch_size", "2", "--logging_steps", "1"]
SCRIPT = ["--dataset_name", "photos", "--use_cpu", "--train_val_split", "0.5", "--report_to", "none", "--disable_tqdm"]
SCRIPT += ["true", "--choose_defaults", "false", "--per_device_train_batch_size", "2", "--logging_steps", "1"]
NEW = ["--image_size", "16", "--config_overrides", json.dumps(TINY)]
WIDE = [*NEW, "--config_overrides", json.dumps({**TINY, "hidden_size": 32, "hidden_dropout_prob": 0.1})]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a new working directory with photos."""
    write_class_folders(tmp_path / "photos", NAMES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(output: str, *arguments: str) -> list[dict[str, float]]:
    """Train a classifier in the same way as the training command, and return the log."""
    run(ImageClassification, [*SCRIPT, "--output_dir", output, *arguments], None, report=lambda _: None)
    return log_of(Path(output))


def log_of(folder: Path) -> list[dict[str, float]]:
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


@pytest.mark.parametrize(
    ("kind", "options", "described"),
    [
        ("ours", "", "token, hard, alpha 0.5"),
        (
            "vit",
            "--distillation_type soft --distillation_temperature 2 --distillation_alpha 0.25",
            "token, soft, temperature 2, alpha 0.25",
        ),
        ("resnet", "--teacher_dtype bfloat16", "token, hard, alpha 0.5"),
    ],
)
def test_a_classifier_learns_from_any_teacher(kind: str, options: str, described: str, place: Path) -> None:
    save_teacher(kind, place / "tutor", ["fox", "cat", "dog"])
    before = load_file("tutor/model.safetensors")
    logs = train("output", *NEW, "--teacher", "tutor", *options.split(), "--max_steps", "2")
    loss = "soft_loss" if "soft" in options else "hard_loss"
    assert [entry[loss] > 0 for entry in logs if "loss" in entry] == [True, True]
    assert any("eval_accuracy" in entry for entry in logs)
    model = HfViTForImageClassification.from_pretrained("output")
    assert model.distillation_classifier.bias.any()  # before training, the bias was zero
    assert_identical(load_file("tutor/model.safetensors"), before)
    card = Path("output/README.md").read_text()
    assert f"| distillation | {described} |" in card
    assert "| teacher | tutor (" in card


def test_feature_distillation_resumes_and_saves_only_the_student(place: Path) -> None:
    save_teacher("resnet", place / "tutor", ["cow", "pig"])
    teacher = ["--teacher", "tutor", "--distillation_type", "features"]
    options = [*WIDE, "--max_steps", "4", "--save_strategy", "steps", "--save_steps", "2"]
    logs = train("output", *options, *teacher)
    assert [entry["patch_feature_loss"] > 0 for entry in logs if "loss" in entry] == [True] * 4
    train("alone", *options)
    for folder in ("", "checkpoint-4"):
        taught, alone = (load_file(Path(output, folder, "model.safetensors")) for output in ("output", "alone"))
        assert {name: taught[name].shape for name in taught} == {name: alone[name].shape for name in alone}
    assert not Path("output", PROJECTION_NAME).exists()
    first, second = (load_file(f"output/checkpoint-{step}/{PROJECTION_NAME}") for step in (2, 4))
    assert (first["weight"].shape, second["bias"].shape) == ((16, 32), (16,))
    assert not torch.equal(first["weight"], second["weight"])
    assert "| distillation | features through a linear layer, alpha 0.5 |" in Path("output/README.md").read_text()
    count = f"{sum(weight.numel() for weight in taught.values()):,} parameters"
    assert all(count in Path(output, "README.md").read_text() for output in ("output", "alone"))
    # A resumed training run with a teacher gives bit-identical weights.
    shutil.copytree("output/checkpoint-2", "again/checkpoint-2")
    resumed = train("again", *options, *teacher, "--resume_from_checkpoint", "last")
    for name in ("model.safetensors", f"checkpoint-4/{PROJECTION_NAME}"):
        assert_identical(load_file(Path("again", name)), load_file(Path("output", name)))
    for name in ("loss", "patch_feature_loss"):
        assert [entry.get(name) for entry in resumed] == [entry.get(name) for entry in logs]


@pytest.mark.parametrize(
    ("begun", "resumed", "needed", "saved"),
    [
        ([], ["--teacher", "tutor"], "{'weight': [16, 32], 'bias': [16]}", "none"),
        (["--teacher", "tutor"], [], "none", "{'bias': [16], 'weight': [16, 32]}"),
    ],
)
def test_a_checkpoint_of_a_training_with_another_teacher_is_not_taken_up(
    begun: list[str], resumed: list[str], needed: str, saved: str, place: Path
) -> None:
    save_teacher("vit", place / "tutor", NAMES)
    features = ["--distillation_type", "features"]
    options = [*WIDE, "--save_strategy", "steps", "--save_steps", "1", "--eval_strategy", "no"]
    train("begun", *begun, *features[: len(begun)], *options, "--max_steps", "1")
    options += [*resumed, *features[: len(resumed)], "--max_steps", "2"]
    options += ["--resume_from_checkpoint", "begun/checkpoint-1"]
    with pytest.raises(SystemExit, match="distillation_type: "):
        train("output", *options)
    message = f"begun/checkpoint-1 do not match. Required: {needed}; saved: {saved}. Resume"
    with pytest.raises(SystemExit, match=re.escape(message)):
        train("output", *options, "--resume_with_changes", "true")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the data folder of each task."""
    folder = tmp_path_factory.mktemp("data")
    objects = {"object_detection": write_objects(folder / "objects")}
    objects["keypoint_detection"] = write_figures(folder / "figures")
    return {**dict.fromkeys(TASKS, write_scenes(folder / "scenes")), **objects}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("task", ALL_TASKS)
def test_every_task_learns_from_features(task: str, data: dict[str, Path], tmp_path: Path) -> None:
    teacher, output = save_teacher("vit", tmp_path / "tutor", NAMES), tmp_path / "output"
    run_task(task, data[task], output, *A_FEW_STEPS, "--teacher", str(teacher), "--logging_steps", "1")
    entries = [entry for entry in log_of(output) if "loss" in entry]
    assert len(entries) == 3
    assert all(0 < entry[f"{part}_feature_loss"] < 2 for entry in entries for part in ("patch", "cls"))
    assert "| teacher | tutor (HfViTModel, " in (output / "README.md").read_text()
    assert not any("distillation" in name for name in load_file(output / "model.safetensors"))


def test_features_are_learned(data: dict[str, Path], tmp_path: Path) -> None:
    teacher = save_teacher("vit", tmp_path / "tutor", NAMES)
    options = ["--max_steps", "40", "--learning_rate", "3e-3", "--logging_steps", "10", "--eval_strategy", "no"]
    options += ["--teacher", str(teacher), "--distillation_alpha", "0.9", "--save_strategy", "no"]
    run_task("keypoint_detection", data["keypoint_detection"], tmp_path / "output", *options)
    losses = [entry["patch_feature_loss"] for entry in log_of(tmp_path / "output") if "loss" in entry]
    assert losses[-1] < 0.7 * losses[0]


def test_a_saved_model_without_a_token_gets_a_fresh_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = build(HfViTForImageClassification, small_config(id2label=dict(enumerate(NAMES)), num_labels=3))
    saved.save_pretrained(tmp_path)
    HfViTImageProcessor.for_model(saved.config).save_pretrained(tmp_path)
    arguments = TaskArguments(dataset_name="data", model_name_or_path=str(tmp_path))
    monkeypatch.setattr(logging.getLogger("hf_vit"), "propagate", True)
    with caplog.at_level(logging.WARNING, "hf_vit"):
        model, _ = load_classifier(arguments, NAMES, use_distillation_token=True)
    assert "A new token and a new head for it are added." in caplog.text
    old, new = saved.state_dict(), model.state_dict()
    table, head = "model.embeddings.position_embeddings", "distillation_classifier"
    assert new.keys() - old.keys() == {"model.embeddings.distillation_token", f"{head}.weight", f"{head}.bias"}
    assert all(torch.equal(new[name], weight) for name, weight in old.items() if name != table)
    assert torch.equal(new[table][:, [0, *range(2, 18)]], old[table])
    assert new[table][:, 1].any()
    model.save_pretrained(tmp_path)
    again, _ = load_classifier(arguments, NAMES, use_distillation_token=True)
    torch.testing.assert_close(again.state_dict(), new, rtol=0, atol=0)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, dict[str, Any]]]:
    """Train with a teacher in two processes, and return the results of each process."""
    folder = tmp_path_factory.mktemp("two_processes")
    finish(start("compare_distillation", folder, processes=2), folder)
    return [torch.load(folder / f"process_{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(("name", "kind"), DISTILLED_CASES)
def test_gradients_are_those_of_one_batch(
    name: str, kind: str, two_processes: list[dict[Any, dict[str, Any]]], tmp_path: Path
) -> None:
    at_once, *others = (train_case(tmp_path, name, "float64", *split, kind=kind) for split in splits(name, 1))
    plain = train_case(tmp_path, name, "float64", *splits(name, 1)[0])
    assert (at_once["losses"] - plain["losses"]).abs().min() > 1e-3
    others += [process[name, kind, split] for process in two_processes for split in splits(name, 2)]
    assert len(others) == 3
    for result in others:
        for key in ("losses", "gradients", "weights"):
            assert_close(result[key], at_once[key], 1e-9, key)
        for part in TEACHER_LOSSES:
            assert result["parts"][part] == pytest.approx(at_once["parts"][part], rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--distillation_type soft", "--distillation_type requires a teacher. Set --teacher to a path"),
        ("--teacher_dtype float16", "--teacher_dtype requires a teacher"),
        ("--teacher tutor --distillation_alpha 1.5", "distillation_alpha=1.5 must lie in (0, 1]"),
        ("--teacher tutor --distillation_temperature 2", "requires --distillation_type soft"),
        (
            "--teacher tutor --distillation_type soft --distillation_temperature -1",
            "distillation_temperature=-1.0 must be more than 0",
        ),
        ("--teacher nowhere", "'nowhere' is not a model"),
        (
            "--teacher strangers",
            "differ from the classes of the data. Only in the teacher: cow, pig; only in the data: cat, dog, fox. "
            "Its features can still be distilled: set --distillation_type features",
        ),
        ("--teacher headless", "was not trained as a classifier. Its features can still be distilled"),
        ("--teacher headless_swin", "was not trained as a classifier. Its features can still be distilled"),
        ("--teacher blind", "has no image processor, which defines its preprocessing"),
        ("--teacher foreign", "has custom code and can be loaded only by running it. Read the code and, if"),
        ("--teacher gray", "expects images with 1 channels, but the student expects 3"),
        ("--teacher tutor --label_smoothing_factor 0.1", "label_smoothing_factor=0.1 is not supported with a teacher"),
        (
            '--teacher tutor --config_overrides {"patch_size":8,"use_distillation_token":false}',
            "requires a distillation token. Remove use_distillation_token from --config_overrides",
        ),
    ],
)
def test_training_explains_mistakes(
    arguments: str, message: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    write_teachers_that_cannot_teach(place, arguments.split()[1])
    with pytest.raises(SystemExit, match=re.escape(message)):
        call_command("train image-classification", [*SCRIPT, *NEW, *arguments.split(), "--output_dir", "output"])
    assert not Path("output/model.safetensors").exists()


def write_teachers_that_cannot_teach(place: Path, name: str) -> None:
    """Save the teacher `name`, whose outputs are not suitable for distillation. Unknown names are ignored."""
    folder, kinds = place / name, {"tutor": "ours", "headless": "ours", "headless_swin": "swin", "blind": "resnet"}
    if name in kinds:
        save_teacher(kinds[name], folder, NAMES)
    match name:
        case "strangers":
            save_teacher("vit", folder, ["cow", "pig"])
        case "headless":
            HfViTForImageClassification.from_pretrained(folder).model.save_pretrained(folder)
        case "headless_swin":
            SwinModel.from_pretrained(folder).save_pretrained(folder)
        case "blind":
            (folder / "preprocessor_config.json").unlink()
        case "foreign":
            folder.mkdir()
            classes = {"AutoConfig": "code.ForeignConfig", "AutoModelForImageClassification": "code.Foreign"}
            (folder / "config.json").write_text(json.dumps({"model_type": "foreign", "auto_map": classes}))
        case "gray":
            config = small_config(num_channels=1, id2label=dict(enumerate(NAMES)), num_labels=3)
            HfViTForImageClassification(config).save_pretrained(folder)
            HfViTImageProcessor.for_model(config).save_pretrained(folder)


def test_tokens_are_of_classifiers_alone_and_a_teacher_needs_the_whole_student(
    data: dict[str, Path], tmp_path: Path
) -> None:
    options = ["--teacher", str(save_teacher("vit", tmp_path / "tutor", NAMES)), "--distillation_type", "hard"]
    with pytest.raises(ValueError, match=r"does not have\. Use --distillation_type features"):
        make_trainer("depth_estimation", data["depth_estimation"], tmp_path, *options)
    args = training_arguments(tmp_path)
    check_distillation(args)
    args.fsdp = True
    with pytest.raises(ValueError, match="Remove --fsdp and --deepspeed"):
        check_distillation(args)
