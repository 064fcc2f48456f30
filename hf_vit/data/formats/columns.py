"""Where a dataset is, and which of its columns hold images and labels or targets."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from datasets import Dataset, Image, Value


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


class SourceKeywords(TypedDict, total=False):
    """Keyword arguments that all loaders take, see `SourceOptions`."""

    dataset_config_name: str | None
    dataset_revision: str | None
    image_column_name: str | None


@dataclass(frozen=True)
class SourceOptions:
    """The place of a dataset, and the columns to take.

    Args:
        source: Path, or name on the Hub.
        target_column: Column of labels, masks, depth maps, objects or captions; by default found by type or name.
        dataset_config_name: Configuration of a dataset on the Hub.
        dataset_revision: Branch, tag or commit on the Hub.
        image_column_name: Column of images or of their paths; by default found by type or name.
    """

    source: str
    target_column: str | None = None
    dataset_config_name: str | None = None
    dataset_revision: str | None = None
    image_column_name: str | None = None

    @property
    def path(self) -> Path:
        """The source as a path, whether it exists or not."""
        return Path(self.source).expanduser()

    @property
    def hub(self) -> dict[str, str | None]:
        """The configuration and the revision, as `datasets.load_dataset` calls them."""
        return {"name": self.dataset_config_name, "revision": self.dataset_revision}

    def check_no_hub_options(self) -> None:
        """Raise `ValueError` if an option for the Hub is given for data on disk."""
        for name in ("dataset_revision", "dataset_config_name"):
            if (value := vars(self)[name]) is not None:
                raise ValueError(
                    f"{name}={value!r} is for datasets on the Hub, but {self.path} is here. Leave it out."
                )

    def choose(self, kind: str, columns: Collection[str], where: str, by_type: Collection[str] = ()) -> str:
        """Returns the column to take: the one that was given, else the only one of the type, else of a usual name."""
        # `kind` is a key of `USUAL_NAMES`, `by_type` the columns of the right type; errors begin with `where`.
        given = self.image_column_name if kind == "image" else self.target_column
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


def take_columns(dataset: Any, columns: Mapping[str, str]) -> Any:
    """Reduces a `Dataset` or an `IterableDataset` to columns, new names by old ones; "image" holds images."""
    new_names = {old: new for old, new in columns.items() if old != new}  # streams take no other
    dataset = dataset.select_columns(list(columns)).rename_columns(new_names)
    return dataset if dataset.features["image"] == Image() else dataset.cast_column("image", Image())


def image_and_target(split: Dataset, name: str, options: SourceOptions, target: str) -> Dataset:
    """Reduces a split to the columns `image` and the one of its targets, "mask" or "depth", which stay encoded."""
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
    return take_columns(split, {image: "image", of_targets: target}).cast_column(target, Image(decode=False))


def can_hold_images(feature: object) -> bool:
    """Returns whether a column of this type can hold encoded images."""
    # Files written without the metadata of `datasets` hold plain bytes, or bytes beside a path.
    if isinstance(feature, dict):
        return "bytes" in feature
    return isinstance(feature, Image) or feature in (Value("binary"), Value("large_binary"))
