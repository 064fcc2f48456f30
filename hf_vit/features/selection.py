"""Select images to label next: images that cover the pool first, then images of which a linear probe is uncertain.

Shapes: N images, D features, L labeled images.
"""

import csv
import os
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from ..data import load_unlabeled_images
from ..data.loaders.unlabeled_images import CLASS, NO_CLASS
from ..extras import check_packages
from ..options.field import COUNT
from ..outputs import check_outputs, check_writable, record_outputs
from ..training.tasks.base import file_name
from ..visualize.figures import arrange_pages, draw_label_tile
from .audit import Audit, extract_all


LIST, SHEET = "selected.csv", "selected.png"
NUM_NEIGHBORS = 20  # number of neighbors whose mean distance shows how typical an image is
MAX_CLUSTERS = 500
LABELS_PER_CLASS = 10  # number of labeled images per class from which the uncertainty is used
NUM_DROPS, DROP_RATE = 3, 0.75  # number of predictions with dropped features, and the share that is dropped
STRENGTH = 0.01  # inverse regularization strength of the probe
MAX_SHOWN = 100


def select_images(
    features: np.ndarray,
    budget: int,
    labeled: np.ndarray | None = None,
    labels: np.ndarray | None = None,
    seed: int = 0,
) -> list[int]:
    """Return the numbers of the images to label next, most useful first.

    With few labels, the most typical image of each cluster is selected, in the order of cluster sizes, without
    clusters that contain labeled images (TypiClust, https://arxiv.org/abs/2202.02794). With at least
    `LABELS_PER_CLASS` labels per class, the images are selected among those whose predicted class changes if features
    are dropped: those closest to the centers of `budget` clusters (DropQuery, https://arxiv.org/abs/2401.14555).

    Args:
        features: (N, D) features of the images to select from.
        budget: Number of images to select, at most N.
        labeled: (L, D) features of images that already have a label.
        labels: (L,) class numbers of these images.
        seed: Seed of the clusters and of the dropped features.
    """
    known = np.zeros((0, features.shape[1]), np.float32) if labeled is None else labeled
    every = np.concatenate([features, known])
    every = every - every.mean(axis=0)  # The common part of all features would dominate their similarity.
    vectors, known_vectors = np.split(
        every / np.linalg.norm(every, axis=1, keepdims=True).clip(1e-12), [len(features)]
    )
    selected: list[int] = []
    if labels is not None and len(labels) >= LABELS_PER_CLASS * len(np.unique(labels)) > LABELS_PER_CLASS:
        uncertain = np.flatnonzero(_is_uncertain(features, known, labels, seed))
        if len(uncertain) > budget:
            return [int(uncertain[n]) for n in _central(vectors[uncertain], budget, seed)]
        selected = [int(n) for n in uncertain]
    rest = np.setdiff1d(np.arange(len(features)), selected)
    covered = np.concatenate([known_vectors, vectors[selected]])
    if len(selected) < budget:
        selected += [int(rest[n]) for n in _typical(vectors[rest], covered, budget - len(selected), seed)]
    return selected


def _clusters(vectors: np.ndarray, count: int, seed: int) -> Any:
    from sklearn.cluster import KMeans  # imported lazily: scikit-learn is optional

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Number of distinct clusters")  # copies of images
        return KMeans(count, n_init=1, random_state=seed).fit(vectors)


def _typical(vectors: np.ndarray, covered: np.ndarray, budget: int, seed: int) -> list[int]:
    """Return the most typical vector of each cluster, starting with the largest clusters that are not covered."""
    every = np.concatenate([vectors, covered])
    count = min(len(covered) + budget, max(MAX_CLUSTERS, budget), len(every))
    cluster = _clusters(every, count, seed).labels_
    num_covered, sizes = Counter(cluster[len(vectors) :].tolist()), Counter(cluster.tolist())
    left = {c: np.flatnonzero(cluster[: len(vectors)] == c).tolist() for c in sizes}
    selected: list[int] = []
    while len(selected) < budget:
        # The number of selected images of a cluster comes first, its size second.
        c = min((c for c in left if left[c]), key=lambda c: (num_covered[c], -sizes[c]))
        members = every[cluster == c]
        distance = 1 - vectors[left[c]] @ members.T  # includes the distance 0 of each image to itself
        nearest = np.sort(distance, axis=1)[:, 1 : NUM_NEIGHBORS + 1]
        best = left[c].pop(int(nearest.mean(axis=1).argmin()) if nearest.shape[1] else 0)
        num_covered[c] += 1
        selected.append(best)
    return selected


def _central(vectors: np.ndarray, budget: int, seed: int) -> list[int]:
    """Return the vectors that are nearest to the centers of `budget` clusters, starting with the largest cluster."""
    found = _clusters(vectors, budget, seed)
    sizes = np.bincount(found.labels_, minlength=budget)
    distance = ((vectors - found.cluster_centers_[found.labels_]) ** 2).sum(axis=1)
    order = np.argsort(distance, kind="stable")
    selected = [int(order[found.labels_[order] == c][0]) for c in np.argsort(-sizes) if sizes[c]]
    return [*selected, *(n for n in order.tolist() if n not in selected)][:budget]  # copies may leave clusters empty


