"""Train a transformers model for the same time and on the same images as a training run of this package.

The transformers model (the peer) replaces our model in the training run of a recipe. Images, augmentation, image size,
batch size, precision and evaluation are the same. The peer is trained in a PyTorch loop with AdamW, warmup and cosine
decay. By default, the learning rate is a function of the elapsed time, and the schedule ends after the duration of our
training run (`train_runtime` in train_results.json). Alternatively, the peer is trained for a number of steps. Several
learning rates are tried with the first seed, and the best learning rate is used with the other seeds.

Peers trained from scratch are ViT, EoMT, DPT and ViTPose of the same shape as our model, SegFormer-b0, and LW-DETR of
the same width and depth. Peers with a published DINOv2 encoder are `Dinov2ForImageClassification`, a linear head on
`Dinov2Backbone`, DPT and RF-DETR. All weights of a peer are trained.
"""

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hf_vit import tasks, training
from hf_vit.data import AugmentedDataset
from hf_vit.evaluation.base import LOWER_IS_BETTER
from hf_vit.model.configuration_hf_vit import to_pair
from hf_vit.model.deformable_decoder import NUM_LAYERS
from hf_vit.model.task_depth_estimation import depth_loss
from hf_vit.model.task_keypoint_detection import flip_heatmaps, keypoint_loss
from hf_vit.options.recipe import read_recipe
from hf_vit.runs import Run, build_run, open_run
from hf_vit.runs.report import evaluate_run
from hf_vit.training.streams import replaced

from .harness import OutputArguments, describe_run, print_header, print_row, save


# Recipe options that do not apply to the peer
OWN_OPTIONS = (
    *("learning_rate", "use_muon", "ema_decay", "layer_decay", "head_learning_rate", "progressive_sizes"),
    *("head_lr_multiplier", "probe_classifier", "trainable_blocks", "cached_views", "lora_rank", "token_drop_rate"),
)


@dataclass(kw_only=True)
class Arguments(OutputArguments):
    """Options of the benchmark."""

    task: str = field(default="image_classification", metadata={"help": "task of the training run, with underscores"})
    training: str = field(default="", metadata={"help": "output folder of our training run, with recipe.yaml"})
    seconds: float | None = field(
        default=None, metadata={"help": "training time of the peer; by default the time of our run"}
    )
    steps: int | None = field(
        default=None,
        metadata={"help": "number of training steps of the peer, instead of a time; for busy machines"},
    )
    learning_rates: list[float] = field(
        default_factory=lambda: [3e-4, 1e-3, 3e-3], metadata={"help": "learning rates to try with the first seed"}
    )
    seeds: list[int] = field(
        default_factory=lambda: [0], metadata={"help": "seeds; the first one is used to select the learning rate"}
    )


class Peer(nn.Module):
    """Wrapper that gives a transformers model the configuration and task options of our model.

    Args:
        ours: Our model.
        peer: The transformers model. It is set to the attention implementation of our model.
    """

    def __init__(self, ours: Any, peer: transformers.PreTrainedModel) -> None:
        super().__init__()
        if peer._supports_sdpa:  # other peers have only one attention implementation
            peer.set_attn_implementation(ours.config._attn_implementation)
        self.config, self.peer = ours.config, peer
        self.options: Any = vars(ours).get("options")

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    def forward(self, pixel_values: Tensor, labels: Any = None, **inputs: Any) -> Any:
        """Run the transformers model without the padding mask, which it does not support."""
        return self.peer(pixel_values=pixel_values, labels=labels)


class UniversalPeer(Peer):
    """Peer for universal segmentation: EoMT."""

    def forward(self, pixel_values: Tensor, labels: Any = None, **inputs: Any) -> Any:
        """Run the model on images without padding."""
        targets = {name: inputs.get(name) for name in ("mask_labels", "class_labels")}
        return self.peer(pixel_values, **targets)


class DepthPeer(Peer):
    """Peer for depth estimation: DPT, with our loss, because DPT in transformers has no loss."""

    def forward(self, pixel_values: Tensor, labels: Any = None, **inputs: Any) -> Any:
        """Run the model and return the predicted depth in the units of our model."""
        outputs = self.peer(pixel_values=pixel_values)
        if labels is not None:
            outputs["loss"] = depth_loss(outputs.predicted_depth, labels, self.options)
        return outputs


class DetectionPeer(Peer):
    """Peer for object detection: LW-DETR or RF-DETR, with sigmoid probabilities."""

    def forward(self, pixel_values: Tensor, labels: Any = None, **inputs: Any) -> Any:
        """Run the model."""
        outputs = self.peer(pixel_values=pixel_values, labels=labels)
        outputs["probabilities"] = outputs.logits.sigmoid()
        return outputs


