"""Keypoint detection: heads, encoding and decoding of heatmaps, loss, model and pipeline.

Shapes: B batch, C channels, H W pixels, h w patch grid, L tokens, D hidden size, K keypoints, s resolution
of heatmaps relative to the patch grid, h' = s·h, w' = s·w, N objects.
"""

import math
from collections.abc import Mapping, Sequence
from types import GeneratorType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import BatchFeature
from transformers.models.vitpose.modeling_vitpose import VitPoseEstimatorOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple, logging

from .configuration_hf_vit import HfViTConfig, to_pair
from .embeddings import image_grids
from .image_targets import read_object_boxes
from .large_images import check_tiles
from .layers import HfViTHeadConv2d, HfViTHeadConvTranspose2d, HfViTNamedHead, make_map_norm
from .modeling_hf_vit import HfViTForDensePrediction, HfViTModel
from .nested_options import check_thresholds
from .pipeline_hf_vit import CORNERS, BatchedImagePipeline, ModelInput, check_on_error
from .shared import can_read_values, in_float32, run_unpadded, to_float32_or_higher, upsample_mask
from .task_configurations import HfViTKeypointConfig


logger = logging.get_logger(__name__)
# Minimum area of objects, relative to the image, for which a whole image resembles the crops of training
MIN_OBJECT_SHARE = 0.5
# Parameters of heatmap decoding, as in DARK (https://arxiv.org/abs/1910.06278)
BLUR_SIGMA, BLUR_RADIUS = 0.8, 5
LOWEST, HIGHEST = 0.001, 50.0  # Limits to which heatmap values are clamped before the logarithm.
BORDER = 3  # Width in pixels of the heatmap border where the blur is affected by padding.
FARTHEST = 2.0  # Maximum distance in heatmap pixels by which refinement may move the position of the maximum.
REACH = 3  # Number of standard deviations beyond which a Gaussian is treated as 0.


class HfViTKeypointPredictor(HfViTHeadConv2d):
    """Last convolution of a keypoint head, initialized near zero, because heatmaps are zero almost everywhere."""

    # The standard deviation is 0.001, as in ViTPose. Larger initial outputs slow down the first hundreds of steps.
    initial_limit = 0.001 * math.sqrt(3)


class HfViTSimpleKeypointHead(nn.Module):
    """Keypoint head with bilinear upsampling and one convolution."""

    def __init__(self, config: HfViTConfig, options: HfViTKeypointConfig) -> None:
        super().__init__()
        self.scale_factor = options.scale_factor
        self.predictor = HfViTKeypointPredictor(config.hidden_size, config.num_labels, kernel_size=3, padding=1)

    def forward(self, maps: Tensor, mask: Tensor | None = None) -> Tensor:
        """Maps features (B, D, h, w) to heatmaps (B, K, s·h, s·w); `mask` (B, h, w) is False for padding."""
        return run_unpadded(self.predict, mask, maps)

    def predict(self, maps: Tensor) -> Tensor:
        """Maps features (B, D, h, w) without padding to heatmaps (B, K, s·h, s·w)."""
        maps = F.interpolate(maps.relu(), scale_factor=self.scale_factor, mode="bilinear", align_corners=False)
        return self.predictor(maps)


class HfViTDeconvolution(nn.Module):
    """Doubles the resolution by a transposed convolution, a norm ("batch" or "instance") and ReLU."""

    def __init__(self, in_size: int, out_size: int, norm: str) -> None:
        super().__init__()
        self.conv = HfViTHeadConvTranspose2d(in_size, out_size, kernel_size=4, stride=2, padding=1, bias=False)
        self.norm = make_map_norm(norm, out_size)

    def forward(self, maps: Tensor, mask: Tensor | None = None) -> Tensor:
        """Maps features (B, C, h, w) to features (B, C', 2·h, 2·w); `mask` (B, h, w) is False for padding."""
        return self.norm(run_unpadded(self.conv, mask, maps), upsample_mask(mask)).relu()