def _is_uncertain(features: np.ndarray, known: np.ndarray, labels: np.ndarray, seed: int) -> np.ndarray:
    """Return for which images (N,) most predictions with dropped features differ from the prediction."""
    from sklearn.linear_model import LogisticRegression  # imported lazily: scikit-learn is optional
    from sklearn.preprocessing import StandardScaler

    scaler, random = StandardScaler().fit(known), np.random.default_rng(seed)
    probe = LogisticRegression(C=STRENGTH, max_iter=1000).fit(scaler.transform(known), labels)
    scaled = scaler.transform(features)
    answer = probe.predict(scaled)
    dropped = [probe.predict(scaled * (random.random(scaled.shape) >= DROP_RATE)) for _ in range(NUM_DROPS)]
    different: np.ndarray = np.sum([other != answer for other in dropped], axis=0)
    return different > NUM_DROPS / 2


def select(
    pool: str | os.PathLike[str],
    model: str | os.PathLike[str],
    *,
    budget: Annotated[int, COUNT] = 100,
    labeled: Path | str | None = None,
    output_dir: Path | str | None = None,
    batch_size: Annotated[int, COUNT] = 32,
    use_cpu: bool = False,
    overwrite: bool = False,
    seed: int = 0,
    report: Callable[[str], None] = print,
) -> list[str]:
    """Select the images of a pool that should be labeled next. Equivalent to `hf-vit select`.

    Args:
        pool: Folder, file, or name on the Hub of a dataset of images. Labels are ignored.
        model: Saved or published model whose encoder computes features.
        budget: Number of images to select.
        labeled: Images with class labels. The selected images differ from them and, if there are at least 10 labels
            per class, are difficult to classify.
        output_dir: Folder for selected.csv, selected.png and the image features, by default outputs/select-POOL.
        batch_size: Number of images per forward pass of the model.
        use_cpu: Run on the CPU.
        overwrite: Replace the files of an earlier selection.
        seed: Random seed.
        report: Function that receives progress messages.

    Returns:
        The files of the selected images, most useful first.

    Raises:
        OSError: if the images or the model are missing, or the output cannot be written.
        ValueError: if there are fewer images than `budget`, or an existing file may not be replaced.
        ImportError: if scikit-learn is missing.
    """
    check_packages("The selection of images", "sklearn")
    pool, model = os.fspath(pool), os.fspath(model)
    folder = Path(output_dir or f"outputs/select-{file_name(pool)}")
    check_writable(folder)
    check_outputs([folder / LIST, folder / SHEET], overwrite=overwrite)
    options = {"batch_size": batch_size, "use_cpu": use_cpu}
    known = labels = None
    if labeled is not None:
        known, labels = _labeled_features(os.fspath(labeled), model, folder / "labeled", options)
    images = Audit(pool, model, load_unlabeled_images([pool]))
    features = extract_all(images.splits, pool, model, folder / "features", **options)
    readable = np.flatnonzero(~np.isnan(features).any(axis=1))
    if len(readable) < budget:
        raise ValueError(f"budget={budget} exceeds the {len(readable):,} readable images of {pool}. Lower it.")
    chosen = readable[select_images(features[readable], budget, known, labels, seed)].tolist()
    files = [images.files[number] for number in chosen]
    _save(images, chosen, files, folder)
    report(f"Selected {budget:,} of {len(features):,} images: {folder / LIST}, {folder / SHEET}")
    return files


def _labeled_features(data: str, model: str, folder: Path, options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the features (L, D) and class numbers (L,) of labeled images."""
    splits = load_unlabeled_images([data])
    if any(CLASS not in rows.column_names for rows in splits.values()):
        raise ValueError(f"{data} has no class labels. Give --labeled class folders, or a table with labels.")
    labels = np.array([label for rows in splits.values() for label in rows[CLASS][:]])
    features = extract_all(splits, data, model, folder, **options)
    is_known = (labels != NO_CLASS) & ~np.isnan(features).any(axis=1)
    return features[is_known], labels[is_known]


def _save(images: Audit, chosen: list[int], files: list[str], folder: Path) -> None:
    """Write the list of the chosen images with an empty column of labels, and a picture of the first ones."""
    opened = [(images.open(number), Path(file).name) for number, file in zip(chosen[:MAX_SHOWN], files, strict=False)]
    shown = [(picture, name) for picture, name in opened if picture is not None]
    tiles = [draw_label_tile(picture, f"{rank + 1}", name) for rank, (picture, name) in enumerate(shown)]
    folder.mkdir(parents=True, exist_ok=True)
    arrange_pages(tiles)[0].save(folder / SHEET)
    with (folder / LIST).open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows([("file_name", "label"), *((file, "") for file in files)])
    record_outputs([folder / LIST, folder / SHEET])
