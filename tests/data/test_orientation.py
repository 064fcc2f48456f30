"""Test that images are rotated by their EXIF orientation, together with annotations of the stored image."""

import json
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, Image
from faster_coco_eval import mask as coco_mask
from PIL import Image as PILImage

from hf_vit.data import (
    load_depth_estimation,
    load_keypoint_detection,
    load_object_detection,
    load_semantic_segmentation,
    load_universal_segmentation,
)
from hf_vit.data.datasets import TargetData
from hf_vit.data.formats.voc import CORNERS
from hf_vit.data.reading import orientation as module

from ..helpers.datasets import write_image
from .errors import expect_error


Turn = PILImage.Transpose
# Maps an EXIF orientation to the transformation from the displayed to the stored image.
STORE = {
    2: Turn.FLIP_LEFT_RIGHT, 3: Turn.ROTATE_180, 4: Turn.FLIP_TOP_BOTTOM, 5: Turn.TRANSPOSE, 6: Turn.ROTATE_90,
    7: Turn.TRANSVERSE, 8: Turn.ROTATE_270
}  # fmt: skip
WIDE, SQUARE = (12, 8), (10, 10)
BOX = (1, 2, 5, 7)  # (x1, y1, x2, y2) in the displayed image
POINTS = [(2, 3, 2), (4, 5, 1), (0, 0, 0)]
COLOR = (250, 10, 20)
FRAMES = ("stored", "displayed")
Loader = Callable[..., TargetData]
Writer = Callable[[Path, "Scene"], Loader]


def stored(image: PILImage.Image, orientation: int) -> PILImage.Image:
    return image if orientation == 1 else image.transpose(STORE[orientation])


def tagged(orientation: int) -> PILImage.Exif:
    exif = PILImage.Exif()
    exif[0x0112] = orientation
    return exif


class Scene:
    """An image with a colored box. The annotation of the box refers to the stored or to the displayed image."""

    def __init__(self, orientation: int, size: tuple[int, int], frame: str, file_format: str = "PNG") -> None:
        self.size = size
        self.frame_turn = orientation if frame == "stored" else 1
        shown = PILImage.new("RGB", size)
        shown.paste(COLOR, BOX)
        buffer = BytesIO()
        stored(shown, orientation).save(buffer, file_format, exif=tagged(orientation))
        self.content = buffer.getvalue()
        self.labels = np.zeros((size[1], size[0]), np.uint8)
        self.labels[BOX[1] : BOX[3], BOX[0] : BOX[2]] = 1
        self.labels[0, 0] = 2  # this corner pixel makes a rotation differ from a flip
        self.frame_size = self.in_frame(self.labels).shape[::-1]

    def in_frame(self, values: np.ndarray) -> np.ndarray:
        return np.array(stored(PILImage.fromarray(values), self.frame_turn))

    @property
    def box(self) -> list[int]:
        rows, columns = np.nonzero(self.in_frame(self.labels) == 1)
        return [int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1]

    @property
    def points(self) -> list[tuple[int, int, int]]:
        found = []
        for x, y, visibility in POINTS:
            marked = np.zeros_like(self.labels)
            marked[y, x] = 1
            (row,), (column,) = np.nonzero(self.in_frame(marked))
            found.append((int(column), int(row), visibility) if visibility else (0, 0, 0))
        return found

    @property
    def xywh(self) -> list[int]:
        x1, y1, x2, y2 = self.box
        return [x1, y1, x2 - x1, y2 - y1]

    @property
    def shares(self) -> list[float]:
        (x, y, width, height), (columns, rows) = self.xywh, self.frame_size
        return [(x + width / 2) / columns, (y + height / 2) / rows, width / columns, height / rows]

    def write_image(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(self.content)


def write_coco(
    folder: Path, scene: Scene, annotation: dict[str, Any], has_size: bool = True, **category: object
) -> None:
    scene.write_image(folder / "train" / "images" / "a.png")
    image: dict[str, Any] = {"id": 1, "file_name": "a.png"}
    if has_size:
        image["width"], image["height"] = scene.frame_size
    content = {
        "images": [image],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, **annotation}],
        "categories": [{"id": 1, "name": "thing", **category}],
    }
    (folder / "train" / "annotations.json").write_text(json.dumps(content))


