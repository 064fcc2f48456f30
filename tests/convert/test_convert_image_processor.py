"""Test that image processors of published checkpoints return the same pixels as the original libraries."""

import json
from functools import partial

import numpy as np
import pytest
import timm
import torch
import transformers
from PIL import Image
from PIL.Image import Resampling
from safetensors.torch import save_file
from sklearn.datasets import load_sample_images
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Normalize, Resize, ToTensor
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.dpt.image_processing_dpt import get_resize_output_image_size

from hf_vit.convert import load_image_processor
from hf_vit.convert.families import FAMILIES
from hf_vit.convert.image_processor import (
    HALF,
    IMAGENET,
    MODEL_CLASSES,
    MODEL_TYPES,
    OPENAI,
    ORIGINALS,
    image_processor_options,
    open_clip_image_processor_options,
    original_image_processor_options,
    resize_image_processor,
    timm_image_processor_options,
)
from hf_vit.model.image_geometry import compute_resized_size

from ..helpers.images import BACKENDS
from .test_convert_files import drawn
from .test_convert_open_clip import model_cfg, state_of_clip


STEPS = {"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 0.00392156862745098}
SQUARE = {"size": {"height": 224, "width": 224}}


def old_file(kind, **options):
    return {"do_normalize": True, "do_resize": True, "feature_extractor_type": f"{kind}FeatureExtractor", **options}


def file(kind, **options):
    return {**STEPS, "image_processor_type": f"{kind}ImageProcessor", **options}


OFF = ("crop_size", "device", "disable_grouping", "do_center_crop", "do_convert_rgb", "return_tensors")
DEPTH = {"do_pad": False, "size_divisor": None, "resample": 3}
# Contents of preprocessor_config.json files on the Hub. For DeiT, MAE, MSN, I-JEPA and dense prediction models, they
# are assembled from options that the image processor classes save.
PUBLISHED = {
    "google/vit-base-patch16-224": old_file("ViT", resample=2, size=224, **HALF),
    "facebook/deit-base-distilled-patch16-224": old_file(
        "DeiT", crop_size=224, do_center_crop=True, resample=3, size=256, **IMAGENET
    ),
    "facebook/vit-mae-base": old_file("ViT", resample=2, size=224, **IMAGENET),
    "facebook/vit-msn-base": old_file("ViT", size=224, **IMAGENET),
    "facebook/ijepa_vith14_1k": file("ViT", do_convert_rgb=None, resample=2, **SQUARE, **IMAGENET),
    "facebook/dinov2-base": file(
        "Bit",
        **{"crop_size": {"height": 224, "width": 224}, "do_center_crop": True, "do_convert_rgb": True},
        **{"resample": 3, "size": {"shortest_edge": 256}, **IMAGENET},
    ),
    "facebook/dinov3-vits16-pretrain-lvd1689m": {
        **file("DINOv3ViT", data_format="channels_first", default_to_square=True, resample=2, **SQUARE, **IMAGENET),
        **{"image_processor_type": "DINOv3ViTImageProcessorFast", "input_data_format": None, **dict.fromkeys(OFF)},
    },
    "openai/clip-vit-base-patch32": old_file(
        "CLIP", crop_size=224, do_center_crop=True, resample=3, size=224, **OPENAI
    ),
    "google/siglip-base-patch16-224": file("Siglip", processor_class="SiglipProcessor", resample=3, **SQUARE, **HALF),
    "Intel/dpt-large": file(
        "DPT", ensure_multiple_of=1, keep_aspect_ratio=False, size={"height": 384, "width": 384}, **DEPTH, **HALF
    ),
    "depth-anything/Depth-Anything-V2-Small-hf": file(
        "DPT", ensure_multiple_of=14, keep_aspect_ratio=True, size={"height": 518, "width": 518}, **DEPTH, **IMAGENET
    ),
    "tue-mps/coco_panoptic_eomt_large_640": {
        **file("Eomt", do_pad=True, do_split_image=False, ignore_index=None, default_to_square=False, **IMAGENET),
        **{"image_processor_type": "EomtImageProcessorFast", "crop_size": None, "do_center_crop": None},
        **{"resample": 2, "size": {"longest_edge": 640, "shortest_edge": 640}},
    },
}
TIMM = {
    "augreg": {"input_size": [3, 224, 224], "interpolation": "bicubic", "crop_pct": 0.9, "mean": [0.5] * 3},
    "nothing said": {"input_size": [3, 224, 224], "mean": None},
    "squash": {"input_size": [3, 336, 336], "crop_pct": 1.0, "crop_mode": "squash", "mean": OPENAI["image_mean"]},
    "squash and crop": {"input_size": [3, 384, 384], "crop_pct": 0.95, "crop_mode": "squash"},
    "not square": {"input_size": [3, 256, 192], "interpolation": "bilinear", "crop_pct": 1.0, "crop_mode": "squash"},
    "whole edge": {"input_size": [3, 224, 224], "interpolation": "bilinear", "crop_pct": 1.0},
    "lanczos": {"input_size": [3, 160, 160], "interpolation": "lanczos", "crop_pct": 0.95, "crop_mode": "center"},
}


@pytest.fixture(scope="module")
def photos():
    """Return landscape, portrait, narrow and small photos. Odd side lengths make crops asymmetric."""
    china, flower = load_sample_images().images
    crops = (china, flower, china[:, :301], china[:, :429], flower[40:240, 100:], china[:160, :131], flower[:97, :63])
    return [Image.fromarray(crop) for crop in crops]


def assert_same_pixels(processor, photos, expected):
    """Assert that pixels differ by at most one gray level.

    Where the resampling filter overshoots, a few pixels may differ more: values are clipped between the horizontal and
    the vertical pass, and the order of these passes differs between torchvision and PIL.
    """
    overshoots = processor.resample in (Resampling.BICUBIC, Resampling.LANCZOS)
    for photo, theirs in zip(photos, expected, strict=True):
        ours = processor(photo, return_tensors="pt").pixel_values[0]
        assert ours.shape == theirs.shape
        levels = (ours - theirs).abs() * torch.tensor(processor.image_std)[:, None, None] * 255
        assert (levels > 1.01).float().mean() <= (2e-3 if overshoots else 0)
        assert levels.mean() <= 0.3
        assert levels.max() <= 10.01


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_file_gives_the_pixels_of_its_own_class(tmp_path, photos, name, backend):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PUBLISHED[name]))
    # The DINOv3 image processor exists only for torchvision.
    backend_of_peer = "torchvision" if "dinov3" in name else backend
    peer = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend=backend_of_peer)
    assert type(peer).__module__.startswith("transformers.")
    expected = [peer(photo, return_tensors="pt").pixel_values[0] for photo in photos]
    options = image_processor_options(PUBLISHED[name], model_type="vit")
    assert_same_pixels(BACKENDS[backend](**options), photos, expected)


