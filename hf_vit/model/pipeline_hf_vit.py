"""Base class of fast image pipelines, which prefetch images in threads and process them in batches on the device.

The subclass for each task is in the module of the task model. Pipelines have the same arguments and results as in
transformers. Shapes: B batch, C channels, H W pixels of an image, h w pixels of the model input.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Lock, Semaphore, Thread
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from transformers import BatchFeature, Pipeline, PreTrainedConfig

from .configuration_hf_vit import INSTALL_COMMAND
from .large_images import DEFAULT_OVERLAP, Pair, check_tiles, place_tiles
from .nested_options import check_thresholds
from .pretrained import check_trained
from .task_configurations import TASK_CONFIGS


AUTO = "auto"  # Value of batch_size and num_workers that selects a default for the device.
# Default batch sizes on a CPU and on other devices, for images of `NATIVE_PIXELS` pixels, that is 224 x 224.
CPU_BATCH, DEVICE_BATCH, NATIVE_PIXELS = 16, 64, 224 * 224
MOST_THREADS = 16
ON_ERROR = ("raise", "return")
CORNERS = ("xmin", "ymin", "xmax", "ymax")  # keys of a box in pipeline results
S = TypeVar("S")
T = TypeVar("T")


def trained_threshold(config: PreTrainedConfig, field: str) -> dict[str, float]:
    """Returns {"threshold": value} with the score threshold selected in training, or {} if there is none.

    Args:
        config: Configuration of any model.
        field: Field of `HfViTConfig` that contains the task options.
    """
    if config.model_type != "hf_vit":
        return {}
    threshold = vars(TASK_CONFIGS[field].of(vars(config).get(field)))["score_threshold"]
    return {} if threshold is None else {"threshold": threshold}


class ReadAhead(Generic[S, T]):
    """Applies `read` to the items of a source in background threads and yields the results in order.

    At most `limit` items are prefetched, which limits the memory for sources of any length. Only one thread at a time
    takes an item from the source. Exceptions of the source or of `read` are raised when iteration reaches the item.

    Args:
        source: Iterable of items, which may block until the next item is available.
        read: Function applied to each item, called concurrently by all threads.
        threads: Number of threads, at least one.
        limit: Maximum number of prefetched items, at least one.
    """

    def __init__(self, source: Iterable[S], read: Callable[[S], T], threads: int, limit: int) -> None:
        self.read, self._items = read, iter(source)
        self._threads = [Thread(target=self._work, daemon=True, name="read_ahead") for _ in range(threads)]
        self._room, self._taking, self._is_closed = Semaphore(limit), Lock(), False
        self._found: SimpleQueue[Future[T] | None] = SimpleQueue()  # None marks the end of the source

    def __iter__(self) -> Iterator[T]:
        for thread in self._threads:
            thread.start()
        try:
            while (found := self._found.get()) is not None:
                self._room.release()
                yield found.result()
        finally:  # stop the threads, also if the caller stops iterating early
            self._is_closed = True
            self._room.release(len(self._threads))

    def is_waiting(self) -> bool:
        """Returns whether the source has not yielded the next item yet."""
        return self._found.empty()

    def _work(self) -> None:
        while True:
            self._room.acquire()
            with self._taking:
                if self._is_closed:
                    return
                result: Future[T] = Future()
                try:
                    item = next(self._items)
                except BaseException as error:  # StopIteration, or an error to raise in the iterating thread
                    self._is_closed = True
                    if not isinstance(error, StopIteration):
                        result.set_exception(error)
                        self._found.put(result)
                    self._found.put(None)
                    return
                self._found.put(result)
            try:
                result.set_result(self.read(item))
            except BaseException as error:
                result.set_exception(error)
            del item, result  # release their memory before waiting for the source


@dataclass(eq=False)
class ModelInput:
    """One model input, created from a whole image, from a tile of it, or from the crop of an object.

    Attributes:
        pixels: Resized pixels (C, h, w), not normalized.
        size: Height and width of the original image, or of the tile, in pixels.
        box: If the input is a crop, the box (4,) of the object as left, top, right and bottom in pixels.
        place: Row and column of the first pixel of a tile in the image.
        is_tiled: Whether the image is split into tiles. The input is then a tile or the whole image.
        answer: Result of the pipeline for this input.
        has_result: Whether `answer` is set.
    """

    pixels: Tensor
    size: Pair
    box: Tensor | None = None
    place: Pair = (0, 0)
    is_tiled: bool = False
    answer: Any = None
    has_result: bool = False


@dataclass(eq=False)
class Photo:
    """An image with its model inputs, or with an error message if it cannot be read."""

    parts: list[ModelInput]
    error: str | None = None


class Answers(IterableDataset[Any]):
    """Lazy iterable over the results for a dataset or generator. It can be passed to another pipeline."""

    def __init__(self, start: Callable[[], Iterator[Any]], inputs: Any) -> None:
        self.start, self.inputs = start, inputs

    def __iter__(self) -> Iterator[Any]:
        return self.start()

    def __len__(self) -> int:
        return len(self.inputs)


class BatchedImagePipeline(Pipeline):
    """Mixin for transformers' image pipelines that reads images in threads and processes them in batches.

    For models and image processors of other packages, the original pipeline class is used. The following arguments are
    added to those of transformers. The first three can also be passed to a call.

    Args:
        batch_size: Number of images per forward pass; image sizes may differ. The default depends on the device. For
            generators, default batches contain only the items that are already available, because a generator may
            wait for a result before yielding the next item.
        num_workers: Number of threads that read images during forward passes; 0 reads in the calling thread. The
            default depends on the device. If there are threads, generators run in them, at most two batches ahead,
            and not in the calling thread.
        on_error: "raise", or "return" to return `{"error": message}` for images that cannot be read.
        optimize: True, or a dictionary of options, to apply `optimize_for_inference` to the model. The model is
            optimized for one batch size, which becomes that of the pipeline; on a CPU, the default is 1.
        tile_size: Height and width of tiles in pixels, or one number for both. Larger images are split into tiles, for
            object detection, semantic segmentation and depth estimation. The argument can also be passed to a call. If
            it is set, `batch_size` is the maximum number of tiles in a batch; a call with one image uses the
            `batch_size` of the pipeline.
        overlap: Overlap of neighboring tiles as a share of their size, in [0, 1); 0.2 by default.
    """

    stock: ClassVar[type[Pipeline] | None] = None
    _postprocess_params: dict[str, Any]
    _batch_size: Any
    task_config: ClassVar[str | None] = None  # Field of `HfViTConfig` that contains the default threshold.
    needs_head: ClassVar[bool] = True  # Whether to raise an error if head weights are untrained.

    def __new__(cls, model: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Creates a pipeline; for models of other packages, it has the original pipeline class of transformers."""
        if cls.stock is not None and model is not None and model.config.model_type != "hf_vit":
            if kwargs.pop("optimize", None):
                raise ValueError(f"optimize supports only hf_vit models, not {type(model).__name__}. Omit optimize.")
            return cls.stock(*args, model=model, **kwargs)
        return super().__new__(cls)

    def __init__(self, *args: Any, optimize: bool | dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not isinstance(optimize, bool | dict | None):
            raise ValueError(f"optimize={optimize!r} must be True, False or options of optimize_for_inference.")
        for name in ("batch_size", "num_workers"):
            kwargs[name] = AUTO if kwargs.get(name) is None else kwargs[name]
        super().__init__(*args, **kwargs)
        check_trained(self.model, self.model.name_or_path, self.model.untrained_weights if self.needs_head else ())
        if self.task_config is not None:
            self._postprocess_params = (
                trained_threshold(self.model.config, self.task_config) | self._postprocess_params
            )
        self.fast_model: Any = None
        if optimize:
            suited = 1 if self.device.type == "cpu" else self.default_counts()[1]
            fitting = {"batch_size": suited if self._batch_size == AUTO else self._batch_size}
            options = fitting | (optimize if isinstance(optimize, dict) else {})
            self.fast_model, self._optimized = optimize_model(self.model, options), self.model
            self._batch_size = options["batch_size"]  # the model is optimized for this batch size

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result for one image, or a list of results for a list of images, which may be empty."""
        inputs = args[0] if args else kwargs.get("inputs", kwargs.get("images"))
        is_empty = isinstance(inputs, list | tuple | Dataset) and isinstance(inputs, Sized) and len(inputs) == 0
        return [] if is_empty else super().__call__(*args, **kwargs)

    def _sanitize_parameters(self, *_: Any, **kwargs: Any) -> Any:
        on_error, tile_size, overlap = (kwargs.pop(name, None) for name in ("on_error", "tile_size", "overlap"))
        tiles = check_tiles(tile_size, overlap, type(self.model).__name__)
        check_thresholds(**{name: value for name, value in kwargs.items() if name.endswith("threshold")})
        preprocess, forward, postprocess = super()._sanitize_parameters(**kwargs)
        return {**preprocess, **check_on_error(on_error), **tiles}, forward, postprocess

    def run_single(self, inputs: Any, preprocess_params: Any, forward_params: Any, postprocess_params: Any) -> Any:
        """Returns the result for one image."""
        if not self._is_fast(preprocess_params):
            return super().run_single(inputs, preprocess_params, forward_params, postprocess_params)
        size = self._batch_size if "tile_size" in preprocess_params else 1
        return next(self._answers([inputs], 0, size, preprocess_params, forward_params, postprocess_params))

    def get_iterator(
        self, inputs: Any, num_workers: Any, batch_size: Any, preprocess_params: Any, *others: Any
    ) -> Any:
        """Returns an iterable over the results for several images."""
        _check_count("batch_size", batch_size, 1)
        _check_count("num_workers", num_workers, 0)
        if not self._is_fast(preprocess_params):
            threads, size = 0 if num_workers == AUTO else num_workers, 1 if batch_size == AUTO else batch_size
            return super().get_iterator(inputs, threads, size, preprocess_params, *others)
        return Answers(partial(self._answers, inputs, num_workers, batch_size, preprocess_params, *others), inputs)

    def _is_fast(self, preprocess_params: dict[str, Any]) -> bool:
        """Returns whether the image processor is from this package, as required for batched processing."""
        # Compare names instead of classes: remote code is imported twice, for the pipeline and the image processor.
        name = type(self.image_processor).__name__
        is_ours = name.startswith("HfViTImageProcessor")
        for option in {"on_error", "tile_size"} & preprocess_params.keys() if not is_ours else ():
            raise ValueError(
                f"{option}={preprocess_params[option]!r} requires an image processor of hf_vit, but this is a {name}. "
                f"Omit {option}."
            )
        if "overlap" in preprocess_params and "tile_size" not in preprocess_params:
            raise ValueError(f"overlap={preprocess_params['overlap']!r} requires tiles. Set tile_size.")
        return is_ours

    def _answers(
        self, inputs: Any, num_workers: Any, batch_size: Any, preprocess: Any, forward: Any, postprocess: Any
    ) -> Iterator[Any]:
        """Yields the result for each image, in order."""
        if self.fast_model is not None and self._optimized is not self.model:
            raise ValueError("The model of this pipeline was replaced after optimization. Create a new pipeline.")
        options, preprocess, forward = self.call_arguments(dict(preprocess), forward)
        answer = partial(self._answer_batch, options=options, forward=forward, postprocess=postprocess)
        photos, is_waiting = self._read_all(
            inputs, num_workers, batch_size, partial(self._read, options, **preprocess)
        )
        waiting, parts = deque[Photo](), list[ModelInput]()
        for photo in photos:
            waiting.append(photo)
            parts += photo.parts
            size = self._choose_batch_size(batch_size, parts)
            while len(parts) >= size or (parts and batch_size == AUTO and is_waiting()):
                answer(parts[:size])
                del parts[:size]
            while waiting and all(part.has_result for part in waiting[0].parts):
                yield self._answer_of(waiting.popleft(), postprocess)
        if parts:
            answer(parts)
        for photo in waiting:
            yield self._answer_of(photo, postprocess)

    def _read_all(
        self, inputs: Any, num_workers: Any, batch_size: Any, read: Callable[[Callable[[], Any]], Photo]
    ) -> tuple[Iterable[Photo], Callable[[], bool]]:
        """Returns an iterable over all images, and a function that returns whether the next one is unavailable."""
        is_list = isinstance(inputs, Sized) and not isinstance(inputs, IterableDataset)
        sources = _items_of(inputs) if is_list else (partial(lambda item: item, item) for item in inputs)
        given = zip((num_workers, batch_size), self.default_counts(), strict=True)
        threads, batch = (suited if value == AUTO else value for value, suited in given)
        if threads == 0:
            return map(read, sources), lambda: not is_list
        photos = ReadAhead(sources, read, threads, 2 * batch)
        return photos, lambda: not is_list and photos.is_waiting()

    def _choose_batch_size(self, batch_size: Any, parts: list[ModelInput]) -> int:
        if batch_size != AUTO:
            return int(batch_size)
        _, most = self.default_counts()
        largest = max((part.pixels[0].numel() for part in parts), default=NATIVE_PIXELS)
        return max(1, most * NATIVE_PIXELS // max(largest, NATIVE_PIXELS))

    def default_counts(self) -> tuple[int, int]:
        """Returns the default number of reader threads and the default batch size for the device."""
        if self.device.type == "cpu":  # The model uses all cores and is slower than reading.
            return max(1, torch.get_num_threads() // 4), CPU_BATCH
        return min(MOST_THREADS, os.cpu_count() or 1), DEVICE_BATCH

    def _read(self, options: dict[str, Any], get: Callable[[], Any], on_error: str = "raise", **given: Any) -> Photo:
        try:
            return Photo(self.read_model_inputs(get(), options, **given))
        except (OSError, TypeError, ValueError) as error:
            if on_error == "raise":
                raise
            return Photo([], str(error))

    def _answer_batch(self, parts: list[ModelInput], options: dict[str, Any], forward: Any, postprocess: Any) -> None:
        """Runs the model on batches of inputs with the same shape and dtype, and stores the results in the inputs."""
        groups: dict[Any, list[ModelInput]] = {}
        for part in parts:
            groups.setdefault((part.pixels.shape, part.pixels.dtype, part.is_tiled), []).append(part)
        for group in groups.values():
            with self.device_placement(), self.get_inference_context()():
                pixels = [part.pixels for part in group]
                inputs = self.image_processor.finish_batch(pixels, options, self.device).to(self.dtype)
                outputs = self.run_model(inputs, **forward)
                decode = self.decode_tiles if group[0].is_tiled else self.decode
                answers = decode(outputs, group, **postprocess)
            for part, answer in zip(group, answers, strict=True):
                part.answer, part.has_result = answer, True

    def _answer_of(self, photo: Photo, postprocess: dict[str, Any]) -> Any:
        if photo.error is not None:
            return {"error": photo.error}
        if any(part.is_tiled for part in photo.parts):
            return self.join_tiles(photo.parts, **postprocess)
        return self.join_results(photo.parts)

    # Subclasses override the following methods.

    @property
    def joins_whole_image(self) -> bool:
        """Whether `join_tiles` requires the result for the whole image, before the results for its tiles."""
        return False

    def call_arguments(self, preprocess: dict[str, Any], forward: dict[str, Any]) -> tuple[dict[str, Any], Any, Any]:
        """Returns the options of one call for the image processor, `read_model_inputs` and `run_model`."""
        return self.image_processor.call_options(), preprocess, forward

    def read_model_inputs(
        self, image: Any, options: dict[str, Any], timeout: float | None = None, **tiles: Any
    ) -> list[ModelInput]:
        """Reads an image of any kind and returns its model inputs; called in background threads.

        An image that is larger than a tile has one input per tile, after one for the whole image if
        `joins_whole_image` is true.
        """
        pixels = self.image_processor.read_pixels(image, options, timeout)  # (C, H, W)
        whole = (pixels.shape[-2], pixels.shape[-1])
        places, size = place_tiles(whole, tiles.get("tile_size", whole), tiles.get("overlap", DEFAULT_OVERLAP))
        is_tiled = len(places) > 1
        parts = [(whole, (0, 0))] if is_tiled and self.joins_whole_image else []
        inputs = []
        for (height, width), (top, left) in [*parts, *((size, place) for place in places)]:
            region = pixels[:, top : top + height, left : left + width]
            (seen,) = self.image_processor.to_model_size(region, options)  # (C, h, w)
            inputs.append(ModelInput(seen, (height, width), place=(top, left), is_tiled=is_tiled))
        return inputs

    def run_model(self, inputs: BatchFeature, *_: Any, **forward: Any) -> Any:
        """Runs the model on `pixel_values` (B, C, h, w) on the device and returns its outputs."""
        return (self.model if self.fast_model is None else self.fast_model)(**inputs, **forward)

    def decode(self, outputs: Any, parts: list[ModelInput], *_: Any, **postprocess: Any) -> list[Any]:
        """Returns the result for each input of a batch."""
        raise NotImplementedError

    def decode_tiles(self, outputs: Any, parts: list[ModelInput], *_: Any, **postprocess: Any) -> list[Any]:
        """Returns the result for each tile of a batch, in the format that `join_tiles` requires."""
        raise NotImplementedError

    def join_tiles(self, parts: list[ModelInput], *_: Any, **postprocess: Any) -> Any:
        """Combines the results for the inputs of an image with tiles into one result in the format of `decode`."""
        raise NotImplementedError

    def join_results(self, parts: list[ModelInput]) -> Any:
        """Combines the results for all model inputs of an image, such as object crops, into the image result."""
        return parts[0].answer


def check_on_error(on_error: str | None) -> dict[str, str]:
    """Returns `{"on_error": on_error}`, or `{}` if `on_error` is `None`; raises `ValueError` for unknown values."""
    if on_error not in (None, *ON_ERROR):
        raise ValueError(f"on_error={on_error!r} must be one of {', '.join(ON_ERROR)}.")
    return {} if on_error is None else {"on_error": on_error}


def optimize_model(model: Any, options: dict[str, Any]) -> Any:
    """Returns an optimized model with the same interface. Its `report` lists the measured variants.

    Raises:
        ImportError: If the package `hf_vit` is not installed. Code saved with checkpoints cannot optimize models.
    """
    try:
        from hf_vit.inference.optimize import optimize_for_inference
    except ImportError as error:
        raise ImportError(
            f"optimize={options} needs the package hf_vit ({error}). Omit optimize, or install: {INSTALL_COMMAND}"
        ) from error
    return optimize_for_inference(model, **options)


def _items_of(inputs: Any) -> Iterator[Callable[[], Any]]:
    """Yields a function for each item of a list or dataset. The function loads the item, one thread at a time."""
    lock = Lock()

    def get(index: int) -> Any:
        with lock:
            return inputs[index]

    yield from (partial(get, index) for index in range(len(inputs)))


def _check_count(name: str, value: Any, least: int) -> None:
    if value != AUTO and (type(value) is not int or value < least):
        raise ValueError(f'{name}={value!r} must be an integer of at least {least}, or "{AUTO}".')