def check_masks(scene: Scene, example: dict[str, Any]) -> None:
    (mask,) = (own for own, label in zip(example["masks"], example["class_labels"], strict=True) if label == 0)
    assert np.array_equal(mask.numpy(), scene.labels == 1)


def check_maps(scene: Scene, example: dict[str, Any]) -> None:
    if "masks" in example:  # one mask per class, as in universal segmentation
        assert np.array_equal(example["masks"][1].numpy(), scene.labels == 1)
    else:
        assert np.array_equal(
            example["segmentation_map" if "segmentation_map" in example else "depth_map"], scene.labels
        )


def check_boxes(scene: Scene, example: dict[str, Any]) -> None:
    assert example["boxes"].tolist() == [pytest.approx(BOX, abs=1e-4)]
    assert example["size"].tolist() == [scene.size[1], scene.size[0]]


def check_keypoints(scene: Scene, example: dict[str, Any]) -> None:
    assert example["keypoints"].tolist() == [list(point) for point in POINTS]
    crop = example["image"].crop([round(value) for value in example["box"].tolist()])
    assert np.array_equal(np.array(crop), np.full((crop.height, crop.width, 3), COLOR))
    assert example["area"] == 20


def semantic(folder: Path, scene: Scene) -> Loader:
    scene.write_image(folder / "train" / "images" / "a.png")
    write_image(folder / "train" / "masks" / "a.png", scene.in_frame(scene.labels))
    return partial(load_semantic_segmentation, class_names=["floor", "box", "dot"])


def regions(folder: Path, scene: Scene) -> Loader:
    semantic(folder, scene)
    return partial(load_universal_segmentation, class_names=["floor", "thing", "dot"], thing_names=["thing"])


def panoptic(folder: Path, scene: Scene) -> Loader:
    bands = np.zeros((*scene.in_frame(scene.labels).shape, 3), np.uint8)
    bands[..., 0] = np.where(scene.in_frame(scene.labels) == 1, 7, 0)
    write_image(folder / "train" / "masks" / "a.png", bands)
    write_coco(folder, scene, {"file_name": "a.png", "segments_info": [{"id": 7, "category_id": 1}]}, isthing=1)
    return load_universal_segmentation


def of_coco(load: Loader, annotate: Callable[..., dict], has_size: bool = True, **category: Any) -> Writer:
    """Return a function that writes a COCO file of a scene."""

    def write(folder: Path, scene: Scene) -> Loader:
        write_coco(folder, scene, annotate(scene), has_size, **category)
        return load

    return write


def polygon(scene: Scene) -> dict[str, Any]:
    x1, y1, x2, y2 = scene.box
    return {"segmentation": [[x1, y1, x2, y1, x2, y2, x1, y2]], "iscrowd": 0}


def run_lengths(scene: Scene) -> dict[str, Any]:
    runs = coco_mask.encode(np.asfortranarray(scene.in_frame(scene.labels) == 1).astype(np.uint8))
    return {"segmentation": {"size": runs["size"], "counts": runs["counts"].decode()}}


def keypoints(scene: Scene) -> dict[str, Any]:
    return {"bbox": scene.xywh, "keypoints": np.ravel(scene.points).tolist(), "area": 20}


def depth(folder: Path, scene: Scene, is_array: bool = False) -> Loader:
    scene.write_image(folder / "train" / "images" / "a.png")
    values, file = scene.in_frame(scene.labels), folder / "train" / "depths" / "a.png"
    write_image(file, values.astype(np.uint16) * 1000)
    if is_array:
        file.unlink()
        np.save(file.with_suffix(".npy"), values.astype(np.float32))
    return load_depth_estimation


def voc(folder: Path, scene: Scene, has_size: bool = True) -> Loader:
    scene.write_image(folder / "train" / "a.png")
    edges = "".join(f"<{name}>{value}</{name}>" for name, value in zip(CORNERS, scene.box, strict=True))
    size = "<size><width>{}</width><height>{}</height></size>".format(*scene.frame_size) if has_size else ""
    box = f"<object><name>thing</name><bndbox>{edges}</bndbox></object>"
    (folder / "train" / "a.xml").write_text(f"<annotation>{size}{box}</annotation>")
    return load_object_detection