@pytest.mark.parametrize("name", sorted(MODEL_TYPES.keys() - {"Siglip2"}))
def test_missing_keys_and_int_sizes_follow_the_source_class(name):
    kind = getattr(transformers, f"{name}ImageProcessor")
    named = {"image_processor_type": f"{name}ImageProcessor"}
    for said in ({}, {"default_to_square": True}, {"default_to_square": False}):
        given = {**named, "size": 96, **said}
        assert image_processor_options(given, model_type="vit")["size"] == dict(kind.from_dict(given).size)
    if name == "VitPose":  # ViTPose crops objects instead of resizing images
        return
    theirs, ours = kind(), image_processor_options(named, model_type="vit")
    assert ours["size"] == dict(theirs.size)
    assert ours["do_center_crop"] == bool(theirs.do_center_crop)
    assert not ours["do_center_crop"] or ours["crop_size"] == dict(theirs.crop_size)
    for option in ("do_resize", "resample", "do_rescale", "rescale_factor", "do_normalize"):
        assert ours[option] == getattr(theirs, option), option
    assert (ours["image_mean"], ours["image_std"]) == (list(theirs.image_mean), list(theirs.image_std))
    for ending in ("FeatureExtractor", "ImageProcessorFast", "ImageProcessorPil"):
        assert image_processor_options({"image_processor_type": f"{name}{ending}"}, model_type="vit") == ours


def test_classes_and_options_that_are_left_out_or_not_supported():
    # A file without an image processor class uses the default class of the model type.
    for model_type, kind in MODEL_CLASSES.items():
        name = f"{kind}ImageProcessor"
        assert IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type, {}).get("torchvision", name) == name
        named = image_processor_options({"image_processor_type": name}, model_type="vit")
        assert image_processor_options({}, model_type=model_type) == named, model_type
    # Disabled options and options that do not affect the pixels are dropped.
    said = {"do_pad": False, "keep_aspect_ratio": False, "do_reduce_labels": True, "processor_class": "CLIPProcessor"}
    assert image_processor_options(said, model_type="vit") == image_processor_options({}, model_type="vit")
    # SigLIP 2 limits the number of patches. Our image processor resizes images to squares with this number of patches.
    said = {"image_processor_type": "Siglip2ImageProcessorFast", "patch_size": 14, "max_num_patches": 256, **HALF}
    options = image_processor_options(said, model_type="siglip2")
    assert options["size"] == {"height": 224, "width": 224}
    assert {"patch_size", "max_num_patches"}.isdisjoint(options)
    assert ORIGINALS.keys() == {family.images for family in FAMILIES if family.images}


