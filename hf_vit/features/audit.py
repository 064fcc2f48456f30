"""Audit a dataset: wrong labels, copies, images unlike the rest, broken, dark and tiny images, and class balance.

N is the number of images of all splits, D the size of a feature.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, List, Value, concatenate_datasets
from PIL import Image as PILImage

from ..data import load_unlabeled_images
from ..data.formats.files import joined
from ..data.loaders.unlabeled_images import CLASS, NO_CLASS
from ..data.shards import open_processes
from ..data.targets import encoded_bytes
from ..extras import check_packages
from ..model.image_inputs import read_image
from ..options.field import COUNT
from ..outputs import check_outputs, check_writable, record_outputs
from ..training.tasks.base import Task, file_name
from .audit_page import TEXTS, write_page
from .dense_audit import check_dense_labels, open_dense
from .extraction import ExtractionArguments, extract_features
from .files import read_features
from .image_checks import ImageFacts, outlier_scores, quality_scores, read_facts
from .label_quality import LABEL_CUT, LEAST_IMAGES, find_label_issues, out_of_sample_probabilities
from .near_duplicates import find_near_duplicates


PAGE, TABLE = "audit.html", "issues.parquet"
ROWS_PER_SHARD = 256  # an interrupted extraction loses at most the features of this many images
REMOVED = ("wrong_label", "wrong_boxes", "wrong_mask", "duplicate", "near_duplicate")  # removed from "train" only


@dataclass
class Audit:
    """Result of an audit of N images.

    Args:
        data: Path or name of the dataset.
        model: Model that computed features or predictions; empty without a model.
        splits: Images of each split, and their targets.
        scores: Scores (N,) of each kind of issue, higher for worse images; NaN for images that were not checked.
        found: Whether each image (N,) has an issue of each kind.
        labels: Class name of each image; None if unknown.
        suggestions: Class name that is suggested instead of the label; empty if the label was not checked.
        copy_of: Number of the most similar copy of each image, its own number for images without copies.
        groups: Number of the image that is kept of the group of copies of each image.
        texts: Explanation of the worst issue of each image.
        pictures: Pictures of boxes and masks by number of the image.
        counts: Number of images or objects by class and split.
        notes: Sentences about checks that were not possible, and about the meaning of results.
    """

    data: str
    model: str
    splits: DatasetDict
    scores: dict[str, np.ndarray] = field(default_factory=dict)
    found: dict[str, np.ndarray] = field(default_factory=dict)
    labels: list[str | None] = field(default_factory=list)
    suggestions: list[str] = field(default_factory=list)
    copy_of: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    groups: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    texts: list[str] = field(default_factory=list)
    pictures: dict[int, PILImage.Image] = field(default_factory=dict)
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @cached_property
    def files(self) -> list[str]:
        """File name of each image."""
        return [file for rows in self.splits.values() for file in rows["file"][:]]

    @cached_property
    def split_of(self) -> list[str]:
        """Split of each image."""
        return [name for name, rows in self.splits.items() for _ in range(len(rows))]

    @cached_property
    def root(self) -> str:
        """Folder relative to which the page names files."""
        is_path = all(map(os.path.isabs, self.files))
        return os.path.commonpath([os.path.dirname(file) for file in self.files]) if is_path else os.curdir

    @cached_property
    def encoded(self) -> Dataset:
        """Encoded images of all splits."""
        images = [
            rows.select_columns("image").cast_column("image", Image(decode=False)) for rows in self.splits.values()
        ]
        return concatenate_datasets(images)

    def open(self, number: int) -> PILImage.Image | None:
        """Return an image, or None if it cannot be read."""
        if "broken" in self.found and self.found["broken"][number]:
            return None
        pixels = read_image(encoded_bytes(self.encoded[number]["image"], "image"), "it", num_channels=3)
        return PILImage.fromarray(pixels.round().byte().movedim(0, -1).numpy())

    def add(self, kind: str, scores: np.ndarray, found: np.ndarray) -> None:
        """Set the scores and flags of a kind of issue."""
        self.scores[kind], self.found[kind] = scores, found

    def table(self) -> Dataset:
        """Return the table of issues: a row for each image, with the kinds of its issues and a score for each kind."""
        kinds = [kind for kind in TEXTS if kind in self.scores]
        issues = [[kind for kind in kinds if self.found[kind][n]] for n in range(len(self.files))]
        copies = [self.files[c] if c != n else None for n, c in enumerate(self.copy_of.tolist())]
        columns = {"file": self.files, "split": self.split_of, "label": self.labels, "issues": issues}
        columns |= {"suggestion": self.suggestions, "copy_of": copies, "text": self.texts}
        texts = {name: Value("string") for name in columns} | {"issues": List(Value("string"))}
        scores = {kind: self.scores[kind].astype(np.float32) for kind in kinds}
        return Dataset.from_dict(columns | scores, Features(texts | {kind: Value("float32") for kind in kinds}))

    def kept(self) -> np.ndarray:
        """Return whether each image (N,) is kept in a cleaned dataset: broken images and bad training images are not.

        Evaluated images with suspicious labels are kept, because removing difficult images would raise the scores.
        """
        is_train = np.array([split == "train" for split in self.split_of])
        bad = [self.found[kind] for kind in REMOVED if kind in self.found]
        return ~self.found["broken"] & ~(is_train & np.any([np.zeros_like(is_train), *bad], axis=0))


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
    splits = (
        load_unlabeled_images([data], label_column_name=label_column_name) if dense is None else dense.loaded.splits
    )
    found = Audit(data, model, splits)
    facts = _check_images(found)
    options = {"batch_size": batch_size, "use_cpu": use_cpu}
    features = extract_all(splits, data, model, folder / "features", **options) if model else None
    _compare_images(found, facts, features)
    if dense is not None:
        check_dense_labels(found, dense, open_processes(use_cpu).device)
    elif features is not None:
        _check_classes(found, features)
    _save(found, folder, cleaned, dense, report)
    return found.table()


def extract_all(splits: DatasetDict, data: str, model: str, folder: Path, **options: Any) -> np.ndarray:
    """Extract features of the images of all splits, or resume. Return them (N, D), with NaN for unreadable images."""
    arguments = ExtractionArguments(
        dataset_name=[data],  # type: ignore[arg-type]
        model_name_or_path=model,
        output_dir=str(folder),
        rows_per_shard=ROWS_PER_SHARD,
        skip_unreadable=True,
        **options,
    )
    extract_features(arguments, splits)
    vectors = []
    for name, rows in splits.items():
        files, known = read_features(folder, name, "mean")
        own = np.full((len(rows), known.shape[1]), np.nan, np.float32)
        own[np.isin(rows["file"][:], files)] = known  # unreadable images have no features
        vectors.append(own)
    return np.concatenate(vectors)


def _check_images(found: Audit) -> list[ImageFacts]:
    """Read all images and find broken, dark, blank and tiny ones; set the labels. Return the facts of each image."""
    facts = [own for rows in found.splits.values() for own in read_facts(rows)]
    if all(own.fault for own in facts):
        raise ValueError(f"None of the {len(facts):,} images of {found.data} can be read: {facts[0].fault}")
    for kind, (scores, flags) in quality_scores(facts).items():
        found.add(kind, scores, flags)
    found.texts, found.suggestions = [own.fault for own in facts], [""] * len(facts)
    for name, rows in found.splits.items():
        if CLASS not in rows.column_names:
            found.labels += [None] * len(rows)
            continue
        names = rows.features[CLASS].names
        labels = [None if number == NO_CLASS else names[number] for number in rows[CLASS][:]]
        found.labels += labels
        for label, count in Counter(filter(None, labels)).items():
            found.counts.setdefault(label, Counter())[name] += count
    return facts


def _compare_images(found: Audit, facts: list[ImageFacts], features: np.ndarray | None) -> None:
    """Find copies and, given features (N, D), images unlike the rest."""
    readable = np.flatnonzero(~found.found["broken"])
    _, first, checksum = np.unique(
        [facts[n].checksum for n in readable.tolist()], return_index=True, return_inverse=True
    )
    exact = np.stack([readable, readable[first[checksum]]], axis=1)
    distinct = readable[first]  # one image of each checksum
    thumbnails = torch.from_numpy(np.stack([facts[n].thumbnail for n in distinct.tolist()])).float()
    vectors = None if features is None else torch.from_numpy(features[distinct])
    pairs, similarity = find_near_duplicates(thumbnails, vectors, show_progress=True)
    near = distinct[pairs.numpy()].reshape(-1, 2)
    # The first image of a group is kept: an evaluated image, if there is one.
    order = np.argsort([split == "train" for split in found.split_of], kind="stable")
    numbers = np.arange(len(facts))
    original, found.groups = _first_of_group(exact, order), _first_of_group(np.concatenate([exact, near]), order)
    is_exact, score, found.copy_of = original != numbers, np.zeros(len(facts)), original.copy()
    for pair, value in zip(near.tolist(), similarity.tolist(), strict=True):
        for own, other in (pair, pair[::-1]):
            if value > score[own]:
                score[own] = value
                found.copy_of[own] = original[own] if is_exact[own] else other
    found.add("duplicate", is_exact.astype(float), is_exact)
    found.add("near_duplicate", score, (found.groups != numbers) & ~is_exact)
    if features is None:
        found.notes.append("Not checked without --model: wrong labels and images unlike the rest.")
    else:
        found.add("outlier", *outlier_scores(features, found.groups))


def _first_of_group(links: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return the image (N,) that is first in `order` (N,) among all images that are linked, given pairs (P, 2)."""
    from scipy.sparse import coo_array  # imported lazily: scipy is optional
    from scipy.sparse.csgraph import connected_components

    graph = coo_array((np.ones(len(links)), links.T), shape=(len(order), len(order)))
    _, group = connected_components(graph, directed=False)
    _, start = np.unique(group[order], return_index=True)
    first: np.ndarray = order[start][group]
    return first


