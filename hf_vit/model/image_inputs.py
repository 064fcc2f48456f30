"""Image inputs of any kind as tensors: loading, checks and colors.

Both image processors and all trainings read their inputs here, and start from the pixels that transformers' pipelines
start from, which open a file with PIL and call `.convert("RGB")`. All arithmetic on pixels is done in torch. Shapes: C
channels, H W pixels.
"""

import base64
import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import cache
from http.client import HTTPException
from io import BytesIO
from typing import Any, BinaryIO

import numpy as np
import torch
from transformers.image_utils import ChannelDimension
from transformers.utils import logging
from transformers.utils.import_utils import is_torchcodec_available, is_vision_available


if is_vision_available():
    import PIL.Image
    import PIL.ImageOps


logger = logging.get_logger(__name__)
# Of an image from a URL: seconds in all, and bytes
DOWNLOAD_TIMEOUT, MAX_DOWNLOAD_BYTES = 30.0, 100 * 2**20
EXIF_ORIENTATION = 0x0112
# What torchcodec calls the modes of JPEG files that it decodes to the pixels of PIL, bit for bit
TORCHCODEC_MODES = {"RGB": "RGB", "L": "GRAY"}
# ITU-R 601 luma weights in 1/65536, the integers that PIL uses
LUMA = (19595, 38470, 7471)
ALPHA_LEFT_OUT = (
    "Transparency is left out, as transformers' pipelines do: transparent pixels show the color that is stored for "
    "them. Put such images on a background first."
)
WIDE_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint32, torch.uint64)


def named_images(images: Any, name: str = "images") -> Iterator[tuple[str, Any]]:
    """Yields each image of a (nested) list or batch (B, ., ., .) with a name; `ValueError` if a list is empty."""
    is_array = isinstance(images, np.ndarray | torch.Tensor)
    if not isinstance(images, list | tuple) and not (is_array and images.ndim == 4):
        yield name, images
        return
    if len(images) == 0:
        raise ValueError(f"{name} is empty. Give at least one image.")
    for index, item in enumerate(images):
        yield from named_images(item, f"{name}[{index}]")


