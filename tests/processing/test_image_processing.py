"""Test that the image processors of both backends agree with transformers and each other in all options."""

import math
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.Image import Resampling
from sklearn.datasets import load_sample_image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import center_crop as torchvision_center_crop
from transformers import ViTImageProcessor, ViTImageProcessorPil
from transformers.image_transforms import get_resize_output_image_size, get_size_with_aspect_ratio
from transformers.image_utils import SizeDict, get_image_size_for_max_height_width
from transformers.models.yolos.image_processing_yolos import get_size_with_aspect_ratio_yolos

from hf_vit import HfViTConfig, HfViTImageProcessorPil
from hf_vit import HfViTImageProcessor as Processor
from hf_vit.model.image_geometry import MAX_OUTPUT_PIXELS, center_crop, compute_resized_size, to_size_dict

from ..helpers.images import BACKENDS, as_chw, noise


RAW = {"do_rescale": False, "do_normalize": False}


def by_backends(image, **options):
    """Return the pixel values that both backends compute for an image."""
    return [kind(**options)(image, return_tensors="pt").pixel_values for kind in BACKENDS.values()]


@pytest.fixture(scope="module")
def photo():
    return np.array(load_sample_image("china.jpg"))  # (427, 640, 3)


def test_backends_differ_in_resizing_devices_and_lists_of_arrays_alone():
    """Methods that are inherited from the common base class of both backends are tested with only one backend."""
    own = {name for kind in BACKENDS.values() for name in vars(kind) if not name.startswith("__")}
    resizing = {"_resize_smoothly", "_resize_batch"}
    assert own == {"valid_kwargs", "_prepare_image_like_inputs", "_to_batch_feature", *resizing}
    assert [kind.__mro__[1:3] for kind in BACKENDS.values()] == [Processor.__mro__[1:3]] * 2


def test_defaults_give_what_the_library_gives(photo):
    images = [photo, noise(250, 260, 3)]  # upscaling the second image causes errors of one gray level
    for ours, theirs, atol in (
        (Processor, ViTImageProcessor, 0),
        (HfViTImageProcessorPil, ViTImageProcessorPil, 1e-6),
    ):
        pair = (kind()(images, return_tensors="pt").pixel_values for kind in (ours, theirs))
        torch.testing.assert_close(*pair, atol=atol, rtol=0)


# Resampling method -> target sizes for images with 427 x 640 and 311 x 333 pixels.
RESIZED = {"BILINEAR": [(224, 224), (100, 333), (31, 17), (512, 512)], "BICUBIC": [(428, 641), (100, 333)]}
RESIZED |= {"LANCZOS": [(900, 700), (224, 224)], "BOX": [(31, 17), (512, 512)], "HAMMING": [(100, 333), (428, 641)]}


@pytest.mark.parametrize(("resample", "size"), [(name, size) for name, sizes in RESIZED.items() for size in sizes])
@pytest.mark.parametrize("subject", ["photo", "noise"])
def test_backends_agree_to_one_gray_level(photo, resample, size, subject):
    image, is_bilinear = photo if subject == "photo" else noise(311, 333, 3), resample == "BILINEAR"
    first, second = by_backends(image, size=size, resample=Resampling[resample], **RAW)
    difference = first - second
    if not is_bilinear or size[0] > image.shape[0] or size[1] > image.shape[1]:
        assert not difference.any()  # for these options and sizes, both backends use PIL
    # PIL rounds to gray levels between the two passes of resizing. Torchvision does this only on CPUs with AVX2.
    # Without AVX2, results additionally differ by at most half a gray level, and by a quarter on average.
    assert difference.abs().max() <= 1
    assert difference.abs().mean() < (0.25 if torch.backends.cpu.get_cpu_capability() == "DEFAULT" else 0.05)
    assert difference.mean().abs() < 0.05


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_backends_agree_for_any_number_of_channels(photo, dtype):
    array = np.concatenate([photo] * 4, axis=-1).astype(dtype)
    for count in (1, 2, 3, 4, 5, 12):
        first, second = by_backends(array[..., :count], num_channels=count, **RAW)
        assert first.shape == (1, count, 224, 224)
        assert (first - second).abs().max() <= (1 if dtype == np.uint8 else 0.01)
        # Channels are resized independently. The fourth channel is not treated as alpha.
        single = by_backends(array[..., count - 1], num_channels=1, **RAW)[1]
        assert torch.equal(second[:, -1:], single)


