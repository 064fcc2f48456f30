"""Test that training, evaluation and prediction read the same pixels as transformers pipelines from all formats."""

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import pipeline
from transformers.image_utils import load_image

from hf_vit import HfViTForImageClassification, HfViTImageProcessor
from hf_vit.data import (
    ImageClassificationCollator,
    load_image_classification,
    load_unlabeled_images,
    stream_image_classification,
    unreadable_images,
)
from hf_vit.data.augmentation.operations import read_uint8
from hf_vit.data.checks import has_transparency
from hf_vit.data.datasets import TargetDataset
from hf_vit.data.targets import image_only, label_target
from hf_vit.features.extraction import ImageReader
from hf_vit.inference.sources import open_image
from hf_vit.model import image_inputs
from hf_vit.model.image_inputs import read_image
from hf_vit.tasks.common import data_notes
from hf_vit.training import HfViTTrainingArguments

from ..helpers.images import noise
from ..helpers.models import small_config
from ..helpers.versions import needs_torchcodec


SIZE = (12, 10)  # width, height
ORIENTATION = 0x0112


def rgba():
    """Return an image with random colors and random alpha."""
    image = Image.fromarray(noise(10, 12, 3))
    image.putalpha(Image.fromarray(noise(10, 12, seed=1)))
    return image


