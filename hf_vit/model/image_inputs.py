"""Functions that load images of any kind as tensors, check them, and convert their colors.

Both image processors and all training runs read images with these functions. The pixels are identical to those of
transformers' pipelines, which open a file with PIL and call `.convert("RGB")`. Shapes: C channels, H W
pixels.
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
# Limits for the download of an image: total time in seconds and size in bytes
DOWNLOAD_TIMEOUT, MAX_DOWNLOAD_BYTES = 30.0, 100 * 2**20
EXIF_ORIENTATION = 0x0112
# Maps PIL modes to torchcodec modes. In these modes, both libraries decode JPEG files to identical pixels.
TORCHCODEC_MODES = {"RGB": "RGB", "L": "GRAY"}
# ITU-R 601 luma weights in units of 1/65536, the integers that PIL uses
LUMA = (19595, 38470, 7471)
ALPHA_DROPPED_MESSAGE = (
    "The alpha channel is dropped, as in transformers' pipelines: transparent pixels show their stored color. Compose "
    "such images with a background first."
)
WIDE_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint32, torch.uint64)


def named_images(images: Any, name: str = "images") -> Iterator[tuple[str, Any]]:
    """Yields (name, image) for each image of a (nested) list or batch; raises `ValueError` if a list is empty."""
    is_array = isinstance(images, np.ndarray | torch.Tensor)
    if not isinstance(images, list | tuple) and not (is_array and images.ndim == 4):
        yield name, images
        return
    if len(images) == 0:
        raise ValueError(f"{name} is empty. Pass at least one image.")
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
    """Reads one image of any kind as a uint8 or float32 tensor (C, H, W) with `num_channels` channels.

    `image` is a path, http(s) URL, base64 string or data URL, the bytes of a file, a PIL image, or a NumPy array or
    tensor (H, W), (C, H, W) or (H, W, C). Float values must range from 0 to 255 (or 1 / `rescale_factor`) if
    `do_rescale` is set; otherwise, if `do_normalize` is set, from 0 to 1. `input_data_format` is inferred by default.
    `timeout` is the time limit of a download in seconds. `HfViTImageProcessorBase` describes the other options. Only
    the first frame of an animation is read, and alpha is dropped. If torchcodec is installed, it decodes JPEG files to
    the same pixels as PIL.

    Raises:
        OSError: If the image cannot be opened or decoded.
        TypeError: If the input is not an image or has an unsupported dtype.
        ValueError: If the shape, number of channels or values are invalid, or a file or PIL image has values that do
            not fit into 8 bits.
    """
    if isinstance(image, str | os.PathLike | bytes | bytearray):
        source = image if isinstance(image, bytes | bytearray) else os.fspath(image)
        name = name_with_source(name, source)
        with _open_stream(source, name, timeout) as stream:
            image = _decode_fast(stream, name)
        input_data_format = "channels_first"  # layout of tensors that torchcodec returns
    elif is_pil(image):
        image = upright(image, name)
    if is_pil(image):
        pixels = array_to_tensor(_pil_to_array(image, name, num_channels, do_convert_rgb), name)
        input_data_format = "channels_last"  # layout of PIL images as arrays
    elif isinstance(image, np.ndarray | torch.Tensor):
        pixels = array_to_tensor(image, name) if isinstance(image, np.ndarray) else image.detach()
    else:
        raise TypeError(
            f"{name} is of type {type(image).__name__}, which is not an image. Pass a path, an http(s) URL, a base64 "
            "data URL, the bytes of a file, a PIL image, a NumPy array, a torch tensor, or a list of these."
        )
    pixels = _channels_first(pixels, name, num_channels, input_data_format)
    check_pixel_count(pixels.shape[1], pixels.shape[2], name)
    pixels = pixels if device is None else pixels.to(device)
    pixels = _to_uint8_or_float32(pixels, name)
    if pixels.is_floating_point() and (do_rescale or do_normalize):
        _check_scale(pixels, name, max(255.0, 1 / rescale_factor) if do_rescale and rescale_factor else 1.0)
    return _match_channels(pixels, name, num_channels, do_convert_rgb is not False)


def open_image(source: str | os.PathLike[str], name: str = "image", timeout: float | None = None) -> "PIL.Image.Image":
    """Opens and decodes an image from a path, http(s) URL, base64 string or data URL, with EXIF orientation applied.

    Raises:
        OSError: If the image cannot be opened or is damaged.
        ValueError: If the image has too many pixels or the data URL is malformed.
    """
    name = name_with_source(name, source)
    with _open_stream(os.fspath(source), name, timeout) as stream:
        return decode_image(stream, name)


def _decode_fast(stream: BinaryIO, name: str) -> "torch.Tensor | PIL.Image.Image":
    """Decodes an image to a tensor (C, H, W) by torchcodec if it supports the image, otherwise to a PIL image."""
    image = _open_encoded(stream, name)
    decode = _torchcodec() if image.format == "JPEG" and image.mode in TORCHCODEC_MODES else None
    # PIL decodes rotated images with XMP metadata, because torchcodec does not read the orientation from XMP.
    if decode is None or ("xmp" in image.info and image.getexif().get(EXIF_ORIENTATION, 1) != 1):
        return upright(image, name)
    check_pixel_count(image.height, image.width, name)
    stream.seek(0)
    # Copy the bytes, because torch warns about read-only buffers, and suppressing the warning is not thread-safe.
    data = torch.frombuffer(bytearray(stream.read()), dtype=torch.uint8)
    try:
        return decode(data, TORCHCODEC_MODES[image.mode])  # (C, H, W)
    except RuntimeError:
        return upright(image, name)  # PIL decodes the image, or raises a more specific error than torchcodec


@cache
def _torchcodec() -> Callable[[torch.Tensor, str], torch.Tensor] | None:
    """Returns torchcodec's image decoder, which releases the GIL, or None if torchcodec is missing or broken."""
    # `load_image_as_tensor` of transformers is not used: it does not support bytes and truncates 16-bit images.
    if is_torchcodec_available():
        try:
            from torchcodec.decoders import ImageReadMode
            from torchcodec.decoders import decode_image as decode
        except Exception as error:  # torchcodec raises various errors if it was built for another version of torch
            logger.warning_once(f"torchcodec cannot be imported: {error} Images are decoded by PIL, which is slower.")
            return None
        return lambda data, mode: decode(data, mode=ImageReadMode[mode])
    return None


