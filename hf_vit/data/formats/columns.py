"""Where a dataset is, and which of its columns hold images and labels or targets."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import ClassLabel, DatasetDict, Image, Value


USUAL_NAMES = {
    "image": ("image", "img", "image_path", "path", "file", "filename", "file_name"),
    "label": ("label", "labels", "class", "category", "target", "fine_label", "coarse_label"),
    "mask": (
        "mask",
        "label",
        "labels",
        "annotation",
        "annotations",
        "segmentation",
        "segmentation_mask",
        "semantic_mask",
    ),
    "objects": ("objects", "object", "annotations", "annotation"),
    "depth": ("depth", "depth_map", "depths", "label", "labels"),
    "caption": ("caption", "captions", "text", "texts", "sentence", "sentences", "description", "descriptions"),
}


@dataclass(frozen=True)
class SourceOptions:
    """Where a dataset is, and what to take of it."""

    source: str  # path, or name on the Hub
    config_name: str | None = None  # configuration of a dataset on the Hub, or which of several sets of idx files
    revision: str | None = None  # branch, tag or commit on the Hub
    image_column: str | None = None  # column of images or of their paths, where neither type nor name say it
    target_column: str | None = None  # the same of labels, masks, depth maps, objects or captions

    @property
    def path(self) -> Path:
        """The source as a path, whether it exists or not."""
        return Path(self.source).expanduser()

    def check_no_revision(self) -> None:
        """Raises `ValueError` if a revision is asked of data that lie on disk."""
        if self.revision is not None:
            raise ValueError(
                f"dataset_revision={self.revision!r} is for datasets on the Hub, but {self.path} is here. Leave it "
                "out."
            )

    def check_no_hub_options(self) -> None:
        """Raises `ValueError` if something that is for the Hub is asked of data that lie on disk."""
        self.check_no_revision()
        if self.config_name is not None:
            raise ValueError(
                f"dataset_config_name={self.config_name!r} chooses on the Hub, but {self.path} is here. Leave it out."
            )

    def choose(self, kind: str, columns: Collection[str], where: str, by_type: Collection[str] = ()) -> str:
        """Returns the column to take: the one that was given, else the only one of the type, else of a usual name."""
        # `kind` is a key of `USUAL_NAMES`, `by_type` the columns of the right type; errors begin with `where`.
        given = self.image_column if kind == "image" else self.target_column
        option, listed = f"{kind}_column_name", ", ".join(map(repr, columns))
        if given is not None:
            if given not in columns:
                raise ValueError(f"{where} has no column {given!r}, only {listed}. Name the right one with {option}.")
            return given
        names = USUAL_NAMES[kind]
        found = list(by_type) or [column for column in columns if column.strip().lower() in names]
        if not found:
            raise ValueError(
                f"{where} has no column of a usual name ({', '.join(names)}), only {listed}. Name it with {option}."
            )
        if len(found) > 1:
            several = ", ".join(map(repr, found))
            raise ValueError(f"{where} has several columns that could be it: {several}. Choose one with {option}.")
        return found[0]

    def choose_image(self, features: Mapping[str, object] | None, where: str) -> str:
        """Returns the column of encoded images, by the types of all columns, which a stream may not know."""
        if features is None:
            raise ValueError(
                f"{where} of the stream does not say which columns it has, as those of CSV and JSON files do not. "
                "Leave streaming out, or store the images as parquet files."
            )
        images = [name for name, feature in features.items() if isinstance(feature, Image)]
        image = self.choose("image", features, where, by_type=images)
        if not can_hold_images(features[image]):
            raise ValueError(
                f"{where} has no encoded images in the column {image!r}, which is of type {features[image]}. Name "
                f"the right one with image_column_name; there are {', '.join(map(repr, features))}."
            )
        return image

    def choose_label(self, features: Mapping[str, object], where: str) -> str:
        """Returns the column of the type `datasets.ClassLabel`, else the one of a usual name; see `choose`."""
        labels = [name for name, feature in features.items() if isinstance(feature, ClassLabel)]
        return self.choose("label", features, where, by_type=labels)


def take_columns(dataset: Any, columns: Mapping[str, str]) -> Any:
    """Reduces a `Dataset` or an `IterableDataset` to columns, new names by old ones; "image" holds images."""
    new_names = {old: new for old, new in columns.items() if old != new}  # streams take no other
    dataset = dataset.select_columns(list(columns)).rename_columns(new_names)
    return dataset if dataset.features["image"] == Image() else dataset.cast_column("image", Image())


def image_and_label(splits: DatasetDict, options: SourceOptions) -> DatasetDict:
    """Reduces every split to the columns `image` and `label`."""
    found = {}
    for name, split in splits.items():
        where = f"The split {name!r}"
        image, label = options.choose_image(split.features, where), options.choose_label(split.features, where)
        found[name] = take_columns(split, {image: "image", label: "label"})
    return DatasetDict(found)


def image_and_target(splits: DatasetDict, target: str, options: SourceOptions) -> DatasetDict:
    """Reduces every split to the columns `image` and the one of its targets, "mask" or "depth", which stay encoded."""
    found = {}
    for name, split in splits.items():
        where = f"The split {name!r}"
        candidates = [column for column, feature in split.features.items() if can_hold_images(feature)]
        if len(candidates) < 2:
            raise ValueError(
                f"{where} has {len(candidates)} columns of encoded images, but there must be one of images and one of "
                f"{target}s. Its columns are {', '.join(map(repr, split.features))}."
            )
        of_targets = options.choose(target, candidates, where)
        others = [column for column in candidates if column != of_targets]
        image = options.choose("image", others, where, by_type=others)
        columns = take_columns(split, {image: "image", of_targets: target})
        found[name] = columns.cast_column(target, Image(decode=False))
    return DatasetDict(found)


def can_hold_images(feature: object) -> bool:
    """Returns whether a column of this type can hold encoded images."""
    # Files written without the metadata of `datasets` hold plain bytes, or bytes beside a path.
    if isinstance(feature, dict):
        return "bytes" in feature
    return isinstance(feature, Image) or feature in (Value("binary"), Value("large_binary"))