def read_image(
    image: Any,
    name: str = "images",
    *,
    num_channels: int,
    do_convert_rgb: bool | None = None,
    input_data_format: str | None = None,
    do_rescale: bool = True,
    rescale_factor: float | None = 1 / 255,
    do_normalize: bool = True,
    device: torch.device | str | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """Returns one image of any kind as a tensor (C, H, W) with `C == num_channels`, uint8 or float32.

    An image is a path, http(s) URL, base64 (also in a data URL), the bytes of a file, PIL image, NumPy array or
    tensor: (H, W), (C, H, W) or (H, W, C). Of animations, the first frame counts, and alpha does not. float32 come
    from arrays of floats, which hold 0..255 (or up to 1 / `rescale_factor`) if `do_rescale`, else 0..1 if
    `do_normalize`. Without `input_data_format` the axis of channels is inferred. For `timeout` see `download`, for the
    other options `HfViTImageProcessorBase`. torchcodec decodes JPEG where it is installed, to the pixels of PIL.

    Raises `OSError` if it cannot be opened or decoded, `TypeError` if it is no image or of a type of number that no
    image has, `ValueError` if its shape, size, channels or values make no image, or 8 bits do not hold the values of a
    file or PIL image, which pipelines would clip.
    """
    if isinstance(image, str | os.PathLike | bytes | bytearray):
        source = image if isinstance(image, bytes | bytearray) else os.fspath(image)
        name = with_source(name, source)
        with _open_stream(source, name, timeout) as stream:
            image = _decode_fast(stream, name)
        input_data_format = "channels_first"  # of torchcodec's tensors
    elif is_pil(image):
        image = upright(image, name)
    if is_pil(image):
        pixels = array_to_tensor(_pil_to_array(image, name, num_channels, do_convert_rgb), name)
        input_data_format = "channels_last"  # as PIL's own bands
    elif isinstance(image, np.ndarray | torch.Tensor):
        pixels = array_to_tensor(image, name) if isinstance(image, np.ndarray) else image.detach()
    else:
        raise TypeError(
            f"{name} is of type {type(image).__name__}, which is no image. Give a path, an http(s) URL, a base64 data "
            "URL, the bytes of a file, a PIL image, a NumPy array, a torch tensor, or a list of these."
        )
    pixels = _channels_first(pixels, name, num_channels, input_data_format)
    check_pixel_count(pixels.shape[1], pixels.shape[2], name)
    pixels = pixels if device is None else pixels.to(device)
    pixels = _to_uint8_or_float32(pixels, name)
    if pixels.is_floating_point() and (do_rescale or do_normalize):
        _check_scale(pixels, name, max(255.0, 1 / rescale_factor) if do_rescale and rescale_factor else 1.0)
    return _match_channels(pixels, name, num_channels, do_convert_rgb is not False)


def open_image(source: str | os.PathLike[str], name: str = "image", timeout: float | None = None) -> "PIL.Image.Image":
    """Returns the decoded, upright PIL image of a path, an http(s) URL, a base64 data URL or base64 alone."""
    # `OSError` if it cannot be opened or is damaged, `ValueError` for too many pixels or a malformed data URL. For the
    # timeout see `download`.
    name = with_source(name, source)
    with _open_stream(os.fspath(source), name, timeout) as stream:
        return decode_image(stream, name)


def _decode_fast(stream: BinaryIO, name: str) -> "torch.Tensor | PIL.Image.Image":
    """Returns an upright PIL image, or a tensor (C, H, W) if torchcodec decodes it."""
    image = _open_encoded(stream, name)
    decode = _torchcodec() if image.format == "JPEG" and image.mode in TORCHCODEC_MODES else None
    # PIL turns images also by what XMP says
    if decode is None or ("xmp" in image.info and image.getexif().get(EXIF_ORIENTATION, 1) != 1):
        return upright(image, name)
    check_pixel_count(image.height, image.width, name)
    stream.seek(0)
    # a copy that may be written to: torch warns of others, and torchcodec silences that in a way unsafe in threads
    data = torch.frombuffer(bytearray(stream.read()), dtype=torch.uint8)
    try:
        return decode(data, TORCHCODEC_MODES[image.mode])  # (C, H, W)
    except RuntimeError:
        return upright(image, name)  # or PIL says why not


@cache
def _torchcodec() -> Callable[[torch.Tensor, str], torch.Tensor] | None:
    """Returns torchcodec's decoder of images, which lets other threads run; None where it is missing or broken."""
    # transformers' own `load_image_as_tensor` calls it for files, but not for bytes, and cuts off 16 bits.
    if is_torchcodec_available():
        try:
            from torchcodec.decoders import ImageReadMode
            from torchcodec.decoders import decode_image as decode
        except Exception as error:  # libraries that do not fit the installed torch fail in many ways
            logger.warning_once(f"torchcodec is installed, but does not work: {error} PIL decodes images, slower.")
            return None
        return lambda data, mode: decode(data, mode=ImageReadMode[mode])
    return None


def decode_image(stream: BinaryIO, name: str) -> "PIL.Image.Image":
    """Returns the decoded, upright PIL image of an encoded one; for errors see `open_image`."""
    return upright(_open_encoded(stream, name), name)


def header(stream: BinaryIO, name: str) -> tuple[int, int, int]:
    """Returns width, height and EXIF orientation of an encoded image, without decoding it; errors as `open_image`."""
    image = _open_encoded(stream, name)
    has_exif = image.format != "PNG" or "exif" in image.info  # PIL would decode all of a PNG to look for it
    exif = image.getexif() if has_exif else {}
    orientation = exif.get(EXIF_ORIENTATION, 1)
    # Of TIFF, PIL gives the size once it is upright: the tags of width and height are those of the stored image.
    width, height = (exif[256], exif[257]) if image.format == "TIFF" else image.size
    return width, height, orientation if orientation in range(2, 9) else 1


def _open_encoded(stream: BinaryIO, name: str) -> "PIL.Image.Image":
    try:
        return PIL.Image.open(stream)
    except PIL.Image.DecompressionBombError as error:
        raise ValueError(f"{name} is too large: {error} Raise PIL.Image.MAX_IMAGE_PIXELS if you trust it.") from error
    except PIL.UnidentifiedImageError as error:  # which says no more than the stream's address in memory
        raise OSError(f"{name} is not an image that PIL can read, or its header is damaged.") from error
    except Exception as error:  # plugins fail on damaged headers in many ways
        raise OSError(f"{name} is not an image that PIL can read, or its header is damaged ({error}).") from error


def upright(image: "PIL.Image.Image", name: str) -> "PIL.Image.Image":
    """Decodes a PIL image that may be lazy, and turns it as its EXIF orientation says; for errors see `open_image`."""
    check_pixel_count(image.height, image.width, name)
    try:
        image.load()
        # exif_transpose copies even where there is nothing to turn
        return image if image.getexif().get(EXIF_ORIENTATION, 1) == 1 else PIL.ImageOps.exif_transpose(image)
    except Exception as error:  # the decoders raise OSError, SyntaxError, ValueError, struct.error, ...
        raise OSError(f"{name} cannot be decoded: {error}. The file is truncated or damaged; get it again.") from error


def check_pixel_count(height: int, width: int, name: str) -> None:
    """Raises `ValueError` for an image without pixels, or with more than PIL allows to decode."""
    if height == 0 or width == 0:
        raise ValueError(f"{name} has no pixels: its height is {height} and its width {width}.")
    limit = PIL.Image.MAX_IMAGE_PIXELS
    if limit is not None and height * width > 2 * limit:
        raise ValueError(
            f"{name} has {height} x {width} pixels, more than the {2 * limit} that PIL takes for safe. Raise "
            "PIL.Image.MAX_IMAGE_PIXELS if you trust it."
        )


def is_pil(image: Any) -> bool:
    """Whether it is an image of PIL."""
    return is_vision_available() and isinstance(image, PIL.Image.Image)


def with_source(name: str, source: str | os.PathLike[str] | bytes | bytearray) -> str:
    """Returns the name of an image with the path or URL that it is read from, if it is."""
    if isinstance(source, bytes | bytearray):
        return name
    text = os.fspath(source)
    return f"{name} ({text!r})" if len(text) <= 120 else f"{name} ({text[:80]!r}... of {len(text)} characters)"


class _WebRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to where images may come from at all, and not into this machine or to other protocols."""

    def redirect_request(self, request: Any, file: Any, code: int, text: str, headers: Any, url: str) -> Any:
        if not url.lower().startswith(("http://", "https://")):
            raise ValueError(f"the server redirects to {url!r}, which is neither http nor https")
        return super().redirect_request(request, file, code, text, headers, url)


def download(url: str, timeout: float | None = None) -> bytes:
    """Returns what is at an http(s) URL; raises `ValueError` if it is too large or slow, or errors of urllib."""
    # It may take `timeout` seconds in all, by default `DOWNLOAD_TIMEOUT`.
    timeout = DOWNLOAD_TIMEOUT if timeout is None else timeout
    end, parts, size = time.monotonic() + timeout, list[bytes](), 0
    cure = "Save the image and give its file, or raise image_inputs."
    # some servers refuse clients without a name
    request = urllib.request.Request(url, headers={"User-Agent": "hf_vit"})
    with urllib.request.build_opener(_WebRedirects).open(request, timeout=timeout) as response:
        while part := response.read1(2**16):  # what has come, while `read` waits for all of it
            parts.append(part)
            size += len(part)
            if size > MAX_DOWNLOAD_BYTES:
                raise ValueError(f"it has more than {MAX_DOWNLOAD_BYTES} bytes. {cure}MAX_DOWNLOAD_BYTES")
            if time.monotonic() > end:
                raise ValueError(f"it takes more than {timeout:g} seconds. {cure}DOWNLOAD_TIMEOUT or the timeout")
    return b"".join(parts)


def _open_stream(source: str | bytes | bytearray, name: str, timeout: float | None) -> BinaryIO:
    if isinstance(source, bytes | bytearray):
        return BytesIO(source)
    if source.startswith(("http://", "https://")):
        try:
            return BytesIO(download(source, timeout))
        except (OSError, HTTPException, ValueError) as error:
            raise OSError(f"{name} cannot be downloaded: {error}. Check the URL and the network.") from error
    if source.startswith("data:"):
        header, _, data = source.partition(",")
        try:
            if not header.endswith(";base64"):
                raise ValueError(f"the header {header!r} does not end in ';base64'")
            return BytesIO(base64.b64decode("".join(data.split()), validate=True))
        except ValueError as error:
            raise ValueError(f"{name} is no base64 data URL ({error}). Write data:image/png;base64,...") from error
    try:
        return open(source, "rb")
    except (OSError, ValueError) as error:  # a long text is no name of a file at all
        if (image := _image_in_base64(source)) is not None:
            return BytesIO(image)
        if not isinstance(error, FileNotFoundError):
            raise OSError(f"{name} cannot be opened: {error}.") from error
        raise FileNotFoundError(
            f"{name}: there is no such file, nor an image in base64. Check the path; relative ones start at "
            f"{os.getcwd()!r}."
        ) from error


def _image_in_base64(text: str) -> bytes | None:
    """Returns the image that a text is in base64, None if it is none."""
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
        PIL.Image.open(BytesIO(data)).close()
    except (OSError, ValueError):  # also that PIL does not know it
        return None
    return data


def is_transparent(image: "PIL.Image.Image") -> bool:
    """Whether a PIL image has pixels that are not opaque, however it stores that."""
    if not image.has_transparency_data:
        return False
    # PIL converts premultiplied gray into nothing but plain gray with alpha
    plain = image.convert("LA") if image.mode in ("LA", "La") else image.convert("RGBA")
    return plain.getchannel("A").histogram()[255] < image.width * image.height


def _pil_to_array(image: "PIL.Image.Image", name: str, num_channels: int, do_convert_rgb: bool | None) -> np.ndarray:
    """Returns the bands of a PIL image, (H, W) or (H, W, C) uint8, as `.convert("RGB")` makes them of it."""
    check_bits(image, name)
    if _is_wide(image):
        return np.array(image).astype(np.uint8)
    try:
        mode = _plain_mode(image, num_channels, do_convert_rgb)
        if mode in ("L", "RGB") and is_transparent(image):
            logger.warning_once(ALPHA_LEFT_OUT)
        image = image.convert("LA") if image.mode == "La" else image  # as PIL converts it into nothing else
        return np.array(image if image.mode == mode else image.convert(mode))
    except Exception as error:  # conversions fail in as many ways as decoders
        raise OSError(f"{name} has mode {image.mode!r}, which PIL fails to convert: {error}.") from error


def _plain_mode(image: "PIL.Image.Image", num_channels: int, do_convert_rgb: bool | None) -> str:
    # a palette is a way to store colors, not a color space: it is always looked up
    if image.mode not in ("1", "P", "PA") and do_convert_rgb is False:
        return str(image.mode)
    if do_convert_rgb is not False and num_channels in (1, 3):
        return "L" if image.mode in ("1", "L") else "RGB"
    if image.mode in ("LA", "La") and num_channels == 2:
        return "LA"
    if image.mode in ("1", "L") and "transparency" not in image.info:
        return "L"
    return "RGBA" if image.has_transparency_data else "RGB"


def check_bits(image: "PIL.Image.Image", name: str) -> None:
    """Raises `ValueError` for values that 8 bits do not hold, which transformers' pipelines clip or make black."""
    if not _is_wide(image):
        return
    values = np.array(image)
    low, high = values.min(), values.max()
    if not (low >= 0 and high <= 255) or (image.mode == "F" and 0 < high <= 1):  # the first also of NaN
        raise ValueError(
            f"{name} has mode {image.mode!r} with values from {low} to {high}. transformers' pipelines convert images "
            "to 8 bits by clipping: whole numbers from 0 to 255 stay, all above becomes white. Scale the values "
            'to that range and save 8 bits, as Image.fromarray((np.asarray(image) / 257).astype("uint8")) does for 16 '
            "bits; arrays of uint16 are scaled so."
        )


def _is_wide(image: "PIL.Image.Image") -> bool:
    return image.mode in ("I", "F") or image.mode.startswith("I;16")


def array_to_tensor(array: np.ndarray, name: str) -> torch.Tensor:
    """Wraps an array without copying, where torch can; `TypeError` for numbers that no image has."""
    if array.dtype.kind not in "buif" or array.dtype.itemsize > 8:
        raise TypeError(
            f"{name} is an array of dtype {array.dtype}, which no image has. Convert it to uint8, uint16, bool or "
            "float32; images of several sizes go into a list."
        )
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()  # torch can neither share read-only memory nor walk backwards
    return torch.from_numpy(array)


def _channels_first(pixels: torch.Tensor, name: str, num_channels: int, input_data_format: str | None) -> torch.Tensor:
    if pixels.ndim == 2:
        return pixels[None]
    if pixels.ndim != 3:
        raise ValueError(
            f"{name} has {pixels.ndim} dimensions, shape {tuple(pixels.shape)}. An image has 2, (height, width), or 3 "
            "with its channels; a batch has 4."
        )
    if input_data_format is not None:
        is_first = ChannelDimension(input_data_format) == ChannelDimension.FIRST
        return pixels if is_first else pixels.movedim(-1, 0)
    known = (1, 3, 4, num_channels)
    first, last = pixels.shape[0], pixels.shape[-1]
    if first not in known and last not in known:
        counts = ", ".join(map(str, sorted(set(known))))
        raise ValueError(
            f"{name} has shape {tuple(pixels.shape)}, where neither the first nor the last axis is one of {counts} "
            "channels. Pass input_data_format, set num_channels to what the model takes, or give a batch of gray "
            "images as a list."
        )
    # the model's own number of channels decides before what could be converted
    is_first = first == num_channels or (last != num_channels and first in known)
    if first in known and last in known:
        logger.warning_once(
            f"In images of shape {tuple(pixels.shape)} the channels could come first or last. They are taken to come "
            f"{'first' if is_first else 'last'}; pass input_data_format to say so."
        )
    return pixels if is_first else pixels.movedim(-1, 0)


def _to_uint8_or_float32(pixels: torch.Tensor, name: str) -> torch.Tensor:
    """Converts all types of number to these two."""
    if pixels.dtype == torch.uint8:
        return pixels
    if pixels.dtype == torch.bool:
        return pixels.to(torch.uint8) * 255
    if pixels.dtype == torch.uint16:
        return ((pixels.to(torch.int32) + 128) // 257).to(torch.uint8)  # 65535 = 257 * 255
    if pixels.is_floating_point():
        pixels = pixels.to(torch.float32)
        low, high = torch.aminmax(pixels)
        if not (torch.isfinite(low) and torch.isfinite(high)):  # NaN goes through minimum and maximum
            raise ValueError(f"{name} has pixels that are NaN or infinite. Replace them, as torch.nan_to_num does.")
        return pixels
    if pixels.dtype not in WIDE_INTEGERS:
        raise TypeError(f"{name} is a tensor of {pixels.dtype}, which no image has. Convert it to uint8 or float32.")
    pixels = pixels.to(torch.int64)
    low, high = torch.aminmax(pixels)
    if low < 0 or high > 255:
        raise ValueError(
            f"{name} holds integers from {int(low)} to {int(high)}, but 8-bit pixels go from 0 to 255. Convert 16-bit "
            "images to uint16, which is scaled down."
        )
    return pixels.to(torch.uint8)


def _check_scale(pixels: torch.Tensor, name: str, white: float) -> None:
    """Raises `ValueError` for floats outside 0..white; warns of those that may be rescaled a second time."""
    low, high = (float(value) for value in torch.aminmax(pixels))
    margin = white / 1000  # for rounding
    if low < -margin or high > white + margin:
        cure = "do_rescale=True takes 0..255" if white == 1 else "do_rescale=False takes 0..1"
        raise ValueError(
            f"{name} holds floats from {low:g} to {high:g}, but they must lie in 0..{white:g}, black to white. Scale "
            f"them to that, or set do_rescale: {cure}. Pixels that are normalized already pass with do_rescale=False "
            "and do_normalize=False."
        )
    if white > 1 and low >= 0 and high <= 1:
        logger.warning_once(
            "All values of a float image lie in [0, 1], but floats are taken to hold 0..255 and are rescaled by "
            "rescale_factor. If they are rescaled already, pass do_rescale=False."
        )


def _match_channels(pixels: torch.Tensor, name: str, num_channels: int, may_convert: bool) -> torch.Tensor:
    """Returns (num_channels, H, W)."""
    given = pixels.shape[0]
    if may_convert and given == 4 and num_channels in (1, 3):
        logger.warning_once(ALPHA_LEFT_OUT)
        pixels = pixels[:3]  # (3, H, W)
    if may_convert and num_channels == 1 and pixels.shape[0] == 3:
        pixels = _luma(pixels)  # (1, H, W)
    if may_convert and num_channels == 3 and pixels.shape[0] == 1:
        pixels = pixels.expand(3, -1, -1)  # (3, H, W)
    if pixels.shape[0] != num_channels:
        hint = "" if may_convert else " do_convert_rgb=False forbids to convert it."
        raise ValueError(
            f"{name} has {given} channels, but num_channels={num_channels}.{hint} Only gray, RGB and RGBA become 1 or "
            "3 channels by themselves; otherwise set num_channels to what the images have and the model takes."
        )
    return pixels


def _luma(pixels: torch.Tensor) -> torch.Tensor:
    wide = pixels if pixels.is_floating_point() else pixels.to(torch.int32)
    red, green, blue = (LUMA[channel] * wide[channel] for channel in range(3))
    total = (red + green + blue)[None]  # (1, H, W)
    return total / 65536 if pixels.is_floating_point() else ((total + 32768) >> 16).to(torch.uint8)
