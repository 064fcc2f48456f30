"""Test that all data loaders download datasets from the Hub by name."""

import json
from pathlib import Path

from datasets import Dataset, Features, Image, List, Value
from PIL import Image as PILImage

from ..helpers.datasets import class_map, dataset_of, encoded, picture
from ..helpers.fresh import run_with_package
from ..helpers.hub import serve
from ..helpers.object_files import NAMES, SCENES, boxes_table


# The loaders run in a new process, because huggingface_hub reads the address of the Hub at import.
CODE = """
import json, sys
from hf_vit.data import load_image_classification, load_object_detection, load_semantic_segmentation
from hf_vit.data.collators import masked_image_target
from hf_vit.data.datasets import TargetDataset
from hf_vit.data.loaders.unlabeled_images import first_images, stream_images

def classes(source, **options):
    splits = load_image_classification(source, **options)
    return {name: [split.features["label"].names, split["label"][:]] for name, split in splits.items()}

def masks(source):
    data = load_semantic_segmentation(source)
    return [data.names, data.examples("train")[1]["segmentation_map"].tolist()]

def boxes(source):
    data = load_object_detection(source)
    return [data.names, data.examples("train")[2]["boxes"].tolist()]

def streamed(source):
    rows = first_images(stream_images([source]), {"train": 5})["train"]
    images = TargetDataset(rows, masked_image_target)
    return [[image["image"].tobytes().hex() for image in images], rows["class_number"][:]]

answers = []
for name, source, options in json.loads(sys.argv[1]):
    try:
        answers.append(globals()[name](source, **options))
    except (FileNotFoundError, ValueError) as error:
        answers.append(str(error))
print(json.dumps(answers))
"""


def ask(workdir: Path, *calls: tuple[str, str, dict], **environment: str) -> list:
    return json.loads(run_with_package(CODE, workdir, json.dumps(calls), **environment).stdout)


def test_names_on_the_hub_are_loaded_from_there(tmp_path: Path) -> None:
    user = tmp_path / "hub" / "user"
    for config, labels in (("small", [0, 1]), ("large", [0, 1, 1])):
        dataset_of(labels, ["dog", "cat"], "img").to_parquet(user / "pets" / config / "train.parquet")
    configs = "".join(f"- config_name: {name}\n  data_files: {name}/train.parquet\n" for name in ("small", "large"))
    (user / "pets" / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    maps = [encoded(PILImage.fromarray(class_map(number))) for number in range(2)]
    pairs = {"image": [encoded(picture(number)) for number in range(2)], "label": maps}
    kind = List({"bbox": List(Value("float32"), length=4), "category": Value("int64")})
    objects = [
        [{"bbox": [x1, y1, x2 - x1, y2 - y1], "category": NAMES.index(name)} for name, (x1, y1, x2, y2) in found]
        for _, _, found in SCENES["train"]
    ]
    masked = Dataset.from_dict(pairs, Features({"image": Image(), "label": Image()}))
    tables = {"streets": masked, "unnamed": masked, "boxes": boxes_table("train", kind, objects)}
    tables["streamed"] = dataset_of([0, 1, 1], ["dog", "cat"])
    for name, table in tables.items():
        table.to_parquet(user / name / "train.parquet")
    (user / "streets" / "id2label.json").write_text('{"0": "sky", "1": "road", "2": "car"}')
    (user / "boxes" / "id2label.json").write_text('{"0": "cat", "1": "dog"}')
    with serve(tmp_path / "hub") as hub:
        commit = hub.find("user/pets").oid
        small, large, no_revision, nobody, streets, unnamed, boxes, streamed, not_streamed = ask(
            tmp_path,
            ("classes", "user/pets", {"dataset_config_name": "small", "dataset_revision": commit}),
            ("classes", "user/pets", {"dataset_config_name": "large", "dataset_revision": commit}),
            ("classes", "user/pets", {"dataset_config_name": "small", "dataset_revision": "v2"}),
            ("classes", "nobody/pets", {}),
            *(("masks", f"user/{name}", {}) for name in ("streets", "unnamed")),
            ("boxes", "user/boxes", {}),
            *(("streamed", name, {}) for name in ("user/streamed", "nobody/pets")),
            **hub.client,
        )
    assert small == {"train": [["dog", "cat"], [0, 1]]}
    assert large == {"train": [["dog", "cat"], [0, 1, 1]]}
    assert "Revision 'v2' doesn't exist" in no_revision
    assert nobody.startswith("There is no file or folder 'nobody/pets'.")
    assert "could not be loaded from the Hub either: Dataset 'nobody/pets' doesn't exist" in nobody
    assert streets == [["sky", "road", "car"], class_map(1).tolist()]
    assert unnamed.startswith("The names of the classes are unknown. Give them as class_names")
    assert boxes == [list(NAMES), [[0, 0, 24, 12]]]
    assert streamed == [
        [picture(number).tobytes().hex() for number in range(3)],
        [1, 0, 0],
    ]  # in the order of the names
    assert not_streamed.startswith("There is no file or folder 'nobody/pets'.")


def test_a_name_that_cannot_be_asked_for_offline_says_so(tmp_path: Path) -> None:
    [answer] = ask(tmp_path, ("classes", "user/pets", {}), HF_HUB_OFFLINE="1")
    assert "could not be loaded from the Hub either: Cannot reach 'user/pets' on the Hub" in answer