def test_images_for_yolos_keep_their_proportions_and_are_padded():
    said = old_file("Yolos", size=512, max_size=864, format="coco_detection")
    options = image_processor_options(said, model_type="yolos")
    assert options["size"] == {"shortest_edge": 512, "longest_edge": 864}
    assert (options["ensure_multiple_of"], options["multiple_rounding"], options["do_pad"]) == (16, "down", True)
    processor = BACKENDS["pil"](**options, patch_size=16)
    batch = processor([Image.new("RGB", size) for size in ((640, 480), (1000, 300))], return_tensors="pt")
    assert batch.pixel_values.shape == (2, 3, 512, 864)
    assert batch.patch_attention_mask.sum((1, 2)).tolist() == [32 * 42, 16 * 54]


@pytest.mark.parametrize("backend", BACKENDS)
def test_images_for_yolos_are_those_of_its_own_image_processor(backend, tmp_path):
    theirs = transformers.YolosImageProcessor(size={"shortest_edge": 64, "longest_edge": 96})
    theirs.save_pretrained(tmp_path / "theirs")
    BACKENDS[backend].from_pretrained(tmp_path / "theirs").save_pretrained(tmp_path / "ours")
    ours = BACKENDS[backend].from_pretrained(tmp_path / "ours")
    draw = np.random.default_rng(0)
    # Images of the last three sizes are not resized, or lose one row or column by rounding.
    for height, width in ((90, 67), (75, 120), (40, 200), (200, 40), (64, 79), (141, 23), (57, 34)):
        image = Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))
        expected = theirs(image, return_tensors="pt")
        inputs = ours(image, return_tensors="pt")
        assert inputs.pixel_values.shape == expected.pixel_values.shape
        assert bool(inputs.patch_attention_mask.all())
        levels = (inputs.pixel_values - expected.pixel_values).abs() * torch.tensor(theirs.image_std)[:, None, None]
        assert levels.max() * 255 < 1.5
        maps = ours(image, segmentation_maps=np.zeros((height, width), np.uint8), return_tensors="pt").labels
        assert maps.shape[1:] == expected.pixel_values.shape[2:]


read_timm, read_open_clip = timm_image_processor_options, partial(open_clip_image_processor_options, image_size=64)
UNKNOWN_DPT = {"do_pad": True, "size_divisor": 14, "model_type": "dpt"}
UNKNOWN_EOMT = {"size": {"shortest_edge": 512, "longest_edge": None}, "do_split_image": True, "model_type": "eomt"}


def read_transformers(said):
    return image_processor_options(said, model_type=said.pop("model_type", "vit"))


@pytest.mark.parametrize(
    ("read", "said", "message"),
    [
        (read_transformers, UNKNOWN_DPT, "'do_pad': True, 'size_divisor': 14"),
        (read_transformers, UNKNOWN_EOMT, "do_split"),
        (read_transformers, {"size": 224, "do_pad": True, "size_divisor": 32}, "'do_pad': True, 'size_divisor': 32"),
        (read_transformers, {"image_processor_type": "SamImageProcessor"}, "Unknown image processor 'SamImageProc"),
        (read_transformers, {"size": 224, "model_type": "sam"}, "model_type='sam' is unknown"),
        (read_transformers, {"size": {"depth": 3}}, "size={'depth': 3}"),
        (read_timm, {"crop_mode": "border"}, "crop_mode='border'"),
        (read_timm, {"crop_mode": "center", "input_size": [3, 256, 192]}, r"input_size=\(3, 256, 192\)"),
        (read_timm, {"interpolation": "random"}, "interpolation='random'"),
        (read_open_clip, {"resize_mode": "longest"}, "resize_mode='longest' is not supported"),
    ],
)
def test_unsupported_image_processor_files_raise(read, said, message):
    with pytest.raises(ValueError, match=message):
        read(dict(said))