def decode_image(stream: BinaryIO, name: str) -> "PIL.Image.Image":
    """Decodes an image file to a PIL image with EXIF orientation applied; raises the errors of `open_image`."""
    return upright(_open_encoded(stream, name), name)


def header(stream: BinaryIO, name: str) -> tuple[int, int, int]:
    """Returns the stored width, height and EXIF orientation of an image file without decoding its pixels."""
    image = _open_encoded(stream, name)
    has_exif = image.format != "PNG" or "exif" in image.info  # getexif() of a PNG without EXIF decodes the whole file
    exif = image.getexif() if has_exif else {}
    orientation = exif.get(EXIF_ORIENTATION, 1)
    # PIL applies the orientation to the size of a TIFF file, so read the tags ImageWidth (256) and ImageLength (257).
    width, height = (exif[256], exif[257]) if image.format == "TIFF" else image.size
    return width, height, orientation if orientation in range(2, 9) else 1


def _open_encoded(stream: BinaryIO, name: str) -> "PIL.Image.Image":
    try:
        return PIL.Image.open(stream)
    except PIL.Image.DecompressionBombError as error:
        raise ValueError(
            f"{name} is too large: {error} Increase PIL.Image.MAX_IMAGE_PIXELS if you trust the file."
        ) from error
    except PIL.UnidentifiedImageError as error:  # the message of PIL contains only the memory address of the stream
        raise OSError(f"{name} is not an image that PIL can read, or its header is damaged.") from error
    except Exception as error:  # PIL plugins raise various errors for damaged headers
        raise OSError(f"{name} is not an image that PIL can read, or its header is damaged ({error}).") from error


def upright(image: "PIL.Image.Image", name: str) -> "PIL.Image.Image":
    """Decodes a lazily loaded PIL image and applies its EXIF orientation; raises the errors of `open_image`."""
    check_pixel_count(image.height, image.width, name)
    try:
        image.load()
        # Skip exif_transpose if the orientation is normal, because it always copies the image.
        return image if image.getexif().get(EXIF_ORIENTATION, 1) == 1 else PIL.ImageOps.exif_transpose(image)
    except Exception as error:  # PIL decoders raise OSError, SyntaxError, ValueError, struct.error, ...
        raise OSError(f"{name} cannot be decoded: {error}. The file is truncated or damaged; replace it.") from error


