"""Mixup and CutMix, soft labels and their loss, repeated augmentation, and patch dropout."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.data_loader import prepare_data_loader
from timm.loss import BinaryCrossEntropy as TimmBinaryCrossEntropy
from torch.utils.data import DataLoader
from transformers.modeling_outputs import ImageClassifierOutput

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTModel
from hf_vit.data import AugmentedDataset
from hf_vit.data.augmentation.classification import small_affine
from hf_vit.data.augmentation.datasets import RepeatedAugmentationSampler, seeded
from hf_vit.model.task_image_classification import classification_loss
from hf_vit.training import HfViTTrainer, ImageClassification
from hf_vit.training.arguments import ClassificationArguments
from hf_vit.training.regularization import BinaryCrossEntropy, Mixing, PatchDropout, regularize
from hf_vit.training.tasks.zero_shot_image_classification import ImageTextContrast

from ..helpers.datasets import load_digits, write_class_folders
from ..helpers.models import small_config
from ..helpers.options import run
from ..helpers.references import assert_close, draw_weights
from ..helpers.regularization import EVERYTHING, NUM_TRAIN, regularized_trainer, train_regularized
from ..helpers.teachers import small_distillation
from ..helpers.trainings import training_arguments


LABELS = torch.tensor([0, 1, 2, 1])


def batch_of_constants() -> dict[str, torch.Tensor]:
    """Return images in which every pixel equals the index of the image."""
    images = torch.arange(4.0)[:, None, None, None].expand(-1, 3, 8, 10).contiguous()
    return {"pixel_values": images, "labels": LABELS}


def mixed(mixing: Mixing, seed: int = 0, progress: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    with seeded(seed):
        batch = mixing(batch_of_constants(), progress)
    return batch["pixel_values"], batch["labels"]


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("alphas", [(0.8, 0.0), (0.0, 1.0)], ids=["mixup", "cutmix"])
def test_labels_have_the_shares_of_the_images(alphas: tuple[float, float], smoothing: float) -> None:
    images, labels = mixed(Mixing(3, *alphas, label_smoothing=smoothing), seed=3)
    share = float(images[1].mean())  # share of image 1; image 0 has zero pixels
    assert 0.02 < share < 0.98
    expected = torch.tensor(
        [[share, 1 - share, 0], [1 - share, share, 0], [0, 1 - share, share], [0, share, 1 - share]]
    )
    assert_close(labels, expected * (1 - smoothing) + smoothing / 3, 1e-6, "labels")
    expected_means = share * torch.arange(4) + (1 - share) * torch.tensor([3, 0, 1, 2])
    assert_close(images.mean(dim=(1, 2, 3)), expected_means, 1e-5, "images")
    is_blended = alphas[0] > 0
    assert bool(((images[1] > 0) & (images[1] < 1)).all()) == is_blended


def test_with_both_either_is_drawn() -> None:
    mixing = Mixing(3, 0.8, 1.0)
    blended = [bool(((images % 1) != 0).any()) for images, _ in (mixed(mixing, seed) for seed in range(40))]
    assert 10 < sum(blended) < 30


def test_the_last_share_of_a_training_and_batches_by_chance_are_not_mixed() -> None:
    plain = batch_of_constants()["pixel_values"]
    last = Mixing(3, 0.8, off_share=0.25, label_smoothing=0.1)
    assert not torch.equal(mixed(last, progress=0.74)[0], plain)
    images, labels = mixed(last, progress=0.75)
    assert torch.equal(images, plain)
    assert_close(labels, F.one_hot(LABELS, 3) * 0.9 + 0.1 / 3, 1e-6, "labels")
    sometimes = Mixing(3, 0.8, probability=0.5)
    assert 10 < sum(torch.equal(mixed(sometimes, seed)[0], plain) for seed in range(40)) < 30


def test_a_wrong_class_number_is_named() -> None:
    with pytest.raises(ValueError, match="Label 2 is out of range: the model has 2 labels"):
        mixed(Mixing(2, 0.8))


@pytest.mark.parametrize(("threshold", "smoothing"), [(None, 0.0), (None, 0.1), (0.0, 0.0), (0.2, 0.1)])
def test_binary_cross_entropy_is_that_of_timm(threshold: float | None, smoothing: float) -> None:
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)) * 3
    theirs = TimmBinaryCrossEntropy(smoothing=smoothing, target_threshold=threshold)
    ours, outputs = BinaryCrossEntropy(threshold), ImageClassifierOutput(logits=logits)
    _, soft = mixed(Mixing(3, label_smoothing=smoothing))
    torch.testing.assert_close(ours(outputs, soft), theirs(logits, LABELS))
    _, soft = mixed(Mixing(3, 0.8, label_smoothing=smoothing))
    torch.testing.assert_close(ours(outputs, soft), theirs(logits, soft))


def test_binary_cross_entropy_is_exact_in_half_precision_and_adds_up() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5], [-3.0, 4.0, 1.0]], dtype=torch.bfloat16)
    soft = torch.tensor([[0.7, 0.3, 0.0], [0.0, 1.0, 0.0]])
    sure = logits.double().sigmoid()
    expected = -(soft * sure.log() + (1 - soft) * (1 - sure).log()).mean(dim=1)
    loss, outputs = BinaryCrossEntropy(), ImageClassifierOutput(logits=logits)
    assert_close(loss(outputs, soft), expected.mean(), 1e-6, "loss")
    assert_close(loss(outputs, soft, num_items_in_batch=torch.tensor(5)), expected.sum() / 5, 1e-6, "share")
    assert_close(loss(outputs, soft, num_items_in_batch=4), expected.sum() / 4, 1e-6, "share")


def test_soft_labels_of_repeated_augmentations_may_be_split(tmp_path: Path) -> None:
    at_once, in_parts = (
        train_regularized(tmp_path, size, gradient_accumulation_steps=parts, dataloader_drop_last=False)
        for size, parts in ((8, 1), (2, 4))
    )
    assert len(at_once["losses"]) == 12
    for part in ("losses", "weights"):
        assert_close(in_parts[part], at_once[part], 1e-5, part)


def test_a_training_with_everything_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 7, "eval_strategy": "epoch"}
    whole = train_regularized(tmp_path / "whole", 8, EVERYTHING, **options)
    checkpoint = tmp_path / "whole" / "checkpoint-7"  # in the middle of the second epoch of 5 steps
    resumed = train_regularized(tmp_path / "resumed", 8, EVERYTHING, str(checkpoint), **options)
    assert len(whole["losses"]) == 10
    for part in ("losses", "weights"):
        assert torch.equal(resumed[part], whole[part])
    saved = HfViTForImageClassification.from_pretrained(checkpoint)
    num_patches, num_prefix = math.prod(saved.config.grid_size), saved.config.num_prefix_tokens
    assert whole["lengths"] == {(True, num_prefix + round(0.75 * num_patches)), (False, num_prefix + num_patches)}
    assert saved.config.problem_type == "single_label_classification"


def test_evaluations_give_the_plain_cross_entropy(tmp_path: Path) -> None:
    trainer = regularized_trainer(tmp_path, 8, EVERYTHING)
    trainer.compute_metrics = None  # else its loss replaces the Trainer's
    loss = trainer.evaluate()["eval_loss"]
    batch = trainer.data_collator(list(trainer.eval_dataset))
    with torch.no_grad():
        logits = trainer.model(pixel_values=batch["pixel_values"]).logits
    assert loss == pytest.approx(float(classification_loss(logits, batch["labels"], None)), rel=1e-5)


def test_a_teacher_sees_the_mixed_images_and_the_student_learns_soft_labels(tmp_path: Path) -> None:
    model = HfViTForImageClassification(small_config(use_distillation_token=True))
    draw_weights(model)
    distillation = small_distillation("hard", model)
    parts = regularize(model, ClassificationArguments("data", mixup_alpha=0.8), 0.1, distillation)
    args = training_arguments(tmp_path, label_smoothing_factor=0.1, max_steps=1, learning_rate=0.0)
    images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
    examples = [{"pixel_values": image, "labels": label} for image, label in zip(images, labels, strict=True)]
    args.per_device_train_batch_size = 4
    trainer = HfViTTrainer(model=model, args=args, train_dataset=examples, distillation=distillation, **parts)
    batches = []
    trainer.batch_transforms.transforms = [*parts["batch_transforms"], lambda batch, _: batches.append(batch) or batch]
    trainer.train()
    (batch,) = batches
    with torch.no_grad():
        outputs = model.eval()(batch["pixel_values"])
        answers = distillation.teacher.logits(batch["pixel_values"])[:, distillation.order].argmax(dim=1)
    own = F.cross_entropy(outputs.cls_logits, batch["labels"])
    theirs = F.cross_entropy(outputs.distillation_logits, answers)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(float((own + theirs) / 2), rel=1e-4)


def test_what_does_not_go_with_a_teacher_is_refused(tmp_path: Path) -> None:
    model = HfViTForImageClassification(small_config(use_distillation_token=True))
    hard, features = (small_distillation(kind, model) for kind in ("hard", "features"))
    binary = regularize(model, ClassificationArguments("data", classification_loss="bce"), distillation=hard)
    with pytest.raises(ValueError, match=r"Leave out compute_loss_func \(--classification_loss bce\)"):
        HfViTTrainer(model=model, args=training_arguments(tmp_path), distillation=hard, **binary)
    with pytest.raises(ValueError, match=r"token_drop_rate=0\.5 drops patches whose features are to be learned"):
        regularize(model, ClassificationArguments("data", token_drop_rate=0.5), distillation=features)


def digits_dataset() -> AugmentedDataset:
    return AugmentedDataset(load_digits()["train"].select(range(NUM_TRAIN)), small_affine(), seed=0)


def test_each_step_has_all_augmentations_of_its_images() -> None:
    dataset = digits_dataset()
    sampler = RepeatedAugmentationSampler(dataset, 3, 12)
    epoch = list(sampler)
    assert len(epoch) == len(sampler) == NUM_TRAIN
    steps = [epoch[start : start + 12] for start in range(0, NUM_TRAIN, 12)]
    for step in steps[:-1]:
        images = step[:4]
        assert step == [(image, repeat) for repeat in range(3) for image, _ in images]
        assert len({image for image, _ in images}) == 4
    assert [len(step) for step in steps] == [12, 12, 12, 8]
    assert len({image for image, _ in epoch}) == 15
    assert list(sampler) == epoch
    dataset.set_epoch(1)
    assert len({image for image, _ in epoch} & {image for image, _ in sampler}) < 10


def test_augmentations_of_an_image_differ() -> None:
    dataset = digits_dataset()
    images = [dataset[index]["image"].tobytes() for index in (5, (5, 0), (5, 1), (5, 2), (5, 2))]
    assert images[0] == images[1]
    assert images[3] == images[4]
    assert len(set(images)) == 3


def test_two_processes_share_the_images_of_each_step() -> None:
    loader = DataLoader(
        digits_dataset(), batch_size=4, sampler=RepeatedAugmentationSampler(digits_dataset(), 2, 16), drop_last=True
    )
    shares = [
        list(prepare_data_loader(loader, num_processes=2, process_index=rank, put_on_device=False).batch_sampler)
        for rank in range(2)
    ]
    together = list(itertools.chain.from_iterable(itertools.chain.from_iterable(zip(*shares, strict=True))))
    assert together == list(loader.sampler)[: len(together)]
    assert len(together) == NUM_TRAIN // 8 * 8


POSITIONS = ["learned", "sincos2d", "rotary", "learned+rotary"]


@pytest.mark.parametrize("positions", POSITIONS)
def test_kept_patches_see_one_another_as_under_a_mask(positions: str) -> None:
    model = HfViTModel(small_config(position_embedding_type=positions, num_register_tokens=2)).eval()
    draw_weights(model)
    images = torch.randn(2, 3, 24, 40)  # 3 x 5 patches
    kept = torch.tensor([[0, 3, 7, 11], [2, 3, 13, 14]])
    with torch.no_grad():
        found = model(images, kept_patches=kept).last_hidden_state
        tokens, rotary = model.embed(images)
        chosen = torch.cat((torch.arange(3).expand(2, -1), kept + 3), dim=1)
        mask = torch.zeros(2, tokens.shape[1], dtype=torch.bool).scatter(1, chosen, True)[:, None, None]
        seen = model.norm(model.encoder(tokens, rotary=rotary, attention_mask=mask))
    expected = seen.gather(1, chosen[..., None].expand(-1, -1, seen.shape[-1]))
    assert_close(found, expected, 1e-5, "tokens")


@pytest.mark.parametrize("pooling", ["cls", "mean", "attention"])
def test_all_patches_kept_change_nothing_and_padding_is_dropped_first(pooling: str) -> None:
    model = HfViTModel(small_config(pooling=pooling, position_embedding_type="rotary")).eval()
    draw_weights(model)
    mask = torch.ones(2, 4, 4, dtype=torch.bool)
    mask[1, 2:] = False
    batch = {"pixel_values": torch.randn(2, 3, 32, 32), "patch_attention_mask": mask}
    with torch.no_grad():
        expected = model(**batch).pooler_output
        for rate in (0.0, 0.5):
            changed = PatchDropout(rate, model.config)(batch, 0.0)
            assert changed["kept_patches"].shape == (2, 16 if rate == 0 else 8)
            found = model(**changed).pooler_output
            # Half of the second image is padding, so all of its patches are kept.
            assert_close(found[1], expected[1], 1e-5, "padded")
            assert torch.allclose(found[0], expected[0], rtol=1e-4) == (rate == 0)


def test_patches_are_dropped_anew_in_each_image() -> None:
    drop = PatchDropout(0.75, HfViTConfig(image_size=32, patch_size=4))
    with seeded(1):
        kept = drop({"pixel_values": torch.zeros(50, 3, 32, 32)}, 0.0)["kept_patches"]
    assert kept.shape == (50, 16)
    assert bool((kept.diff(dim=1) > 0).all())
    assert len({tuple(row) for row in kept.tolist()}) == 50
    assert bool((kept.flatten().bincount(minlength=64) > 0).all())


def test_wrong_patches_are_refused() -> None:
    model = HfViTModel(small_config())
    with pytest.raises(ValueError, match=r"kept_patches must be \(batch, kept\) = \(2, …\), not \(1, 3\)"):
        model(torch.zeros(2, 3, 32, 32), kept_patches=torch.zeros(1, 3, dtype=torch.long))
    windowed = small_config(window_size=2)
    with pytest.raises(ValueError, match="which window_size=2 does not support"):
        HfViTModel(windowed)(torch.zeros(1, 3, 32, 32), kept_patches=torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"token_drop_rate=0\.5 leaves holes in the patch grid"):
        PatchDropout(0.5, windowed)


SCRIPT = ["--dataset_name", "photos", "--use_cpu", "--train_val_split", "0.5", "--report_to", "none"]
SCRIPT += ["--choose_defaults", "false"]
SCRIPT += ["--disable_tqdm", "true", "--per_device_train_batch_size", "2", "--output_dir", "output"]
SCRIPT += ["--image_size", "16", "--eval_strategy", "no"]
SHAPE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "patch_size": 8}


def test_the_script_takes_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_class_folders(tmp_path / "photos", ["cat", "dog", "fox"])
    monkeypatch.chdir(tmp_path)
    options = ["--mixup_alpha", "0.8", "--cutmix_alpha", "1", "--classification_loss", "bce", "--max_steps", "2"]
    options += ["--bce_target_threshold", "0", "--token_drop_rate", "0.5", "--repeated_augmentations", "2"]
    options += ["--auto_augment", "3augment", "--color_jitter", "0.3", "--crop_padding", "4", "--min_crop_scale", "1"]
    run(ImageClassification, [*SCRIPT, "--config_overrides", json.dumps(SHAPE), *options], None, report=lambda _: None)
    card = (tmp_path / "output" / "README.md").read_text()
    assert (
        "| regularization | mixup_alpha 0.8, cutmix_alpha 1.0, classification_loss bce, bce_target_threshold 0.0, "
        "token_drop_rate 0.5 |"
    ) in card
    config = json.loads((tmp_path / "output" / "config.json").read_text())
    assert config["problem_type"] == "single_label_classification"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mixup_alpha", "-1"], r"mixup_alpha=-1\.0 must be at least 0"),
        (["--mixing_off_share", "2"], r"mixing_off_share=2\.0 must lie in \[0, 1\]"),
        (["--token_drop_rate", "1"], r"token_drop_rate=1\.0 must lie in \[0, 1\)"),
        (["--bce_target_threshold", "0"], r"bce_target_threshold=0\.0 requires --classification_loss bce"),
        (["--classification_loss", "bce", "--bce_target_threshold", "1"], r"=1\.0 must lie in \[0, 1\)"),
        (["--repeated_augmentations", "0"], "repeated_augmentations=0 must be at least 1"),
        (["--repeated_augmentations", "3"], "repeated_augmentations=3 does not divide the 2 images of a step"),
    ],
)
def test_mistakes_are_explained(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_class_folders(tmp_path / "photos", ["cat", "dog", "fox"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=message):
        run(ImageClassification, [*SCRIPT, *options], None, report=lambda _: None)


def test_only_augmented_images_with_numbers_can_be_repeated(tmp_path: Path) -> None:
    trainer = regularized_trainer(tmp_path, 8)
    with pytest.raises(ValueError, match=r"repeated_augmentations=2 needs images with numbers .* not list"):
        HfViTTrainer(model=trainer.model, args=trainer.args, train_dataset=[])


def test_images_beside_texts_are_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="repeated_augmentations=2 brings an image into a batch several times"):
        ImageTextContrast.from_options(
            {"dataset_name": "photos", "output_dir": tmp_path, "use_cpu": True, "repeated_augmentations": 2}
        )


def test_the_defaults_change_nothing() -> None:
    model = HfViTForImageClassification(small_config())
    arguments = ClassificationArguments("data")
    parts: dict[str, Any] = regularize(model, arguments, 0.1)
    assert parts == {"batch_transforms": [], "compute_loss_func": None}
    assert (model.config.problem_type, arguments.describe()) == (None, {})