class KeypointPeer(Peer):
    """Peer for keypoint detection: ViTPose, with our loss, because ViTPose in transformers has no loss.

    Our loss is the loss of the ViTPose paper.
    """

    def forward(self, pixel_values: Tensor, labels: Any = None, **inputs: Any) -> Any:
        """Run the model."""
        outputs = self.peer(pixel_values)
        if labels is not None:
            size = (pixel_values.shape[-2], pixel_values.shape[-1])
            outputs["loss"] = keypoint_loss(outputs.heatmaps, labels, size, self.options)
        return outputs

    def mirrored_heatmaps(self, pixel_values: Tensor) -> Tensor:
        """Predict heatmaps from mirrored images and return these heatmaps, mirrored back."""
        return flip_heatmaps(self(pixel_values.flip(-1)).heatmaps, self.options.flip_pairs)


def shape_of(config: Any) -> dict[str, Any]:
    """Return the configuration fields of our model that all plain ViTs in transformers share."""
    (patch, patch_width), size = to_pair(config.patch_size), to_pair(config.image_size)
    assert patch == patch_width, "transformers' models have square patches"
    return {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "num_channels": config.num_channels,
        "patch_size": patch,
        "image_size": size[0] if size[0] == size[1] else list(size),
    }


def make_classifier(ours: Any) -> Peer:
    """Return a transformers ViT of the same shape as our model."""
    config = transformers.ViTConfig(**shape_of(ours.config), num_labels=ours.config.num_labels)
    return Peer(ours, transformers.ViTForImageClassification(config))


def make_segmenter(ours: Any) -> Peer:
    """Return SegFormer-b0, the smallest SegFormer, which accepts images of any size."""
    config = transformers.SegformerConfig(num_labels=ours.config.num_labels, semantic_loss_ignore_index=255)
    return Peer(ours, transformers.SegformerForSemanticSegmentation(config))


def make_universal_segmenter(ours: Any) -> Peer:
    """Return EoMT of the same shape as our model, with equal numbers of queries and of blocks with queries."""
    options = {name: vars(ours.options)[name] for name in ("num_queries", "train_num_points")}
    options["num_blocks"] = ours.options.num_blocks or min(4, ours.config.num_hidden_layers)
    shape = {name: value for name, value in shape_of(ours.config).items() if name != "intermediate_size"}
    shape["mlp_ratio"] = ours.config.intermediate_size // ours.config.hidden_size
    config = transformers.EomtConfig(**shape, num_labels=ours.config.num_labels, **options)
    peer = transformers.EomtForUniversalSegmentation(config)
    peer.attn_mask_probs.zero_()  # 0 is the final value of mask annealing: attention is not masked.
    return UniversalPeer(ours, peer)


def make_depth_estimator(ours: Any) -> Peer:
    """Return DPT with the same shape and neck as our model."""
    config = transformers.DPTConfig(
        **shape_of(ours.config),
        neck_hidden_sizes=list(ours.options.neck_hidden_sizes),
        fusion_hidden_size=ours.options.fusion_hidden_size,
        backbone_out_indices=[block - 1 for block in ours.depth_head.out_indices],
        depth_estimation_type=ours.options.depth_estimation_type,
        max_depth=ours.options.max_depth,
        is_hybrid=False,
    )
    peer = transformers.DPTForDepthEstimation(config)
    *_, last, _ = peer.head.head
    nn.init.constant_(last.bias, START_DEPTH)
    return DepthPeer(ours, peer)


def decoder_of(ours: Any) -> dict[str, Any]:
    """Return the configuration fields that the decoders of LW-DETR and RF-DETR share with our decoder."""
    options = ours.options
    return {
        "d_model": options.hidden_size,
        "decoder_layers": options.num_layers or NUM_LAYERS,
        "decoder_self_attention_heads": options.num_attention_heads,
        "decoder_cross_attention_heads": options.num_attention_heads,
        "num_queries": options.num_queries,
        "group_detr": options.num_groups,
        "num_labels": ours.config.num_labels,
    }