def test_ratio_is_kept_to_the_pixel_as_dpt_keeps_it():
    rng = torch.Generator().manual_seed(0)
    for height, width, target in torch.randint(20, 900, (300, 3), generator=rng).tolist():
        for multiple in (1, 14):
            image = torch.empty(1, height, width, device="meta")
            theirs = get_resize_output_image_size(image, (target, target + 7), True, multiple)
            size = {"height": target, "width": target + 7}
            ours = compute_resized_size(height, width, size=size, ensure_multiple_of=multiple, keep_aspect_ratio=True)
            assert ours == (max(theirs.height, multiple), max(theirs.width, multiple)), (height, width, size)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TIMM)
def test_timm_file_gives_the_pixels_of_its_transform(photos, name, backend):
    config = timm.data.resolve_data_config(pretrained_cfg=TIMM[name])
    transform = timm.data.create_transform(**config, is_training=False)
    processor = BACKENDS[backend](**timm_image_processor_options(TIMM[name]))
    assert_same_pixels(processor, photos, [transform(photo) for photo in photos])


def test_timm_file_with_another_number_of_channels_raises():
    options = timm_image_processor_options({"input_size": [1, 28, 28], "mean": [0.1307], "std": [0.3081]})
    pixels = BACKENDS["pil"](**options)(Image.new("RGB", (40, 30)), return_tensors="pt").pixel_values
    assert pixels.shape == (1, 1, 28, 28)
    assert pixels.mean() == pytest.approx(-0.1307 / 0.3081)


CUBIC, LINEAR = InterpolationMode.BICUBIC, InterpolationMode.BILINEAR
MIXED = {**OPENAI, "image_std": IMAGENET["image_std"]}
SQUASHED = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bilinear", "resize_mode": "squash"}
SHORTEST = {"mean": None, "std": IMAGENET["image_std"], "interpolation": "random", "resize_mode": "shortest"}


# Our image processor options, and the resizing, crop size and color normalization of the original evaluation code.
@pytest.mark.parametrize(
    ("options", "resize", "crop", "colors"),
    [
        (original_image_processor_options("dinov2", 224), Resize(256, CUBIC), 224, IMAGENET),
        (original_image_processor_options("dinov2", 384), Resize(438, CUBIC), 384, IMAGENET),
        (original_image_processor_options("vit_jax", 384), Resize((384, 384), LINEAR), 384, HALF),
        (read_open_clip({}), Resize(64, CUBIC), 64, OPENAI),
        (read_open_clip(SQUASHED), Resize((64, 64), LINEAR), 64, HALF),
        (read_open_clip(SHORTEST), Resize(64, CUBIC), 64, MIXED),
    ],
)
def test_original_weights_get_the_pixels_of_their_own_evaluation(photos, options, resize, crop, colors):
    steps = [resize, CenterCrop(crop), ToTensor(), Normalize(colors["image_mean"], colors["image_std"])]
    assert_same_pixels(BACKENDS["pil"](**options), photos, [Compose(steps)(photo) for photo in photos])


def test_open_clip_weights_are_processed_as_the_file_beside_them_says(tmp_path):
    torch.save(state_of_clip(), tmp_path / "open_clip_pytorch_model.bin")
    for preprocess, mean, size in (
        ({"preprocess_cfg": {"mean": [0.5] * 3, "resize_mode": "squash"}}, 0.5, {"height": 32, "width": 32}),
        ({}, OPENAI["image_mean"][0], {"shortest_edge": 32}),
    ):
        said = {"model_cfg": model_cfg(), **preprocess}
        (tmp_path / "open_clip_config.json").write_text(json.dumps(said))
        processor = load_image_processor(tmp_path / "open_clip_pytorch_model.bin")
        assert (processor.image_mean[0], processor.size) == (mean, size)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, (36, Resampling.BICUBIC, 0.485)),
        ({"pretrained_cfg": None}, (36, Resampling.BICUBIC, 0.485)),
        ({"interpolation": "bilinear", "crop_pct": 1.0, "mean": [0.5] * 3}, (32, Resampling.BILINEAR, 0.5)),
    ],
    ids=["nothing", "null", "beside the architecture"],
)
def test_timm_folder_without_options_gets_those_of_timm(tmp_path, caplog, said, expected):
    save_file(drawn("vit_base_patch16_224").state_dict(), tmp_path / "model.safetensors")
    config = {"architecture": "vit_base_patch16_224", "model_args": {"img_size": 32, "num_heads": 2}, **said}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with caplog.at_level("WARNING", "hf_vit"):
        processor = load_image_processor(tmp_path)
    assert "has no image processor options" in caplog.text
    assert (processor.size["shortest_edge"], processor.resample, processor.image_mean[0]) == expected
    assert processor.crop_size == {"height": 32, "width": 32}


