"""Test mixed images, soft labels, repeated augmentation, dropped patches, whitened patches and several image sizes."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.data_loader import prepare_data_loader
from timm.loss import BinaryCrossEntropy as TimmBinaryCrossEntropy
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTModel
from transformers.modeling_outputs import ImageClassifierOutput

from hf_vit import (
    HfViTConfig,
    HfViTForImageClassification,
    HfViTForKeypointDetection,
    HfViTForObjectDetection,
    HfViTModel,
)
from hf_vit.data import AugmentedDataset
from hf_vit.data.augmentation.classification import small_affine
from hf_vit.data.augmentation.datasets import RepeatedAugmentationSampler, seeded
from hf_vit.model.task_image_classification import classification_loss
from hf_vit.runs import build_run
from hf_vit.runs.model_card import describe_recipe
from hf_vit.tasks import ImageClassification
from hf_vit.tasks.base import plain_batches
from hf_vit.tasks.common.arguments import ClassificationArguments
from hf_vit.tasks.common.models import LEAST_VARIANCE, NUM_IMAGES, whiten_patches
from hf_vit.tasks.common.regularization import BinaryCrossEntropy, Mixing, PatchDropout, regularize
from hf_vit.tasks.zero_shot_image_classification import ImageTextContrast
from hf_vit.training import HfViTTrainer, HfViTTrainingArguments
from hf_vit.training.regularization import REFUSED, BatchTransforms, ImageSizes, resize_batch, size_transforms

from ..helpers.datasets import load_digits, write_class_folders
from ..helpers.models import TRAINING_CASES, pixels, small_config
from ..helpers.options import run
from ..helpers.pretraining import A_FEW, make_task, write_colors
from ..helpers.references import assert_close
from ..helpers.regularization import EVERYTHING, NUM_TRAIN, regularized_trainer, train_regularized
from ..helpers.teachers import small_distillation
from ..helpers.trainings import (
    AUGMENTED_SAVE_STEP,
    AtManySizes,
    build,
    digits_trainer,
    draw_size,
    examples_of,
    model_and_batch,
    train_augmented,
    training_arguments,
)


LABELS = torch.tensor([0, 1, 2, 1])


def batch_of_constants() -> dict[str, torch.Tensor]:
    """Return a batch of four images. All pixels of an image equal its index in the batch."""
    images = torch.arange(4.0)[:, None, None, None].expand(-1, 3, 8, 10).contiguous()
    return {"pixel_values": images, "labels": LABELS}


def mixed(mixing: Mixing, seed: int = 0, progress: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    with seeded(seed):
        batch = mixing(batch_of_constants(), progress)
    return batch["pixel_values"], batch["labels"]


@pytest.mark.parametrize(("mixup", "cutmix", "smoothing"), [(0.8, 0.0, 0.3), (0.0, 1.0, 0.0)])
def test_labels_have_the_shares_of_the_images(mixup: float, cutmix: float, smoothing: float) -> None:
    images, labels = mixed(Mixing(3, mixup, cutmix, label_smoothing=smoothing), seed=3)
    # Image 1, whose pixels are all 1, is mixed with image 0, whose pixels are all 0. The mean is thus the mixing
    # weight.
    share = float(images[1].mean())
    assert 0.02 < share < 0.98
    rest = 1 - share
    expected = torch.tensor([[share, rest, 0], [rest, share, 0], [0, rest, share], [0, share, rest]])
    assert_close(labels, expected * (1 - smoothing) + smoothing / 3, 1e-6, "labels")
    expected_means = share * torch.arange(4) + rest * torch.tensor([3, 0, 1, 2])
    assert_close(images.mean(dim=(1, 2, 3)), expected_means, 1e-5, "images")
    # Only Mixup blends pixel values; CutMix replaces pixels.
    assert bool(((images[1] > 0) & (images[1] < 1)).all()) == (mixup > 0)


def test_last_batches_and_batches_by_chance_are_not_mixed_and_methods_alternate() -> None:
    plain = batch_of_constants()["pixel_values"]
    last = Mixing(3, 0.8, off_share=0.25, label_smoothing=0.1)
    assert not torch.equal(mixed(last, progress=0.74)[0], plain)
    images, labels = mixed(last, progress=0.75)
    assert torch.equal(images, plain)
    assert_close(labels, F.one_hot(LABELS, 3) * 0.9 + 0.1 / 3, 1e-6, "labels")
    sometimes, both = Mixing(3, 0.8, probability=0.5), Mixing(3, 0.8, 1.0)
    assert 10 < sum(torch.equal(mixed(sometimes, seed)[0], plain) for seed in range(40)) < 30
    assert 10 < sum(bool((mixed(both, seed)[0] % 1 != 0).any()) for seed in range(40)) < 30
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
    options = {"num_train_epochs": 1, "dataloader_drop_last": False}
    at_once = train_regularized(tmp_path, 8, **options)
    in_parts = train_regularized(tmp_path, 2, gradient_accumulation_steps=4, **options)
    assert len(at_once["losses"]) == 6
    for part in ("losses", "weights"):
        assert_close(in_parts[part], at_once[part], 1e-5, part)


def test_a_training_with_everything_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 7, "eval_strategy": "epoch"}
    whole = train_regularized(tmp_path / "whole", 8, EVERYTHING, **options)
    checkpoint = tmp_path / "whole" / "checkpoint-7"  # step 7 is in the middle of the second epoch of 5 steps
    resumed = train_regularized(tmp_path / "resumed", 8, EVERYTHING, str(checkpoint), **options)
    assert len(whole["losses"]) == 10
    for part in ("losses", "weights"):
        assert torch.equal(resumed[part], whole[part])
    # Evaluations report plain cross-entropy. A metric named "loss" would replace the loss that the Trainer computes.
    trainer = regularized_trainer(tmp_path, 8, EVERYTHING)
    trainer.compute_metrics = None
    batch = trainer.data_collator(list(trainer.eval_dataset))
    with torch.no_grad():
        logits = trainer.model(pixel_values=batch["pixel_values"]).logits
    expected = float(classification_loss(logits, batch["labels"], None))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    saved = HfViTForImageClassification.from_pretrained(checkpoint)
    num_patches, num_prefix = math.prod(saved.config.grid_size), saved.config.num_prefix_tokens
    assert whole["lengths"] == {(True, num_prefix + round(0.75 * num_patches)), (False, num_prefix + num_patches)}
    assert saved.config.problem_type == "single_label_classification"


def test_a_teacher_sees_the_mixed_images_and_the_student_learns_soft_labels(tmp_path: Path) -> None:
    model = build(HfViTForImageClassification, small_config(use_distillation_token=True))
    distillation = small_distillation("hard", model)
    parts = regularize(model, ClassificationArguments("data", mixup_alpha=0.8), 0.1)
    options = {"max_steps": 1, "learning_rate": 0.0, "per_device_train_batch_size": 4}
    args = training_arguments(tmp_path, label_smoothing_factor=0.1, **options)
    examples = examples_of({"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.arange(4)})
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
    binary = regularize(model, ClassificationArguments("data", classification_loss="bce"))
    with pytest.raises(ValueError, match=r"Remove compute_loss_func \(--classification_loss bce\)"):
        HfViTTrainer(model=model, args=training_arguments(tmp_path), distillation=distillation, **binary)
    with pytest.raises(ValueError, match=r"token_drop_rate=0\.5 removes patches, but feature distillation needs"):
        regularize(model, ClassificationArguments("data", token_drop_rate=0.5), learns_features=True)


def test_each_step_has_all_augmentations_of_its_images_and_two_processes_share_them() -> None:
    dataset = AugmentedDataset(load_digits()["train"].select(range(NUM_TRAIN)), small_affine(), seed=0)
    sampler = RepeatedAugmentationSampler(dataset, 3, 12)
    epoch = list(sampler)
    assert len(epoch) == len(sampler) == NUM_TRAIN
    steps = [epoch[start : start + 12] for start in range(0, NUM_TRAIN, 12)]
    assert [len(step) for step in steps] == [12, 12, 12, 8]
    for step in steps[:-1]:
        images = [image for image, _ in step[:4]]
        assert step == [(image, repeat) for repeat in range(3) for image in images]
        assert len({*images}) == 4
    assert len({image for image, _ in epoch}) == 15
    assert list(sampler) == epoch
    loader = DataLoader(dataset, batch_size=4, sampler=RepeatedAugmentationSampler(dataset, 2, 16), drop_last=True)
    shares = [
        list(prepare_data_loader(loader, num_processes=2, process_index=rank, put_on_device=False).batch_sampler)
        for rank in range(2)
    ]
    together = [index for batches in zip(*shares, strict=True) for batch in batches for index in batch]
    assert together == list(loader.sampler)[: len(together)]
    assert len(together) == NUM_TRAIN // 8 * 8
    dataset.set_epoch(1)
    assert len({image for image, _ in epoch} & {image for image, _ in sampler}) < 10
    plain, first, second, third, again = (
        dataset[index]["image"].tobytes() for index in (5, (5, 0), (5, 1), (5, 2), (5, 2))
    )
    assert (plain, third) == (first, again)
    assert len({first, second, third}) == 3


@pytest.mark.parametrize("positions", ["learned", "sincos2d", "rotary", "learned+rotary"])
def test_kept_patches_see_one_another_as_under_a_mask(positions: str) -> None:
    model = build(HfViTModel, small_config(position_embedding_type=positions, num_register_tokens=2)).eval()
    images = torch.randn(2, 3, 24, 40)  # an image has 3 x 5 patches
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
    model = build(HfViTModel, small_config(pooling=pooling, position_embedding_type="rotary")).eval()
    mask = torch.ones(2, 4, 4, dtype=torch.bool)
    mask[1, 2:] = False
    batch = {"pixel_values": torch.randn(2, 3, 32, 32), "patch_attention_mask": mask}
    with torch.no_grad():
        expected = model(**batch).pooler_output
        for rate, kept in ((0.0, 16), (0.5, 8)):
            changed = PatchDropout(rate, model.config)(batch, 0.0)
            assert changed["kept_patches"].shape == (2, kept)
            found = model(**changed).pooler_output
            # Half of the second image is padding, so all of its other patches are kept.
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
    windowed, kept = small_config(window_size=2), torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"kept_patches must be \(batch, kept\) = \(2, …\), not \(1, 3\)"):
        HfViTModel(small_config())(torch.zeros(2, 3, 32, 32), kept_patches=kept)
    with pytest.raises(ValueError, match="which window_size=2 does not support"):
        HfViTModel(windowed)(torch.zeros(1, 3, 32, 32), kept_patches=kept)
    with pytest.raises(ValueError, match=r"token_drop_rate=0\.5 removes patches, which window_size=2 does not"):
        PatchDropout(0.5, windowed)


SCRIPT = ["--dataset_name", "photos", "--use_cpu", "--train_val_split", "0.5", "--report_to", "none"]
SCRIPT += ["--choose_defaults", "false", "--eval_strategy", "no", "--output_dir", "output", "--image_size", "16"]
SCRIPT += ["--disable_tqdm", "true", "--per_device_train_batch_size", "2", "--max_steps", "2"]
SCRIPT += ["--config_overrides", '{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}']
SCRIPT = ["--dataset_name", "photos", "--use_cpu", "--train_val_split", "0.5", "--report_to", "none"]
SCRIPT += ["--choose_defaults", "false", "--eval_strategy", "no", "--output_dir", "output", "--image_size", "16"]
SCRIPT += ["--disable_tqdm", "true", "--per_device_train_batch_size", "2", "--max_steps", "2"]
SCRIPT += ["--config_overrides", '{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}']
SCRIPT = ["--dataset_name", "photos", "--use_cpu", "--train_val_split", "0.5", "--report_to", "none"]
SCRIPT += ["--choose_defaults", "false", "--eval_strategy", "no", "--output_dir", "output", "--image_size", "16"]
SCRIPT += ["--disable_tqdm", "true", "--per_device_train_batch_size", "2", "--max_steps", "2"]
SCRIPT += ["--config_overrides", '{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}']


def test_command_accepts_all_regularization_and_defaults_disable_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_class_folders(tmp_path / "photos", ["cat", "dog", "fox"])
    monkeypatch.chdir(tmp_path)
    options = ["--mixup_alpha", "0.8", "--cutmix_alpha", "1", "--classification_loss", "bce"]
    options += ["--bce_target_threshold", "0", "--token_drop_rate", "0.5", "--repeated_augmentations", "2"]
    options += ["--auto_augment", "3augment", "--color_jitter", "0.3", "--crop_padding", "4", "--min_crop_scale", "1"]
    run(ImageClassification, [*SCRIPT, *options], None, report=lambda _: None)
    mixing = "mixup_alpha 0.8, cutmix_alpha 1.0, classification_loss bce, bce_target_threshold 0.0"
    assert f"| regularization | {mixing}, token_drop_rate 0.5 |" in Path("output/README.md").read_text()
    assert json.loads(Path("output/config.json").read_text())["problem_type"] == "single_label_classification"
    model, arguments = HfViTForImageClassification(small_config()), ClassificationArguments("data")
    assert regularize(model, arguments, 0.1) == {"batch_transforms": [], "compute_loss_func": None}
    assert (model.config.problem_type, arguments.describe()) == (None, {})


def test_only_augmented_images_with_numbers_and_without_texts_can_be_repeated(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="3 images of an optimizer step are not a multiple of repeated_aug"):
        regularized_trainer(tmp_path, 3).get_train_dataloader()
    trainer = regularized_trainer(tmp_path, 8)
    with pytest.raises(ValueError, match=r"repeated_augmentations=2 requires an AugmentedDataset .* not list"):
        HfViTTrainer(model=trainer.model, args=trainer.args, train_dataset=[])
    options = {"dataset_name": "photos", "output_dir": tmp_path, "use_cpu": True, "repeated_augmentations": 2}
    with pytest.raises(ValueError, match="repeated_augmentations=2 puts an image into a batch several times"):
        ImageTextContrast.from_options(options)


PATCH = 4
SIZE = 3 * PATCH * PATCH  # number of pixel values per patch


def smooth_images() -> Tensor:
    """Return images with similar neighboring pixels and a non-zero mean."""
    noise = torch.randn(40, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    return 3 * F.avg_pool2d(noise, 3, stride=1, padding=1) + 0.5


def patches_of(images: Tensor) -> Tensor:
    return F.unfold(images, PATCH, stride=PATCH).mT.flatten(0, 1)


def embed(hidden_size: int, images: Tensor, seed: int = 0) -> tuple[nn.Conv2d, Tensor]:
    """Return a patch embedding with whitening weights, and its output (M, D) for all M patches of the images."""
    config = small_config(hidden_size=hidden_size, patch_size=PATCH, image_size=24, num_hidden_layers=1)
    model = HfViTModel(config)
    whiten_patches(model, images, seed)
    projection = model.embeddings.patch_embeddings.projection
    return projection, projection(images).flatten(2).mT.flatten(0, 1).detach()


def covariance(states: Tensor) -> Tensor:
    return torch.cov(states.T, correction=0)


def test_embedded_patches_are_white_and_the_seed_draws_the_rotation() -> None:
    images = smooth_images()
    projection, states = embed(64, images)
    assert torch.equal(projection.weight, embed(64, images)[0].weight)
    assert (projection.weight - embed(64, images, seed=1)[0].weight).abs().max() > 0.01
    assert states.mean(dim=0).abs().max() < 1e-4
    before = torch.linalg.eigvalsh(covariance(patches_of(images)))
    assert before[-1] / before[0] > 50  # pixels of a patch are correlated before whitening
    found = torch.linalg.eigvalsh(covariance(states))
    assert found[: 64 - SIZE].abs().max() < 1e-4
    expected = 64 / SIZE * (before / (before + LEAST_VARIANCE))
    torch.testing.assert_close(found[-SIZE:], expected.sort().values, rtol=1e-3, atol=1e-4)
    # If hidden_size is below the number of values per patch, the directions of largest variance are kept.
    _, states = embed(32, images)
    assert torch.linalg.eigvalsh(covariance(states)).min() > 0.8
    centered = patches_of(images) - patches_of(images).mean(dim=0)
    rest = centered - states @ torch.linalg.lstsq(states, centered).solution
    assert rest.square().sum() / len(rest) == pytest.approx(float(before[:-32].sum()), rel=1e-2)


def test_only_a_training_from_scratch_starts_with_whitened_patches(tmp_path: Path) -> None:
    data, whitening = write_colors(tmp_path / "colors"), ("--whiten_patches", "true")
    for options in ([], ["--streaming", "true", *A_FEW]):
        run = build_run(make_task(data, tmp_path / "output", *whitening, *options))
        trainer = run.trainer
        batches = plain_batches(run.task, trainer.model, trainer.processing_class, run.data, NUM_IMAGES)
        inputs = torch.cat([batch["pixel_values"] for batch in batches])
        projection = trainer.model.base_model.embeddings.patch_embeddings.projection
        states = projection(inputs).flatten(2).mT.flatten(0, 1).detach()
        assert states.mean(dim=0).abs().max() < 1e-4
        assert 0.4 < covariance(states).diagonal().mean() < 1.01  # with random weights, this value would be 0.02
    with pytest.raises(ValueError, match="whiten_patches=True and model_name_or_path='somewhere' exclude each other"):
        ClassificationArguments(dataset_name="photos", whiten_patches=True, model_name_or_path="somewhere")


def test_gray_images_in_three_channels_leave_colors_out() -> None:
    axis = torch.tensor([1.0, 1.1, 0.9]).view(3, 1, 1)
    images = smooth_images()[:, :1] * axis + torch.tensor([0.1, 0.0, -0.2]).view(3, 1, 1)
    projection, states = embed(64, images)
    assert states.std() > 0.3
    color = torch.randn(8, 3, 24, 24, generator=torch.Generator().manual_seed(1))
    # Remove the component along the gray axis, so that only color remains.
    color = color - axis * (color * axis).sum(dim=1, keepdim=True) / axis.square().sum()
    assert (projection(color) - projection(torch.zeros_like(color))).abs().max() < 1e-3


def test_patches_that_are_all_the_same_or_not_finite_change_nothing() -> None:
    model = HfViTModel(small_config())
    weight = model.embeddings.patch_embeddings.projection.weight
    before = weight.clone()
    whiten_patches(model, torch.full((4, 3, 32, 32), 0.5), 0)
    for count, value, message in (
        (0, 0.0, "have no patches"),
        (2, float("nan"), "infinite or NaN"),
        (2, float("inf"), "infinite or NaN"),
    ):
        with pytest.raises(ValueError, match=message):
            whiten_patches(model, torch.full((count, 3, 32, 32), value), 0)
    assert torch.equal(weight, before)


SQUARES = ((16, 16), (24, 24), (32, 32))


class Growing(HfViTTrainer):
    """Trainer that increases the image size in three stages and records the image height of every batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, batch_transforms=[ImageSizes(((16, 16), (20, 20), (28, 28)))], **kwargs)
        self.heights: list[int] = []
        self.model.register_forward_pre_hook(
            lambda model, args, batch: self.heights.append(batch["pixel_values"].shape[-2]), with_kwargs=True
        )


