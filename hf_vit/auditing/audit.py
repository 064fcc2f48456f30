"""Find wrong labels, copies, unusual and bad images of a dataset, and write an HTML page and a table.

Without a model, the command finds identical and nearly identical images within and across splits, broken, dark and
tiny images, and the class balance. An encoder adds wrong class labels and images unlike the rest. A detector or
segmenter of hf-vit adds wrong boxes or masks; it must have been trained on other images.

Examples:
    hf-vit audit photos
    hf-vit audit photos --model facebook/dinov2-small --write photos-cleaned
    hf-vit audit cells --model outputs/cells-trained-on-other-images
"""

# Shapes: N images of all splits, D size of a feature

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import torch
from datasets import Dataset

from ..data import load_unlabeled_images
from ..data.reading.files import joined
from ..data.shards import open_processes
from ..extras import check_packages
from ..features.extraction import extract_all
from ..features.near_duplicates import find_near_duplicates
from ..options.field import COUNT
from ..outputs import check_outputs, check_writable, file_name, record_outputs
from .audit_result import TEXTS, Audit, write_cleaned, write_page
from .dense_audit import check_dense_labels, open_dense
from .image_checks import outlier_scores, quality_scores, read_facts
from .label_quality import LABEL_CUT, LEAST_IMAGES, find_label_issues, out_of_sample_probabilities


PAGE, TABLE = "audit.html", "issues.parquet"


def audit(
    data: str | os.PathLike[str],
    model: str | os.PathLike[str] | None = None,
    *,
    output_dir: Path | str | None = None,
    write: Path | str | None = None,
    label_column_name: str | None = None,
    batch_size: Annotated[int, COUNT] = 32,
    use_cpu: bool = False,
    overwrite: bool = False,
    report: Callable[[str], None] = print,
) -> Dataset:
    """Search a dataset for wrong labels, copies and bad images. Equivalent to `hf-vit audit`.

    Args:
        data: Folder, file, or name on the Hub of a dataset with or without labels.
        model: Saved or published model. An encoder finds wrong classes, unusual images and more near duplicates. A
            detector or segmenter of this package finds wrong boxes or masks of data on which it was not trained.
        output_dir: Folder for audit.html, issues.parquet and the image features, by default outputs/audit-DATA. The
            same command resumes an interrupted extraction of features.
        write: New folder for a list of the images without the broken ones, and without training images that have
            suspicious labels or are copies. hf-vit train reads it.
        label_column_name: Column of class labels; by default found by type or name.
        batch_size: Number of images per forward pass of the model.
        use_cpu: Run on the CPU.
        overwrite: Replace the files of an earlier audit.
        report: Function that receives progress messages.

    Returns:
        The table of issues: a row for each image with its file, split, label, issues, and a score for each kind.

    Raises:
        OSError: if the data or the model is missing, or the output cannot be written.
        ValueError: if there are no images, the data is invalid, or an existing file may not be replaced.
        ImportError: if scikit-learn or scipy is missing.
    """
    check_packages("An audit", "sklearn", "scipy")
    data, model = os.fspath(data), "" if model is None else os.fspath(model)
    folder = Path(output_dir or f"outputs/audit-{file_name(data)}")
    check_writable(folder)
    check_outputs([folder / PAGE, folder / TABLE], overwrite=overwrite)
    cleaned = None if write is None else Path(write)
    if cleaned is not None and cleaned.exists():
        raise ValueError(f"{cleaned} exists. Choose a new folder for --write.")
    dense = open_dense(data, model, str(folder)) if model else None
    splits = dense[1].splits if dense else load_unlabeled_images([data], label_column_name=label_column_name)
    found = Audit(data, model, splits)
    facts = _check_images(found)
    options = {"batch_size": batch_size, "use_cpu": use_cpu}
    features = extract_all(splits, data, model, folder / "features", **options) if model else None
    groups = _compare_images(found, facts, features)
    if dense is not None:
        check_dense_labels(found, *dense, open_processes(use_cpu).device)
    elif features is not None:
        _check_classes(found, features, groups)
    table = _save(found, folder, report)
    if cleaned is not None:
        _save_cleaned(found, cleaned, dense[1].names if dense else (), report)
    return table


def _check_images(found: Audit) -> pd.DataFrame:
    """Read all images, find broken, dark, blank and tiny ones, and count classes. Return the facts of all images."""
    facts = read_facts(found.encoded)
    if (facts["fault"] != "").all():
        raise ValueError(f"None of the {len(facts):,} images of {found.data} can be read: {facts['fault'][0]}")
    for kind, (scores, flags) in quality_scores(facts).items():
        found.scores[kind], found.found[kind] = scores, flags
    for image, fault in zip(found.images, facts["fault"], strict=True):
        image.text = fault
        if image.label is not None:
            found.counts[image.label][image.split] += 1
    return facts


