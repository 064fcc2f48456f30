"""Select the images that should be labeled next, and write them to a table and a contact sheet.

With few labels, the selected images cover the pool. With at least 10 labels per class, they are difficult to
classify. Fill the column label of selected.csv; hf-vit train image-classification reads the table.

Examples:
    hf-vit select photos facebook/dinov2-small --budget 100
    hf-vit select photos facebook/dinov2-small --labeled labeled_photos --output_dir outputs/next
"""

# Shapes: N images, D features, L labeled images

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from datasets import Dataset

from ..data import load_unlabeled_images
from ..data.loaders.unlabeled_images import CLASS, NO_CLASS
from ..extras import check_packages
from ..features.extraction import extract_all
from ..options.field import COUNT
from ..outputs import check_outputs, check_writable, file_name, record_outputs
from ..visualize.figures import arrange_pages, draw_label_tile
from .image_checks import join_images, open_picture


LIST, SHEET = "selected.csv", "selected.png"
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

    The images are those closest to the centers of clusters of features whose principal components are balanced. With
    few labels, all images are clustered, and clusters without labeled images come first, the largest first (TypiClust,
    https://arxiv.org/abs/2202.02794). With at least `LABELS_PER_CLASS` labels per class, only images are clustered
    whose predicted class changes if features are dropped (DropQuery, https://arxiv.org/abs/2401.14555).

    Args:
        features: (N, D) features of the images to select from.
        budget: Number of images to select, at most N.
        labeled: (L, D) features of images that already have a label.
        labels: (L,) class numbers of these images.
        seed: Seed of the clusters and of the dropped features.
    """
    known = np.zeros((0, features.shape[1]), np.float32) if labeled is None else labeled
    vectors, covered = np.split(_balanced(np.concatenate([features, known])), [len(features)])
    selected: list[int] = []
    if labels is not None and len(labels) >= LABELS_PER_CLASS * len(np.unique(labels)) > LABELS_PER_CLASS:
        uncertain = np.flatnonzero(_is_uncertain(features, known, labels, seed))
        selected = uncertain[_cover(vectors[uncertain], covered[:0], min(budget, len(uncertain)), seed)].tolist()
    rest = np.setdiff1d(np.arange(len(features)), selected)
    others = _cover(vectors[rest], np.concatenate([covered, vectors[selected]]), budget - len(selected), seed)
    return selected + [int(n) for n in rest[others]]


def _balanced(features: np.ndarray) -> np.ndarray:
    """Return unit vectors (N, C) of the principal components, each divided by the root of its standard deviation.

    Otherwise, few components would dominate the distances, and the clusters would not be classes.
    """
    centered = features - features.mean(axis=0)
    _, deviation, axes = np.linalg.svd(centered, full_matrices=False)
    vectors: np.ndarray = centered @ (axes / np.sqrt(deviation.clip(1e-6 * deviation[0] + 1e-12))[:, None]).T
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12)


def _cover(vectors: np.ndarray, covered: np.ndarray, budget: int, seed: int) -> list[int]:
    """Return the vectors nearest to cluster centers, starting with the largest clusters that are not covered."""
    from sklearn.cluster import KMeans  # imported lazily: scikit-learn is optional

    if not budget:
        return []
    count = min(len(covered) + budget, max(MAX_CLUSTERS, budget), len(vectors) + len(covered))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Number of distinct clusters")  # copies of images
        found = KMeans(count, n_init=1, random_state=seed).fit(np.concatenate([vectors, covered]))
    own, of_covered = np.split(found.labels_, [len(vectors)])
    distance = ((vectors - found.cluster_centers_[own]) ** 2).sum(axis=1)
    # The images of a cluster take turns in the order of their distance from its center.
    nearest = pd.Series(np.argsort(np.argsort(distance, kind="stable"))).groupby(own)
    turn = nearest.rank() + np.bincount(of_covered, minlength=count)[own]
    size = np.bincount(found.labels_)[own]
    return np.lexsort([nearest.transform("min"), -size, turn])[:budget].tolist()


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
    splits = load_unlabeled_images([pool])
    features = extract_all(splits, pool, model, folder / "features", **options)
    readable = np.flatnonzero(~np.isnan(features).any(axis=1))
    if len(readable) < budget:
        raise ValueError(f"budget={budget} exceeds the {len(readable):,} readable images of {pool}. Lower it.")
    chosen = readable[select_images(features[readable], budget, known, labels, seed)]
    rows = join_images(splits).select(chosen)
    _save(rows, folder)
    report(f"Selected {budget:,} of {len(features):,} images: {folder / LIST}, {folder / SHEET}")
    return rows["file"][:]


def _labeled_features(data: str, model: str, folder: Path, options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the features (L, D) and class numbers (L,) of labeled images."""
    splits = load_unlabeled_images([data])
    if any(CLASS not in rows.column_names for rows in splits.values()):
        raise ValueError(f"{data} has no class labels. Give --labeled class folders, or a table with labels.")
    labels = np.array([label for rows in splits.values() for label in rows[CLASS][:]])
    features = extract_all(splits, data, model, folder, **options)
    is_known = (labels != NO_CLASS) & ~np.isnan(features).any(axis=1)
    return features[is_known], labels[is_known]


def _save(rows: Dataset, folder: Path) -> None:
    """Write the list of the selected images with an empty column of labels, and a picture of the first ones."""
    shown = rows.select(range(min(len(rows), MAX_SHOWN)))
    tiles = [
        draw_label_tile(open_picture(row["image"]), f"{rank}", Path(row["file"]).name)
        for rank, row in enumerate(shown, start=1)
    ]
    arrange_pages(tiles)[0].save(folder / SHEET)
    pd.DataFrame({"file_name": rows["file"][:], "label": ""}).to_csv(folder / LIST, index=False, lineterminator="\r\n")
    record_outputs([folder / LIST, folder / SHEET])
