"""Training with progressive image sizes or a random size for each batch."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from transformers import ViTConfig, ViTModel

from hf_vit import HfViTForImageClassification, HfViTForKeypointDetection, HfViTForObjectDetection
from hf_vit.training import HfViTTrainer, HfViTTrainingArguments
from hf_vit.training.publishing.model_card import describe_recipe
from hf_vit.training.regularization import REFUSED, BatchTransforms, ImageSizes, resize_batch, size_transforms

from ..helpers.models import TRAINING_CASES, pixels, small_config
from ..helpers.trainings import AUGMENTED_SAVE_STEP, AtManySizes, build, digits_trainer, train_augmented


SIZES = ((16, 16), (20, 20), (28, 28))
STEPS = 15  # as in `train_augmented`


class Growing(HfViTTrainer):
    """Train with three increasing image sizes and record the size of every batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, batch_transforms=[ImageSizes(SIZES)], **kwargs)
        self.heights: list[int] = []
        self.model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, model: torch.nn.Module, args: tuple[Any, ...], batch: dict[str, Any]) -> None:
        self.heights.append(batch["pixel_values"].shape[-2])


def images(batch: int = 2, height: int = 32, width: int = 32) -> torch.Tensor:
    return torch.rand(batch, 3, height, width, generator=torch.Generator().manual_seed(0))


def test_sizes_have_equal_shares_of_the_steps() -> None:
    changes = BatchTransforms([ImageSizes(((16, 16), (24, 24), (32, 32)))], seed=0)
    batch = {"pixel_values": images()}
    heights = [changes(batch, step, 8)["pixel_values"].shape[-1] for step in range(8)]
    assert heights == [16, 16, 16, 24, 24, 24, 32, 32]  # changes at steps 2 2/3 and 5 1/3


@pytest.mark.parametrize("size", [(16, 24), (40, 48)])
def test_images_are_those_that_torch_interpolates_and_targets_stay(size: tuple[int, int]) -> None:
    batch = {"pixel_values": images(), "labels": torch.arange(2)}
    resized = resize_batch(batch, size)
    expected = F.interpolate(images(), size, mode="bilinear", antialias=True)
    assert torch.equal(resized["pixel_values"], expected)
    assert resized["labels"] is batch["labels"]
    assert torch.equal(batch["pixel_values"], images())


def test_images_of_the_size_wanted_are_not_touched() -> None:
    batch = {"pixel_values": images()}
    assert resize_batch(batch, (32, 32)) is batch


def test_padding_is_resized_with_its_image() -> None:
    real = torch.tensor([[True, True, True, False], [False, False, False, False]])
    batch = {"pixel_values": images(1, 16, 32), "patch_attention_mask": real[None]}
    larger = resize_batch(batch, (32, 64))["patch_attention_mask"]
    assert torch.equal(larger[0], real.repeat_interleave(2, 0).repeat_interleave(2, 1))
    smaller = resize_batch(batch, (8, 16))["patch_attention_mask"]
    assert smaller.tolist() == [[[True, True]]]


