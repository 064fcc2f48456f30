"""Test pictures of attention and features, drawn by functions and by the command."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Dinov2Config, Dinov2Model, ViTConfig, ViTForImageClassification

from hf_vit import HfViTForDepthEstimation, HfViTForImageClassification, HfViTImageProcessor, HfViTModel
from hf_vit.inference.visualization import PHOTO_DRAWINGS, Inspection, encode_words, kinds_of, open_for_inspection
from hf_vit.model.embeddings import sincos_position_embeddings
from hf_vit.outputs import RECORD
from hf_vit.training import whole_image_processor
from hf_vit.visualize import gradient_rollout, record_attention
from hf_vit.visualize.patches import draw_attention, draw_feature_colors, draw_heat, mosaic, overlay_heat
from hf_vit.visualize.tokens import draw_tokens

from ..helpers.image_text_models import build_model, build_processor
from ..helpers.images import noise
from ..helpers.models import small_config
from ..helpers.options import call_command
from .test_visualize import columns, holds, texts


GRAY = np.full((300, 600, 3), 200, np.uint8)
HEAT = np.array([[0.0, 1.0, 2.0], [3.0, 4.0, 9.0]])


def read(file: Path) -> np.ndarray:
    with Image.open(file) as picture:
        return np.asarray(picture.convert("RGB")).astype(int)


def test_heat_is_bright_where_values_are_high_and_shows_the_image_through() -> None:
    picture = overlay_heat(GRAY, torch.from_numpy(HEAT))
    assert picture.shape == GRAY.shape
    brightness = picture.astype(int).sum(-1)
    middles = brightness[75::150, 100::200]
    assert (np.diff(middles.ravel()) > 0).all()
    assert np.array_equal(overlay_heat(GRAY, HEAT, opacity=0), GRAY)
    assert np.array_equal(overlay_heat(GRAY, np.ones((2, 3))), overlay_heat(GRAY, np.zeros((2, 3))))
    assert overlay_heat(np.zeros((28, 14, 3), np.uint8), HEAT).shape == (480, 240, 3)


def test_selected_patch_is_marked(tmp_path: Path) -> None:
    draw_heat(GRAY, HEAT, "$5_$", tmp_path / "plain.png")
    draw_heat(GRAY, HEAT, "$5_$", tmp_path / "marked.svg", (0, 0))
    assert texts(tmp_path / "marked.svg")[:2] == ["image", "$5_$"]
    plain = read(tmp_path / "plain.png")
    # The picture has two panels and a color bar, which is 0.28 times as wide as a panel. `middle` is between the
    # panels.
    middle = plain.shape[1] * 100 // 228
    inside = (plain[:, :middle] == 200).all(-1)
    top, *_, bottom = np.flatnonzero(inside.mean(1) > 0.5)
    left, *_, right = np.flatnonzero(inside.mean(0) > 0.5)
    for patch in ((0, 0), (1, 2)):
        draw_heat(GRAY, HEAT, "$5_$", tmp_path / "marked.png", patch)
        changed = (plain != read(tmp_path / "marked.png")).any(-1)
        y, x = (float(numbers.mean()) for numbers in np.nonzero(changed[:, :middle]))
        assert (x - left) / (right - left) == pytest.approx((patch[1] + 0.5) / 3, abs=0.02)
        assert (y - top) / (bottom - top) == pytest.approx((patch[0] + 0.5) / 2, abs=0.02)
        assert changed[:, middle:].any()  # the patch is marked in the other panel too


def test_maps_stand_in_rows_and_columns(tmp_path: Path) -> None:
    maps = np.arange(2 * 3 * 2 * 4).reshape(2, 3, 2, 4)
    whole = mosaic(maps)
    assert whole.shape == (2 * 3 - 1, 3 * 5 - 1)
    for row, column in np.ndindex(2, 3):
        assert np.array_equal(whole[3 * row : 3 * row + 2, 5 * column : 5 * column + 4], maps[row, column])
    assert np.isnan(whole).sum() == whole.size - maps.size
    # The picture has one row per layer and one column per head.
    maps = np.random.default_rng(0).random((5, 4, 2, 3))
    draw_attention(GRAY, maps, tmp_path / "attention.svg")
    written = texts(tmp_path / "attention.svg")
    assert sorted(written) == sorted(["1", "2", "3", "4", "head", "1", "2", "3", "4", "5", "layer"])
    scaled = maps * np.arange(1, 5)[:, None, None]  # each head has its own color scale
    draw_attention(GRAY, maps, tmp_path / "attention.png")
    draw_attention(GRAY, scaled, tmp_path / "scaled.png")
    assert np.array_equal(read(tmp_path / "attention.png"), read(tmp_path / "scaled.png"))
    # Each patch is drawn in its feature color.
    colors = torch.tensor([[[1.0, 0, 0], [0, 0, 1]], [[1, 1, 0], [0, 1, 0]]])
    draw_feature_colors([GRAY, GRAY[:, :300]], [colors, colors], tmp_path / "pca.png")
    (_, patches) = columns(tmp_path / "pca.png", 2)
    for color in ((255, 0, 0), (0, 0, 255), (255, 255, 0), (0, 255, 0)):
        assert holds(patches, np.array(color))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a classifier, a depth model with rotary positions, and two photos of different shapes."""
    folder = tmp_path_factory.mktemp("inspection")
    torch.manual_seed(0)
    names = {"id2label": {0: "cat", 1: "dog"}, "label2id": {"cat": 0, "dog": 1}, "num_labels": 2}
    classifier = HfViTForImageClassification(small_config(**names))
    torch.nn.init.normal_(classifier.classifier.weight)
    models = {"pets": classifier, "rooms": HfViTForDepthEstimation(small_config("rotary"))}
    for name, model in models.items():
        model.save_pretrained(folder / name)
        HfViTImageProcessor.for_model(model.config).save_pretrained(folder / name)
    processor = build_processor(["a red dog"])
    build_model(processor).save_pretrained(folder / "words")
    processor.save_pretrained(folder / "words")
    (folder / "photos").mkdir()
    for name, shape in {"a": (60, 90, 3), "b": (90, 50, 3)}.items():
        Image.fromarray(noise(*shape)).save(folder / "photos" / f"{name}.png")
    return folder