class HfViTClassicKeypointHead(nn.Module):
    """Keypoint head with two transposed convolutions, which each double the resolution."""

    def __init__(self, config: HfViTConfig, options: HfViTKeypointConfig) -> None:
        super().__init__()
        size, norm = options.hidden_size, options.norm
        self.up1 = HfViTDeconvolution(config.hidden_size, size, norm)
        self.up2 = HfViTDeconvolution(size, size, norm)
        self.predictor = HfViTKeypointPredictor(size, config.num_labels, kernel_size=1)

    def forward(self, maps: Tensor, mask: Tensor | None = None) -> Tensor:
        """Maps features (B, D, h, w) to heatmaps (B, K, 4·h, 4·w); `mask` (B, h, w) is False for padding."""
        maps = self.up1(maps, mask)  # (B, C, 2·h, 2·w)
        return self.predictor(self.up2(maps, upsample_mask(mask)))


HEADS = {"classic": HfViTClassicKeypointHead, "simple": HfViTSimpleKeypointHead}


class HfViTKeypointHead(HfViTNamedHead):
    """Keypoint head of the type that `options.head` selects."""

    def __init__(self, config: HfViTConfig, options: HfViTKeypointConfig) -> None:
        count = config.num_labels
        for name in ("flip_pairs", "skeleton"):
            if unknown := [list(pair) for pair in vars(options)[name] if max(pair) >= count]:
                raise ValueError(
                    f"{name} has {unknown[0]}, but num_labels={count} keypoints have the indices 0 to {count - 1}. "
                    f"Change {name} in keypoint_config, or num_labels."
                )
        if options.oks_sigmas is not None and len(options.oks_sigmas) != count:
            raise ValueError(
                f"oks_sigmas has {len(options.oks_sigmas)} numbers, but there are num_labels={count} keypoints. "
                "Set one number per keypoint."
            )
        super().__init__(options.head, HEADS[options.head](config, options))


def encode_keypoints(
    keypoints: Tensor, image_size: tuple[int, int], heatmap_size: tuple[int, int], sigma: float
) -> tuple[Tensor, Tensor]:
    """Encodes keypoints as target heatmaps with a Gaussian of maximum 1, centered with subpixel precision.

    Args:
        keypoints: x and y in image pixels, and visibility (B, K, 3), which is 0 for keypoints that are not labeled.
        image_size: Height and width of the image.
        heatmap_size: Height and width of the heatmaps.
        sigma: Standard deviation of the Gaussians in heatmap pixels.

    Returns:
        Heatmaps (B, K, *heatmap_size), and a mask (B, K) that is True for labeled keypoints whose Gaussian overlaps
        the image.
    """
    sizes = [heatmap_size[1], heatmap_size[0]]  # in the order of x and y
    scales = [(there - 1) / max(here - 1, 1) for there, here in zip(sizes, reversed(image_size), strict=True)]
    places = keypoints[..., :2] * keypoints.new_tensor(scales)  # (B, K, 2)
    last = places.new_tensor(sizes) - 1
    reach = REACH * sigma
    counts = (keypoints[..., 2] > 0) & ((places >= -reach) & (places <= last + reach)).all(dim=-1)  # (B, K)
    x, y = (
        torch.exp(-((torch.arange(size, device=places.device) - place[..., None]) ** 2) / (2 * sigma**2))
        for size, place in zip(sizes, places.where(counts[..., None], 0).unbind(dim=-1), strict=True)
    )  # (B, K, w'), (B, K, h')
    return y[..., :, None] * x[..., None, :] * counts[..., None, None], counts