def write_files(folder):
    """Write an image file in each format. Return a dictionary: file -> whether it has transparent pixels."""
    color, gray = Image.fromarray(noise(10, 12, 3)), Image.fromarray(noise(10, 12))
    palette, exif = color.quantize(16), Image.Exif()
    exif[ORIENTATION] = 6  # this EXIF orientation rotates the image by 90 degrees
    wide = Image.fromarray(noise(10, 12).astype(np.uint16))
    files = {
        "color.png": color,
        "color.jpg": color,
        "gray.png": gray,
        "one_bit.png": gray.convert("1"),
        "gray_16_bit.png": wide,
        "gray_16_bit.tiff": wide,
        "gray_32_bit.tiff": Image.fromarray(noise(10, 12).astype(np.int32)),
        "floats.tiff": Image.fromarray(noise(10, 12).astype(np.float32) * np.float32(0.9)),
        "palette.png": palette,
        "palette.gif": palette,
        "cmyk.jpg": color.convert("CMYK"),
        "cmyk.tiff": color.convert("CMYK"),
        "opaque.png": color.convert("RGBA"),
    }
    transparent = {"rgba.png": rgba(), "rgba.webp": rgba(), "gray_alpha.png": rgba().convert("LA")}
    folder.mkdir(parents=True)
    for name, image in (files | transparent).items():
        image.save(folder / name)
    turned = {"turned.jpg": color, "turned.png": color, "turned_rgba.png": rgba()}
    for name, image in turned.items():
        image.save(folder / name, exif=exif)
    keyed = {"palette_key.png": palette, "palette_key.gif": palette, "gray_key.png": gray, "color_key.png": color}
    for name, image in keyed.items():
        image.save(folder / name, transparency=image.getpixel((0, 0)))
    palette.save(folder / "palette_alpha.png", transparency=bytes(range(0, 256, 16)))
    is_transparent = {*transparent, *keyed, "palette_alpha.png", "turned_rgba.png"}
    return {file.name: file.name in is_transparent for file in folder.iterdir()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    write_files(root / "train" / "any")
    (root / "train" / "other").mkdir()
    Image.new("L", SIZE).save(root / "train" / "other" / "black.png")
    return root


def test_every_kind_of_file_is_seen_as_pipelines_see_it(folder):
    rows = load_image_classification(str(folder))["train"]
    assert not unreadable_images(rows, show_progress=False)
    processor = HfViTImageProcessor(do_resize=False, do_rescale=False, do_normalize=False)
    collate = ImageClassificationCollator(processor)
    features = load_unlabeled_images([str(folder)])["train"]
    reader = ImageReader(features, range(len(features)), processor)
    read_by_features = {reader[index].file: reader[index].pixels for index in range(len(reader))}
    for example in map(TargetDataset(rows, label_target).__getitem__, range(len(rows))):
        file = example["file"]
        expected = torch.from_numpy(np.array(load_image(file))).movedim(-1, 0)  # (3, H, W)
        # Augmentation reads images with `read_uint8`.
        assert torch.equal(read_uint8(example["image"], 3), expected), file
        # Evaluation reads images with `collate`.
        assert torch.equal(collate([example])["pixel_values"][0], expected.float()), file
        assert torch.equal(processor(file, return_tensors="pt")["pixel_values"][0], expected.float()), file
        assert torch.equal(read_by_features[file].to(torch.uint8), expected), file
        assert np.array_equal(np.array(open_image(Path(file))), np.array(load_image(file))), file
        gray = torch.from_numpy(np.array(load_image(file).convert("L")))[None]
        assert torch.equal(read_uint8(example["image"], 1), gray), file
    streamed = stream_image_classification(str(folder), train_val_split=0).first("train", 99, 10)
    assert len(streamed) == len(rows)
    for row in streamed:
        buffer = BytesIO()
        load_image(row["file"]).save(buffer, "png")
        assert torch.equal(read_uint8(row["image"], 3), read_uint8(Image.open(buffer), 3)), row["file"]


XMP = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
XMP_NAME = "turned by what XMP says"
JPEGS = {
    "photo": {},
    "all colors": {"subsampling": 0},
    "half of the colors": {"subsampling": 1},
    "progressive": {"progressive": True},
    "coarse": {"quality": 20},
    "as RGB": {"keep_rgb": True},
    **{f"turned {turn}": {"exif": {ORIENTATION: turn}} for turn in range(2, 9)},
    XMP_NAME: {"xmp": XMP.encode()},
}
CODED = [("photo", "L"), ("progressive", "L"), ("turned 6", "L"), (XMP_NAME, "L")]
CODED += [("photo", "CMYK"), ("turned 5", "CMYK")]


@needs_torchcodec
@pytest.mark.parametrize(("name", "mode"), [*((name, "RGB") for name in JPEGS), *CODED])
def test_torchcodec_decodes_to_the_pixels_of_pil(name, mode, monkeypatch):
    options, exif = dict(JPEGS[name]), Image.Exif()
    exif.update(options.pop("exif", {}))
    smooth = Image.fromarray(noise(5, 4, 3)).resize((43, 29)).convert(mode)
    buffer = BytesIO()
    smooth.save(buffer, "jpeg", **options, **({"exif": exif} if exif else {}))
    decode, shapes = image_inputs._torchcodec(), []
    assert decode is not None, "torchcodec, of the extra `fast`, is missing"
    monkeypatch.setattr(
        image_inputs, "_torchcodec", lambda: lambda data, how: shapes.append(len(data)) or decode(data, how)
    )
    for num_channels in (1, 3):
        by_torchcodec = read_image(buffer.getvalue(), num_channels=num_channels)
        by_pil = read_image(image_inputs.decode_image(buffer, "it"), num_channels=num_channels)
        assert torch.equal(by_torchcodec, by_pil)
        is_turned = name in (XMP_NAME, "turned 5", "turned 6", "turned 7", "turned 8")
        assert by_pil.shape == (num_channels, *((43, 29) if is_turned else (29, 43)))
    assert len(shapes) == (0 if mode == "CMYK" or name == XMP_NAME else 2)


def test_what_torchcodec_cannot_decode_is_left_to_pil(monkeypatch):
    def fail(data, mode):
        raise RuntimeError("a new kind of JPEG")

    image, buffer = Image.fromarray(noise(10, 12, 3)), BytesIO()
    image.save(buffer, "jpeg")
    expected = read_image(Image.open(buffer), num_channels=3)
    for decoder in (lambda: fail, lambda: None):
        monkeypatch.setattr(image_inputs, "_torchcodec", decoder)
        assert torch.equal(read_image(buffer.getvalue(), num_channels=3), expected)


def test_a_pipeline_gives_the_scores_of_an_evaluation(folder, tmp_path):
    torch.manual_seed(0)
    config = small_config(image_size=16, num_labels=2)
    model = HfViTForImageClassification(config).eval()
    torch.nn.init.normal_(model.classifier.weight)
    processor = HfViTImageProcessor.for_model(config)
    classify = pipeline("image-classification", model=model, image_processor=processor)
    rows = TargetDataset(load_image_classification(str(folder))["train"], label_target)
    examples = [rows[index] for index in range(len(rows))]
    with torch.no_grad():
        logits = model(ImageClassificationCollator(processor)(examples)["pixel_values"]).logits
    expected = logits.softmax(dim=-1)
    for example, scores in zip(examples, expected.tolist(), strict=True):
        found = {part["label"]: part["score"] for part in classify(example["file"])}
        assert found == pytest.approx(dict(zip(config.id2label.values(), scores, strict=True)), abs=1e-5)
    assert expected.std(dim=0).max() > 0.01


def test_files_of_16_bits_that_pipelines_make_white_are_named_before_a_training(folder, tmp_path):
    wide = noise(10, 12).astype(np.uint16) * 257
    for name, image in {"a.png": Image.fromarray(wide), "b.tiff": Image.fromarray(wide / np.float32(65535))}.items():
        place = tmp_path / "train" / name[0] / name
        place.parent.mkdir(parents=True)
        image.save(place)
    found = unreadable_images(load_image_classification(str(tmp_path))["train"], show_progress=False)
    assert "a.png has mode 'I;16' with values from" in found[0]
    assert "b.tiff has mode 'F' with values from" in found[1]
    assert "pipelines convert images to 8 bits by clipping" in found[0]
    examples = TargetDataset(load_unlabeled_images([str(tmp_path)])["train"], image_only)
    with pytest.raises(ValueError, match=r"a\.png has mode 'I;16' with values from"):
        examples[0]


def test_transparent_images_are_named_also_for_the_card(tmp_path, monkeypatch):
    expected = write_files(tmp_path / "train" / "any")
    for name, is_transparent in expected.items():
        file = tmp_path / "train" / "any" / name
        assert has_transparency({"path": str(file), "bytes": None}) == is_transparent, name
        assert has_transparency({"path": None, "bytes": file.read_bytes()}) == is_transparent, name
    assert not has_transparency({"path": "nowhere.png", "bytes": None})
    messages = []
    monkeypatch.setattr(data_notes.logger, "warning", lambda text, *values: messages.append(text % values))
    args = HfViTTrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to="none", disable_tqdm=True)
    rows = load_unlabeled_images([str(tmp_path)])["train"]
    (note,) = data_notes.check_transparency("train", rows, args)
    assert note == (
        f"{sum(expected.values())} train images have transparent pixels. They are read with the color stored for "
        "these pixels, as in transformers pipelines."
    )
    assert all(f"any/{name}" in messages[0] for name in ("rgba.png", "palette_alpha.png", "color_key.png"))
    opaque = [index for index, file in enumerate(rows["file"]) if not expected[Path(file).name]]
    assert data_notes.check_transparency("train", rows.select(opaque), args) == []