def test_image_processor_of_a_weight_file_follows_its_arguments(tmp_path):
    save_file(drawn("vit_small_patch16_rope_224").state_dict(), tmp_path / "vit.safetensors")
    given = {"architecture": "vit_small_patch16_rope_224"}
    processor = load_image_processor(tmp_path / "vit.safetensors", 64, given=given)
    assert (processor.crop_size, processor.image_mean[0]) == ({"height": 64, "width": 64}, 0.485)
    torch.save(drawn("vit_base_patch16_224", in_chans=1).state_dict(), tmp_path / "gray.pth")
    assert load_image_processor(tmp_path / "gray.pth").num_channels == 1


def rectangle(height, width):
    return {"height": height, "width": width}


def cropped(shortest, crop):
    return {"size": {"shortest_edge": shortest}, "do_center_crop": True, "crop_size": crop}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"size": rectangle(384, 384)}, {"size": rectangle(378, 378)}),
        ({"size": rectangle(28, 384)}, {"size": rectangle(28, 378)}),
        ({"size": rectangle(8, 14)}, {"size": rectangle(14, 14)}),
        (cropped(438, rectangle(384, 384)), {"size": {"shortest_edge": 431}, "crop_size": rectangle(378, 378)}),
        ({"size": {"shortest_edge": 384}}, {"size": {"shortest_edge": 384}}),
    ],
)
def test_images_get_whole_patches_where_the_patch_is_known(tmp_path, caplog, said, expected):
    content = {"image_processor_type": "BitImageProcessor", "do_center_crop": False, **said}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    with caplog.at_level("WARNING", "hf_vit"):
        processor = load_image_processor(tmp_path, patch_size=14)
    assert {name: processor.to_dict()[name] for name in expected} == expected
    assert ("is not a multiple of patch_size=14" in caplog.text) == (said["size"] != expected["size"])
    assert load_image_processor(tmp_path).size == said["size"]


CROPPED = cropped(256, rectangle(224, 224))
WIDE = rectangle(112, 448)


def test_another_image_size_keeps_the_share_that_is_cropped_and_becomes_exact():
    for options, image_size, expected in (
        ({"size": rectangle(224, 224)}, 384, {"size": rectangle(384, 384)}),
        ({"size": rectangle(224, 224)}, (192, 256), {"size": rectangle(192, 256)}),
        (CROPPED, 384, {"size": {"shortest_edge": 439}, "crop_size": rectangle(384, 384)}),
        (CROPPED, (112, 448), {"size": {"shortest_edge": 512}, "crop_size": WIDE}),
        ({**CROPPED, "size": rectangle(256, 256)}, (112, 448), {"size": rectangle(128, 512), "crop_size": WIDE}),
        ({"size": {"longest_edge": 512}}, 384, {"size": rectangle(384, 384)}),
    ):
        resized = resize_image_processor({**options, **IMAGENET}, image_size)
        assert resized == {**options, **IMAGENET, **expected}
        pixels = BACKENDS["torchvision"](**resized)(Image.new("RGB", (640, 480)), return_tensors="pt").pixel_values
        assert pixels.shape[-2:] == ((image_size, image_size) if isinstance(image_size, int) else image_size)
    for name in ("depth-anything/Depth-Anything-V2-Small-hf", "tue-mps/coco_panoptic_eomt_large_640"):
        options = resize_image_processor(image_processor_options(PUBLISHED[name], model_type="vit"), (56, 70))
        pixels = BACKENDS["pil"](**options)(Image.new("RGB", (40, 30)), return_tensors="pt").pixel_values
        assert pixels.shape == (1, 3, 56, 70)


def test_another_number_of_channels_takes_the_mean_or_repeats():
    options = image_processor_options(PUBLISHED["facebook/dinov2-base"], model_type="dinov2")
    gray, five = (resize_image_processor(options, num_channels=number) for number in (1, 5))
    assert (gray["image_mean"], gray["image_std"]) == ([pytest.approx(0.449)], [pytest.approx(0.226)])
    assert five["image_mean"] == [0.485, 0.456, 0.406, 0.485, 0.456]
    assert resize_image_processor(options, num_channels=3) == options
    pixels = BACKENDS["pil"](**gray)(Image.new("RGB", (300, 300)), return_tensors="pt").pixel_values
    assert pixels.shape == (1, 1, 224, 224)
    assert resize_image_processor({**HALF, "image_mean": 0.5}, num_channels=1)["image_mean"] == 0.5