@in_float32
def keypoint_loss(
    heatmaps: Tensor,
    labels: Tensor,
    image_size: tuple[int, int],
    options: HfViTKeypointConfig,
    mask: Tensor | None = None,
    num_images: Tensor | int | None = None,
) -> Tensor:
    """Returns the sum of the image losses, divided by `num_images`, by default the batch size.

    If each part of a global batch is passed with the total number of images, the losses add up to the batch loss. The
    loss of an image is the mean squared error of its heatmaps, averaged over keypoints. The error is 0 for keypoints
    that are unlabeled or too far outside the image.

    `heatmaps` are (B, K, h', w'). `labels` (B, K, 3) are x and y in image pixels and visibility (0 not labeled, 1
    hidden, 2 visible), checked only on the CPU. `mask` (B, h, w) is False for padding.
    """
    check_labels(heatmaps, labels)
    labels = labels.to(heatmaps.dtype)
    num_images = len(labels) if num_images is None else num_images
    if mask is None:
        return image_losses(heatmaps, labels, image_size, options).sum() / num_images
    finer, patch = heatmaps.shape[-2] // mask.shape[1], [image_size[i] // mask.shape[1 + i] for i in range(2)]
    losses = []
    for own, label, (rows, columns) in zip(heatmaps[:, None], labels[:, None], image_grids(mask), strict=True):
        own = own[:, :, : finer * rows, : finer * columns]
        losses.append(image_losses(own, label, (rows * patch[0], columns * patch[1]), options))
    return torch.cat(losses).sum() / num_images


def image_losses(
    heatmaps: Tensor, labels: Tensor, image_size: tuple[int, int], options: HfViTKeypointConfig
) -> Tensor:
    """Returns the loss (B,) of each image without padding, see `keypoint_loss`."""
    targets, counts = encode_keypoints(labels, image_size, (heatmaps.shape[-2], heatmaps.shape[-1]), options.sigma)
    return ((heatmaps - targets).square().mean(dim=(2, 3)) * counts.to(heatmaps.dtype)).mean(dim=1)


def check_labels(heatmaps: Tensor, labels: Tensor) -> None:
    """Raises `ValueError` unless labels are valid floats (B, K, 3); values are checked only on the CPU."""
    expected = (*heatmaps.shape[:2], 3)
    if labels.shape != expected or not labels.is_floating_point():
        raise ValueError(
            f"labels must be floats (batch, keypoints, 3) = {expected}, x, y and visibility, not {labels.dtype} of "
            f"shape {tuple(labels.shape)}. The image processor creates them from num_labels keypoints per object."
        )
    if not can_read_values(labels):
        return
    visibility = labels[..., 2]
    is_wrong = (visibility > 0) & ~labels.isfinite().all(dim=-1)
    is_wrong |= ~torch.isin(visibility, labels.new_tensor([0, 1, 2]))
    if is_wrong.any():
        image, keypoint = is_wrong.nonzero()[0].tolist()
        raise ValueError(
            f"Keypoint {keypoint} of image {image} is {labels[image, keypoint].tolist()}. It must be x, y in pixels "
            "and visibility: 0 (not labeled), 1 (hidden) or 2 (visible)."
        )