def test_a_size_is_drawn_for_every_batch_from_seed_and_step_alone() -> None:
    def draw(seed: int, state: int) -> list[int]:
        torch.manual_seed(state)
        changes = BatchTransforms([ImageSizes(((16, 16), (24, 24), (32, 32)), is_drawn=True)], seed)
        return [changes({"pixel_values": images(1)}, step // 2, 30)["pixel_values"].shape[-1] for step in range(60)]

    drawn = draw(0, state=0)
    assert drawn == draw(0, state=1)
    assert drawn != draw(1, state=0)
    assert drawn[::2] != drawn[1::2]  # two batches per step
    assert min(Counter(drawn)[height] for height in (16, 24, 32)) > 10


def test_a_training_grows_and_its_evaluations_see_the_size_of_the_model(tmp_path: Path) -> None:
    trainer = digits_trainer(tmp_path, Growing, max_steps=6, per_device_train_batch_size=4)
    trainer.train()
    assert trainer.heights == [16, 16, 20, 20, 28, 28]
    trainer.evaluate()
    assert set(trainer.heights[6:]) == {28}
    trainer.save_model()
    assert HfViTForImageClassification.from_pretrained(tmp_path).config.image_size == 28


@pytest.mark.parametrize("trainer_class", [Growing, AtManySizes])
def test_a_training_taken_up_between_sizes_goes_on_bit_for_bit(
    trainer_class: type[HfViTTrainer], tmp_path: Path
) -> None:
    assert AUGMENTED_SAVE_STEP * 3 % STEPS
    whole = train_augmented(tmp_path, 8, trainer_class=trainer_class)
    checkpoint = str(tmp_path / f"checkpoint-{AUGMENTED_SAVE_STEP}")
    resumed = train_augmented(tmp_path, 8, checkpoint, trainer_class=trainer_class)
    assert len(whole["losses"]) == STEPS
    assert torch.equal(resumed["losses"], whole["losses"])
    assert torch.equal(resumed["weights"], whole["weights"])


@pytest.mark.parametrize(
    "name", [name for name, case in TRAINING_CASES.items() if not issubclass(case.model_class, (*REFUSED,))]
)
def test_all_other_models_train_on_images_of_another_size(name: str) -> None:
    case = TRAINING_CASES[name]
    config = small_config(**case.overrides)
    model = build(case.model_class, config).train()
    (change,) = size_transforms(HfViTTrainingArguments("out", use_cpu=True, multi_scale_sizes=[40]), model)
    batch = change(case.make_batch(config, 2), 0.0)
    assert batch["pixel_values"].shape[-2:] == (40, 40)
    loss = model(**batch).loss
    loss.backward()
    assert loss.isfinite()
    assert model.get_input_embeddings().projection.weight.grad.abs().max() > 0


def trainer_of(folder: Path, **options: Any) -> HfViTTrainer:
    args = HfViTTrainingArguments(str(folder), use_cpu=True, report_to="none", eval_strategy="no", **options)
    return HfViTTrainer(model=HfViTForImageClassification(small_config("sincos")), args=args)


def test_arguments_give_heights_in_the_proportions_of_the_model(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, progressive_sizes=[16, 24, 32])  # 32 x 48 pixels, patches of 8 x 16
    assert trainer.batch_transforms.transforms == [ImageSizes(((16, 32), (24, 32), (32, 48)))]
    assert describe_recipe(trainer)["image heights"] == "16, 24, 32 pixels, for equal shares of the steps"
    trainer = trainer_of(tmp_path, multi_scale_sizes=[24, 32, 40])
    assert trainer.batch_transforms.transforms == [ImageSizes(((24, 32), (32, 48), (40, 64)), is_drawn=True)]
    assert describe_recipe(trainer)["image heights"] == "24, 32, 40 pixels, one drawn for each batch"
    assert trainer_of(tmp_path).batch_transforms.transforms == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"progressive_sizes": [16, 20, 32]},
            r"20 is not a multiple of the patch height 8 .* valid values: 16 or 24\.",
        ),
        ({"multi_scale_sizes": [4, 32]}, r"multi_scale_sizes=4 is not .* The nearest that fit: 8\."),
        ({"multi_scale_sizes": [0]}, r"multi_scale_sizes=\[0\] must be at least 1"),
        ({"progressive_sizes": [16, 24]}, r"must end at 32, .* Add it, or set --image_size 24\."),
        ({"progressive_sizes": [16, 32], "multi_scale_sizes": [32]}, r"Give one of the two\."),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, **options)


@pytest.mark.parametrize(
    ("model_class", "message"),
    [
        (HfViTForObjectDetection, "does not go with HfViTForObjectDetection, .* --multi_scale true"),
        (HfViTForKeypointDetection, "whose targets are in pixels of the images: choose another --image_size"),
    ],
)
def test_models_whose_targets_would_not_fit_are_refused(model_class: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        size_transforms(
            HfViTTrainingArguments("out", use_cpu=True, multi_scale_sizes=[32]), model_class(small_config())
        )


def test_models_of_another_library_are_refused() -> None:
    config = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    with pytest.raises(ValueError, match="progressive_sizes needs a model of hf_vit"):
        size_transforms(HfViTTrainingArguments("out", use_cpu=True, progressive_sizes=[32]), ViTModel(config))


def test_a_compiled_model_is_traced_twice_for_all_sizes() -> None:
    config = small_config("registers", num_hidden_layers=1)
    model = HfViTForImageClassification(config).train()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    for cells in (2, 3, 5, 6, 7):
        compiled(pixel_values=pixels(config, grid=(cells, cells)), labels=torch.zeros(2, dtype=torch.long))
    assert counter.frame_count <= 2