def draw(batch: int = 2, height: int = 32, width: int = 32) -> torch.Tensor:
    return torch.rand(batch, 3, height, width, generator=torch.Generator().manual_seed(0))


def test_image_sizes_have_equal_shares_and_random_numbers_depend_on_seed_and_step() -> None:
    changes = BatchTransforms([ImageSizes(SQUARES)], seed=0)
    heights = [changes({"pixel_values": draw()}, step, step / 8)["pixel_values"].shape[-1] for step in range(8)]
    # Each of the three sizes is used for 8/3 steps.
    assert heights == [16, 16, 16, 24, 24, 24, 32, 32]

    def sizes_of(seed: int, state: int) -> list[int]:
        torch.manual_seed(state)
        changes, batch = BatchTransforms([draw_size], seed), {"pixel_values": draw(1)}
        return [changes(batch, step // 2, step / 60)["pixel_values"].shape[-1] for step in range(60)]

    drawn = sizes_of(0, state=0)
    assert drawn == sizes_of(0, state=1)
    assert drawn != sizes_of(1, state=0)
    assert drawn[::2] != drawn[1::2]  # the two batches of a step have different sizes
    assert min(Counter(drawn)[height] for height in (16, 28, 36)) > 10


def test_images_are_those_that_torch_interpolates_and_targets_stay() -> None:
    batch = {"pixel_values": draw(), "labels": torch.arange(2)}
    for size in ((16, 24), (40, 48)):
        resized = resize_batch(batch, size)
        expected = F.interpolate(draw(), size, mode="bilinear", antialias=True)
        assert torch.equal(resized["pixel_values"], expected)
        assert resized["labels"] is batch["labels"]
        assert torch.equal(batch["pixel_values"], draw())
    assert resize_batch(batch, (32, 32)) is batch
    # The padding mask is resized together with the image.
    real = torch.tensor([[True, True, True, False], [False, False, False, False]])
    batch = {"pixel_values": draw(1, 16, 32), "patch_attention_mask": real[None]}
    larger = resize_batch(batch, (32, 64))["patch_attention_mask"]
    assert torch.equal(larger[0], real.repeat_interleave(2, 0).repeat_interleave(2, 1))
    assert resize_batch(batch, (8, 16))["patch_attention_mask"].tolist() == [[[True, True]]]


def test_a_training_grows_and_its_evaluations_see_the_size_of_the_model(tmp_path: Path) -> None:
    trainer = digits_trainer(tmp_path, Growing, max_steps=6, per_device_train_batch_size=4)
    trainer.train()
    assert trainer.heights == [16, 16, 20, 20, 28, 28]
    trainer.evaluate()
    assert set(trainer.heights[6:]) == {28}
    trainer.save_model()
    assert HfViTForImageClassification.from_pretrained(tmp_path).config.image_size == 28


@pytest.mark.thinned(2)
@pytest.mark.parametrize("trainer_class", [AtManySizes, Growing])
def test_a_training_resumes_between_sizes(trainer_class: type[HfViTTrainer], tmp_path: Path) -> None:
    whole = train_augmented(tmp_path, 8, trainer_class=trainer_class)
    assert len(whole["losses"]) == 15
    assert AUGMENTED_SAVE_STEP * 3 % 15  # the image size does not change right after the checkpoint
    checkpoint = str(tmp_path / f"checkpoint-{AUGMENTED_SAVE_STEP}")
    resumed = train_augmented(tmp_path, 8, checkpoint, trainer_class=trainer_class)
    for part in ("losses", "weights"):
        assert torch.equal(resumed[part], whole[part])


OTHERS = [name for name, case in TRAINING_CASES.items() if not issubclass(case.model_class, (*REFUSED,))]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", OTHERS)
def test_all_other_models_train_on_images_of_another_size(name: str) -> None:
    model, batch = model_and_batch(name, 2)
    (change,) = size_transforms(HfViTTrainingArguments("out", use_cpu=True, progressive_sizes=[40, 32]), model)
    batch = change(batch, 0.0)
    assert batch["pixel_values"].shape[-2:] == (40, 40)
    loss = model.train()(**batch).loss
    loss.backward()
    assert loss.isfinite()
    assert model.get_input_embeddings().projection.weight.grad.abs().max() > 0


def trainer_of(folder: Path, **options: Any) -> HfViTTrainer:
    args = HfViTTrainingArguments(str(folder), use_cpu=True, report_to="none", eval_strategy="no", **options)
    return HfViTTrainer(model=HfViTForImageClassification(small_config("sincos")), args=args)


def test_arguments_give_heights_in_the_proportions_of_the_model(tmp_path: Path) -> None:
    # The expected values apply to images of 32 x 48 pixels and patches of 8 x 16 pixels.
    trainer = trainer_of(tmp_path, progressive_sizes=[16, 24, 32])
    assert trainer.batch_transforms.transforms == [ImageSizes(((16, 32), (24, 32), (32, 48)))]
    assert describe_recipe(trainer)["image heights"] == "16, 24, 32 pixels, for equal shares of the steps"
    assert trainer_of(tmp_path).batch_transforms.transforms == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"progressive_sizes": [16, 20, 32]}, r"20 is not a multiple of the patch height 8 .* values: 16 or 24\."),
        ({"progressive_sizes": [4, 32]}, r"progressive_sizes=4 is not .* Nearest valid values: 8\."),
        ({"progressive_sizes": [16, 24]}, r"must end at 32, .* Add it, or set --image_size 24\."),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, **options)


def test_models_of_other_libraries_and_with_targets_in_pixels_are_refused() -> None:
    boxes, points = (kind(small_config()) for kind in (HfViTForObjectDetection, HfViTForKeypointDetection))
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    args = HfViTTrainingArguments("out", use_cpu=True, progressive_sizes=[32])
    for model, message in (
        (boxes, "does not support HfViTForObjectDetection, .* --multi_scale true"),
        (points, r"whose targets are in pixels of the images\. Set another --image_size"),
        (ViTModel(ViTConfig(**shape)), "progressive_sizes requires a model of hf_vit"),
    ):
        with pytest.raises(ValueError, match=message):
            size_transforms(args, model)


def test_a_compiled_model_is_traced_twice_for_all_sizes() -> None:
    config = small_config("registers", num_hidden_layers=1)
    model = HfViTForImageClassification(config).train()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    for cells in (2, 3, 5):
        compiled(pixel_values=pixels(config, grid=(cells, cells)), labels=torch.zeros(2, dtype=torch.long))
    assert counter.frame_count <= 2