def yolo(folder: Path, scene: Scene) -> Loader:
    scene.write_image(folder / "images" / "train" / "a.png")
    (folder / "labels" / "train").mkdir(parents=True)
    (folder / "labels" / "train" / "a.txt").write_text(" ".join(map(str, [0, *scene.shares])))
    return partial(load_object_detection, class_names=["thing"])


def write_table(folder: Path, scene: Scene, objects: dict[str, Any], has_size: bool = True) -> None:
    folder.mkdir(exist_ok=True)
    columns: dict[str, list[Any]] = {"image": [{"bytes": scene.content, "path": None}], "objects": [objects]}
    if has_size:
        columns["width"], columns["height"] = ([side] for side in scene.frame_size)
    Dataset.from_dict(columns).cast_column("image", Image()).to_parquet(folder / "train.parquet")


def table(folder: Path, scene: Scene, has_size: bool = True) -> Loader:
    write_table(folder, scene, {"bbox": [scene.xywh], "category": ["thing"]}, has_size)
    return partial(load_object_detection, bbox_format="coco")


def table_of_shares(folder: Path, scene: Scene) -> Loader:
    write_table(folder, scene, {"bbox": [scene.shares], "category": ["thing"]})
    return partial(load_object_detection, bbox_format="yolo")


def keypoint_table(folder: Path, scene: Scene) -> Loader:
    write_table(folder, scene, {"bbox": [scene.xywh], "keypoints": [np.ravel(scene.points).tolist()]})
    return load_keypoint_detection


def landmarks(folder: Path, scene: Scene) -> Loader:
    scene.write_image(folder / "a.png")
    names = [f"{axis}{number}" for number in range(3) for axis in "xyv"]
    values = [*np.ravel(scene.points), *scene.box]
    header = ",".join(["file_name", *names, "x_min", "y_min", "x_max", "y_max"])
    (folder / "train.csv").write_text(f"{header}\na.png,{','.join(map(str, values))}\n")
    return load_keypoint_detection


in_coco = partial(of_coco, load_object_detection, lambda scene: {"bbox": scene.xywh})
CHECKS: dict[str, tuple[Writer, Callable[[Scene, dict[str, Any]], None]]] = {
    "semantic": (semantic, check_maps), "regions": (regions, check_maps), "panoptic": (panoptic, check_masks),
    "polygons": (of_coco(load_universal_segmentation, polygon), check_masks),
    "run lengths": (of_coco(load_universal_segmentation, run_lengths), check_masks),
    "depth": (depth, check_maps), "depth array": (partial(depth, is_array=True), check_maps),
    "coco": (in_coco(), check_boxes), "voc": (voc, check_boxes), "table": (table, check_boxes),
    "table of shares": (table_of_shares, check_boxes), "keypoint table": (keypoint_table, check_keypoints),
    "coco keypoints": (of_coco(load_keypoint_detection, keypoints, keypoints=["a", "b", "c"]), check_keypoints),
    "coco without size": (in_coco(has_size=False), check_boxes),
    "voc without size": (partial(voc, has_size=False), check_boxes),
    "table without size": (partial(table, has_size=False), check_boxes),
    "yolo without size": (yolo, check_boxes), "landmarks without size": (landmarks, check_keypoints)
}  # fmt: skip


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *values: messages.append(text % values))
    return messages


def only_example(data: TargetData) -> dict[str, Any]:
    """Return the only training example of a dataset, after checking its image."""
    (example,) = data.examples("train")
    shown = np.zeros((example["image"].height, example["image"].width, 3), np.uint8)
    shown[BOX[1] : BOX[3], BOX[0] : BOX[2]] = COLOR
    assert np.array_equal(np.array(example["image"]), shown)
    return example


@pytest.mark.thinned(5)
@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("size", [WIDE, SQUARE], ids=["wide", "square"])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", CHECKS)
def test_annotations_show_what_the_upright_image_shows(name, orientation, size, frame, tmp_path, warnings):
    (write, check), scene = CHECKS[name], Scene(orientation, size, frame)
    load = write(tmp_path, scene)
    is_decided = orientation == 1 or ("without size" not in name and size == WIDE and orientation > 4)
    if is_decided or frame == "displayed":
        check(scene, only_example(load(str(tmp_path))))
        assert len(warnings) == (not is_decided)
        assert all(text.startswith("1 of 1 train images have an EXIF orientation") for text in warnings)
    warnings.clear()
    check(scene, only_example(load(str(tmp_path), annotation_orientation=frame)))
    assert not warnings


