"""What makes the pipelines of images fast: threads that read ahead, and batches from pixels to answers on the device.

The pipeline of a task stands beside its model. Of the stock ones they keep how they are called and what they answer.
Shapes: B batch, C channels, H W pixels of an image, h w of what the model sees.
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
from .nested_options import check_thresholds
from .pretrained import check_trained
from .task_configurations import TASK_CONFIGS


AUTO = "auto"  # as the size of batches or number of threads
# Images of 224 x 224 pixels in a batch, on a CPU and on another device, beside which more threads may read
CPU_BATCH, DEVICE_BATCH, NATIVE_PIXELS = 16, 64, 224 * 224
MOST_THREADS = 16
ON_ERROR = ("raise", "return")
CORNERS = ("xmin", "ymin", "xmax", "ymax")  # of a box, in answers
S = TypeVar("S")
T = TypeVar("T")


def chosen_threshold(config: PreTrainedConfig, field: str) -> dict[str, float]:
    """Returns as `threshold` the score that the training of a model has chosen; nothing where none has been.

    Args:
        config: Of any model.
        field: The field of `HfViTConfig` that holds the options of its task.
    """
    if config.model_type != "hf_vit":
        return {}
    threshold = vars(TASK_CONFIGS[field].of(vars(config).get(field)))["score_threshold"]
    return {} if threshold is None else {"threshold": threshold}


class ReadAhead(Generic[S, T]):
    """Iterates over what `read` makes of each item of a source, in order, while threads read those that follow.

    No more than `limit` items are taken from the source before they are asked for, so that memory is bounded, however
    long the source is. One thread at a time takes an item from it, other than the one that iterates here. What the
    source or `read` raises is raised at the place of its item.

    Args:
        source: What to read; it may wait for its items to come.
        read: Called in the threads, several at a time.
        threads: Number of them, at least one.
        limit: Number of items, at least one.
    """

    def __init__(self, source: Iterable[S], read: Callable[[S], T], threads: int, limit: int) -> None:
        self.read, self._items = read, iter(source)
        self._threads = [Thread(target=self._work, daemon=True, name="read_ahead") for _ in range(threads)]
        self._room, self._taking, self._is_closed = Semaphore(limit), Lock(), False
        self._found: SimpleQueue[Future[T] | None] = SimpleQueue()  # None at the end

    def __iter__(self) -> Iterator[T]:
        for thread in self._threads:
            thread.start()
        try:
            while (found := self._found.get()) is not None:
                self._room.release()
                yield found.result()
        finally:  # also if the caller does not want the rest
            self._is_closed = True
            self._room.release(len(self._threads))

    def is_waiting(self) -> bool:
        """Whether the source has not given the next item yet."""
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
                except BaseException as error:  # the end, or an error that belongs to the thread that iterates
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
            del item, result  # release the memory before waiting for the source


@dataclass(eq=False)
class Part:
    """What the model sees of an image: the whole, or an object.

    Attributes:
        pixels: (C, h, w), not normalized.
        size: Height and width of the image in pixels.
        box: (4,) left, top, right and bottom of an object in pixels.
        answer: Of the pipeline.
        is_answered: Whether there is one.
    """

    pixels: Tensor
    size: tuple[int, int]
    box: Tensor | None = None
    answer: Any = None
    is_answered: bool = False


@dataclass(eq=False)
class Photo:
    """An image that is read, or the error of one that cannot be."""

    parts: list[Part]
    error: str | None = None


class Answers(IterableDataset[Any]):
    """Iterates over the answers to a dataset or generator as it goes, which another pipeline takes as its input."""

    def __init__(self, start: Callable[[], Iterator[Any]], inputs: Any) -> None:
        self.start, self.inputs = start, inputs

    def __iter__(self) -> Iterator[Any]:
        return self.start()

    def __len__(self) -> int:
        return len(self.inputs)


class BatchedImagePipeline(Pipeline):
    """A pipeline whose images are read by threads and answered in batches; put before a class of the stock ones.

    Beyond what that takes, at construction or, the first three, in a call:

    Args:
        batch_size: Images that the model sees at once, which need not be of one size. By default as many as suit the
            device, and of a generator no more than are there already: it may wait for an answer before it goes on.
        num_workers: Threads that read images while the model computes; 0 reads in the caller's. By default as many as
            suit the device. They take a generator's items one by one, in another thread than the caller's, and are
            ahead by two batches at most.
        on_error: "raise", or "return" for `{"error": what is wrong}` in place of the answer to an image that cannot be
            read.
        optimize: True, or a dictionary of its options, for a model as `optimize_for_inference` makes it: for one batch
            size, which on a CPU is 1 by default, and which becomes that of the pipeline.

    Models and image processors that are not ours are left to the stock class.
    """

    stock: ClassVar[type[Pipeline] | None] = None
    _postprocess_params: dict[str, Any]
    _batch_size: Any
    task_config: ClassVar[str | None] = None  # the field of `HfViTConfig` whose threshold is the default
    needs_head: ClassVar[bool] = True  # `from_pretrained` refuses a backbone with missing weights in any case

    def __new__(cls, model: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Returns a pipeline of the stock class for a model of others."""
        if cls.stock is not None and model is not None and model.config.model_type != "hf_vit":
            if kwargs.pop("optimize", None):
                raise ValueError(f"optimize is for models of hf_vit, not for {type(model).__name__}. Leave it out.")
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
            self._postprocess_params = chosen_threshold(self.model.config, self.task_config) | self._postprocess_params
        self.fast_model: Any = None
        if optimize:
            suited = 1 if self.device.type == "cpu" else self.suited_counts()[1]
            fitting = {"batch_size": suited if self._batch_size == AUTO else self._batch_size}
            options = fitting | (optimize if isinstance(optimize, dict) else {})
            self.fast_model, self._optimized = optimize_model(self.model, options), self.model
            self._batch_size = options["batch_size"]  # other batches are not as fast

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the answer to an image, or those to many; `[]` for an empty list or dataset."""
        inputs = args[0] if args else kwargs.get("inputs", kwargs.get("images"))
        is_empty = isinstance(inputs, list | tuple | Dataset) and isinstance(inputs, Sized) and len(inputs) == 0
        return [] if is_empty else super().__call__(*args, **kwargs)

    def _sanitize_parameters(self, *_: Any, **kwargs: Any) -> Any:
        on_error = kwargs.pop("on_error", None)
        check_thresholds(**{name: value for name, value in kwargs.items() if name.endswith("threshold")})
        preprocess, forward, postprocess = super()._sanitize_parameters(**kwargs)
        return {**preprocess, **check_on_error(on_error)}, forward, postprocess

    def run_single(self, inputs: Any, preprocess_params: Any, forward_params: Any, postprocess_params: Any) -> Any:
        """Returns the answer to one image."""
        if not self._is_fast(preprocess_params):
            return super().run_single(inputs, preprocess_params, forward_params, postprocess_params)
        return next(self._answers([inputs], 0, 1, preprocess_params, forward_params, postprocess_params))

    def get_iterator(
        self, inputs: Any, num_workers: Any, batch_size: Any, preprocess_params: Any, *others: Any
    ) -> Any:
        """Returns an iterable over the answers to many images."""
        _check_count("batch_size", batch_size, 1)
        _check_count("num_workers", num_workers, 0)
        if not self._is_fast(preprocess_params):
            threads, size = 0 if num_workers == AUTO else num_workers, 1 if batch_size == AUTO else batch_size
            return super().get_iterator(inputs, threads, size, preprocess_params, *others)
        return Answers(partial(self._answers, inputs, num_workers, batch_size, preprocess_params, *others), inputs)

    def _is_fast(self, preprocess_params: dict[str, Any]) -> bool:
        """Whether the image processor is ours; if not, the stock class does all."""
        # by its name: a saved folder's files are imported once for the pipeline and once for the image processor
        name = type(self.image_processor).__name__
        is_ours = name.startswith("HfViTImageProcessor")
        if not is_ours and "on_error" in preprocess_params:
            raise ValueError(
                f"on_error={preprocess_params['on_error']!r} needs an image processor of hf_vit, but this one is a "
                f"{name}. Leave on_error out."
            )
        return is_ours

    def _answers(
        self, inputs: Any, num_workers: Any, batch_size: Any, preprocess: Any, forward: Any, postprocess: Any
    ) -> Iterator[Any]:
        """Yields the answer to each image, in order."""
        if self.fast_model is not None and self._optimized is not self.model:
            raise ValueError("The model of this pipeline was replaced after it had been optimized. Make a new one.")
        options, preprocess, forward = self.begin_call(dict(preprocess), forward)
        answer = partial(self._answer_batch, options=options, forward=forward, postprocess=postprocess)
        photos, is_waiting = self._read_all(
            inputs, num_workers, batch_size, partial(self._read, options, **preprocess)
        )
        waiting, parts = deque[Photo](), list[Part]()
        for photo in photos:
            waiting.append(photo)
            parts += photo.parts
            size = self._choose_batch_size(batch_size, parts)
            while len(parts) >= size or (parts and batch_size == AUTO and is_waiting()):
                answer(parts[:size])
                del parts[:size]
            while waiting and all(part.is_answered for part in waiting[0].parts):
                yield self._answer_of(waiting.popleft())
        if parts:
            answer(parts)
        for photo in waiting:
            yield self._answer_of(photo)

    def _read_all(
        self, inputs: Any, num_workers: Any, batch_size: Any, read: Callable[[Callable[[], Any]], Photo]
    ) -> tuple[Iterable[Photo], Callable[[], bool]]:
        """Returns an iterable over all images, and what says whether the next one has not come yet."""
        is_list = isinstance(inputs, Sized) and not isinstance(inputs, IterableDataset)
        sources = _items_of(inputs) if is_list else (partial(lambda item: item, item) for item in inputs)
        given = zip((num_workers, batch_size), self.suited_counts(), strict=True)
        threads, batch = (suited if value == AUTO else value for value, suited in given)
        if threads == 0:
            return map(read, sources), lambda: not is_list
        photos = ReadAhead(sources, read, threads, 2 * batch)
        return photos, lambda: not is_list and photos.is_waiting()

    def _choose_batch_size(self, batch_size: Any, parts: list[Part]) -> int:
        if batch_size != AUTO:
            return int(batch_size)
        _, most = self.suited_counts()
        largest = max((part.pixels[0].numel() for part in parts), default=NATIVE_PIXELS)
        return max(1, most * NATIVE_PIXELS // max(largest, NATIVE_PIXELS))

    def suited_counts(self) -> tuple[int, int]:
        """Returns how many threads read, and how many images are a batch, where nobody says otherwise."""
        if self.device.type == "cpu":  # on all of whose cores the model computes, which takes longer than reading
            return max(1, torch.get_num_threads() // 4), CPU_BATCH
        return min(MOST_THREADS, os.cpu_count() or 1), DEVICE_BATCH

    def _read(self, options: dict[str, Any], get: Callable[[], Any], on_error: str = "raise", **given: Any) -> Photo:
        try:
            return Photo(self.read_parts(get(), options, **given))
        except (OSError, TypeError, ValueError) as error:
            if on_error == "raise":
                raise
            return Photo([], str(error))

    def _answer_batch(self, parts: list[Part], options: dict[str, Any], forward: Any, postprocess: Any) -> None:
        """Answers parts, those of one shape together."""
        groups: dict[Any, list[Part]] = {}
        for part in parts:
            groups.setdefault((part.pixels.shape, part.pixels.dtype), []).append(part)
        for group in groups.values():
            with self.device_placement(), self.get_inference_context()():
                pixels = [part.pixels for part in group]
                inputs = self.image_processor.finish_batch(pixels, options, self.device).to(self.dtype)
                outputs = self.run_model(inputs, **forward)
                answers = self.decode(outputs, group, **postprocess)
            for part, answer in zip(group, answers, strict=True):
                part.answer, part.is_answered = answer, True

    def _answer_of(self, photo: Photo) -> Any:
        return self.join_parts(photo.parts) if photo.error is None else {"error": photo.error}

    # What tasks do in their own way

    def begin_call(self, preprocess: dict[str, Any], forward: dict[str, Any]) -> tuple[dict[str, Any], Any, Any]:
        """Returns the options of the image processor, and those of `read_parts` and `run_model`, of a call."""
        return self.image_processor.call_options(), preprocess, forward

    def read_parts(self, image: Any, options: dict[str, Any], timeout: float | None = None, **_: Any) -> list[Part]:
        """Returns what the model is to see of an image of any kind; called in threads."""
        pixels = self.image_processor.read_pixels(image, options, timeout)  # (C, H, W)
        (seen,) = self.image_processor.to_model_size(pixels, options)  # (C, h, w)
        return [Part(seen, (pixels.shape[-2], pixels.shape[-1]))]

    def run_model(self, inputs: BatchFeature, *_: Any, **forward: Any) -> Any:
        """Returns the outputs of the model for `pixel_values` (B, C, h, w), on the device."""
        return (self.model if self.fast_model is None else self.fast_model)(**inputs, **forward)

    def decode(self, outputs: Any, parts: list[Part], *_: Any, **postprocess: Any) -> list[Any]:
        """Returns the answer to each of the parts of a batch."""
        raise NotImplementedError

    def join_parts(self, parts: list[Part]) -> Any:
        """Returns the answer to an image of which all parts have theirs."""
        return parts[0].answer


def check_on_error(on_error: str | None) -> dict[str, str]:
    """Returns the option by its name if it is given; `ValueError` if there is no such behavior."""
    if on_error not in (None, *ON_ERROR):
        raise ValueError(f"on_error={on_error!r} must be one of {', '.join(ON_ERROR)}.")
    return {} if on_error is None else {"on_error": on_error}


def optimize_model(model: Any, options: dict[str, Any]) -> Any:
    """Return a model with the same call that is faster on this machine; `.report` lists what was tried.

    Raises:
        ImportError: if the package is not installed: what it takes does not travel with checkpoints.
    """
    try:
        from hf_vit.inference.optimize import optimize_for_inference
    except ImportError as error:
        raise ImportError(
            f"optimize={options} needs the package hf_vit ({error}). Leave optimize out, or install: {INSTALL_COMMAND}"
        ) from error
    return optimize_for_inference(model, **options)


def _items_of(inputs: Any) -> Iterator[Callable[[], Any]]:
    """Yields what gets each item of a list or dataset, which opens it only then, for one thread at a time."""
    lock = Lock()

    def get(index: int) -> Any:
        with lock:
            return inputs[index]

    yield from (partial(get, index) for index in range(len(inputs)))


def _check_count(name: str, value: Any, least: int) -> None:
    if value != AUTO and (type(value) is not int or value < least):
        raise ValueError(f'{name}={value!r} must be a whole number of at least {least}, or "{AUTO}".')
