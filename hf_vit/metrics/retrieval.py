"""How well images of the same class are found by the similarity of their features."""

import torch
import torch.nn.functional as F
from torch import Tensor


def retrieval_average_precision(
    features: Tensor, classes: Tensor, gallery: Tensor, gallery_classes: Tensor, own: Tensor | None = None
) -> Tensor:
    """Looks for images of the class of each query, by cosine similarity.

    Images that are equally similar count as found at once, as in scikit-learn's `average_precision_score`.

    Args:
        features: (B, D) of the queries.
        classes: (B,) class numbers.
        gallery: (M, D) of the images among which is looked.
        gallery_classes: (M,) class numbers.
        own: (B,) index of each query in the gallery, where it is left out; None if the queries are not there.

    Returns:
        (B,) average precision in [0, 1], NaN where the gallery has no image of the class.
    """
    similarity = F.normalize(features.float(), dim=1) @ F.normalize(gallery.float(), dim=1).T  # (B, M)
    is_right = classes[:, None] == gallery_classes  # (B, M)
    if own is not None:
        queries = torch.arange(len(own), device=own.device)
        similarity[queries, own], is_right[queries, own] = -torch.inf, False
    similarity, order = similarity.sort(dim=1, descending=True)
    is_right = is_right.gather(1, order)
    # Of each image, how many are at least as similar, and how many of those are right
    found = torch.searchsorted(-similarity, -similarity, right=True)
    right = is_right.cumsum(dim=1).gather(1, found - 1)
    return (right / found * is_right).sum(dim=1) / is_right.sum(dim=1)