@pytest.mark.parametrize(
    ("size", "choice"), [(WIDE, "auto"), (SQUARE, "auto"), (WIDE, "stored"), (SQUARE, "displayed")]
)
def test_a_mask_with_an_orientation_is_turned_by_that_one_alone(size, choice, tmp_path, warnings):
    for orientation in range(2, 9):
        scene, folder = Scene(orientation, size, "stored"), tmp_path / str(orientation)
        load = semantic(folder, scene)
        mask = PILImage.fromarray(scene.in_frame(scene.labels))
        mask.save(folder / "train" / "masks" / "a.png", exif=tagged(orientation))
        check_maps(scene, only_example(load(str(folder), annotation_orientation=choice)))
    assert not warnings


def test_the_warning_counts_images_and_targets_alone_are_turned_too(tmp_path: Path, warnings: list[str]) -> None:
    scenes = [Scene(orientation, WIDE, "stored") for orientation in (1, 6, 3, 2)]
    for number, scene in enumerate(scenes):
        load = semantic(tmp_path / "one", scene)
        for kind in ("images", "masks"):
            file = tmp_path / "train" / kind / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "one" / "train" / kind / "a.png").rename(file)
    (tmp_path / "one" / "train" / "images").rmdir()
    data = load(str(tmp_path))
    assert len(warnings) == 1
    assert warnings[0].startswith("2 of 4 train images have an EXIF orientation")
    assert "annotation_orientation" in warnings[0]
    assert data.splits["train"]["turn"][:] == [1, 6, 1, 1]
    data = load(str(tmp_path), annotation_orientation="stored")
    assert all(np.array_equal(labels.numpy(), scenes[0].labels) for labels in data.examples("train").read_targets())


def test_annotations_that_fit_neither_size_raise_for_every_option(tmp_path: Path) -> None:
    scene = Scene(6, WIDE, "stored")
    load = semantic(tmp_path / "masks", scene)
    write_image(tmp_path / "masks" / "train" / "masks" / "a.png", np.zeros((5, 5), np.uint8))
    scene.frame_size = (30, 20)
    CHECKS["coco"][0](tmp_path / "boxes", scene)
    for choice in ("auto", *FRAMES):
        with pytest.raises(ValueError, match=r"has 8 x 12 pixels, but its segmentation map has 5 x 5"):
            load(str(tmp_path / "masks"), annotation_orientation=choice).examples("train")[0]
        with pytest.raises(ValueError, match=r"is 12 pixels wide and 8 high, but .* width of 30 and a height of 20"):
            load_object_detection(str(tmp_path / "boxes"), annotation_orientation=choice).examples("train")[0]


def test_wrong_boxes_of_turned_images_stay_wrong_and_choices_are_checked(tmp_path: Path) -> None:
    for number, box in enumerate(([5, 4, -3, 2], [2, 2, 30, 2])):
        write_coco(tmp_path / str(number), Scene(6, WIDE, "stored"), {"bbox": box})
        message = "1 of 1 boxes have no area or exceed their image"
        expect_error(message, load_object_detection, str(tmp_path / str(number)))
    load = semantic(tmp_path, Scene(1, WIDE, "stored"))
    for choice in ("upright", None):
        message = r"annotation_orientation=.* is unknown. Use 'auto', 'stored' or"
        expect_error(message, load, str(tmp_path), annotation_orientation=choice)


def test_tiff_is_turned_like_other_formats(tmp_path: Path) -> None:
    for orientation in range(1, 9):
        folder, scene = tmp_path / str(orientation), Scene(orientation, WIDE, "stored", "TIFF")
        for number, (write, check) in enumerate([CHECKS["semantic"], CHECKS["coco"]]):
            load = write(folder / str(number), scene)
            check(scene, only_example(load(str(folder / str(number)), annotation_orientation="stored")))
        scene = Scene(orientation, WIDE, "displayed", "TIFF")
        check_boxes(scene, only_example(CHECKS["coco without size"][0](folder, scene)(str(folder))))