def test_neither_large_floats_nor_grouping_by_shape_change_a_result(backend):
    array = np.random.default_rng(0).normal(size=(3, 40, 50)).astype(np.float32) * 300
    processor = backend(size=20, **RAW)
    large, small = (processor(own, return_tensors="pt").pixel_values for own in (array, array / np.float32(1024)))
    torch.testing.assert_close(large, small * 1024)
    images = [noise(40, 50, 3, seed=seed) for seed in range(3)] + [noise(30, 50, 3)]
    images.insert(1, images[0].astype(np.float32))
    processor = Processor(size=32)
    grouped, single = (
        processor(images, disable_grouping=flag, return_tensors="pt").pixel_values for flag in (False, True)
    )
    assert torch.equal(grouped, single)


def test_nearest_takes_the_pixel_under_each_center_in_both_backends(photo):
    first, second = by_backends(photo, size=(300, 224), resample=Resampling.NEAREST, **RAW)
    rows = [int((row + 0.5) * 427 / 300) for row in range(300)]
    columns = [(2 * column + 1) * 640 // 448 for column in range(224)]
    assert torch.equal(first, second)
    assert torch.equal(first[0], as_chw(photo[rows][:, columns]))


def test_center_crop_is_that_of_the_library_or_torchvision():
    library = ViTImageProcessor()
    for size in [(30, 50), (31, 50), (60, 50), (61, 45), (20, 71), (41, 61)]:
        image = torch.from_numpy(noise(3, 40, 60))
        theirs = library.center_crop(image, SizeDict(height=size[0], width=size[1]))
        assert torch.equal(center_crop(image, *size), theirs)
    for height in range(3, 22):
        image = torch.from_numpy(noise(3, height, 12))
        assert torch.equal(center_crop(image, 9, 9, "half_to_even"), torchvision_center_crop(image, [9, 9]))
        theirs = library.center_crop(image, SizeDict(height=9, width=9))
        assert torch.equal(center_crop(image, 9, 9, "down"), theirs)


def test_output_size():
    for image, size, multiple, expected in (
        ((480, 640), {"height": 224, "width": 196}, None, (224, 196)),
        ((480, 640), {"shortest_edge": 224}, None, (224, 298)),
        ((640, 480), {"longest_edge": 224}, None, (224, 168)),
        ((1, 10000), {"longest_edge": 224}, None, (1, 224)),
        ((480, 640), {"shortest_edge": 224, "longest_edge": 256}, None, (192, 256)),
        ((640, 480), {"shortest_edge": 800, "longest_edge": 1066}, None, (1066, 800)),
        ((480, 640), {"max_height": 120, "max_width": 240}, None, (120, 160)),
        ((49, 49), {"max_height": 1, "max_width": 1}, None, (1, 1)),
        ((480, 640), {"shortest_edge": 224}, (14, 14), (224, 294)),
        ((480, 640), {"shortest_edge": 224}, (16, 32), (224, 288)),
        ((1, 900), {"longest_edge": 100}, (16, 16), (16, 96)),
        ((900, 1), {"longest_edge": 100}, (16, 16), (96, 16)),
    ):
        assert compute_resized_size(*image, size=size, ensure_multiple_of=multiple) == expected, (image, size)


YOLOS = [(40, 120), (800, 1344), (512, 864), (800, 1333), (200, 300)]


@pytest.mark.parametrize(
    ("size", "theirs"),
    [
        ((60,), lambda image, edge: get_resize_output_image_size(np.empty((3, *image)), edge, False)),
        ((60, 70), get_size_with_aspect_ratio),
        ((40, 120), get_size_with_aspect_ratio),
        ((800, 1333), get_size_with_aspect_ratio),
        ((90, 70), get_image_size_for_max_height_width),
        ((40, 40), get_image_size_for_max_height_width),
        *((bounds, partial(get_size_with_aspect_ratio_yolos, mod_size=16)) for bounds in YOLOS),
    ],
)
def test_sizes_that_keep_the_aspect_ratio_are_the_librarys_to_the_pixel(size, theirs):
    is_yolos, is_max = isinstance(theirs, partial), theirs is get_image_size_for_max_height_width
    names = ("max_height", "max_width") if is_max else ("shortest_edge", "longest_edge")
    options = {"ensure_multiple_of": 16, "multiple_rounding": "down"} if is_yolos else {}
    rng = np.random.default_rng(0)
    sides = [(203, 55), (55, 203), (1, 500), (500, 1)]
    sides += rng.integers(1, 1400, (1000, 2)).tolist()
    sides += [(size[0], other) for other in range(1, 700, 7)] + [(other, size[0]) for other in range(1, 700, 7)]
    for image in sides:
        expected = tuple(max(side, 16 if is_yolos else 1) for side in theirs(image, *size))
        if math.prod(expected) <= MAX_OUTPUT_PIXELS:
            found = compute_resized_size(*image, size=dict(zip(names, size, strict=False)), **options)
            assert found == expected, image


def test_the_pil_processor_resizes_as_pil_and_the_library_do():
    sizes = (((66, 106), (56, 231)), ((90, 40), (30, 80)), ((40, 60), (80, 30)))
    for (image, size), resample in product(sizes, (Resampling.BILINEAR, Resampling.BICUBIC)):
        pixels, kinds = noise(*image, 3), (HfViTImageProcessorPil, ViTImageProcessorPil)
        options = {"size": {"height": size[0], "width": size[1]}, "resample": resample, **RAW}
        ours, theirs = (kind(**options)(pixels, return_tensors="np")["pixel_values"][0] for kind in kinds)
        np.testing.assert_array_equal(ours, theirs)
        by_pil = Image.fromarray(pixels).resize(size[::-1], resample)
        np.testing.assert_array_equal(ours, np.asarray(by_pil).transpose(2, 0, 1))


def test_size_options_at_construction_and_per_call(backend):
    image = noise(40, 60, 3)
    for options, shape in (
        ({"size": 32}, (32, 32)),
        ({"size": [20, 30]}, (20, 30)),
        ({"size": 32, "default_to_square": False}, (32, 48)),
        ({"size": {"longest_edge": 48}}, (32, 48)),
        ({"size": {"shortest_edge": 32}, "do_center_crop": True, "crop_size": 28}, (28, 28)),
        ({"size": {"longest_edge": 50}, "ensure_multiple_of": 16}, (32, 48)),
        ({"size": SizeDict(height=8, width=9)}, (8, 9)),
    ):
        constructed = backend(**options)(image, return_tensors="pt").pixel_values
        assert constructed.shape[-2:] == shape
        if not isinstance(options["size"], SizeDict):
            assert torch.equal(backend()(image, return_tensors="pt", **options).pixel_values, constructed)


def test_bad_sizes_are_refused():
    wrong = [{"height": 3}, {"min_pixels": 4, "max_pixels": 9}, {"shortest_edge": 0}, {"height": 2.0, "width": 2}]
    for size in [*wrong, 0, (1,), "a"]:
        with pytest.raises(ValueError, match=r"^size=.* must "):
            Processor(size=size)
    with pytest.raises(ValueError, match=r"^crop_size=.*\"height\", \"width\""):
        to_size_dict({"shortest_edge": 3}, "crop_size", (("height", "width"),))
    message = r"images\[1\] with 1 x 10000 pixels would become 224 x 2240000.*longest_edge"
    with pytest.raises(ValueError, match=message):  # the error is raised before memory is allocated
        Processor(size={"shortest_edge": 224})([noise(9, 9, 3), noise(1, 10000, 3)])


def test_means_are_spread_over_the_channels_or_given_for_each():
    for num_channels in (1, 3, 5):
        options = {"image_mean": 0.25, "image_std": [0.5] * num_channels, "do_resize": False}
        processor = Processor(num_channels=num_channels, **options)
        assert processor.image_mean == (0.25,) * num_channels
        image = noise(num_channels, 30, 40)
        expected = (torch.tensor(image) / 255 - 0.25) / 0.5
        torch.testing.assert_close(processor(image, return_tensors="pt").pixel_values[0], expected)
    mean, std, image = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6], noise(20, 30, 3) / np.float32(255)
    options = {"image_mean": mean, "image_std": std, "do_resize": False}
    expected = as_chw((image - np.float32(mean)) / np.float32(std))
    for scale in (1, 255):
        values = Processor(**options, do_rescale=scale == 255)(image * np.float32(scale), return_tensors="pt")
        torch.testing.assert_close(values.pixel_values[0], expected, atol=1e-5, rtol=1e-5)
    plain = Processor(do_resize=False, do_normalize=False)(image * np.float32(255), return_tensors="pt")
    torch.testing.assert_close(plain.pixel_values[0], as_chw(image))


