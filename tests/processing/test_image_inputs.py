"""Test image types and color modes of image processors, and errors that name the invalid image."""

import base64
import threading
import time
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product

import numpy as np
import PIL.Image
import pytest
import torch

from hf_vit import HfViTImageProcessor as Processor
from hf_vit.data.targets import encoded_bytes
from hf_vit.model import image_inputs

from ..helpers.images import PLAIN, as_chw, noise, png, read


pixels_of = partial(read, Processor)


@pytest.fixture
def warnings(monkeypatch):
    messages = []
    monkeypatch.setattr(image_inputs.logger, "warning_once", messages.append)
    return messages


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_GET(self):
            if self.path.startswith("/to:"):
                self.send_response(302)
                self.send_header("Location", self.path.removeprefix("/to:"))
                self.end_headers()
            elif self.path == "/slow":
                self.send_response(200)
                self.end_headers()
                with suppress(OSError):  # the client may close the connection
                    for _ in range(100):
                        self.wfile.write(b"x")
                        time.sleep(0.05)
            else:
                super().do_GET()

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=tmp_path)) as http_server:
        threading.Thread(target=http_server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http_server.server_port}"
        http_server.shutdown()


def test_image_types_give_equal_pixels(backend, tmp_path, server):
    array, path = noise(40, 50, 3), tmp_path / "image.png"
    image, tensor = PIL.Image.fromarray(array), torch.from_numpy(array)
    image.save(path)
    encoded = base64.b64encode(path.read_bytes()).decode()
    data_url = "data:image/png;base64," + encoded
    kinds = [str(path), path, f"{server}/image.png", data_url, encoded, image, array, array.transpose(2, 0, 1), tensor]
    kinds += [tensor.permute(2, 0, 1).contiguous(), array.astype(np.float32), array.astype(np.int64)]
    outputs = backend()(kinds, return_tensors="pt").pixel_values
    assert outputs.shape == (len(kinds), 3, 224, 224)
    assert outputs.dtype == torch.float32
    assert outputs.is_contiguous()
    # Resized float images are not rounded, so they may differ from resized uint8 images by half a gray level.
    assert (outputs[-2] - outputs[0]).abs().max() < 2.5 / 127.5
    same = torch.cat((outputs[:-2], outputs[-1:]))
    assert torch.equal(same, outputs[:1].expand_as(same))


def test_batch_equals_single_images_and_inputs_are_unchanged(backend):
    images = [noise(30, 40, 3), PIL.Image.fromarray(noise(40, 30)), torch.from_numpy(noise(4, 20, 20)).float()]
    processor = backend(size=24)
    batch = processor(images, return_tensors="pt").pixel_values
    singles = [processor(image, return_tensors="pt").pixel_values[0] for image in images]
    assert torch.equal(batch, torch.stack(singles))
    # Batched arrays and nested lists are processed as lists of images.
    for kind, shape in ((np.asarray, (3, 3, 20, 30)), (torch.from_numpy, (3, 20, 30, 3))):
        batch = noise(*shape)
        nested = [[kind(batch[:1])], (kind(batch[1]), kind(batch[2]))]
        listed, *others = (processor(own, return_tensors="pt").pixel_values for own in ([*batch], kind(batch), nested))
        assert all(torch.equal(own, listed) for own in others)
    for array in (noise(3, 20, 30), noise(3, 20, 30).astype(np.float32)):
        before, tensor = array.copy(), torch.from_numpy(array)
        backend(do_resize=False)([array, tensor, tensor[:, :10]])
        backend(do_resize=False, do_normalize=False)([array, tensor[:, :10]])
        backend(**PLAIN)([array, tensor[:, :10]])["pixel_values"][0][:] = 0
        assert np.array_equal(array, before)


def test_types_of_number_and_memory_layouts():
    gray = noise(6, 7)
    options = {"num_channels": 1}
    for dtype in (np.int16, np.int32, np.uint32, np.uint64, np.float16, np.float64):
        assert torch.equal(pixels_of(gray.astype(dtype), **options), as_chw(gray)), dtype
    assert torch.equal(pixels_of(torch.tensor(gray).bfloat16(), **options), as_chw(gray))
    assert pixels_of(gray > 99, **options).unique().tolist() == [0, 255]
    wide = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    expected = as_chw(np.round(wide / 257))
    assert torch.equal(pixels_of(wide, **options), expected)
    assert torch.equal(pixels_of(torch.from_numpy(wide), **options), expected)
    assert torch.equal(pixels_of(np.stack([wide] * 3, axis=-1)), expected.expand(3, -1, -1))
    wide = noise(20, 30, 3) * np.uint16(257)
    for array in (wide[..., ::-1], wide[::-1, ::2], wide.astype(">u2")):
        expected = as_chw(array.astype(np.float64) / 257)
        assert torch.equal(pixels_of(array), expected)
        array.flags.writeable = False
        assert torch.equal(pixels_of(array), expected)
    array = noise(20, 30, 3)
    shares = []
    for array.flags.writeable in (True, False):  # torch shares only writable memory
        shares.append(image_inputs.read_image(array, num_channels=3).data_ptr() == array.ctypes.data)
    assert shares == [True, False]


