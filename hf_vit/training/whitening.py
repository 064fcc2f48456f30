"""The start of patch embeddings by the data: features of patches that are of equal size and tell of one thing each.

Shapes: M patches of an image, of E values each, D hidden size, C channels, p q patch height and width, K directions.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel


NULL_VARIANCE = 1e-6  # of a direction: less than the rounding of 8-bit pixels, so that the images do not have it
NUM_IMAGES = 256  # whose patches tell how patches are
LEAST_VARIANCE = 1e-2  # of a direction, in units of pixel values: what varies less is noise, and stays small


@torch.no_grad()
def whiten_patches(model: PreTrainedModel, images: Iterable[Tensor], seed: int) -> None:
    """Lets the patch embedding of a model from scratch start as a whitening of the patches of its images.

    Neighboring pixels are alike, so that most of what random weights make of a patch is its mean color. The principal
    directions of patches, each divided by its deviation, make details as large as colors from the first step on. A
    random rotation spreads them over all D channels; where D < E the directions of least variance are left out, and
    always those without variance, such as the colors of gray images.

    Args:
        model: Has an `HfViTModel` as its base.
        images: (C, H, W) as the model takes them, with sides that are multiples of the patch.
        seed: Of the rotation.

    Raises:
        ValueError: if there are no patches, or a pixel is infinite or NaN.

    Source: whitening as a fixed first layer is from https://arxiv.org/abs/2404.00498, after
    https://myrtle.ai/learn/how-to-train-your-resnet-8-bag-of-tricks/.
    """
    projection = model.base_model.embeddings.patch_embeddings.projection
    kernel = projection.weight.shape[2:]
    size = projection.weight[0].numel()  # E
    count, total, products = 0, torch.zeros(size, dtype=torch.float64), torch.zeros(size, size, dtype=torch.float64)
    for image in images:  # one by one: all patches at once may be gigabytes
        patches = F.unfold(image[None], kernel, stride=kernel)[0].T.to("cpu", torch.float64)  # (M, E)
        count, total, products = count + len(patches), total + patches.sum(dim=0), products + patches.T @ patches
    if not (count and products.isfinite().all()):
        found = "infinite or NaN pixels" if count else "no patches"
        raise ValueError(f"whiten_patches=True: the images have {found}. Check them, or set whiten_patches=False.")
    mean = total / count  # (E,)
    variances, directions = torch.linalg.eigh(products / count - mean.outer(mean))
    width = len(projection.weight)
    kept = min(width, int((variances > NULL_VARIANCE).sum()))  # K
    if kept == 0:
        return  # all patches are the same
    whitening = (directions / (variances + LEAST_VARIANCE).sqrt())[:, -kept:].T  # (K, E), the largest variances
    draws = torch.randn(width, kept, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rotation = torch.linalg.qr(draws).Q * (width / kept) ** 0.5  # (D, K), to channels of variance 1
    kernels = rotation @ whitening  # (D, E)
    projection.weight.copy_(kernels.view_as(projection.weight))
    if projection.bias is not None:
        projection.bias.copy_(-kernels @ mean)