def test_a_mean_and_deviation_for_each_of_four_channels_take_images_of_four():
    options = {"image_mean": [0.1, 0.2, 0.3, 0.4], "image_std": (0.5, 0.6, 0.7, 0.8), "do_resize": False}
    processor = Processor()
    for input_data_format, image in (("channels_last", noise(30, 40, 4)), ("channels_first", noise(4, 30, 40))):
        call = {**options, "input_data_format": input_data_format, "return_tensors": "pt"}
        theirs = ViTImageProcessor()(image, **call).pixel_values
        torch.testing.assert_close(processor(image, **call).pixel_values, theirs, atol=1e-6, rtol=1e-6)
    assert processor.num_channels == 3  # call arguments do not change the processor
    for three in (noise(30, 40, 3), noise(30, 40)):
        with pytest.raises(ValueError, match="num_channels=4"):
            processor(three, **options)
    gray, half = {"image_mean": [0.5], "image_std": [0.5]}, {"image_mean": [0.5] * 4}
    for wrong in (gray, half, {"num_channels": 3, **options}):
        with pytest.raises(ValueError, match=r"values, .*num_channels=3"):
            processor(noise(30, 40, 4), **wrong)


def test_padding_and_its_mask(backend):
    images = [noise(40, 60, 3), noise(60, 30, 3), noise(33, 47, 3)]
    processor = backend(do_pad=True, size={"longest_edge": 64}, ensure_multiple_of=16)
    outputs = processor(images, return_tensors="pt")
    pixels, mask = outputs["pixel_values"], outputs["patch_attention_mask"]
    assert set(outputs) == {"pixel_values", "patch_attention_mask"}
    assert pixels.shape == (3, 3, 64, 64)
    assert mask.dtype == torch.bool
    expected = torch.zeros(3, 4, 4, dtype=torch.bool)
    expected[0, :3], expected[1, :, :2], expected[2, :3] = True, True, True
    assert torch.equal(mask, expected)
    per_pixel = mask.repeat_interleave(16, 1).repeat_interleave(16, 2)[:, None].expand_as(pixels)
    assert pixels[~per_pixel].abs().max() == 0
    for image, padded in zip(images, pixels, strict=True):
        alone = processor(image, return_tensors="pt", do_pad=False).pixel_values[0]
        assert torch.equal(padded[:, : alone.shape[1], : alone.shape[2]], alone)
    # Images are padded to a given size, although they do not consist of whole patches.
    processor = Processor(do_pad=True, do_resize=False, ensure_multiple_of=(8, 16), pad_size=(24, 64))
    outputs = processor([noise(17, 33, 3), noise(8, 16, 3)], return_tensors="pt")
    assert outputs.pixel_values.shape == (2, 3, 24, 64)
    assert outputs.patch_attention_mask.sum((1, 2)).tolist() == [9, 1]
    with pytest.raises(ValueError, match=r"images\[1\] has 25 x 16 pixels.*pad_size"):
        processor([noise(8, 8, 3), noise(25, 16, 3)])
    natural = processor(noise(17, 33, 3), return_tensors="np", pad_size=None)
    assert natural["pixel_values"].shape == (1, 3, 24, 48)
    assert natural["patch_attention_mask"].all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"multiple_rounding": "up"}, "multiple_rounding='up' must be one of nearest, down"),
        ({"do_pad": True}, "do_pad=True .* requires ensure_multiple_of.*patch_size"),
        ({"do_pad": True, "hide_padding": False}, "Set pad_size="),
        ({"size": {"shortest_edge": 9}, "keep_aspect_ratio": True}, "=True requires a size with height.*edge': 9"),
        ({"do_pad": True, "ensure_multiple_of": 16, "pad_size": 40}, "pad_size=.*40.* must be a multiple of .*16"),
        ({"ensure_multiple_of": (8, 8, 8)}, "ensure_multiple_of=.*must be"),
        ({"image_std": [0.5]}, "image_std has 1 values.*num_channels=3"),
        ({"image_std": [0.5, 0.0, 1.0]}, "image_std=.* must be positive"),
        ({"image_mean": float("nan")}, "image_mean=.* finite"),
    ],
)
def test_options_that_contradict_are_refused(options, message):
    """More invalid options are tested in `tests/hostile/test_configs.py`."""
    with pytest.raises(ValueError, match=message):
        Processor(**options)
    with pytest.raises(ValueError, match=message):
        Processor()(noise(8, 8, 3), **options)