def inspect(workplace: Path, model: str, output: Path, *options: str, photos: str = "photos") -> list[str]:
    """Run `hf-vit visualize` on photos. Return the names of the written files."""
    call_command("visualize", [str(workplace / model), str(workplace / photos), "--output_dir", str(output), *options])
    return sorted(file.name for file in output.iterdir() if file.name != RECORD)


def test_the_script_draws_all_kinds_that_a_model_has(workplace, tmp_path, capsys):
    written = inspect(workplace, "pets", tmp_path / "pets")
    each = ("attention", "rollout", "saliency", "similarity", "positions", "patches")
    assert written == sorted([f"{name}_{kind}.png" for name in "ab" for kind in each] + ["pca.png"])
    assert sorted(Path(line).name for line in capsys.readouterr().out.splitlines()) == written
    assert all(read(tmp_path / "pets" / name).std() > 5 for name in written)
    without_table = HfViTForDepthEstimation(small_config("rotary"))
    assert kinds_of(without_table) == ["attention", "rollout", "similarity", "patches", "pca"]


def test_the_script_searches_a_whole_photo_for_a_class_or_from_a_point(workplace: Path, tmp_path: Path) -> None:
    options = ["--kinds", "saliency", "--image_size", "48", "--class_name", "dog"]
    inspect(workplace, "pets", tmp_path, *options, photos="photos/a.png")
    model = HfViTForImageClassification.from_pretrained(workplace / "pets").eval()
    processor = HfViTImageProcessor.from_pretrained(workplace / "pets", size={"height": 48, "width": 72})
    photo = Image.open(workplace / "photos" / "a.png")
    (heat,) = gradient_rollout(model, processor(photo, return_tensors="pt").pixel_values, [1])
    assert heat.shape == (6, 9)
    draw_heat(photo, heat, "saliency for dog", tmp_path / "expected.png")
    assert np.abs(read(tmp_path / "a_saliency.png") - read(tmp_path / "expected.png")).max() <= 3
    # For all other kinds of maps, a point selects a patch.
    kinds, photos = ["--kinds", "attention", "rollout", "similarity", "patches"], "photos/a.png"
    written = inspect(workplace, "rooms", tmp_path / "whole", *kinds, photos=photos)
    assert inspect(workplace, "rooms", tmp_path / "point", *kinds, "--point", "45,5", photos=photos) == written
    for name in written:
        assert not np.array_equal(read(tmp_path / "whole" / name), read(tmp_path / "point" / name))


