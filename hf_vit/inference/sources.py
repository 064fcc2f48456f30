"""Images to predict: files, URLs, folders, parquet files, tar files, tables, and the frames of videos.

Shapes: H W pixels of a frame, N frames.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from ..data import load_unlabeled_images
from ..data.fingerprint import image_state
from ..data.reading.files import IMAGE_SUFFIXES, TABLE_SUFFIXES, VIDEO_SUFFIXES, walk_files
from ..data.reading.shards import TAR_SUFFIXES
from ..data.targets import encoded_bytes
from ..extras import check_packages
from ..model.image_inputs import download, read_image
from ..outputs import record_outputs


URL = ("http://", "https://")
CHUNK_SIZE = 1024  # Number of images per call of the pipeline.
# Frames of a video are decoded in chunks of at most `MAX_FRAMES`, and at most `FRAME_BYTES` if there are several.
MAX_FRAMES, FRAME_BYTES = 64, 64 * 2**20


class Frame(NamedTuple):
    """A frame of a video: its number from 0, its time in seconds, its pixels (3, H, W) uint8, and the frame rate."""

    number: int
    seconds: float
    pixels: Tensor
    rate: float


class Source(NamedTuple):
    """An image or a video: a file, a URL, a row of a dataset, or a frame of a video."""

    file: str  # path or URL; for a row, only its name
    rows: datasets.Dataset | Sequence[Mapping[str, Any]] | None = None  # dataset of the row, if any
    number: int = 0  # number of the row
    frame: Frame | None = None  # frame of the video `file`, if any
    fault: str = ""  # reason why the video `file` cannot be read
    stem: Path | None = None  # path prefix for the output files of the image
    labeled: Path | None = None  # path of the labeled video

    @property
    def is_video(self) -> bool:
        """Whether the source is a video, by its suffix."""
        return self.rows is None and Path(self.file).suffix.lower() in VIDEO_SUFFIXES

    @property
    def caption(self) -> str:
        """File name and, for frames, time."""
        name = Path(self.file).name
        return name if self.frame is None else f"{name}, {self.frame.seconds:.2f} s"

    def read(self) -> Any:
        """Returns the path or URL, the encoded image in the row, or the frame (3, H, W); raises `OSError`."""
        if self.fault:
            raise OSError(self.fault)
        if self.frame is not None:
            return self.frame.pixels
        if self.rows is None:
            return self.file
        try:
            return encoded_bytes(self.rows[self.number]["image"], "image")
        except Exception as error:  # Reading a dataset row raises many types of errors.
            raise OSError(f"{error}") from error

    def decode(self) -> Image.Image:
        """Returns the upright 8-bit RGB image, decoded as in training. Many types of errors are raised on failure."""
        pixels = read_image(self.read(), "it", num_channels=3)  # (3, H, W)
        return Image.fromarray(pixels.round().byte().movedim(0, -1).numpy())


def find_sources(inputs: Iterable[str | Path], *, has_videos: bool = False) -> Iterator[Source]:
    """Yields the images in image files, URLs, folders, parquet files, tar files and tables, and videos if requested.

    Folders are listed during iteration, in a fixed order. Before the first image is yielded, `ValueError` is raised if
    a path does not exist or has no images, and `ImportError` if a video is given and torchcodec is missing.
    """
    suffixes = IMAGE_SUFFIXES | (VIDEO_SUFFIXES if has_videos else set())
    return chain.from_iterable([_sources_at(os.fspath(given), suffixes) for given in inputs])


def _sources_at(given: str, suffixes: set[str]) -> Iterable[Source]:
    if given.startswith(URL):
        return [Source(given)]
    path = Path(given)
    if path.suffix.lower() in VIDEO_SUFFIXES & suffixes and path.is_file():
        check_packages(f"Reading the video {path}", "torchcodec", extra="fast")
    return find_stored(path) or (Source(str(file)) for file in _files_at(path, suffixes))


def find_images(inputs: Sequence[Path]) -> list[Path]:
    """Lists image files and the image files in folders; raises `ValueError` if a path has no images."""
    return [file for path in inputs for file in _files_at(path, IMAGE_SUFFIXES)]


def _files_at(path: Path, suffixes: set[str]) -> Iterator[Path]:
    """Yields the file `path` or the files in the folder `path`; raises `ValueError` before iteration."""
    if not path.exists():
        raise ValueError(f"There is no file or folder {path}.")
    found = iter([path]) if path.is_file() else (p for p in walk_files(path) if p.suffix.lower() in suffixes)
    if (first := next(found, None)) is None:
        raise ValueError(f"The folder {path} contains no images: no file name ends in {', '.join(sorted(suffixes))}.")
    return chain([first], found)


def find_stored(path: Path) -> list[Source]:
    """Lists the images in a parquet file, tar file, table or folder of these, with unique names, or returns []."""
    is_stored = path.is_file() and path.name.lower().endswith((".parquet", *TAR_SUFFIXES, *TABLE_SUFFIXES))
    if path.is_dir():
        is_stored = all(file.suffix.lower() not in IMAGE_SUFFIXES | VIDEO_SUFFIXES for file in walk_files(path))
    if not is_stored:
        return []
    found: dict[str, Source] = {}
    for split, images in load_unlabeled_images([str(path)]).items():
        rows = images.cast_column("image", datasets.Image(decode=False))
        for number, name in enumerate(rows["file"]):
            file = name if name not in found else f"{split}-{number}-{name}"
            found[file] = Source(file, rows, number)
    return list(found.values())


def open_image(file: Path) -> Image.Image:
    """Returns the upright 8-bit RGB image in a file, decoded as in training; raises `ValueError` on failure."""
    try:
        return Source(str(file)).decode()
    except Exception as error:  # Decoders raise many types of errors.
        raise ValueError(f"{file} cannot be read as an image: {error}") from error


def name_outputs(files: Sequence[str | Path]) -> list[str]:
    """Returns a unique output name for each file: the file name without suffix, with a number to resolve conflicts."""
    counts: Counter[str] = Counter()
    names: dict[str, None] = {}
    for stem in (Path(file).stem for file in files):
        name = stem
        while name in names:
            counts[stem] += 1
            name = f"{stem}-{counts[stem] + 1}"
        names[name] = None
    return list(names)


def digest_sources(sources: Iterable[Source]) -> tuple[int, str]:
    """Returns the number of sources, and a hash of their names and of what identifies them, see `image_state`."""
    content, count = sha256(), 0
    for count, source in enumerate(sources, start=1):  # noqa: B007
        file = {"path": source.file, "bytes": None}
        state = image_state(file if source.rows is None else source.rows[source.number]["image"])
        content.update(f"{source.file} {state}\n".encode(errors="surrogateescape"))
    return count, content.hexdigest()


# Videos


def in_chunks(sources: Iterable[Source]) -> Iterator[list[Source]]:
    """Yields the images in chunks that fit into memory. Videos are replaced by chunks of their frames."""
    images: list[Source] = []
    for source in sources:
        if images and (source.is_video or len(images) == CHUNK_SIZE):
            yield images
            images = []
        if source.is_video:
            yield from _frames_of(source)
        else:
            images.append(source)
    if images:
        yield images


def _frames_of(video: Source) -> Iterator[list[Source]]:
    """Yields chunks of the frames of a video. If it cannot be read, the last chunk has one source with a `fault`."""
    try:
        check_packages("Reading a video", "torchcodec", extra="fast")
        from torchcodec.decoders import VideoDecoder  # Imported here because torchcodec is optional

        decoder = VideoDecoder(download(video.file) if video.file.startswith(URL) else video.file)
        data, rate = decoder.metadata, float(decoder.metadata.average_fps or 0)
        if not (len(decoder) and rate):
            raise OSError("The video has no frames.")
        size = max(1, min(MAX_FRAMES, FRAME_BYTES // (3 * data.height * data.width)))
        for start in range(0, len(decoder), size):
            batch = decoder.get_frames_in_range(start, min(start + size, len(decoder)))  # (N, 3, H, W)
            times = enumerate(zip(batch.pts_seconds.tolist(), batch.data, strict=True), start)
            frames = (Frame(number, round(time, 6), pixels, rate) for number, (time, pixels) in times)
            yield [video._replace(frame=frame) for frame in frames]
    except Exception as error:  # FFmpeg and torchcodec raise many types of errors.
        yield [video._replace(fault=_shorten(error))]


def _shorten(error: Exception) -> str:
    """Returns the message of an error of torchcodec without the places in its source code."""
    if "FFmpeg is not properly installed" in str(error):
        return "torchcodec found no FFmpeg libraries. Install FFmpeg, for example: apt install ffmpeg"
    return re.sub(r"\w+, \S+\.cpp:\d+, ", "", str(error))


class VideoWriter:
    """Writes pictures to a video file one by one. The file has a temporary name until `close` is called.

    The first picture determines the size of the video. Larger pictures are scaled down, smaller ones are padded.
    """

    def __init__(self, file: Path, frame_rate: float) -> None:
        from torchcodec.encoders import Encoder  # Imported here because torchcodec is optional

        self.file, self.frame_rate, self.size = file, frame_rate, (0, 0)
        self._unfinished, self._encoder = file.with_stem(f".{file.stem}.part"), Encoder()
        self._stream: Any = None

    def add(self, picture: Image.Image) -> None:
        """Appends a picture."""
        if self._stream is None:
            width, height = self.size = (picture.width + picture.width % 2, picture.height + picture.height % 2)
            # yuv420p, which all players support, requires even sizes.
            self._stream = self._encoder.add_video(
                height=height, width=width, frame_rate=self.frame_rate, pixel_format="yuv420p"
            )
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._encoder.open_file(self._unfinished)
        canvas = Image.new("RGB", self.size, "white")
        is_larger = picture.width > self.size[0] or picture.height > self.size[1]
        canvas.paste(ImageOps.contain(picture, self.size) if is_larger else picture)
        self._stream.add_frames(torch.from_numpy(np.array(canvas)).movedim(-1, 0)[None])  # (1, 3, H, W)

    def close(self) -> None:
        """Completes the file."""
        self._encoder.close()
        self._unfinished.replace(self.file)
        record_outputs([self.file])
