"""Test predictions, exported programs and serving of models with several heads."""

import json
import re
from pathlib import Path
from typing import Any

import gradio as gr
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from hf_vit import HfViTForDepthEstimation, HfViTForImageClassification, HfViTForMultiTask, HfViTModel, visualize_model
from hf_vit.inference.export import export_model
from hf_vit.inference.export.programs import HfViTProgram, min_grid, open_model, output_names
from hf_vit.inference.predict import predict_files
from hf_vit.inference.serving.app import Limits
from hf_vit.inference.serving.page import Panel
from hf_vit.inference.serving.photos import Photo, PhotoStore
from hf_vit.inference.serving.served_model import open_models
from hf_vit.visualize.inspection import open_for_inspection

from ..helpers.images import noise
from ..helpers.models import pixels, save_model, small_config
from ..helpers.references import draw_weights


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an image, two single-task models, and the model `both` that combines them."""
    folder = tmp_path_factory.mktemp("heads")
    Image.fromarray(noise(40, 50, 3)).save(folder / "image.png")
    backbone = HfViTModel(small_config())
    draw_weights(backbone)
    for name, kind in (("species", HfViTForImageClassification), ("rooms", HfViTForDepthEstimation)):
        model: Any = kind(small_config())
        draw_weights(model)
        model.model.load_state_dict(backbone.state_dict(), strict=False)
        save_model(model, folder / name)
    both = HfViTForMultiTask.from_heads(species=folder / "species", rooms=folder / "rooms")
    both.save_pretrained(folder / "both")
    return folder


def test_predictions_are_those_of_the_heads_with_a_panel_for_each(workplace: Path, tmp_path: Path) -> None:
    image = workplace / "image.png"
    (line,) = predict_files(str(workplace / "both"), [image], output_dir=tmp_path)
    alone = {name: next(predict_files(str(workplace / name), [image])) for name in ("species", "rooms")}
    assert line["species"]["label"] == alone["species"]["label"]
    assert line["species"]["score"] == pytest.approx(alone["species"]["score"], rel=1e-4)
    assert line["rooms"]["median"] == pytest.approx(alone["rooms"]["median"], rel=1e-3)
    names = {"image-rooms_depth.npy", "image-rooms_depth.png", "image_picture.png"}
    assert {Path(file).name for file in line["written"]} == names
    with Image.open(tmp_path / "image_picture.png") as picture:
        assert picture.width > 2 * 50
    with pytest.raises(ValueError, match="tile_size=32 requires a model of hf_vit for object detection"):
        list(predict_files(str(workplace / "both"), [image], tile_size=32))
    with pytest.raises(ValueError, match=r"--threshold 0\.9 applies to a single head .* Set --head"):
        list(predict_files(str(workplace / "both"), [image], threshold=0.9))


def test_one_of_several_heads_is_used_like_a_single_task_model(workplace: Path, tmp_path: Path) -> None:
    image, both = workplace / "image.png", str(workplace / "both")
    (line,) = predict_files(both, [image], head="rooms", picture=tmp_path / "one.png")
    (alone,) = predict_files(str(workplace / "rooms"), [image])
    assert line.keys() == alone.keys()
    assert line["median"] == pytest.approx(alone["median"], rel=1e-3)
    (served,) = open_models([both], {"candidate_labels": None}, head="species")
    ((answer, _),) = served.predict([image.read_bytes()])
    assert answer["label"] == next(predict_files(str(workplace / "species"), [image]))["label"]
    assert type(open_model(both, head="rooms")) is HfViTForDepthEstimation
    assert type(open_for_inspection(both, head="species")[0]) is HfViTForImageClassification
    with pytest.raises(ValueError, match="head='cells' is not a head of the model"):
        list(predict_files(both, [image], head="cells"))


def test_visualize_draws_the_predictions_of_all_heads(workplace: Path, tmp_path: Path) -> None:
    files: list[str] = []
    visualize_model(str(workplace / "both"), [workplace / "image.png"], output_dir=tmp_path, report=files.append)
    assert {"predictions.png", "pca.png", "image_attention.png"} <= {Path(file).name for file in files}
    list(predict_files(str(workplace / "both"), [workplace / "image.png"], picture=tmp_path / "same.png"))
    with Image.open(tmp_path / "predictions.png") as drawn, Image.open(tmp_path / "same.png") as same:
        assert drawn.tobytes() == same.tobytes()


def test_exported_programs_name_the_outputs_of_each_head(workplace: Path) -> None:
    model = HfViTForMultiTask.from_pretrained(workplace / "both").eval()
    assert set(output_names(model)) == {"species_logits", "rooms_predicted_depth"}
    images = pixels(model.config, grid=min_grid(model))
    found, answers = HfViTProgram(model)(images), model(images).answers
    assert torch.equal(found["rooms_predicted_depth"], answers["rooms"].predicted_depth)
    assert torch.equal(found["species_logits"], answers["species"].logits)
    assert min_grid(model) == min_grid(HfViTForDepthEstimation.from_pretrained(workplace / "rooms"))


def test_exported_folders_hold_the_labels_of_each_head(workplace: Path, tmp_path: Path) -> None:
    export_model(workplace / "both", tmp_path / "torch", "torch")
    labels = json.loads((tmp_path / "torch" / "labels.json").read_text())
    assert labels["species"] == {str(number): f"LABEL_{number}" for number in range(small_config().num_labels)}
    assert labels.keys() == {"rooms", "species"}


def test_served_models_answer_with_all_heads(workplace: Path, tmp_path: Path) -> None:
    (served,) = open_models([str(workplace / "both")], {"threshold": None, "candidate_labels": None})
    (good, _), (bad, _) = served.predict([(workplace / "image.png").read_bytes(), b"no image"])
    assert good.keys() == {"rooms", "species"}
    assert "cannot be decoded" in bad["error"]
    (vector,) = served.embed([(workplace / "image.png").read_bytes()])
    assert len(vector) == small_config().hidden_size
    with gr.Blocks(), served.threads["predictions"]:
        photo = Photo((workplace / "image.png").read_bytes(), "session")
        *_, text, _ = Panel(served, Limits(), PhotoStore(tmp_path, 1_000_000)).answer(photo)
    parts = dict(re.findall(r"<h4>(\w+)</h4>(.*?)(?=<h4>|$)", text))
    assert parts.keys() == {"rooms", "species"}
    assert good["species"]["label"] in parts["species"]
    assert f"{good['rooms']['max']:.2f} meters" in parts["rooms"]


def test_parquet_files_hold_the_predictions_of_all_heads(workplace: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"no image")
    images = [workplace / "image.png", tmp_path / "broken.png"]
    (expected, _) = predict_files(str(workplace / "both"), images)
    (shard,) = predict_files(str(workplace / "both"), images, output_dir=tmp_path / "shards", rows_per_shard=5)
    good, bad = pq.read_table(shard["written"]).to_pylist()
    assert good["species"]["label"] == expected["species"]["label"]
    assert good["rooms"] == expected["rooms"]
    assert good["rooms_depth_png"]["bytes"].startswith(b"\x89PNG")
    assert bad["species"] is None
    assert "cannot be read" in bad["error"]
