"""Which columns of a dataset hold its images and its labels or targets."""

from collections.abc import Collection, Mapping

from datasets import ClassLabel, Dataset, DatasetDict, Image, Value


USUAL_NAMES = {
    "image_column_name": ("image", "img", "image_path", "path", "file", "filename", "file_name"),
    "label_column_name": ("label", "labels", "class", "category", "target", "fine_label", "coarse_label"),
    "mask_column_name": (
        "mask",
        "label",
        "labels",
        "annotation",
        "annotations",
        "segmentation",
        "segmentation_mask",
        "semantic_mask",
    ),
    "objects_column_name": ("objects", "object", "annotations", "annotation"),
    "depth_column_name": ("depth", "depth_map", "depths", "label", "labels"),
    "caption_column_name": (
        "caption",
        "captions",
        "text",
        "texts",
        "sentence",
        "sentences",
        "description",
        "descriptions",
    ),
}


def image_and_label(splits: DatasetDict, image_column: str | None, label_column: str | None) -> DatasetDict:
    """Reduces every split to the columns `image` and `label`.

    The columns are those of the types `datasets.Image` and `datasets.ClassLabel`, else those with a usual name.

    Args:
        splits: Datasets with any columns.
        image_column: Which column holds the images, where that is not clear.
        label_column: Which column holds the labels, where that is not clear.

    Raises:
        ValueError: if a column is missing, if several could be it, or if it does not hold images.
    """
    return DatasetDict(
        {
            name: _two_columns(split, f"The split {name!r}", image_column, label_column)
            for name, split in splits.items()
        }
    )


def _two_columns(dataset: Dataset, where: str, image_column: str | None, label_column: str | None) -> Dataset:
    features = dataset.features
    labels = [name for name, feature in features.items() if isinstance(feature, ClassLabel)]
    image = choose_image_column(features, image_column, where)
    label = choose_column("label_column_name", label_column, features, where, by_type=labels)
    dataset = dataset.select_columns([image, label]).rename_columns({image: "image", label: "label"})
    return dataset if dataset.features["image"] == Image() else dataset.cast_column("image", Image())


def image_and_target(
    splits: DatasetDict, target: str, image_column: str | None, target_column: str | None
) -> DatasetDict:
    """Reduces every split to the columns `image` and the one of its targets, which are images too.

    Args:
        splits: Datasets with any columns.
        target: What to call the column of targets, "mask" or "depth", which stay encoded.
        image_column: Which column holds the images, where that is not clear.
        target_column: Which column holds the targets, where none has a usual name.

    Raises:
        ValueError: if a column is missing, if several could be it, or if it does not hold images.
    """
    return DatasetDict(
        {
            name: _two_image_columns(split, f"The split {name!r}", target, image_column, target_column)
            for name, split in splits.items()
        }
    )


def _two_image_columns(
    dataset: Dataset, where: str, target: str, image_column: str | None, target_column: str | None
) -> Dataset:
    candidates = [name for name, feature in dataset.features.items() if can_hold_images(feature)]
    if len(candidates) < 2:
        raise ValueError(
            f"{where} has {len(candidates)} columns of encoded images, but there must be one of images and one of "
            f"{target}s. Its columns are {', '.join(map(repr, dataset.features))}."
        )
    found = choose_column(f"{target}_column_name", target_column, candidates, where)
    others = [name for name in candidates if name != found]
    image = choose_column("image_column_name", image_column, others, where, by_type=others)
    columns = {image: "image", found: target}
    dataset = dataset.select_columns(list(columns)).rename_columns(columns)
    return dataset.cast_column("image", Image()).cast_column(target, Image(decode=False))


def check_columns_known(features: Mapping[str, object] | None, where: str) -> None:
    """Raises `ValueError` if a stream does not say which columns it has."""
    if features is None:
        raise ValueError(
            f"{where} of the stream does not say which columns it has, as those of CSV and JSON files do not. Leave "
            "streaming out, or store the images as parquet files."
        )


def choose_image_column(features: Mapping[str, object], given: str | None, where: str) -> str:
    """Returns the column that holds the images.

    Args:
        features: The types of all columns by name.
        given: Which one it is, where that is not clear.
        where: What has the columns, to begin an error with.

    Raises:
        ValueError: if it is missing, if several could be it, or if it does not hold images.
    """
    images = [name for name, feature in features.items() if isinstance(feature, Image)]
    image = choose_column("image_column_name", given, features, where, by_type=images)
    if not can_hold_images(features[image]):
        raise ValueError(
            f"{where} has no encoded images in the column {image!r}, which is of type {features[image]}. Name the "
            f"right one with image_column_name; there are {', '.join(map(repr, features))}."
        )
    return image


def can_hold_images(feature: object) -> bool:
    """Returns whether a column of this type can hold encoded images."""
    # Files written without the metadata of `datasets` hold plain bytes, or bytes beside a path.
    if isinstance(feature, dict):
        return "bytes" in feature
    return isinstance(feature, Image) or feature in (Value("binary"), Value("large_binary"))


def choose_column(
    option: str, given: str | None, columns: Collection[str], where: str, by_type: Collection[str] = ()
) -> str:
    """Returns the column to take: the one that was `given`, else the only one of the type, else of a usual name.

    Args:
        option: The argument that decides, "image_column_name" or "label_column_name".
        given: Its value.
        columns: All columns.
        where: What has the columns, to begin an error with.
        by_type: The columns of the right type.

    Raises:
        ValueError: if there is no such column, or none or several that could be it.
    """
    listed = ", ".join(map(repr, columns))
    if given is not None:
        if given not in columns:
            raise ValueError(f"{where} has no column {given!r}, only {listed}. Name the right one with {option}.")
        return given
    names = USUAL_NAMES[option]
    found = list(by_type) or [column for column in columns if column.strip().lower() in names]
    if not found:
        raise ValueError(
            f"{where} has no column of a usual name ({', '.join(names)}), only {listed}. Name it with {option}."
        )
    if len(found) > 1:
        several = ", ".join(map(repr, found))
        raise ValueError(f"{where} has several columns that could be it: {several}. Choose one with {option}.")
    return found[0]