def _check_classes(found: Audit, features: np.ndarray) -> None:
    """Check the class labels, if there are at least two classes with enough images."""
    is_known = ~np.isnan(features).any(axis=1) & np.array([label is not None for label in found.labels])
    counts = Counter(label for label, known in zip(found.labels, is_known, strict=True) if known)
    names = sorted(str(label) for label, count in counts.items() if count >= LEAST_IMAGES)
    if small := sorted(str(label) for label, count in counts.items() if count < LEAST_IMAGES):
        found.notes.append(f"Not checked: labels of classes with a single image: {joined(small)}.")
    if len(names) < 2:
        state = f"all labels are {names[0]!r}" if names else "there are no class labels"
        found.notes.append(f"Not checked: wrong labels, because {state}. For boxes or masks, give a trained --model.")
        return
    numbers = {name: number for number, name in enumerate(names)}
    checked = np.array([n for n in np.flatnonzero(is_known).tolist() if found.labels[n] in numbers])
    labels = np.array([numbers[str(found.labels[n])] for n in checked.tolist()])
    probabilities = out_of_sample_probabilities(features[checked], labels, found.groups[checked])
    scores = np.full(len(features), np.nan)
    scores[checked], suggestions = find_label_issues(probabilities, labels)
    found.add("wrong_label", scores, np.nan_to_num(scores) > LABEL_CUT)
    for number, suggestion in zip(checked.tolist(), suggestions.tolist(), strict=True):
        found.suggestions[number] = names[suggestion]
    accuracy = float((probabilities.argmax(axis=1) == labels).mean())
    found.notes.append(
        f"The probe on the features agrees with {accuracy:.1%} of the labels. The lower this share, the more right "
        "labels are reported as wrong: look at them before you remove any."
    )