@torch.no_grad()
def decode_heatmaps(heatmaps: Tensor) -> tuple[Tensor, Tensor]:
    """Decodes heatmaps (B, K, h', w') to points (B, K, 2) as x and y in heatmap pixels, and scores (B, K).

    The score is the maximum of the heatmap. As in DARK (https://arxiv.org/abs/1910.06278), the position of the maximum
    is refined by one step of Newton's method on the logarithm of the blurred heatmap, which finds the center of a
    Gaussian. Near the border, the heatmap is not blurred, and derivatives are computed at the nearest inner pixel. If
    there is no peak or the step is too large, the maximum is not refined. All steps use at least float32 precision.
    """
    heatmaps = to_float32_or_higher(heatmaps)
    height, width = heatmaps.shape[-2:]
    scores, index = heatmaps.flatten(2).max(dim=2)  # (B, K)
    peak = torch.stack((index % width, index // width), dim=-1)  # (B, K, 2)
    size = torch.tensor([width, height], device=peak.device)
    is_inside = ((peak >= BORDER) & (peak < size - BORDER)).all(dim=-1)  # (B, K)
    logarithms = blur(heatmaps).where(is_inside[..., None, None], heatmaps).clamp(LOWEST, HIGHEST).log()
    center = peak.clamp_min(1).minimum(size - 2)
    step, is_peak = newton_step(around(logarithms, center))
    places = center + step
    is_peak &= ((places - peak).abs() <= FARTHEST).all(dim=-1)
    return places.where(is_peak[..., None], peak.to(places.dtype)), scores


@torch.no_grad()
def expected_distances(heatmaps: Tensor, points: Tensor) -> Tensor:
    """Returns the weighted mean distance (B, K) of all heatmap positions from `points` (B, K, 2), in heatmap pixels.

    The weights of the positions are the squared values of `heatmaps` (B, K, h', w').
    """
    height, width = (torch.arange(side, device=points.device, dtype=points.dtype) for side in heatmaps.shape[-2:])
    positions = torch.cartesian_prod(height, width).flip(-1)  # (h'·w', 2)
    weights = heatmaps.to(points.dtype).clamp_min(0).flatten(2).square()  # (B, K, h'·w')
    tiny = torch.finfo(points.dtype).tiny
    return (weights * torch.cdist(points, positions)).sum(dim=-1) / weights.sum(dim=-1).clamp_min(tiny)


def blur(heatmaps: Tensor) -> Tensor:
    """Smooths heatmaps (B, K, h', w') with a Gaussian kernel."""
    distances = torch.arange(-BLUR_RADIUS, BLUR_RADIUS + 1, device=heatmaps.device, dtype=heatmaps.dtype)
    kernel = torch.exp(-(distances**2) / (2 * BLUR_SIGMA**2))
    kernel = kernel / kernel.sum()
    maps = F.pad(heatmaps.flatten(0, 1)[:, None], [BLUR_RADIUS] * 4, mode="replicate")  # (B·K, 1, ., .)
    maps = F.conv2d(F.conv2d(maps, kernel[None, None, None]), kernel[None, None, :, None])
    return maps.view_as(heatmaps)


def around(maps: Tensor, center: Tensor) -> Tensor:
    """Returns the 3x3 neighborhoods (B, K, 3, 3) of integer points (B, K, 2) in maps, with replicated borders."""
    height, width = maps.shape[-2:]
    steps = torch.arange(-1, 2, device=center.device)
    columns = (center[..., 0, None] + steps).clamp(0, width - 1)  # (B, K, 3)
    rows = (center[..., 1, None] + steps).clamp(0, height - 1)
    index = rows[..., :, None] * width + columns[..., None, :]  # (B, K, 3, 3)
    return maps.flatten(2).gather(2, index.flatten(2)).view_as(index)


def newton_step(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the step (..., 2) in x and y from the center of values (..., 3, 3) to their peak, and a mask of peaks.

    The mask (...) is True if the second derivatives indicate a maximum.
    """
    (up_left, up, _), (left, middle, right), (_, down, down_right) = (
        row.unbind(dim=-1) for row in values.unbind(dim=-2)
    )
    slope_x, slope_y = (right - left) / 2, (down - up) / 2
    eps = torch.finfo(torch.float32).eps  # from the published code of DARK
    bend_x, bend_y = right - 2 * middle + left + eps, down - 2 * middle + up + eps
    bend_xy = (down_right - right - down + 2 * middle - left - up + up_left) / 2
    determinant = bend_x * bend_y - bend_xy**2
    is_peak = (bend_x < 0) & (determinant > 0)
    step = torch.stack((bend_xy * slope_y - bend_y * slope_x, bend_xy * slope_x - bend_x * slope_y), dim=-1)
    return step / determinant.where(is_peak, 1)[..., None], is_peak


def flip_heatmaps(heatmaps: Tensor, flip_pairs: Sequence[Sequence[int]]) -> Tensor:
    """Mirrors the heatmaps (B, K, h', w') of mirrored images back and swaps the keypoints in `flip_pairs`."""
    return heatmaps[:, mirrored_order(heatmaps.shape[1], flip_pairs)].flip(-1)


def mirrored_order(num_keypoints: int, flip_pairs: Sequence[Sequence[int]]) -> list[int]:
    """Returns the keypoint order of a mirrored image, in which the keypoints of each pair are swapped."""
    order = list(range(num_keypoints))
    for first, second in flip_pairs:
        order[first], order[second] = second, first
    return order


class HfViTKeypointDetectionOutput(VitPoseEstimatorOutput):
    """Outputs of a keypoint detection model, to pass to `post_process_keypoint_detection`.

    Args:
        loss: Scalar loss, if labels were given.
        heatmaps: Confidence (B, K, h', w') of each keypoint at each position, with a maximum of about 1.
        hidden_states: If requested, tokens (B, L, D) before the first block and after each block.
        attentions: If requested, attention weights (B, heads, L, L) of each block.
    """


class HfViTForKeypointDetection(HfViTForDensePrediction):
    """Keypoint detection model, which predicts the keypoints named in `config.id2label` for one object per image.

    The architecture is ViTPose (https://arxiv.org/abs/2204.12484). The loss is the mean over images. `HfViTTrainer`
    averages over the images of all accumulated batches of a training step; these batches may differ in size.
    """

    def __init__(self, config: HfViTConfig) -> None:
        super().__init__(config)
        if not config.num_labels:
            raise ValueError("num_labels=0 is not supported: set the number of keypoints by num_labels or id2label.")
        self.options = HfViTKeypointConfig.of(config.keypoint_config)
        self.model = HfViTModel(config, add_pooling_layer=False)
        self.keypoint_head = HfViTKeypointHead(config, self.options)
        self.post_init()

    def count_items(self, labels: Tensor) -> Tensor:
        """Returns the number of images in a batch, by which the loss of the batch is divided."""
        return torch.tensor(float(len(labels)))

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        patch_attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> HfViTKeypointDetectionOutput:
        """Runs the model.

        Args:
            pixel_values: Images (B, C, H, W), with H and W multiples of the patch size.
            labels: Keypoints (B, K, 3) as floats: x and y in pixels, with the center of pixel i at i, and visibility,
                which is 0 (not labeled), 1 (hidden) or 2 (visible).
            patch_attention_mask: Mask (B, h, w), False for padding on the right and at the bottom.
            interpolate_pos_encoding: Ignored, for compatibility; position embeddings are always interpolated.
            num_items_in_batch: Number of images by which the loss is divided, for example of all batches of a step on
                all processes. The default is the number of images of this batch.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            `HfViTKeypointDetectionOutput`. The loss is `keypoint_loss`.

        Raises:
            ValueError: If an input does not match the model; the message describes valid inputs.
        """
        outputs, (maps,), _ = self.run_encoder(
            pixel_values, [self.config.num_hidden_layers], patch_attention_mask=patch_attention_mask, **kwargs
        )
        assert pixel_values is not None  # `run_encoder` raises an error for None
        heatmaps = self.keypoint_head(maps, patch_attention_mask)
        loss = None
        if labels is not None:
            size = (pixel_values.shape[-2], pixel_values.shape[-1])
            loss = keypoint_loss(heatmaps, labels, size, self.options, patch_attention_mask, num_items_in_batch)
        return HfViTKeypointDetectionOutput(
            loss=loss, heatmaps=heatmaps, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )

    @torch.no_grad()
    def predict_flipped(
        self, pixel_values: Tensor, patch_attention_mask: Tensor | None = None
    ) -> HfViTKeypointDetectionOutput:
        """Averages the predictions for images and mirrored images. This is twice as slow and slightly more accurate.

        Args:
            pixel_values: Images (B, C, H, W).
            patch_attention_mask: Mask (B, h, w), False for padding on the right and at the bottom. With a mask, images
                are processed one by one.

        Returns:
            `heatmaps` (B, K, h', w'), the mean of both predictions.

        Raises:
            ValueError: If the model is in training mode.
        """
        if self.training:
            raise ValueError("In training mode, results are random because of dropout. Call model.eval() first.")

        def average(images: Tensor) -> Tensor:
            return (self(images, return_dict=True).heatmaps + self.mirrored_heatmaps(images)) / 2

        mask = upsample_mask(patch_attention_mask, to_pair(self.config.patch_size))  # (B, H, W)
        return HfViTKeypointDetectionOutput(heatmaps=run_unpadded(average, mask, pixel_values))

    def mirrored_heatmaps(self, pixel_values: Tensor) -> Tensor:
        """Predicts heatmaps (B, K, h', w') of images (B, C, H, W) by running the model on the mirrored images."""
        mirrored: Tensor = self(pixel_values.flip(-1), return_dict=True).heatmaps
        return flip_heatmaps(mirrored, self.options.flip_pairs)


class HfViTKeypointDetectionPipeline(BatchedImagePipeline):
    """Predicts the keypoints of objects in given boxes, or of the single object in an image.

    ```python
    pipe = pipeline("keypoint-detection", model="path/to/model", trust_remote_code=True)
    pipe("photo.jpg", boxes=[[34, 20, 180, 310]], threshold=0.3)
    ```

    `batch_size` is the number of objects per batch, which can be from several images.
    """

    task_config: ClassVar[str | None] = "keypoint_config"
    _load_processor = _load_video_processor = _load_feature_extractor = _load_tokenizer = False
    _load_image_processor = True

    def __call__(self, inputs: Any, boxes: Any = None, **kwargs: Any) -> Any:
        """Predicts keypoints.

        Args:
            inputs: One image (PIL, path, http(s) URL, base64, array or tensor), or several: a list, a dataset such as
                transformers' `KeyDataset`, or a generator. An image can also be `{"image": ..., "boxes": ...}`.
            boxes: Object boxes of an image as left, top, right and bottom in pixels, or as `{"xmin", "ymin", "xmax",
                "ymax"}` as returned by the object detection pipeline; for several images, a list of these. `None`
                stands for the whole image.
            **kwargs: `threshold`, the score above which a keypoint is returned, by default the one selected in the
                training run, if any; `flip_test=True` to average over the mirrored image, which is twice as slow;
                `timeout`, the time limit for the download of an image in seconds; and the arguments of
                `BatchedImagePipeline`.

        Returns:
            For each image a list with one entry per box: `{"keypoints": [[x, y], ...], "scores": [...], "labels":
            [names], "box": {"xmin", "ymin", "xmax", "ymax"}}` in pixels, with the center of pixel i at i. For a
            calibrated model, "expected_errors" contains the expected distance of each keypoint from its true position.
            For a list of images, the result is a list, for a dataset or generator a lazy iterator.

        Raises:
            OSError: If an image cannot be opened.
            ValueError: If boxes are invalid, or their number differs from that of images.
        """
        return super().__call__(inputs if boxes is None else _with_boxes(inputs, boxes), **kwargs)

    def _sanitize_parameters(
        self,
        threshold: float | None = None,
        flip_test: bool | None = None,
        timeout: float | None = None,
        on_error: str | None = None,
        tile_size: Any = None,
        overlap: Any = None,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        check_thresholds(threshold=threshold)
        check_tiles(tile_size, overlap, type(self.model).__name__)  # raises an error: objects are cropped already
        preprocess = ({} if timeout is None else {"timeout": timeout}) | check_on_error(on_error)
        forward = {} if flip_test is None else {"flip_test": flip_test}
        return preprocess, forward, {} if threshold is None else {"threshold": threshold}

    def read_model_inputs(
        self, image: Any, options: dict[str, Any], timeout: float | None = None, **_: Any
    ) -> list[ModelInput]:
        """Reads an image and returns the crops of its object boxes."""
        given = image if isinstance(image, Mapping) else {"image": image}
        if "image" not in given:
            raise ValueError(f"The input {dict(given)!r} has no key 'image'. Add it.")
        share, padding = self.model.options.object_share, self.image_processor.box_padding
        has_crops = padding != 1 if share is None else share < MIN_OBJECT_SHARE  # 1 is the padding of whole images
        if has_crops and given.get("boxes") is None:
            extent = "" if share is None else f" that cover {share:.0%} of their images (median)"
            logger.warning_once(
                f"Images without boxes are used as a whole, but this model was trained on crops of objects{extent}. "
                "Pass the boxes of an object detector: boxes=... in Python, --boxes of hf-vit predict."
            )
        pixels = self.image_processor.read_pixels(given["image"], options, timeout)  # (C, H, W)
        size = (pixels.shape[-2], pixels.shape[-1])
        (boxes,) = read_object_boxes([_corners(given.get("boxes"))], [size])  # (N, 4)
        crops = self.image_processor.to_model_size(pixels, options, boxes)  # each crop is (C, h, w)
        return [ModelInput(crop, size, box) for crop, box in zip(crops, boxes, strict=True)]

    def run_model(self, inputs: BatchFeature, flip_test: bool = False) -> Any:
        """Returns the outputs of the model with heatmaps (B, K, h', w'); `flip_test` averages over mirrored images."""
        return self.model.predict_flipped(**inputs) if flip_test else super().run_model(inputs)

    def decode(self, outputs: Any, parts: list[ModelInput], threshold: float | None = None) -> list[dict[str, Any]]:
        """Returns the keypoints of each object."""
        boxes = torch.stack([part.box for part in parts if part.box is not None])  # (B, 4)
        names, scale = self.model.config.id2label, self.model.calibration.applied_error_scale
        (objects,) = self.image_processor.post_process_keypoint_detection(
            outputs, [boxes], threshold=threshold, error_scale=scale
        )
        return [
            {
                "keypoints": found["keypoints"].tolist(),
                "scores": found["scores"].tolist(),
                "labels": [names[number] for number in found["labels"].tolist()],
                "box": dict(zip(CORNERS, found["box"].tolist(), strict=True)),
                **({"expected_errors": found["expected_errors"].tolist()} if scale else {}),
            }
            for found in objects
        ]

    def join_results(self, parts: list[ModelInput]) -> list[dict[str, Any]]:
        """Returns the results for all objects of an image."""
        return [part.answer for part in parts]

    def _one_by_one(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            "This pipeline has no preprocess, _forward and postprocess methods for single images. Call the pipeline "
            "instead."
        )

    # Batched processing does not call these abstract methods of `Pipeline`.
    preprocess = _forward = postprocess = _one_by_one


def _with_boxes(inputs: Any, boxes: Any) -> Any:
    """Combines each image with its boxes in a dictionary; lists stay lists, and datasets become generators."""
    if isinstance(inputs, list):
        if len(boxes) != len(inputs):
            raise ValueError(
                f"boxes has {len(boxes)} entries, but there are {len(inputs)} images. Pass one entry per image, or "
                "None for the whole image."
            )
        return [{"image": image, "boxes": own} for image, own in zip(inputs, boxes, strict=True)]
    if isinstance(inputs, Dataset | GeneratorType):
        images: Any = inputs  # torch's Dataset has no type annotation for iteration
        return ({"image": image, "boxes": own} for image, own in zip(images, boxes, strict=True))
    return {"image": inputs, "boxes": boxes}


def _corners(boxes: Any) -> Any:
    """Converts boxes with named corners, or results of an object detection pipeline, to lists of four numbers."""
    if not isinstance(boxes, list | tuple):
        return boxes
    rows = []
    for index, box in enumerate(boxes):
        if isinstance(box, Mapping) and "box" in box:
            box = box["box"]
        if isinstance(box, Mapping) and set(CORNERS) - box.keys():
            raise ValueError(f"boxes[{index}] is {dict(box)}, but must have {', '.join(CORNERS)}.")
        rows.append([box[corner] for corner in CORNERS] if isinstance(box, Mapping) else box)
    return rows
