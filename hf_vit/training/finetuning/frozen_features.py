"""Features of frozen blocks, which are computed once per view of a training image and read in each training step.

In shapes, B is the batch size, C the number of channels, (H, W) the image size, L the number of tokens, and D the
hidden size.
"""

import io
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import datasets
import numpy as np
import pyarrow as pa
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from datasets import Dataset, Features, List, Value, concatenate_datasets
from datasets.arrow_writer import ArrowWriter
from datasets.fingerprint import Hasher
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, Subset
from transformers import TrainingArguments
from transformers.utils import logging

from ... import __version__
from ...data.augmentation.datasets import AugmentedDataset
from ...data.datasets import TargetDataset
from ...data.fingerprint import FEATURE_FOLDER, digest, digest_weights, fingerprint
from ...model.modeling_hf_vit import HfViTModel
from ...model.task_configurations import TASK_CONFIGS
from ...options.training_arguments import training_options_of
from ...outputs import find_intact, recorded_file, remove_unfinished
from ...processes import on_first_process
from ..errors import format_bytes
from ..optimizer import find_backbone


logger = logging.get_logger(__name__)
ROWS_PER_SHARD = 256  # rows per file; if a process is killed, at most this many rows are lost
BATCH_SIZE = 32  # batch size of the extraction, fixed so that files do not depend on the training batch size
PROBED = 4  # number of images that are encoded to determine the required features and their size
STATES, TARGET, POOLED = "frozen_states", "target", "pooled"
MODEL_INPUTS = ("pixel_values", "patch_attention_mask")
# Fields of the configuration that do not influence features
NOT_FEATURES = {"_name_or_path", "architectures", "dtype", "transformers_version", "problem_type"}
NOT_FEATURES |= {"out_features", "out_indices", "stage_names"}
Collator = Callable[[list[dict[str, Any]]], dict[str, Any]]
DTYPES = {"float32": torch.float32, "float16": torch.float16}