def _save(found: Audit, folder: Path, write: Path | None, task: Task | None, report: Callable[[str], None]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    table = found.table()
    write_page(found, folder / PAGE)
    table.to_parquet(str(folder / TABLE))
    record_outputs([folder / PAGE, folder / TABLE])
    for kind, (title, _) in TEXTS.items():
        if kind in found.scores:
            report(f"{title}: {int(found.found[kind].sum()):,}")
    for note in found.notes:
        report(note)
    report(f"Page and table: {folder / PAGE}, {folder / TABLE}")
    if write is not None and not found.counts:
        report(f"The list {write} has no targets, because there are no class labels. For boxes, give a --model.")
    if write is not None:
        kept = found.kept()
        write_cleaned(found.splits, kept, write, () if task is None else task.loaded.names)
        report(f"Kept {int(kept.sum()):,} of {len(kept):,} images: {write}")


def write_cleaned(splits: DatasetDict, kept: np.ndarray, folder: Path, names: Sequence[str]) -> None:
    """Write a parquet file for each split with the images that are kept, as paths if they are files.

    Args:
        splits: Images and targets.
        kept: Whether each image (N,) is kept.
        folder: New folder.
        names: Class names of boxes or masks.
    """
    folder.mkdir(parents=True)
    start = 0
    for name, rows in splits.items():
        own, start = kept[start : start + len(rows)], start + len(rows)
        rows = rows.select(np.flatnonzero(own)).remove_columns(
            [column for column in ("file", "number") if column in rows.column_names]
        )
        if CLASS in rows.column_names:
            rows = rows.rename_column(CLASS, "label")
        if "boxes" in rows.column_names:
            rows = _with_objects(rows, names)
        rows.to_parquet(str(folder / f"{name}.parquet"))
    if any("mask" in rows.column_names for rows in splits.values()):
        (folder / "classes.txt").write_text("\n".join(names) + "\n", encoding="utf-8")


def _with_objects(rows: Dataset, names: Sequence[str]) -> Dataset:
    """Return rows of images and their objects in the format of a dataset on the Hub."""
    image = rows.features["image"]
    objects = {"bbox": List(List(Value("float32"), length=4)), "category": List(ClassLabel(names=list(names)))}
    objects |= {"iscrowd": List(Value("bool"))}

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        boxes = np.array(row["boxes"], np.float32).reshape(-1, 4)
        boxes[:, 2:] -= boxes[:, :2]  # from corners to sizes
        return {"objects": {"bbox": boxes.tolist(), "category": row["class_labels"], "iscrowd": row["is_crowd"]}}

    others = [name for name in rows.column_names if name != "image"]
    features = Features({"image": Image(decode=False), "objects": objects})
    converted = rows.cast_column("image", Image(decode=False)).map(convert, remove_columns=others, features=features)
    return converted.cast_column("image", image)
