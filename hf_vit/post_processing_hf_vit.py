"""From the outputs of dense models to maps of the size of each image.

Images are handled one by one and in bands of rows, so that memory stays flat however many classes or queries there
are. Shapes: B batch, K classes, Q queries, C either of them, h w the model's output, H W the result, r rows of a band.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.image_processing_outputs import SemanticSegmentationPostProcessorOutput


# Numbers in a band of rows: 64 MB of float32
BAND_NUMEL = 2**24

SEMANTIC = {"logits": 4}
UNIVERSAL = {"class_queries_logits": 3, "masks_queries_logits": 4}
DEPTH = {"predicted_depth": 3}
MODELS = {
    "logits": "HfViTForSemanticSegmentation",
    "masks_queries_logits": "HfViTForUniversalSegmentation",
    "predicted_depth": "HfViTForDepthEstimation",
}

Sizes = Any  # list of (height, width), or a tensor (B, 2)


class HfViTPostProcessing:
    """What the image processors of both backends make of outputs."""

    label_ids_to_fuse: tuple[int, ...] | None = None

    def post_process_semantic_segmentation(
        self,
        outputs: Any,
        target_sizes: Sizes = None,
        return_segmentation_scores: bool = False,
        patch_attention_mask: Tensor | None = None,
    ) -> list[Tensor] | list[SemanticSegmentationPostProcessorOutput]:
        """Returns the class of every pixel.

        Args:
            outputs: Of a semantic model, `logits` (B, K, h, w), or a universal one, `class_queries_logits`
                (B, Q, K + 1) and `masks_queries_logits` (B, Q, h, w). They are resized before classes are compared.
            target_sizes: Height and width of each image in pixels; by default those of the outputs.
            return_segmentation_scores: Whether scores are returned too.
            patch_attention_mask: (B, rows, columns), as the image processor returns it; padding is cut off.

        Returns:
            For each image a map (H, W) int64. With scores an object with that `segmentation` and with
            `segmentation_scores` (K, H, W) float32: probabilities; of a universal model, for each class the sum over
            queries of its probability times the mask's, which is not bound to 1.

        Raises:
            ValueError: if the outputs are of another model, or the number of sizes or masks is not that of images.
        """
        is_universal = "masks_queries_logits" in outputs
        maps = _own_maps(outputs, UNIVERSAL if is_universal else SEMANTIC, patch_attention_mask)
        results: list[Any] = []
        for index, (logits, size) in enumerate(zip(maps, _sizes(target_sizes, maps), strict=True)):
            classes = _query_classes(outputs, index)[:, :-1] if is_universal else None  # (Q, K)
            scores: list[Tensor] = []
            winners: list[Tensor] = []
            for band in _bands(logits, size):  # (C, r, W)
                band = band if classes is None else torch.einsum("qk,qrw->krw", classes, band.sigmoid())
                winners.append(band.argmax(dim=0))  # (r, W)
                if return_segmentation_scores:
                    scores.append(band.softmax(dim=0) if classes is None else band)
            segmentation = torch.cat(winners)  # (H, W)
            if return_segmentation_scores:
                data = {"segmentation": segmentation, "segmentation_scores": torch.cat(scores, dim=1)}
                results.append(SemanticSegmentationPostProcessorOutput(data=data))
            else:
                results.append(segmentation)
        return results

    def post_process_depth_estimation(
        self, outputs: Any, target_sizes: Sizes = None, patch_attention_mask: Tensor | None = None
    ) -> list[dict[str, Tensor]]:
        """Returns the depth of every pixel.

        Resized by bicubic interpolation as in transformers' DPT, but never beyond what the model predicts in the
        image: where a near edge meets a far one, it would swing below zero.

        Args:
            outputs: Of a depth model, `predicted_depth` (B, h, w).
            target_sizes: Height and width of each image in pixels; by default those of the outputs.
            patch_attention_mask: (B, rows, columns), as the image processor returns it; padding is cut off.

        Returns:
            For each image `{"predicted_depth": (H, W) float32}` in the unit of the model, metres for metric depth.

        Raises:
            ValueError: if the outputs are of another model, or the number of sizes or masks is not that of images.
        """
        maps = _own_maps(outputs, DEPTH, patch_attention_mask)
        results = []
        for depth, size in zip(maps, _sizes(target_sizes, maps), strict=True):
            depth = depth.float()  # (h, w)
            low, high = depth.aminmax()
            resized = F.interpolate(depth[None, None], size=size, mode="bicubic")[0, 0]  # (H, W)
            results.append({"predicted_depth": resized.clamp(low, high)})
        return results


def _own_maps(outputs: Any, fields: dict[str, int], patch_attention_mask: Tensor | None) -> list[Tensor]:
    """Returns the last of `fields` for each image, without padding, after checking that the outputs have them all.

    Args:
        outputs: Of a model.
        fields: Names, and how many dimensions each has.
        patch_attention_mask: (B, rows, columns), or `None` where nothing is padded.
    """
    for name, dimensions in fields.items():
        if name not in outputs or outputs[name].ndim != dimensions:
            found = ", ".join(f"{key} {tuple(x.shape)}" for key, x in outputs.items() if isinstance(x, Tensor))
            raise ValueError(
                f"The outputs have no {name} with {dimensions} dimensions, but {found or 'no tensors'}. This takes "
                f"the outputs of {MODELS[[*fields][-1]]}."
            )
    maps: Tensor = outputs[[*fields][-1]]
    if patch_attention_mask is None:
        return list(maps)
    if len(patch_attention_mask) != len(maps):
        raise ValueError(
            f"patch_attention_mask is for {len(patch_attention_mask)} images, but the outputs are of {len(maps)}. "
            "Pass that of the same batch."
        )
    rows, columns = patch_attention_mask.shape[-2:]
    own = []
    for values, mask in zip(maps, patch_attention_mask, strict=True):
        height = int(mask.any(dim=1).sum()) * values.shape[-2] // rows
        width = int(mask.any(dim=0).sum()) * values.shape[-1] // columns
        own.append(values[..., :height, :width])
    return own


def _sizes(target_sizes: Sizes, maps: list[Tensor]) -> list[tuple[int, int]]:
    """Returns the height and width of each result."""
    if target_sizes is None:
        return [(values.shape[-2], values.shape[-1]) for values in maps]
    if len(target_sizes) != len(maps):
        raise ValueError(
            f"target_sizes has {len(target_sizes)} entries, but the outputs are of {len(maps)} images. Give one "
            "(height, width) an image."
        )
    return [(int(height), int(width)) for height, width in target_sizes]


def _query_classes(outputs: Any, index: int) -> Tensor:
    """Probabilities (Q, K + 1) of one image's queries; the last class stands for none."""
    logits: Tensor = outputs["class_queries_logits"][index]
    return logits.float().softmax(dim=-1)


def _bands(maps: Tensor, size: tuple[int, int]) -> Iterator[Tensor]:
    """Yields maps (C, h, w), resized bilinearly in float32, as bands (C, r, W) from top to bottom."""
    height, width = size
    rows = max(1, BAND_NUMEL // (max(1, maps.shape[0]) * width))
    # the rows between whose centres each new one lies; F.interpolate knows no part of its result
    centres = (torch.arange(height, device=maps.device) + 0.5) * (maps.shape[-2] / height) - 0.5
    centres = centres.clamp(0, maps.shape[-2] - 1)
    for band in centres.split(rows):
        above = band.long()  # (r,)
        below = (above + 1).clamp(max=maps.shape[-2] - 1)
        mixed = torch.lerp(maps[:, above].float(), maps[:, below].float(), (band - above)[:, None])  # (C, r, w)
        yield F.interpolate(mixed[None], size=(len(band), width), mode="bilinear")[0]  # (C, r, W)
