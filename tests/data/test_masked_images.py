"""Test masks and crops for masked image modeling, and the order and length of image streams."""

import os
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Image
from torch.utils.data import DataLoader

from hf_vit import HfViTConfig, HfViTForMaskedImageModeling, HfViTImageProcessor, HfViTMaskedImageModelingConfig
from hf_vit.data import AugmentedDataset, load_unlabeled_images
from hf_vit.data.augmentation.classification import cropped_example_augmentation
from hf_vit.data.augmentation.datasets import AugmentedStream
from hf_vit.data.collators import MaskedImageModelingCollator, draw_mask_seed, masked_image_target
from hf_vit.data.datasets import TargetDataset
from hf_vit.data.loaders.unlabeled_images import stream_images

from ..helpers.datasets import dataset_of, truncate, write_pictures
from ..helpers.models import small_config
from .errors import expect_error


pytestmark = pytest.mark.slow  # slow, because the tests start worker processes


NUM_IMAGES = 11
SMALL_DECODER = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write_pictures(tmp_path, *(f"{number:02}.png" for number in range(NUM_IMAGES)))
    return tmp_path


def collator(config: HfViTConfig, **options: Any) -> MaskedImageModelingCollator:
    processor = HfViTImageProcessor.for_model(config)
    return MaskedImageModelingCollator(processor, (8, 8), HfViTMaskedImageModelingConfig(**options))


def joined(photos: Path) -> TargetDataset:
    return TargetDataset(load_unlabeled_images([str(photos)])["train"], masked_image_target)


def streamed(photos: Path, transform: Callable[[Any], Any], **options: Any) -> AugmentedStream:
    stream = stream_images([str(photos)])["train"]
    defaults = {"seed": 0, "buffer_size": 5}
    return AugmentedStream(stream, transform, **{**defaults, **options})


@pytest.mark.parametrize(
    ("options", "name"), [({}, "noise"), ({"mask_unit": 2}, "noise"), ({"mask_type": "blockwise"}, "bool_masked_pos")]
)
def test_the_mask_of_an_image_is_its_own_whatever_else_is_in_the_batch(photos: Path, options: dict, name: str) -> None:
    images, make = joined(photos), collator(small_config(), **options)
    batch = make([images[index] for index in range(NUM_IMAGES)])
    assert batch.keys() == {"pixel_values", name}
    assert batch[name].shape == (NUM_IMAGES, 16)
    torch.manual_seed(1)
    for index in (5, 2):
        alone = make([images[index]])
        assert torch.equal(alone[name][0], batch[name][index])
        assert torch.equal(alone["pixel_values"][0], batch["pixel_values"][index])
    model = HfViTForMaskedImageModeling(small_config(masked_image_modeling_config={**SMALL_DECODER, **options}))
    masks = model(**batch).bool_masked_pos
    assert (masks.sum(dim=1) == 12).all()
    assert len(masks.unique(dim=0)) >= 4


def test_training_draws_crop_and_mask_anew_every_epoch_and_never_otherwise(photos: Path) -> None:
    augmentation = cropped_example_augmentation(draw_mask_seed, (32, 32), 3, min_crop_scale=0.2, horizontal_flip=0.5)
    dataset = AugmentedDataset(joined(photos), augmentation, seed=0, column=None)
    make = collator(small_config())
    first, again = (make([dataset[0], dataset[1]]) for _ in range(2))
    dataset.set_epoch(1)
    later = make([dataset[0], dataset[1]])
    for name, values in first.items():
        assert torch.equal(values, again[name])
        assert not torch.equal(values, later[name])
        assert not torch.equal(values[0], values[1])
    expect_error("no mask_seed, only image", make, [{"image": torch.zeros(3, 32, 32, dtype=torch.uint8)}])


def keep_file(example: dict[str, Any]) -> dict[str, Any]:
    return {"file": Path(example["file"]).name, "drawn": float(torch.rand(()))}


def files_of(examples: Iterable[dict[str, Any]]) -> list[str]:
    return [example["file"] for example in examples]