def check_pixel_count(height: int, width: int, name: str) -> None:
    """Raises `ValueError` if an image has no pixels, or more than twice `PIL.Image.MAX_IMAGE_PIXELS`."""
    if height == 0 or width == 0:
        raise ValueError(f"{name} has no pixels: its height is {height} and its width {width}.")
    limit = PIL.Image.MAX_IMAGE_PIXELS
    if limit is not None and height * width > 2 * limit:
        raise ValueError(
            f"{name} has {height} x {width} pixels, more than PIL's safety limit of {2 * limit}. Increase "
            "PIL.Image.MAX_IMAGE_PIXELS if you trust the file."
        )


def is_pil(image: Any) -> bool:
    """Returns whether `image` is a PIL image; returns False if PIL is not installed."""
    return is_vision_available() and isinstance(image, PIL.Image.Image)


def name_with_source(name: str, source: str | os.PathLike[str] | bytes | bytearray) -> str:
    """Appends the path or URL of an image to its name, for error messages; for bytes, returns only the name."""
    if isinstance(source, bytes | bytearray):
        return name
    text = os.fspath(source)
    return f"{name} ({text!r})" if len(text) <= 120 else f"{name} ({text[:80]!r}... of {len(text)} characters)"


class _WebRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to http and https URLs only, so that a server cannot redirect to local files."""

    def redirect_request(self, request: Any, file: Any, code: int, text: str, headers: Any, url: str) -> Any:
        if not url.lower().startswith(("http://", "https://")):
            raise ValueError(f"the server redirects to {url!r}, which is neither an http nor an https URL")
        return super().redirect_request(request, file, code, text, headers, url)


def download(url: str, timeout: float | None = None) -> bytes:
    """Downloads the content of an http(s) URL.

    Args:
        url: The URL.
        timeout: Total time limit in seconds, by default `DOWNLOAD_TIMEOUT`.

    Raises:
        ValueError: If the content is larger than `MAX_DOWNLOAD_BYTES` or the time limit is exceeded.
        OSError: If urllib cannot open the URL.
    """
    timeout = DOWNLOAD_TIMEOUT if timeout is None else timeout
    end, parts, size = time.monotonic() + timeout, list[bytes](), 0
    cure = "Download the file yourself and pass its path, or increase image_inputs."
    # Some servers reject requests without a User-Agent.
    request = urllib.request.Request(url, headers={"User-Agent": "hf_vit"})
    with urllib.request.build_opener(_WebRedirects).open(request, timeout=timeout) as response:
        while part := response.read1(2**16):  # `read` could exceed the time limit, because it waits for all bytes
            parts.append(part)
            size += len(part)
            if size > MAX_DOWNLOAD_BYTES:
                raise ValueError(f"the file has more than {MAX_DOWNLOAD_BYTES} bytes. {cure}MAX_DOWNLOAD_BYTES")
            if time.monotonic() > end:
                raise ValueError(f"it takes longer than {timeout:g} seconds. {cure}DOWNLOAD_TIMEOUT or the timeout")
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
            raise ValueError(
                f"{name} is not a base64 data URL ({error}). Use the form data:image/png;base64,..."
            ) from error
    try:
        return open(source, "rb")
    except (OSError, ValueError) as error:  # errors also occur if the source is a base64 string instead of a path
        if (image := _image_in_base64(source)) is not None:
            return BytesIO(image)
        if not isinstance(error, FileNotFoundError):
            raise OSError(f"{name} cannot be opened: {error}.") from error
        raise FileNotFoundError(
            f"{name}: there is no such file, and the text is not a base64 image. Check the path; relative paths start "
            f"at {os.getcwd()!r}."
        ) from error


def _image_in_base64(text: str) -> bytes | None:
    """Returns the bytes of a base64-encoded image file, or None if the text does not encode an image."""
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
        PIL.Image.open(BytesIO(data)).close()
    except (OSError, ValueError):
        return None
    return data


def is_transparent(image: "PIL.Image.Image") -> bool:
    """Returns whether a PIL image has transparent pixels, due to an alpha channel or a transparent palette color."""
    if not image.has_transparency_data:
        return False
    # PIL can convert the mode La (gray with premultiplied alpha) only to LA.
    plain = image.convert("LA") if image.mode in ("LA", "La") else image.convert("RGBA")
    return plain.getchannel("A").histogram()[255] < image.width * image.height


def _pil_to_array(image: "PIL.Image.Image", name: str, num_channels: int, do_convert_rgb: bool | None) -> np.ndarray:
    """Converts a PIL image to an array (H, W) or (H, W, C) uint8, with the colors of `.convert("RGB")`."""
    check_bits(image, name)
    if _may_exceed_8_bits(image):
        return np.array(image).astype(np.uint8)
    try:
        mode = _plain_mode(image, num_channels, do_convert_rgb)
        if mode in ("L", "RGB") and is_transparent(image):
            logger.warning_once(ALPHA_DROPPED_MESSAGE)
        image = image.convert("LA") if image.mode == "La" else image  # PIL can convert mode La only to LA
        return np.array(image if image.mode == mode else image.convert(mode))
    except Exception as error:  # PIL conversions raise various errors
        raise OSError(f"{name} has mode {image.mode!r}, which PIL cannot convert: {error}.") from error


def _plain_mode(image: "PIL.Image.Image", num_channels: int, do_convert_rgb: bool | None) -> str:
    # Palette and 1-bit images are always converted, because their modes are storage formats and not color spaces.
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
    """Raises `ValueError` if a PIL image has values beyond 8 bits, because conversion would clip these values."""
    if not _may_exceed_8_bits(image):
        return
    values = np.array(image)
    low, high = values.min(), values.max()
    if not (low >= 0 and high <= 255) or (image.mode == "F" and 0 < high <= 1):  # `not` also rejects NaN
        raise ValueError(
            f"{name} has mode {image.mode!r} with values from {low} to {high}. transformers' pipelines convert images "
            "to 8 bits by clipping: all values above 255 become white. Scale the values to 0..255 and save 8 "
            'bits. For 16 bits, use Image.fromarray((np.asarray(image) / 257).astype("uint8")) or pass an array of '
            "dtype uint16, which is scaled automatically."
        )


def _may_exceed_8_bits(image: "PIL.Image.Image") -> bool:
    return image.mode in ("I", "F") or image.mode.startswith("I;16")


def array_to_tensor(array: np.ndarray, name: str) -> torch.Tensor:
    """Converts an array to a tensor, without copying if possible; raises `TypeError` for unsupported dtypes."""
    if array.dtype.kind not in "buif" or array.dtype.itemsize > 8:
        raise TypeError(
            f"{name} is an array of dtype {array.dtype}, which is not supported. Convert it to uint8, uint16, bool or "
            "float32. Pass images of different sizes as a list."
        )
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()  # torch supports neither read-only memory nor negative strides
    return torch.from_numpy(array)


def _channels_first(pixels: torch.Tensor, name: str, num_channels: int, input_data_format: str | None) -> torch.Tensor:
    if pixels.ndim == 2:
        return pixels[None]
    if pixels.ndim != 3:
        raise ValueError(
            f"{name} has {pixels.ndim} dimensions and the shape {tuple(pixels.shape)}. An image has 2 dimensions, "
            "(height, width), or 3 with channels; a batch has 4."
        )
    if input_data_format is not None:
        is_first = ChannelDimension(input_data_format) == ChannelDimension.FIRST
        return pixels if is_first else pixels.movedim(-1, 0)
    known = (1, 3, 4, num_channels)
    first, last = pixels.shape[0], pixels.shape[-1]
    if first not in known and last not in known:
        counts = ", ".join(map(str, sorted(set(known))))
        raise ValueError(
            f"{name} has shape {tuple(pixels.shape)}, but the first or the last axis must have one of {counts} "
            "channels. Pass input_data_format, set num_channels to the value of the model, or pass a batch of gray "
            "images as a list."
        )
    # An axis with exactly `num_channels` entries is preferred to an axis with another valid number of channels.
    is_first = first == num_channels or (last != num_channels and first in known)
    if first in known and last in known:
        logger.warning_once(
            f"The channels of an image of shape {tuple(pixels.shape)} could be first or last. They are assumed to be "
            f"{'first' if is_first else 'last'}; pass input_data_format to avoid this ambiguity."
        )
    return pixels if is_first else pixels.movedim(-1, 0)


def _to_uint8_or_float32(pixels: torch.Tensor, name: str) -> torch.Tensor:
    """Converts floating-point pixels to float32, and pixels of other dtypes to uint8."""
    if not pixels.numel():
        raise ValueError(f"{name} has no pixels: its shape is {tuple(pixels.shape)}. Remove it.")
    if pixels.dtype == torch.uint8:
        return pixels
    if pixels.dtype == torch.bool:
        return pixels.to(torch.uint8) * 255
    if pixels.dtype == torch.uint16:
        return ((pixels.to(torch.int32) + 128) // 257).to(torch.uint8)  # 65535 / 255 = 257
    if pixels.is_floating_point():
        pixels = pixels.to(torch.float32)
        low, high = torch.aminmax(pixels)
        if not (torch.isfinite(low) and torch.isfinite(high)):  # aminmax returns NaN if any pixel is NaN
            raise ValueError(f"{name} has pixels that are NaN or infinite. Replace them, as torch.nan_to_num does.")
        return pixels
    if pixels.dtype not in WIDE_INTEGERS:
        raise TypeError(f"{name} is a tensor of {pixels.dtype}, which is not supported. Use uint8 or float32.")
    pixels = pixels.to(torch.int64)
    low, high = torch.aminmax(pixels)
    if low < 0 or high > 255:
        raise ValueError(
            f"{name} holds integers from {int(low)} to {int(high)}, but 8-bit pixels range from 0 to 255. Convert "
            "16-bit images to uint16, which is scaled to 8 bits."
        )
    return pixels.to(torch.uint8)


def _check_scale(pixels: torch.Tensor, name: str, white: float) -> None:
    """Raises `ValueError` for float pixels outside [0, `white`]; warns if the pixels seem to be rescaled already."""
    low, high = (float(value) for value in torch.aminmax(pixels))
    margin = white / 1000  # tolerance for rounding errors of pixel values
    if low < -margin or high > white + margin:
        cure = "do_rescale=True expects 0..255" if white == 1 else "do_rescale=False expects 0..1"
        raise ValueError(
            f"{name} holds floats from {low:g} to {high:g}, but they must lie in 0..{white:g}, black to white. Scale "
            f"them to this range, or change do_rescale: {cure}. For pixels that are normalized already, set "
            "do_rescale=False and do_normalize=False."
        )
    if white > 1 and low >= 0 and high <= 1:
        logger.warning_once(
            "All values of a float image lie in [0, 1], but floats are expected in 0..255 and are multiplied by "
            "rescale_factor. If the image is rescaled already, pass do_rescale=False."
        )


def _match_channels(pixels: torch.Tensor, name: str, num_channels: int, may_convert: bool) -> torch.Tensor:
    """Converts pixels to (num_channels, H, W) by dropping alpha, computing luma or repeating gray."""
    given = pixels.shape[0]
    if may_convert and given == 4 and num_channels in (1, 3):
        logger.warning_once(ALPHA_DROPPED_MESSAGE)
        pixels = pixels[:3]  # (3, H, W)
    if may_convert and num_channels == 1 and pixels.shape[0] == 3:
        pixels = _luma(pixels)  # (1, H, W)
    if may_convert and num_channels == 3 and pixels.shape[0] == 1:
        pixels = pixels.expand(3, -1, -1)  # (3, H, W)
    if pixels.shape[0] != num_channels:
        hint = "" if may_convert else " do_convert_rgb=False disables conversion."
        raise ValueError(
            f"{name} has {given} channels, but num_channels={num_channels}.{hint} Only gray, RGB and RGBA images are "
            "converted to 1 or 3 channels; otherwise images and model must have the same number of channels, which is "
            "num_channels."
        )
    return pixels


def _luma(pixels: torch.Tensor) -> torch.Tensor:
    wide = pixels if pixels.is_floating_point() else pixels.to(torch.int32)
    red, green, blue = (LUMA[channel] * wide[channel] for channel in range(3))
    total = (red + green + blue)[None]  # (1, H, W)
    return total / 65536 if pixels.is_floating_point() else ((total + 32768) >> 16).to(torch.uint8)