def make_detector(ours: Any) -> Peer:
    """Return LW-DETR with the same width, depth, queries, groups and decoder layers as our model."""
    shape, options = shape_of(ours.config), ours.options
    blocks = ours.config.num_hidden_layers
    whole = ours.config.global_attention_layers
    windows = round((to_pair(ours.config.image_size)[0] / shape["patch_size"]) / (ours.config.window_size or 1e9))
    backbone = transformers.LwDetrViTConfig(
        **{name: value for name, value in shape.items() if name != "intermediate_size"},
        mlp_ratio=ours.config.intermediate_size // ours.config.hidden_size,
        num_windows=max(1, windows) ** 2,
        window_block_indices=[block for block in range(blocks) if whole is not None and block not in whole],
        out_indices=[index - 1 for index in options.out_indices or [blocks // 2, blocks]],
    )
    config = transformers.LwDetrConfig(
        backbone_config=backbone,
        projector_scale_factors=[float(factor) for factor in options.scale_factors],
        **decoder_of(ours),
    )
    return DetectionPeer(ours, transformers.LwDetrForObjectDetection(config))


def make_pose_estimator(ours: Any) -> Peer:
    """Return ViTPose of the same shape as our model, with the classic decoder. Patches must exceed 4 pixels."""
    shape = shape_of(ours.config)
    patch, size = (to_pair(value) for value in (shape.pop("patch_size"), shape.pop("image_size")))
    shape["mlp_ratio"] = shape.pop("intermediate_size") // shape["hidden_size"]
    blocks = {"out_indices": [shape["num_hidden_layers"]]}
    backbone = transformers.VitPoseBackboneConfig(**shape, **blocks, patch_size=list(patch), image_size=list(size))
    config = transformers.VitPoseConfig(
        backbone_config=backbone, num_labels=ours.config.num_labels, use_simple_decoder=False
    )
    return KeypointPeer(ours, transformers.VitPoseForPoseEstimation(config))


class LinearSegmenter(Peer):
    """Peer for semantic segmentation: batch norm and a linear layer on the patch tokens of a backbone."""

    def __init__(self, ours: Any, backbone: transformers.PreTrainedModel) -> None:
        super().__init__(ours, backbone)
        self.norm = nn.BatchNorm2d(ours.config.hidden_size)
        self.classifier = nn.Conv2d(ours.config.hidden_size, ours.config.num_labels, 1)

    def forward(self, pixel_values: Tensor, labels: Any = None, **inputs: Any) -> Any:
        """Run the model and return logits of the size of the patch grid."""
        logits = self.classifier(self.norm(self.peer(pixel_values).feature_maps[-1]))
        loss = None
        if labels is not None:
            enlarged = F.interpolate(logits, labels.shape[-2:], mode="bilinear", align_corners=False)
            loss = F.cross_entropy(enlarged, labels, ignore_index=255)
        return transformers.modeling_outputs.SemanticSegmenterOutput(loss=loss, logits=logits)


def open_classifier(ours: Any, name: str) -> Peer:
    """Return `Dinov2ForImageClassification` with the weights of a published encoder."""
    kind = transformers.Dinov2ForImageClassification
    return Peer(ours, kind.from_pretrained(name, num_labels=ours.config.num_labels))


def open_segmenter(ours: Any, name: str) -> Peer:
    """Return a linear segmentation head on a published encoder."""
    return LinearSegmenter(ours, transformers.Dinov2Backbone.from_pretrained(name))


def open_depth_estimator(ours: Any, name: str) -> Peer:
    """Return DPT on a published encoder, with the neck of our model."""
    options = {"out_indices": list(ours.depth_head.out_indices), "reshape_hidden_states": False}
    config = transformers.DPTConfig(
        backbone_config=transformers.Dinov2Config.from_pretrained(name, **options),
        neck_hidden_sizes=list(ours.options.neck_hidden_sizes),
        fusion_hidden_size=ours.options.fusion_hidden_size,
        depth_estimation_type=ours.options.depth_estimation_type,
        max_depth=ours.options.max_depth,
        is_hybrid=False,
    )
    peer = transformers.DPTForDepthEstimation(config)
    peer.backbone = transformers.Dinov2Backbone.from_pretrained(name, **options)
    *_, last, _ = peer.head.head
    nn.init.constant_(last.bias, START_DEPTH)
    return DepthPeer(ours, peer)


def open_detector(ours: Any, name: str) -> Peer:
    """Return RF-DETR on a published encoder without windows. Decoder width and queries are those of our model."""
    encoder = transformers.Dinov2Config.from_pretrained(name).to_dict()
    blocks = encoder["num_hidden_layers"]
    whole: dict[str, Any] = {"num_windows": 1, "out_indices": [blocks // 2, blocks], "out_features": None}
    encoder = {key: value for key, value in encoder.items() if key != "model_type"}
    config = transformers.RfDetrConfig(
        backbone_config=transformers.RfDetrDinov2Config(**{**encoder, **whole}),
        **decoder_of(ours),
    )
    peer = transformers.RfDetrForObjectDetection(config)
    weights = transformers.AutoModel.from_pretrained(name).state_dict()
    lacking, unknown = peer.model.backbone.backbone.load_state_dict(weights, strict=False)
    assert not [*lacking, *unknown]
    return DetectionPeer(ours, peer)


OPEN_PEER: dict[str, Callable[[Any, str], Peer]] = {
    "image_classification": open_classifier,
    "semantic_segmentation": open_segmenter,
    "depth_estimation": open_depth_estimator,
    "object_detection": open_detector,
}
MAKE_PEER: dict[str, Callable[[Any], Peer]] = {
    "image_classification": make_classifier,
    "semantic_segmentation": make_segmenter,
    "universal_segmentation": make_universal_segmenter,
    "depth_estimation": make_depth_estimator,
    "object_detection": make_detector,
    "keypoint_detection": make_pose_estimator,
}
CHOOSES = {  # evaluation score by which the learning rate is selected
    "image_classification": "accuracy",
    "semantic_segmentation": "mean_iou",
    "universal_segmentation": "pq",
    "depth_estimation": "abs_rel",
    "object_detection": "map",
    "keypoint_detection": "nme",
}
START_DEPTH = 1.0  # initial depth of DPT in meters; near 0, the gradient of its last ReLU can vanish
SQUEEZED = {"universal_segmentation", "depth_estimation"}  # tasks whose peers require all images to have the same size


def parse_recipe(args: Arguments, seed: int, folder: str) -> Run:
    """Return our training run, with only those options that apply to the peer."""
    recipe = read_recipe(Path(args.training) / "recipe.yaml")
    kept = {name: value for name, value in recipe.items() if name not in OWN_OPTIONS}
    shape = {"keep_aspect_ratio": False} if args.task in SQUEEZED else {}
    kept |= {"seed": seed, "output_dir": folder, "eval_strategy": "no", "report_to": "none", **shape}
    return Run(*tasks.TASKS[args.task.replace("_", "-")].from_options(kept))


def train_model(
    model: nn.Module, trainer: training.HfViTTrainer, rate: float, seconds: float, length: int | None
) -> int:
    """Train a model on the data of a trainer for a number of seconds or steps; return the number of steps."""
    args = trainer.args
    loader = DataLoader(
        trainer.train_dataset,
        args.train_batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=trainer.data_collator,
        num_workers=args.dataloader_num_workers,
    )
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim <= 1]
    decayed = {"params": matrices, "weight_decay": trainer.args.weight_decay}
    optimizer = torch.optim.AdamW([decayed, {"params": others, "weight_decay": 0.0}], lr=rate)

    def batches() -> Iterator[Any]:
        for epoch in range(10**6):
            if isinstance(trainer.train_dataset, AugmentedDataset):
                trainer.train_dataset.set_epoch(epoch)
            yield from loader

    model.train()
    start, steps = time.perf_counter(), 0
    for batch in batches():
        share = steps / length if length else (time.perf_counter() - start) / seconds
        if share >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate * min(share / 0.1, 0.5 + 0.5 * math.cos(math.pi * max(0.0, (share - 0.1) / 0.9)))
        with torch.autocast(args.device.type, torch.bfloat16, enabled=args.bf16):
            loss = model(**trainer._prepare_inputs(batch)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    model.eval()
    return steps


def train_peer(args: Arguments, rate: float, seed: int, seconds: float) -> dict[str, float]:
    """Train a peer and return the scores, number of steps and number of parameters of the peer."""
    with tempfile.TemporaryDirectory() as folder:
        run = open_run(parse_recipe(args, seed, folder))
        transformers.set_seed(seed)
        run = build_run(run)
        trainer, name = run.trainer, run.task.options.model_name_or_path
        peer = MAKE_PEER[args.task](trainer.model) if name is None else OPEN_PEER[args.task](trainer.model, name)
        peer.to(trainer.args.device)
        steps = train_model(peer, trainer, rate, seconds, args.steps)
        with replaced(trainer, model=peer, model_wrapped=peer):
            scores, *_ = evaluate_run(run, run.data.evaluated_split)
    size = sum(weight.numel() for weight in peer.parameters())
    return {**scores, "steps": steps, "parameters": size}


def main(args: Arguments) -> None:
    """Train the peer with each learning rate, then with each seed, and print a row for each run."""
    run = describe_run(args, transformers)
    ours = json.loads((Path(args.training) / "train_results.json").read_text())
    seconds = args.seconds or float(ours["train_runtime"])
    name, found = CHOOSES[args.task], dict[tuple[float, int], dict[str, float]]()
    rates = args.learning_rates
    for seed in args.seeds:
        for rate in rates:
            found[rate, seed] = scores = train_peer(args, rate, seed, seconds)
            if len(found) == 1:
                print_header("learning rate", "seed", *scores)
            print_row(f"{rate:g}", seed, *scores.values())
        sign = -1 if name in LOWER_IS_BETTER else 1
        rates = sorted(rates, key=lambda rate: sign * found[rate, args.seeds[0]][name])[-1:]
    chosen = [found[rates[0], seed] for seed in args.seeds]
    print_row(f"{rates[0]:g}", "mean", *(mean(scores[name] for scores in chosen) for name in chosen[0]))
    rows = [{"learning_rate": rate, "seed": seed, **scores} for (rate, seed), scores in found.items()]
    save({**run, "seconds": seconds, "rows": rows}, args.output)