def test_a_stream_gives_every_image_once_in_each_epoch_in_an_order_by_its_seed(photos: Path) -> None:
    examples = list(islice(streamed(photos, keep_file), 3 * NUM_IMAGES))
    epochs = [files_of(examples[start : start + NUM_IMAGES]) for start in (0, NUM_IMAGES, 2 * NUM_IMAGES)]
    assert all(sorted(files) == sorted(os.listdir(photos)) for files in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert len({example["drawn"] for example in examples}) == len(examples)
    # The order of the stream depends only on its seed, not on the global random generator.
    state = torch.get_rng_state()
    first, again, other = (list(islice(streamed(photos, keep_file, seed=seed), 15)) for seed in (0, 0, 1))
    assert first == again
    assert torch.equal(torch.get_rng_state(), state)
    assert files_of(first) != files_of(other)
    assert not {example["drawn"] for example in first} & {example["drawn"] for example in other}


def test_worker_processes_share_a_stream_that_is_long_enough(photos: Path, tmp_path: Path) -> None:
    loader = DataLoader(streamed(photos, keep_file), batch_size=1, num_workers=2)
    batches = list(islice(loader, 2 * (NUM_IMAGES // 2)))
    files = [file for batch in batches for file in batch["file"]]
    assert len(set(files)) == len(files)
    assert len({float(batch["drawn"]) for batch in batches}) == len(batches)
    write_pictures(tmp_path / "short", "1.png")
    with pytest.raises(ValueError, match=r"one of 2 workers \(1 processes with 2 workers each\) gets none"):
        list(islice(DataLoader(streamed(tmp_path / "short", keep_file), batch_size=1, num_workers=2), 2))


@pytest.mark.parametrize(
    ("num_shards", "counts"),
    # The cases have more shards than processes, equally many, or fewer. If there are 2 shards, they have 6 and 5
    # images. With 2 shards and 3 processes, two processes share the shard of 6 images.
    [(11, [6, 5]), (11, [4, 4, 3]), (2, [6, 5]), (2, [3, 5, 3]), (1, [6, 5]), (1, [4, 4, 3])],
)
def test_processes_share_every_epoch_of_a_stream(photos: Path, num_shards: int, counts: list[int]) -> None:
    rows = load_unlabeled_images([str(photos)])["train"].cast_column("image", Image(decode=False))
    epochs: list[list[str]] = [[], []]
    drawn = []
    for process, count in enumerate(counts):
        stream = AugmentedStream(rows.to_iterable_dataset(num_shards), keep_file, seed=0, buffer_size=5)
        stream.share(process, len(counts))
        examples = list(islice(stream, 2 * count))
        for epoch in range(2):
            epochs[epoch] += files_of(examples[epoch * count : (epoch + 1) * count])
        drawn += [example["drawn"] for example in examples]
    for files in epochs:
        assert sorted(files) == sorted(os.listdir(photos))
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize(("workers", "skip_unreadable"), [(0, False), (2, True)])
def test_resumed_stream_continues_after_skipped_batches(photos, workers, skip_unreadable):
    def batches(count: int, done: int) -> list[Any]:
        stream = streamed(photos, keep_file, skip_unreadable=skip_unreadable)
        stream.start_after(done, 2)
        loader = DataLoader(stream, batch_size=2, num_workers=workers, collate_fn=list)
        return list(islice(loader, count))

    if skip_unreadable:
        truncate(photos / "03.png", 0.3)
    whole, resumed = batches(9, 0), batches(9, 7)  # one epoch has 5.5 batches
    assert resumed == [[None, None]] * 7 + whole[7:]
    assert None not in whole[0]


def test_skipped_stream_images_are_not_decoded_and_empty_streams_end(photos: Path) -> None:
    read: list[str] = []
    stream = streamed(photos, keep_file, read_target=lambda row: read.append(row["file"]) or {})
    stream.start_after(3, 4)
    assert list(islice(stream, 12)) == [None] * 12
    assert read == []
    next(islice(stream, 12, None))
    assert len(read) == 1
    stream = streamed(photos, keep_file)
    stream.stream = stream.stream.take(0)
    assert list(stream) == []


def test_a_damaged_or_missing_image_of_a_stream_stops_it_or_is_left_out(photos, caplog, tmp_path):
    truncate(photos / "03.png", 0.3)
    expect_error(r"03\.png", list, islice(streamed(photos, keep_file), NUM_IMAGES), error=OSError)
    files = files_of(islice(streamed(photos, keep_file, skip_unreadable=True), NUM_IMAGES - 1))
    assert len(set(files)) == NUM_IMAGES - 1
    assert "03.png" not in files
    assert "03.png" in caplog.text
    # A missing image is handled in the same way as an unreadable one.
    rows = tmp_path / "rows"
    dataset_of([0, 1, 0]).add_item({"image": None, "label": 1}).to_parquet(rows / "train.parquet")
    expect_error("an image is missing", list, islice(streamed(rows, keep_file), 4))
    # If the missing image is skipped, an epoch has 3 images, so the 4 images come from two epochs.
    assert len(list(islice(streamed(rows, keep_file, skip_unreadable=True), 4))) == 4