def test_return_types_and_formats(backend):
    images, processor = [noise(20, 30, 3), noise(30, 20, 3)], backend(size=16, do_pad=True, ensure_multiple_of=8)
    tensors, arrays, lists = (processor(images, return_tensors=kind) for kind in ("pt", "np", None))
    kind = torch.Tensor if backend is Processor else np.ndarray
    for name, dtype in {"pixel_values": np.float32, "patch_attention_mask": np.bool_}.items():
        assert isinstance(arrays[name], np.ndarray)
        assert arrays[name].dtype == dtype
        assert np.array_equal(tensors[name].numpy(), arrays[name])
        assert all(isinstance(value, kind) for value in lists[name])
        assert np.array_equal(np.stack([np.asarray(value) for value in lists[name]]), arrays[name])
    for size in (16, {"longest_edge": 16}):
        formats = ("channels_first", "channels_last")
        first, last = (backend(size=size)(images, data_format=name)["pixel_values"] for name in formats)
        for image, moved in zip(first, last, strict=True):
            assert moved.shape[-1] == 3
            assert np.array_equal(np.asarray(image), np.moveaxis(np.asarray(moved), -1, 0))
    # Images of several sizes cannot be stacked.
    processor = backend(size={"longest_edge": 24})
    values = [np.asarray(value) for value in processor(images)["pixel_values"]]
    assert [value.shape for value in values] == [(3, 16, 24), (3, 24, 16)]
    assert all(value.flags.c_contiguous for value in values)
    with pytest.raises(ValueError, match=r"2 sizes, from \(16, 24\) to \(24, 16\).*do_pad=True"):
        processor(images, return_tensors="pt")