def _compare_images(found: Audit, facts: pd.DataFrame, features: np.ndarray | None) -> np.ndarray:
    """Find copies and, given features (N, D), images unlike the rest.

    Return the number of the image (N,) that is kept of the copies of each image, its own number without copies.
    """
    readable = np.flatnonzero(facts["fault"] == "")
    _, first, checksum = np.unique(facts["checksum"][readable].to_list(), return_index=True, return_inverse=True)
    distinct = readable[first]  # one image of each checksum
    exact = np.stack([readable, distinct[checksum]], axis=1)
    thumbnails = torch.from_numpy(np.stack(facts["thumbnail"][distinct].to_list())).float()
    vectors = None if features is None else torch.from_numpy(features[distinct])
    pairs, similarity = find_near_duplicates(thumbnails, vectors)
    near = distinct[pairs.numpy()].reshape(-1, 2)
    # The first image of a group is kept: an evaluated image, if there is one.
    order = np.argsort([image.split == "train" for image in found.images], kind="stable")
    original, groups = _first_of_group(exact, order), _first_of_group(np.concatenate([exact, near]), order)
    numbers, score = np.arange(len(facts)), np.zeros(len(facts))
    is_exact = original != numbers
    for number in np.flatnonzero(is_exact).tolist():
        found.images[number].copy_of = int(original[number])
    for pair, value in zip(near.tolist(), similarity.tolist(), strict=True):
        for own, other in (pair, pair[::-1]):
            if value > score[own]:
                score[own] = value
                found.images[own].copy_of = int(original[own]) if is_exact[own] else other
    found.scores["duplicate"], found.found["duplicate"] = is_exact.astype(float), is_exact
    found.scores["near_duplicate"], found.found["near_duplicate"] = score, (groups != numbers) & ~is_exact
    if features is None:
        found.notes.append("Not checked without --model: wrong labels and images unlike the rest.")
    else:
        found.scores["outlier"], found.found["outlier"] = outlier_scores(features, groups)
    return groups


def _first_of_group(links: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return the image (N,) that is first in `order` (N,) among all images that are linked, given pairs (P, 2)."""
    from scipy.sparse import coo_array  # imported lazily: scipy is optional
    from scipy.sparse.csgraph import connected_components

    graph = coo_array((np.ones(len(links)), links.T), shape=(len(order), len(order)))
    _, group = connected_components(graph, directed=False)
    _, start = np.unique(group[order], return_index=True)
    first: np.ndarray = order[start][group]
    return first


def _check_classes(found: Audit, features: np.ndarray, groups: np.ndarray) -> None:
    """Check the class labels, given features (N, D) and group numbers (N,) that are equal for copies."""
    labels = pd.Series([image.label for image in found.images], dtype=object)
    labels = labels[labels.notna() & ~np.isnan(features).any(axis=1)]
    counts = labels.value_counts().sort_index()
    names = [*counts.index[counts >= LEAST_IMAGES]]
    if small := [*counts.index[counts < LEAST_IMAGES]]:
        found.notes.append(f"Not checked: labels of classes with a single image: {joined(small)}.")
    if len(names) < 2:
        state = f"all labels are {names[0]!r}" if names else "there are no class labels"
        found.notes.append(f"Not checked: wrong labels, because {state}. For boxes or masks, give a trained --model.")
        return
    checked = labels[labels.isin(names)]
    numbers, images = pd.Categorical(checked, names).codes.astype(int), checked.index.to_numpy()
    probabilities = out_of_sample_probabilities(features[images], numbers, groups[images])
    scores = np.full(len(features), np.nan)
    scores[images], suggestions = find_label_issues(probabilities, numbers)
    found.scores["wrong_label"], found.found["wrong_label"] = scores, np.nan_to_num(scores) > LABEL_CUT
    for image, suggestion in zip(images.tolist(), suggestions.tolist(), strict=True):
        found.images[image].suggestion = names[suggestion]
    accuracy = float((probabilities.argmax(axis=1) == numbers).mean())
    found.notes.append(
        f"The probe on the features agrees with {accuracy:.1%} of the labels. The lower this share, the more right "
        "labels are reported as wrong: look at them before you remove any."
    )


def _save(found: Audit, folder: Path, report: Callable[[str], None]) -> Dataset:
    """Write the page and the table of an audit, report its results, and return the table."""
    table = found.table()
    folder.mkdir(parents=True, exist_ok=True)
    write_page(found, folder / PAGE)
    table.to_parquet(str(folder / TABLE))
    record_outputs([folder / PAGE, folder / TABLE])
    for kind, (title, _) in TEXTS.items():
        if kind in found.scores:
            report(f"{title}: {int(found.found[kind].sum()):,}")
    for note in found.notes:
        report(note)
    report(f"Page and table: {folder / PAGE}, {folder / TABLE}")
    return table


def _save_cleaned(found: Audit, folder: Path, names: Sequence[str], report: Callable[[str], None]) -> None:
    kept = found.kept()
    write_cleaned(found.splits, kept, folder, names)
    if not found.counts:
        report(f"The list {folder} has no targets, because there are no class labels. For boxes, give a --model.")
    report(f"Kept {int(kept.sum()):,} of {len(kept):,} images: {folder}")