def test_unclear_arrays_warn(warnings):
    array = noise(3, 5, 3)
    assert torch.equal(pixels_of(array, input_data_format="channels_last"), as_chw(array))
    assert not warnings
    assert torch.equal(pixels_of(array), torch.tensor(array).float())
    assert "first or last" in warnings.pop()
    # A first dimension of 4 could be RGBA channels, but the model has 3 channels.
    assert pixels_of(noise(4, 8, 3)).shape == (3, 4, 8)
    warnings.clear()
    array = noise(8, 8, 3) / np.float32(255)  # pixel values from 0 to 1, which must not be rescaled
    Processor()(array * 255)
    Processor(do_rescale=False)(array)
    Processor()(PIL.Image.new("F", (8, 8)))
    assert not warnings
    Processor()(array)
    assert "do_rescale=False" in warnings[0]


def test_fetch_images_opens_files_and_passes_the_rest(tmp_path):
    PIL.Image.fromarray(noise(4, 5, 4)).save(tmp_path / "a.png")
    array = noise(4, 5)
    fetched = Processor().fetch_images([[str(tmp_path / "a.png")], array])
    assert fetched[0][0].mode == "RGBA"
    assert fetched[1] is array
    assert torch.equal(Processor().process_image(fetched[0][0]), Processor().process_image(tmp_path / "a.png"))
    frames = [PIL.Image.new("L", (8, 8), value) for value in (10, 200)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert pixels_of(tmp_path / "a.gif").unique().tolist() == [10]


@pytest.mark.parametrize("suffix", [".png", ".tiff"])
def test_exif_orientation_is_followed(tmp_path, suffix):
    array, path = noise(6, 9, 3), tmp_path / f"image{suffix}"
    turned = {1: array, 2: array[:, ::-1], 3: array[::-1, ::-1], 4: array[::-1], 5: array.transpose(1, 0, 2)}
    turned |= {6: np.rot90(array, -1), 7: np.rot90(array, 2).transpose(1, 0, 2), 8: np.rot90(array)}
    for orientation, expected in turned.items():
        image = PIL.Image.fromarray(array)
        image.getexif()[0x0112] = orientation
        image.save(path, exif=image.getexif())
        with PIL.Image.open(path) as lazy:
            for kind in (path, lazy, Processor().fetch_images(path)):
                assert torch.equal(pixels_of(kind), as_chw(expected.copy()))


def test_modes_without_alpha_become_what_pil_makes_of_them():
    color = PIL.Image.fromarray(noise(9, 8, 3))
    for mode in ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"):
        image = PIL.Image.merge("LAB", color.split()) if mode == "LAB" else color.convert(mode)
        rgb = image.convert("RGB")
        for num_channels, expected in ((3, rgb), (1, rgb.convert("L"))):
            assert torch.equal(pixels_of(image, num_channels=num_channels), as_chw(np.array(expected))), mode
    # Arrays and tensors are converted to gray with the same weights as in PIL.
    array = noise(200, 300, 3)
    array[0, 0] = 255
    expected = as_chw(np.array(PIL.Image.fromarray(array).convert("L")))
    for image in (PIL.Image.fromarray(array), array, torch.from_numpy(array)):
        assert torch.equal(pixels_of(image, num_channels=1), expected)
    floats = pixels_of(array.astype(np.float32), num_channels=1)
    assert (floats - expected).abs().max() <= 0.501
    assert expected[0, 0, 0] == 255


def half_transparent(mode):
    """Return an image of two pixels: a transparent one with gray value 7 and an opaque one with gray value 40."""
    if mode in ("LA", "La", "RGBa"):
        image = PIL.Image.new("LA", (2, 1), (7, 0))
        image.putpixel((1, 0), (40, 255))
        return image.convert("RGBA").convert(mode) if mode == "RGBa" else image.convert(mode)
    clear, solid = {"L": (7, 40), "RGB": ((7,) * 3, (40,) * 3), "1": (0, 255)}.get(mode, (1, 2))
    image = PIL.Image.new("P" if mode == "PA" else mode, (2, 1), clear)
    image.putpixel((1, 0), solid)
    if mode in ("P", "PA"):
        image.putpalette([0, 0, 0, 7, 7, 7, 40, 40, 40])
    if mode == "PA":
        image = image.convert("PA")
        image.putalpha(PIL.Image.frombytes("L", (2, 1), bytes([0, 255])))
    else:
        image.info["transparency"] = clear
    return image


@pytest.mark.parametrize("mode", ["LA", "La", "PA", "RGBa", "P", "L", "RGB", "1"])
def test_transparency_is_left_out_however_it_is_stored(mode, warnings):
    image = half_transparent(mode)
    assert image.mode == mode
    # PIL cannot convert the mode La to RGB directly.
    expected = np.array((image.convert("LA") if mode == "La" else image).convert("RGB"))
    assert torch.equal(pixels_of(image), as_chw(expected))
    assert torch.equal(pixels_of(image, num_channels=1), as_chw(expected[..., 0]))
    assert all("The alpha channel is dropped" in warning for warning in warnings)
    assert warnings
    solid = image.convert("LA") if mode == "La" else image.convert("RGBA")
    solid.putalpha(255)
    warnings.clear()
    pixels_of(solid)
    assert not warnings


def test_alpha_of_arrays_is_left_out_unless_the_model_takes_it(warnings):
    rgba, gray_alpha = noise(5, 6, 4), noise(5, 6, 2)
    for kind in (PIL.Image.fromarray(rgba), rgba, torch.from_numpy(rgba), rgba.astype(np.float32)):
        assert torch.equal(pixels_of(kind), as_chw(rgba[..., :3]))
    assert len(warnings) == 4
    assert torch.equal(pixels_of(PIL.Image.fromarray(rgba), num_channels=4), as_chw(rgba))
    assert torch.equal(pixels_of(PIL.Image.fromarray(gray_alpha, "LA"), num_channels=2), as_chw(gray_alpha))


def wide_image(mode, values):
    if mode in ("I", "F"):
        return PIL.Image.fromarray(values.astype({"I": np.int32, "F": np.float32}[mode]))
    return PIL.Image.frombytes(mode, values.shape[::-1], values.astype(">u2" if mode == "I;16B" else "<u2").tobytes())


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I", "F"])
def test_more_than_8_bits_are_read_as_pipelines_read_them_or_refused(tmp_path, mode):
    values = np.arange(256).reshape(16, 16)
    image = wide_image(mode, values)
    assert image.mode == mode
    assert torch.equal(pixels_of(image), as_chw(np.array(image.convert("RGB"))))
    image.save(tmp_path / "a.tiff")
    assert torch.equal(pixels_of(tmp_path / "a.tiff", num_channels=1), as_chw(values))
    with pytest.raises(ValueError, match=f"mode '{mode}' with values from 0.* to 257.*clipping.*/ 257"):
        pixels_of(wide_image(mode, values + (values == 255) * 2))
    if mode == "F":  # transformers pipelines convert images with values from 0 to 1 to black
        with pytest.raises(ValueError, match=r"mode 'F' with values from 0.* to 1"):
            pixels_of(wide_image(mode, np.linspace(0, 1, 20).reshape(4, 5)))


def test_bad_files_and_absurdly_large_images_are_refused(tmp_path, monkeypatch):
    PIL.Image.fromarray(noise(64, 64, 3)).save(tmp_path / "whole.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:900])
    with pytest.raises(OSError, match=r"cannot be decoded.*truncated") as caught:
        Processor()([noise(4, 4, 3), tmp_path / "whole.jpg", tmp_path / "cut.jpg"])
    assert f"images[2] ('{tmp_path / 'cut.jpg'}')" in str(caught.value)
    with pytest.raises(ValueError, match=r"images is empty. Pass at least one image"):
        Processor()(())
    # The file is truncated, so decoding it before the check would raise a different error.
    (tmp_path / "a.png").write_bytes(png(PIL.Image.fromarray(noise(50, 50, 3)))[:200])
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 1000)
    lazy = PIL.Image.new("RGB", (50, 50))
    for image in (tmp_path / "a.png", lazy, noise(50, 50, 3), torch.from_numpy(noise(3, 50, 50))):
        with pytest.raises(ValueError, match=r"images\[0\].*2000.*MAX_IMAGE_PIXELS"):
            Processor()([image])
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", None)
    assert Processor()(lazy)["pixel_values"][0].shape == (3, 224, 224)


def test_bad_images_are_named(monkeypatch):
    """More invalid images are tested in `tests/hostile/test_images.py`."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for image, error, message in (
        ([], ValueError, r"is empty"),
        (PIL.Image.new("RGB", (0, 5)), ValueError, "has no pixels"),
        (np.full((4, 4), 1e39), ValueError, "has pixels that are NaN or infinite"),
        (np.zeros((60, 28, 28)), ValueError, r"has shape \(60, 28, 28\).*as a list"),
        (np.full((4, 4), 256), ValueError, "holds integers from 256 to 256.*uint16"),
        (PIL.Image.fromarray(np.float32([[np.nan]])), ValueError, "has mode 'F' with values from nan"),
        (PIL.Image.fromarray(np.float32([[300]])), ValueError, "has mode 'F' with values from 300"),
        (PIL.Image.fromarray(np.int32([[70000]])), ValueError, "70000.*8 bits"),
        ("data:image/png,abc", ValueError, r"\('data:image/png,abc'\) is not a base64 data URL"),
        ("data:image/png;base64,aGVsbG8=", OSError, r"\(.*\) is not an image"),
        ("x" * 5000, OSError, r"\('x{80}'... of 5000 characters\)"),
        ("http://127.0.0.1:1/a.png", OSError, r"\('http://127.0.0.1:1/a.png'\) cannot be downloaded"),
        ("http://", OSError, r"\('http://'\) cannot be downloaded"),
    ):
        with pytest.raises(error, match=rf"images\[1\] {message}" if "70000" not in message else message):
            Processor()([noise(4, 4, 3), image])


def test_downloads_have_limits_and_lead_to_the_web_alone(server, tmp_path, monkeypatch):
    PIL.Image.fromarray(noise(8, 8, 3)).save(tmp_path / "a.png")
    redirected, direct = (Processor()(place).pixel_values for place in (f"{server}/to:/a.png", f"{server}/a.png"))
    np.testing.assert_array_equal(redirected, direct)
    for place in ("file:///etc/hostname", "ftp://127.0.0.1/a.png", "data:image/png;base64,aGVsbG8="):
        with pytest.raises(OSError, match=f"(?i)cannot be downloaded: .*redirect.*'{place}'"):
            Processor()(f"{server}/to:{place}")
    with pytest.raises(OSError, match=r"images \('http.*/no.png'\) cannot be downloaded: .*404"):
        Processor()(f"{server}/no.png")
    (tmp_path / "large.png").write_bytes(bytes(5000))
    cell = {"path": f"{server}/large.png", "bytes": None}  # cell of an image column in a dataset, before decoding
    assert encoded_bytes(cell, "image") == bytes(5000)
    monkeypatch.setattr(image_inputs, "MAX_DOWNLOAD_BYTES", 4096)
    with pytest.raises(OSError, match=r"cannot be downloaded: the file has more than 4096 bytes\..*MAX_DOWNLOAD"):
        Processor()(f"{server}/large.png")
    with pytest.raises(ValueError, match="more than 4096 bytes"):
        encoded_bytes(cell, "image")
    monkeypatch.setattr(image_inputs, "DOWNLOAD_TIMEOUT", 0.3)
    with pytest.raises(OSError, match=r"cannot be downloaded: it takes longer than 0.3 seconds\. .*DOWNLOAD_TIMEOUT"):
        Processor()(f"{server}/slow")
    with pytest.raises(OSError, match=r"cannot be downloaded: it takes longer than 0.1 seconds"):
        image_inputs.open_image(f"{server}/slow", timeout=0.1)


def test_ambiguous_channels_convert_only_with_do_convert_rgb():
    for num_channels, given in product((1, 3, 4, 5), range(1, 6)):
        options = {"num_channels": num_channels, "input_data_format": "channels_first"}
        image = noise(given, 20, 30)
        if given == num_channels or (given in (1, 3, 4) and num_channels in (1, 3)):
            assert pixels_of(image, **options).shape[0] == num_channels
        else:
            with pytest.raises(ValueError, match=f"has {given} channels, but num_channels={num_channels}"):
                pixels_of(image, **options)
    rgb, gray = noise(5, 6, 3), noise(5, 6)
    cmyk = PIL.Image.fromarray(noise(5, 6, 4), "CMYK")
    assert torch.equal(pixels_of(gray, do_convert_rgb=True), as_chw(gray).expand(3, -1, -1))
    assert torch.equal(pixels_of(rgb, do_convert_rgb=False), as_chw(rgb))
    assert torch.equal(pixels_of(cmyk, do_convert_rgb=False, num_channels=4), as_chw(np.array(cmyk)))
    hsv = PIL.Image.fromarray(rgb).convert("HSV")
    assert torch.equal(pixels_of(hsv, do_convert_rgb=False), as_chw(np.array(hsv)))
    palette = PIL.Image.fromarray(rgb).convert("P")
    assert torch.equal(pixels_of(palette, do_convert_rgb=False), as_chw(np.array(palette.convert("RGB"))))
    for image in (gray, PIL.Image.fromarray(gray), noise(5, 6, 4)):
        with pytest.raises(ValueError, match=r"images\[0\] has . channels, but num_channels=3. do_convert_rgb=False"):
            pixels_of([image], do_convert_rgb=False)
    with pytest.raises(ValueError, match="do_convert_rgb=True makes 3 channels, but num_channels=1"):
        Processor(do_convert_rgb=True, num_channels=1)