def test_options_of_a_call_do_not_stick_and_unknown_ones_are_refused():
    image = noise(20, 30, 3)
    for kind in BACKENDS.values():
        for device in ("cpu", torch.device("cpu")):
            assert kind()(image, return_tensors="pt", device=device).pixel_values.device.type == "cpu"
    with pytest.raises(ValueError, match="device='cuda:0' requires torchvision"):
        HfViTImageProcessorPil()(image, device="cuda:0")
    assert Processor(resample=InterpolationMode.BICUBIC).resample is Resampling.BICUBIC
    processor = Processor(size=16)
    before = processor.to_dict()
    processor(noise(8, 8), size=8, image_mean=0.1, num_channels=3, do_pad=True, ensure_multiple_of=4)
    assert processor.to_dict() == before
    with pytest.raises(TypeError, match="sizes"):
        processor(noise(8, 8), sizes=8)


def test_every_documented_option_is_an_option():
    options = Processor.valid_kwargs.__annotations__
    lines = Processor.__mro__[1].__doc__.splitlines()
    documented = [line.split(":")[0].strip() for line in lines if line[:8] == " " * 8]
    documented = [name for name in documented if (name.isidentifier() and "_" in name) or name in ("size", "resample")]
    assert len(documented) > 12
    assert set(documented) <= set(options)
    assert {"num_channels", "ensure_multiple_of"} <= set(documented)


def test_for_model(backend):
    processor = backend.for_model(HfViTConfig(image_size=(32, 48), patch_size=16, num_channels=1), do_normalize=False)
    assert (processor.size, processor.num_channels, processor.do_normalize) == ({"height": 32, "width": 48}, 1, False)
    assert processor(noise(28, 28), return_tensors="pt").pixel_values.shape == (1, 1, 32, 48)
    assert backend.for_model(HfViTConfig(), size=64).size == {"height": 64, "width": 64}