@dataclass
class FrozenPart:
    """Frozen first part of a backbone: embeddings and blocks, and pooling if the whole backbone is frozen.

    Features are named "0" (input of the first block), "1" (output of the first block) and so on, or "pooled".
    """

    backbone: HfViTModel
    num_blocks: int
    has_pool: bool

    @classmethod
    def of(cls, model: nn.Module, frozen: Sequence[nn.Module]) -> "FrozenPart | None":
        """Return the part of `model` that consists of modules in `frozen`, or None if it contains no block."""
        backbone = find_backbone(model)
        if backbone is None:
            return None
        inside = {module for part in frozen for module in part.modules()}
        start = all(part in inside or not list(part.parameters()) for part in (backbone.embeddings, backbone.pre_norm))
        is_frozen = [start and block in inside for block in backbone.encoder.layers]
        num_blocks = [*is_frozen, False].index(False)
        return cls(backbone, num_blocks, backbone in inside) if num_blocks else None

    def functions(self) -> dict[str, tuple[nn.Module, str]]:
        """Return, for each feature name, the module and the name of its method that computes the feature."""
        blocks = self.backbone.encoder.layers[: self.num_blocks]
        modules = {str(number): (module, "forward") for number, module in enumerate((self.backbone.pre_norm, *blocks))}
        return {**modules, **({POOLED: (self.backbone, "pool")} if self.has_pool else {})}

    @torch.no_grad()
    def run(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Compute the features of a batch of images by name: tokens (B, L, D), pooled features (B, D) or (B, 2·D)."""
        mask = batch.get("patch_attention_mask")
        tokens, blocks = self.backbone.start_blocks(batch["pixel_values"], mask)
        states, masks = {"0": tokens}, blocks.masks(tokens)
        for number in range(self.num_blocks):
            states[str(number + 1)] = tokens = blocks.run(tokens, number, number + 1, **masks)
        if self.has_pool:
            normed = tokens if self.backbone.config.norm_after_pooling else self.backbone.norm(tokens)
            states[POOLED] = self.backbone.pool(normed, mask)
        return states

    def find_read(self, compute_loss: Callable[[], Tensor]) -> tuple[dict[str, Tensor], "FrozenPart"]:
        """Return the features that a loss depends on, and the part that computes them.

        A loss depends on a feature if the feature has a gradient. If the head changes the tokens before a block, for
        example by adding queries, the part ends before this block.
        """
        leaves: dict[str, Tensor] = {}

        def taps(name: str, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
            before = str(self.num_blocks) if name == POOLED else str(int(name) - 1)

            def tap(states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                if name != "0" and (before not in leaves if name == POOLED else leaves.get(before) is not states):
                    return compute(states, *args, **kwargs)
                with torch.no_grad():
                    output = compute(states, *args, **kwargs)
                leaves[name] = output = output.detach().requires_grad_()
                return output

            return tap

        functions = self.functions()
        with replaced_methods({functions[name]: taps(name, bound(*functions[name])) for name in functions}):
            loss = compute_loss()
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        read = {
            name: leaf.detach()
            for (name, leaf), found in zip(leaves.items(), gradients, strict=True)
            if found is not None
        }
        num_blocks = max((int(name) for name in leaves if name != POOLED), default=0)
        return read, replace(self, num_blocks=num_blocks, has_pool=POOLED in read)


def bound(module: nn.Module, name: str) -> Callable[..., Tensor]:
    """Return the bound method `name` of a module, either `pool` or `forward`, which computes features."""
    return module.pool if isinstance(module, HfViTModel) and name == "pool" else module.forward


@contextmanager
def replaced_methods(methods: Mapping[tuple[nn.Module, str], Callable[..., Tensor]]) -> Iterator[None]:
    """Context manager that temporarily replaces methods of modules."""
    with ExitStack() as stack:
        for (module, name), method in methods.items():
            attributes = vars(module)
            restore = partial(attributes.update, {name: attributes[name]}) if name in attributes else None
            stack.callback(restore or partial(attributes.pop, name))
            attributes[name] = method
        yield


@dataclass(eq=False, repr=False)
class FeatureDataset(AugmentedDataset):
    """Stored features and targets of an `AugmentedDataset`; each epoch reads one view.

    Args:
        rows: Stored rows: all images of the first view, then all images of the second view, and so on.
        num_views: Number of stored views of each image. Consecutive epochs read consecutive views.
    """

    rows: Dataset = field(kw_only=True)
    num_views: int = field(kw_only=True)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        """Return the features by name, as flat arrays, and the encoded target.

        An index (i, n) selects view n of image i, independent of the epoch.
        """
        index, view = index if isinstance(index, tuple) else (index, int(self.epoch))
        row = self.rows[view % self.num_views * len(self) + index]  # Arrow table with one row
        values = {name: row.column(name).chunk(0) for name in row.column_names}
        target = values.pop(TARGET)[0].as_buffer()
        return {TARGET: target, **{name: value.flatten().to_numpy() for name, value in values.items()}}


@dataclass
class FeatureCollator:
    """Collate stored features. Targets are collated by the collator for images, which receives blank images.

    Args:
        collator: Collator of examples with images.
        image: Blank image (C, H, W).
        shapes: Shape of each feature without the batch dimension.
    """

    collator: Callable[[list[dict[str, Any]]], dict[str, Any]]
    image: Tensor
    shapes: Mapping[str, tuple[int, ...]]

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a batch with the targets of the rows, and their features by name under the key `frozen_states`."""
        examples = [{**torch.load(io.BytesIO(row[TARGET]), weights_only=True), "image": self.image} for row in rows]
        states = {
            name: torch.from_numpy(np.stack([row[name] for row in rows])).unflatten(1, shape)
            for name, shape in self.shapes.items()
        }
        return {**self.collator(examples), STATES: states}


@dataclass
class ExtractionCollator:
    """Collate images to compute their features, and encode their targets."""

    collator: Callable[[list[dict[str, Any]]], dict[str, Any]]

    def __call__(self, examples: list[dict[str, Any]]) -> tuple[dict[str, Any], list[bytes]]:
        """Return the inputs of the frozen part and the encoded targets."""
        batch = self.collator(examples)
        return {name: batch[name] for name in MODEL_INPUTS if name in batch}, [*map(encode_target, examples)]


def encode_target(example: Mapping[str, Any]) -> bytes:
    """Encode an example without its image as bytes that `torch.load` opens without running code."""
    stream = io.BytesIO()
    # Clone tensors, because saving a view of a tensor would save the whole base tensor.
    target = {name: value.clone() if isinstance(value, Tensor) else value for name, value in example.items()}
    torch.save({name: value for name, value in target.items() if name != "image"}, stream)
    return stream.getvalue()


@dataclass
class FrozenFeatures:
    """Features of the frozen part of a model, stored on disk for several views of each training image.

    View v of an image is the image as it would be augmented in epoch v of a run without stored features. Epoch e reads
    view e modulo `cached_views`. The features are stored in the cache of `datasets`, in files of `ROWS_PER_SHARD`
    rows. The folder name depends on images, targets, transform, frozen weights and precision, so that a matching new
    run or a resumed run reuses the features. Each process writes some of the files and reads all of them. `seconds` is
    the time spent on computing new features.

    Args:
        model: The model.
        source: Training images.
        image_collator: Collator of training batches.
        compute_loss: Function that returns the loss of a batch.
        frozen: The frozen modules of the model, see `frozen_modules`.
        args: Training arguments, with the options for stored features.
        accelerator: Provides the precision of the model, and synchronizes the processes.
        report: Function that receives a line of text about the features.
        folder: Folder of all stored features; by default in the cache of `datasets`.

    Raises:
        ValueError: If the features exceed `cache_gigabytes`, exceed the range of float16, or are not read by the head.
    """

    model: nn.Module
    source: AugmentedDataset
    image_collator: Collator
    compute_loss: Callable[[dict[str, Any]], Tensor]
    frozen: Sequence[nn.Module]
    args: TrainingArguments
    accelerator: Accelerator
    report: Callable[[str], None] = logger.info
    folder: Path | None = None

    def __post_init__(self) -> None:
        self.options, self.precision = training_options_of(self.args), self.accelerator.autocast
        self.dtype = DTYPES[self.options.cache_dtype]
        self.device = next(self.model.parameters()).device
        first = self._images(0)
        examples = [first[index] for index in range(min(PROBED, len(first)))]
        batch = self.image_collator(examples)
        read, self.part = self._probe(batch)
        if not read.keys() - {"0"}:
            raise ValueError(
                f"cached_views={self.options.cached_views} is not supported, because the head modifies the tokens of "
                "every block. Remove cached_views."
            )
        self.read = {name: read[name][0] for name in sorted(read)}
        height, width = self.part.backbone.embeddings.patch_embeddings.grid(batch["pixel_values"])
        self.length = self.part.backbone.config.num_prefix_tokens + height * width
        if not isinstance(examples[0]["image"], Tensor) and "label" not in examples[0]:
            raise ValueError(
                "cached_views requires a transform that returns image tensors of the input size of the model."
            )
        blank = torch.zeros(batch["pixel_values"].shape[1:], dtype=torch.uint8)
        self.collator = FeatureCollator(
            self.image_collator, blank, {name: one.shape for name, one in self.read.items()}
        )
        sizes = [one.numel() * self.dtype.itemsize for one in self.read.values()]
        self.size = int(sum(sizes) + np.mean([len(encode_target(example)) for example in examples]))
        self.size *= self.options.cached_views * len(self.source)
        self._check_size()
        self.error = max(float((one.to(self.dtype) - one).norm() / one.norm()) for one in read.values())
        place = self.folder or Path(datasets.config.HF_DATASETS_CACHE) / FEATURE_FOLDER
        self.place = place / self._key(batch["pixel_values"])
        self._extract()
        files = [str(self._file(*shard)) for shard in self._shards()]
        rows = concatenate_datasets([Dataset.from_file(file) for file in files]).with_format("arrow")
        known = {one.name: vars(self.source)[one.name] for one in fields(AugmentedDataset)}
        self.dataset = FeatureDataset(**known, rows=rows, num_views=self.options.cached_views)

    def _probe(self, batch: dict[str, Any]) -> tuple[dict[str, Tensor], FrozenPart]:
        """Return the features of a batch that the loss depends on, and the part of the model that computes them."""
        part = FrozenPart.of(self.model, self.frozen)
        assert part is not None  # `check_cache` raises an error if there is no frozen part
        batch, device = send_to_device(batch, self.device), self.device
        self.model.train()
        for module in self.model.modules():
            if isinstance(module, _BatchNorm):  # in evaluation mode, the statistics of batch norm do not change
                module.eval()
        with torch.random.fork_rng([device] if device.type == "cuda" else []), self.precision():
            read, part = part.find_read(lambda: self.compute_loss(dict(batch)))
            states = part.run(batch)
        assert all(torch.allclose(states[name], one, rtol=1e-3, atol=1e-3) for name, one in read.items())
        return read, part

    def _check_size(self) -> None:
        views, limit = self.options.cached_views, self.options.cache_gigabytes
        if self.size > limit * 10**9:
            raise ValueError(
                f"The features of {len(self.source):,} images in {views} views take {format_bytes(self.size)}, more "
                f"than cache_gigabytes={limit:g}. Increase this limit, reduce --cached_views or --image_size, set "
                "--cache_dtype float16, or set --cached_views 0 to train without stored features."
            )

    def _key(self, pixel_values: Tensor) -> str:
        """Return the name of the folder of the features: a digest of everything that the features depend on."""
        examples: Any = self.source.dataset
        backbone, count = self.part.backbone, self.part.num_blocks
        is_read = isinstance(examples, TargetDataset)
        start = nn.ModuleList([backbone.embeddings, backbone.pre_norm, *backbone.encoder.layers[:count]])
        fields_of_backbone = {
            name: value for name, value in backbone.config.to_dict().items() if not isinstance(value, dict)
        }
        described = {
            "version": __version__,
            "data": fingerprint(examples.rows if is_read else examples),
            "targets": Hasher.hash(examples.read_target) if is_read else "",
            "transform": Hasher.hash([self.source.transform, self.source.column]),
            # The digest includes pixels, because they depend on the settings of the image processor.
            "pixels": digest([str(pixel_values.shape), pixel_values.numpy(force=True).tobytes()]),
            "weights": digest_weights(backbone if self.part.has_pool else start),
            "config": {
                name: value for name, value in fields_of_backbone.items() if name not in (*NOT_FEATURES, *TASK_CONFIGS)
            },
            "features": {name: [str(one.dtype), *one.shape] for name, one in self.read.items()},
            "stored": [self.options.cache_dtype, str(self.accelerator.mixed_precision), ROWS_PER_SHARD],
            "seed": self.source.seed,
        }
        return on_first_process(self.args, lambda: digest([json.dumps(described, default=str)]))

    def _images(self, view: int) -> AugmentedDataset:
        images = replace(self.source)
        images.set_epoch(view)
        return images

    def _shards(self) -> list[tuple[int, int]]:
        """Return the view and the file number within the view for each file."""
        count = math.ceil(len(self.source) / ROWS_PER_SHARD)
        return [(view, number) for view in range(self.options.cached_views) for number in range(count)]

    def _numbers(self, number: int) -> range:
        """Return the numbers of the images in a file."""
        return range(len(self.source))[number * ROWS_PER_SHARD : (number + 1) * ROWS_PER_SHARD]

    def _file(self, view: int, number: int) -> Path:
        return self.place / f"view-{view:04d}-{number:05d}.arrow"

    def _extract(self) -> None:
        """Compute and write the missing and damaged files, and report the number of images and the time."""
        args, start = self.args, time.monotonic()
        files = {shard: self._file(*shard).name for shard in self._shards()}
        intact = find_intact(self.place, files.values())
        is_missing = {shard: name not in intact for shard, name in files.items()}
        self.accelerator.wait_for_everyone()  # all processes must list the files before a file is written
        own = [shard for shard, missing in is_missing.items() if missing][args.process_index :: args.world_size]
        self.place.mkdir(parents=True, exist_ok=True)
        remove_unfinished(self.place)
        hides_bar = args.disable_tqdm or args.process_index > 0
        total = sum(len(self._numbers(number)) for _, number in own)
        with logging.tqdm(total=total, desc="Features", disable=hides_bar) as bar:
            for shard in own:
                self._write(*shard, bar.update)
        self.accelerator.wait_for_everyone()
        self.seconds = time.monotonic() - start
        if args.process_index == 0:
            size = sum(self._file(*shard).stat().st_size for shard in is_missing)
            count, views = sum(is_missing.values()), self.options.cached_views
            how = "reused" if not count else f"{count} of {len(is_missing)} files computed"
            error = f", {self.error:.1e} off float32" if self.dtype != torch.float32 else ""
            self.report(
                f"Frozen features ({', '.join(self.read)}): {len(self.source):,} images, {views} views, "
                f"{format_bytes(size)} in {self.place}{error}; {how} in {self.seconds:.1f} s."
            )

    def _write(self, view: int, number: int, update: Callable[[int], Any]) -> None:
        """Compute the features of one file, and write it atomically with its checksum."""
        loader = DataLoader(
            Subset(self._images(view), self._numbers(number)),
            BATCH_SIZE,
            num_workers=self.args.dataloader_num_workers,
            collate_fn=ExtractionCollator(self.image_collator),
            generator=torch.Generator(),  # restore the state of the global random generator
        )
        columns = {name: List(Value(self.options.cache_dtype), one.numel()) for name, one in self.read.items()}
        features = Features({TARGET: Value("binary"), **columns})
        with (
            recorded_file(self._file(view, number)) as unfinished,
            ArrowWriter(path=str(unfinished), features=features) as writer,
        ):
            for batch, targets in loader:
                with self.precision():
                    states = self.part.run(send_to_device(batch, self.device))
                table = {name: self._rounded(states[name]) for name in self.read}
                writer.write_table(pa.table({TARGET: pa.array(targets, pa.binary()), **table}))
                update(len(targets))
            writer.finalize()

    def _rounded(self, states: Tensor) -> pa.Array:
        """Flatten the features (B, ...) of each image into a list, as stored on disk."""
        stored = states.to(self.dtype).flatten(1)
        if not stored.isfinite().all():
            raise ValueError(
                f"Features have values up to {float(states.abs().max()):g}, too large for "
                f"cache_dtype={self.options.cache_dtype}. Set --cache_dtype float32."
            )
        return pa.FixedSizeListArray.from_arrays(pa.array(stored.numpy(force=True).ravel()), stored.shape[1])

    @contextmanager
    def serving(self, inputs: dict[str, Any]) -> Iterator[None]:
        """Context manager that removes stored features from `inputs` and makes the frozen part return them."""
        states, config_of_part = inputs.pop(STATES), self.part.backbone.config
        first = next(iter(states.values()))
        tokens = self.length, config_of_part.hidden_size
        # Use NaN as placeholder for features that are not stored. If the loss depended on them, it would become NaN.
        blank = first.new_full((), math.nan, dtype=torch.float32).expand(len(first), *tokens)
        given = {name: states[name].to(one.dtype) for name, one in self.read.items()}
        functions = {"": (self.part.backbone.embeddings, "forward"), **self.part.functions()}
        with replaced_methods({place: returning(given.get(name, blank)) for name, place in functions.items()}):
            yield


def returning(value: Tensor) -> Callable[..., Tensor]:
    """Return a function that ignores its arguments and returns the tensor `value`."""
    return lambda *_, **__: value


@runtime_checkable
class Declaring(Protocol):
    """Model, collator or batch transform that declares whether training may read stored features."""

    supports_stored_features: bool


def supports_stored_features(part: Any, default: bool) -> bool:
    """Return whether training with a model, a collator or a batch transform may read features instead of images.

    `default` applies to classes that do not declare it.
    """
    return part.supports_stored_features if isinstance(part, Declaring) else default


def check_cache(
    model: nn.Module,
    dataset: Any,
    collator: Any,
    frozen: Sequence[nn.Module],
    args: TrainingArguments,
    transforms: Sequence[Any] = (),
    has_teacher: bool = False,
    is_sharded: bool = False,
) -> None:
    """Raise `ValueError` if training on stored features is not possible with the given options.

    The arguments are those of `FrozenFeatures`, the batch transforms, whether there is a teacher, and whether FSDP or
    DeepSpeed shard the weights.
    """
    options = training_options_of(args)
    changing = [one for one in transforms if not supports_stored_features(one, False)]
    rows = dataset.dataset if isinstance(dataset, AugmentedDataset) else None
    reasons = {
        "the model draws new masks or views in each step, or reconstructs the images. Remove cached_views": not (
            supports_stored_features(model, True)
        ),
        "the images of a stream are not numbered. Remove cached_views or --streaming": not isinstance(
            rows, TargetDataset | Dataset
        ),
        "a teacher needs the images. Remove cached_views or the teacher": has_teacher,
        "batch transforms change the images in each step. Remove mixup, cutmix, token_drop_rate and "
        "progressive_sizes": bool(changing),
        "multi_scale changes the image size of each batch. Set --multi_scale false": not supports_stored_features(
            collator, True
        ),
        "FSDP and DeepSpeed shard the weights of the frozen part. Train with DDP": is_sharded,
        "this process has several GPUs. Start one process per GPU with torchrun --nproc_per_node": args.n_gpu > 1,
        "no block of the model is frozen. Set --trainable_blocks to less than the number of blocks": (
            FrozenPart.of(model, frozen) is None
        ),
    }
    if reason := next((reason for reason, applies in reasons.items() if applies), None):
        raise ValueError(f"cached_views={options.cached_views} stores features of images, but {reason}.")
