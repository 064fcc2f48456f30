"""Find near duplicates among images: copies that were resized, compressed, mirrored, cropped, or made brighter.

Candidates are nearest neighbors in thumbnails and, if available, in features of an encoder. Each candidate pair is
verified by aligning the two thumbnails and correlating their details, so that similar but different photos are not
reported.

Shapes: N images, P pairs, S side of thumbnails, D features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils import logging


SIDE = 32  # side of thumbnails in pixels
SIMILAR = 0.82  # correlation of the details of aligned thumbnails above which a pair counts as near duplicates
NUM_CANDIDATES = 4  # number of nearest neighbors that are verified, in thumbnails, mirrored thumbnails and features
LEAST_COARSE = 0.6  # minimum correlation of blurred thumbnails before alignment; candidates below are skipped
LEAST_FEATURES = 0.4  # minimum cosine similarity of centered features; two skirts of the same cut are below it
LEAST_REFINED = 0.5  # minimum correlation of details after the first alignment; other pairs are not refined
NUM_STEPS, STEP_SIZE = 20, 0.02  # steps of the alignment, and their size relative to half the side
LEAST_CONTRAST = 4.0  # contrast in gray levels that is added, so that noise is not amplified
CHUNK_SIZE = 1024  # number of rows or pairs that are processed together


def find_near_duplicates(thumbnails: Tensor, features: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return pairs of near duplicates.

    Args:
        thumbnails: (N, S, S) float brightness of the images, resized to a square.
        features: (N, D) features of the images, which find further candidates; NaN for unknown features.

    Returns:
        Indices (P, 2) of the images of each pair, and the correlation (P,) of their details in [`SIMILAR`, 1].
    """
    vectors = None if features is None else F.normalize(features - features.nanmean(dim=0), dim=1).nan_to_num()
    coarse, mirrored = (_normalized(_blurred(images, 2)) for images in (thumbnails, thumbnails.flip(-1)))
    found = [_neighbors(coarse, coarse), _neighbors(mirrored, coarse)]
    if vectors is not None:
        found.append(_neighbors(vectors, vectors))
    pairs = torch.cat(found).sort(dim=1).values.unique(dim=0)  # (P, 2)
    first, second = pairs.T
    reach = torch.maximum((coarse[first] * coarse[second]).sum(1), (mirrored[first] * coarse[second]).sum(1))
    is_close = reach > LEAST_COARSE
    if vectors is not None:
        is_close &= (vectors[first] * vectors[second]).sum(1) > LEAST_FEATURES
    pairs = pairs[is_close]
    scores = [torch.zeros(0)]
    for chunk in logging.tqdm(pairs.split(CHUNK_SIZE) if len(pairs) else (), desc=f"Comparing {len(pairs):,} pairs"):
        left, right = thumbnails[chunk[:, 0]], thumbnails[chunk[:, 1]]
        # A copy may be a crop of either image, and may be mirrored.
        options = [(left, right), (right, left), (left.flip(-1), right), (right.flip(-1), left)]
        scores.append(torch.stack([aligned_correlation(*option) for option in options]).amax(dim=0))
    score = torch.cat(scores)
    return pairs[score >= SIMILAR], score[score >= SIMILAR]


def _neighbors(queries: Tensor, vectors: Tensor) -> Tensor:
    """Return pairs (P, 2) of each row of `queries` (N, D) and its nearest other rows of `vectors` (N, D)."""
    pairs = []
    for rows in torch.arange(len(queries)).split(CHUNK_SIZE):
        similarity = queries[rows] @ vectors.T  # (n, N)
        similarity[torch.arange(len(rows)), rows] = -torch.inf
        nearest = similarity.topk(min(NUM_CANDIDATES, len(vectors) - 1), dim=1).indices
        pairs.append(torch.stack([rows[:, None].expand_as(nearest), nearest], dim=-1).flatten(0, 1))
    return torch.cat(pairs)


def aligned_correlation(moving: Tensor, fixed: Tensor) -> Tensor:
    """Return the correlation (P,) of the details of `fixed` and of the best matching crop of `moving`, (P, S, S).

    The crop is found by gradient steps that maximize the correlation, at half the resolution first. It has any
    position, and at least 3/4 of the width and height.
    """
    moves = _align(F.avg_pool2d(moving, 2), F.avg_pool2d(fixed, 2), torch.zeros(len(moving), 4), NUM_STEPS)
    score = _correlation(moving, fixed, moves)
    (close,) = (score > LEAST_REFINED).nonzero(as_tuple=True)
    if len(close):
        moves = _align(moving[close], fixed[close], moves[close], NUM_STEPS)
        score[close] = torch.maximum(score[close], _correlation(moving[close], fixed[close], moves))
    return score


def _align(moving: Tensor, fixed: Tensor, start: Tensor, num_steps: int) -> Tensor:
    """Return the size and position (P, 4) of the crops of `moving` that match `fixed`, given initial values."""
    moves, images, target = start.clone().requires_grad_(), moving[:, None], _normalized(fixed)
    optimizer = torch.optim.Adam([moves], lr=STEP_SIZE)
    with torch.enable_grad():
        for _ in range(num_steps):
            optimizer.zero_grad()
            (-_normalized(_crops(images, moves)) * target).sum().backward()
            optimizer.step()
    return moves.detach()


def _correlation(moving: Tensor, fixed: Tensor, moves: Tensor) -> Tensor:
    details = [_normalized(_details(image)) for image in (_crops(moving[:, None], moves), fixed)]
    return (details[0] * details[1]).sum(dim=1)


def _crops(images: Tensor, moves: Tensor) -> Tensor:
    """Return one crop (P, S, S) of each image (P, 1, S, S), for the moves (P, 4) of size and position."""
    size, shift = 1 - moves[:, :2].clamp(-0.02, 0.25), moves[:, 2:]
    transform = torch.cat([torch.diag_embed(size), shift[:, :, None]], dim=2)  # (P, 2, 3)
    grid = F.affine_grid(transform, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)[:, 0]


def _blurred(images: Tensor, radius: int) -> Tensor:
    side = 2 * radius + 1
    return F.avg_pool2d(F.pad(images[:, None], [radius] * 4, mode="replicate"), side, stride=1)[:, 0]


def _details(images: Tensor) -> Tensor:
    """Return images (N, S, S) minus their local mean, divided by their local contrast.

    Without the division, outlines would dominate, and two black skirts on white would be near duplicates.
    """
    details = images - _blurred(images, 3)
    return details / (_blurred(details**2, 3).sqrt() + LEAST_CONTRAST)


def _normalized(images: Tensor) -> Tensor:
    """Return vectors (N, S * S) of zero mean and unit length, whose dot product is a correlation."""
    flat = images.flatten(1)
    return F.normalize(flat - flat.mean(dim=1, keepdim=True), dim=1)