def test_tokens_and_their_attention_are_drawn(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = HfViTModel(small_config("registers", attn_implementation="eager")).eval()
    (recorded,) = record_attention(model, torch.randn(1, 3, 16, 48))
    draw_tokens(noise(40, 120, 3), recorded, model.config, (0, 5), (1, 2), tmp_path / "tokens.svg")
    written = texts(tmp_path / "tokens.svg")
    num_prefix, length = recorded.num_prefix, recorded.num_prefix + 12
    assert {"2 x 6 patches", "A", "B", "0: CLS", f"{num_prefix}: (0, 0)", f"{length - 1}: (1, 5)"} <= {*written}
    assert f"equal attention to {length} tokens" in written
    assert f"{num_prefix - 1}: register {model.config.num_register_tokens}" in written
    for pair in (((2, 0), (0, 0)), ((0, 0), (0, 6))):
        with pytest.raises(ValueError, match="There is no patch"):
            draw_tokens(noise(40, 120, 3), recorded, model.config, *pair, tmp_path / "tokens.svg")


def test_similarity_of_positions_is_that_of_the_table(tmp_path: Path) -> None:
    config = small_config("registers", position_embedding_type="sincos2d")
    photo = Image.fromarray(noise(32, 32, 3))
    inspection = Inspection(HfViTModel(config).eval(), HfViTImageProcessor.for_model(config), photo, [(20, 10)])
    PHOTO_DRAWINGS["positions"](inspection, tmp_path / "found.png")
    table = sincos_position_embeddings((4, 4), config.hidden_size, 0)[0].view(4, 4, -1)
    heat = torch.cosine_similarity(table, table[1, 2], dim=-1)
    draw_heat(photo, heat, "similarity of positions", tmp_path / "expected.png", (1, 2))
    assert np.abs(read(tmp_path / "found.png") - read(tmp_path / "expected.png")).max() <= 3


def test_a_text_adds_a_heatmap_for_each_word(workplace: Path, tmp_path: Path) -> None:
    written = inspect(workplace, "words", tmp_path, "--text", "dog red dog", photos="photos/a.png")
    assert "a_words.png" in written
    model, processor = open_for_inspection(str(workplace / "words"))
    found = encode_words(model, str(workplace / "words"), "dog red dog")
    assert list(found) == ["dog", "red", "dog red dog"]
    torch.testing.assert_close(found["dog"], -found["red"])  # relative to their mean, two words are opposite
    inspection = Inspection(model, processor, Image.open(workplace / "photos" / "a.png"), text_features=found)
    PHOTO_DRAWINGS["words"](inspection, tmp_path / "words.svg")
    assert texts(tmp_path / "words.svg") == ["image", *found]


def test_invalid_visualize_options_raise_one_line_errors(workplace: Path, tmp_path: Path) -> None:
    for model, options, message in (
        ("rooms", ["--kinds", "saliency"], "HfViTForDepthEstimation does not predict a class"),
        ("pets", ["--kinds", "saliency", "--class_name", "cow"], "has no class 'cow'. Its classes include cat, dog"),
        ("pets", ["--kinds", "rollout", "--point", "70,5"], "70,5 .* outside of the image of 50 x 90"),
        ("pets", ["--image_size", "0"], "image_size=0 must be at least 1"),
        (
            "rooms",
            ["--kinds", "patches", "--point", "5,5", "--point", "70,5"],
            "70,5 .* outside of the image of 50 x 90",
        ),
        ("pets", ["--text", "a dog"], "HfViTForImageClassification does not compare images with texts"),
        ("words", ["--kinds", "words"], "--text"),
        ("rooms", ["--kinds", "positions"], "adds no position embeddings"),
        ("nothing", [], "nothing"),
    ):
        with pytest.raises(SystemExit, match=message) as stopped:
            inspect(workplace, model, tmp_path, *options)
        assert "\n" not in str(stopped.value)


def test_visualize_opens_saved_and_published_models_with_their_class(workplace: Path, tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
    classifier = ViTForImageClassification(ViTConfig(**shape, intermediate_size=48, num_labels=3))
    classifier.save_pretrained(tmp_path / "classifier")
    Dinov2Model(Dinov2Config(**shape)).save_pretrained(tmp_path / "encoder")
    for folder, expected in (
        (workplace / "rooms", HfViTForDepthEstimation),
        (tmp_path / "classifier", HfViTForImageClassification),
        (tmp_path / "encoder", HfViTModel),
    ):
        model, processor = open_for_inspection(str(folder), 40)
        assert (type(model), model.training, model.config._attn_implementation) == (expected, False, "eager")
        pixel_values = processor(Image.new("RGB", (90, 60)), return_tensors="pt").pixel_values
        assert pixel_values.shape == (1, 3, 40, 64)
        (attention,) = record_attention(model, pixel_values)
        assert attention.grid == (5, 8)
    # With `keep_aspect_ratio`, `size` applies to the side whose scale is closer to 1. Photos are not cropped.
    start = HfViTImageProcessor(size={"height": 32, "width": 32}, keep_aspect_ratio=True, ensure_multiple_of=8)
    whole = whole_image_processor(start, small_config(), keep_aspect_ratio=True)
    assert whole(Image.new("RGB", (90, 60)), return_tensors="pt").pixel_values.shape == (1, 3, 32, 48)
