"""Images per second and latency under many clients at once: our pipeline with dynamic batches beside the stock one.

Each client sends one JPEG, waits for its labels, and sends the next. A server thread takes all images that wait, up to
a limit, for one batch. Beside it stand the stock pipeline that takes requests one after the other, and the stock one
behind the same server.
"""

import io
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import transformers
from PIL import Image
from transformers import ImageClassificationPipeline, pipeline

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor

from .harness import DTYPES, RoundArguments, describe_run, in_rounds, make_photos, print_header, print_row, save


PERCENTILES = (0.5, 0.95, 0.99)
STOP = None  # in the place of a request


@dataclass(kw_only=True)
class Arguments(RoundArguments):
    """What to measure."""

    preset: str = field(default="base", metadata={"help": "size of the model"})
    dtype: str = field(default="bfloat16", metadata={"help": ", ".join(DTYPES)})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda"})
    image_size: int = field(default=224, metadata={"help": "height and width that images are resized to in pixels"})
    photo_size: list[int] = field(default_factory=lambda: [640, 427], metadata={"help": "width and height of JPEGs"})
    num_clients: int = field(default=64, metadata={"help": "that wait for an answer at the same time"})
    num_requests: int = field(default=512, metadata={"help": "of all clients in a measurement"})
    batch_size: int = field(default=64, metadata={"help": "most images of a batch"})
    rounds: int = 3


class Server:
    """Answers requests in batches of what waits.

    Args:
        answer: From images to their answers.
        batch_size: Most images of a batch.
    """

    def __init__(self, answer: Callable[[list[Any]], Sequence[Any]], batch_size: int) -> None:
        self.answer, self.batch_size = answer, batch_size
        self.requests = queue.SimpleQueue[tuple[Any, Future[Any]] | None]()
        self.thread = threading.Thread(target=self.serve)

    def __enter__(self) -> "Server":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.requests.put(STOP)
        self.thread.join()

    def __call__(self, image: Any) -> Any:
        """Returns the answer to one image, when it is there; raises what went wrong with its batch."""
        future = Future[Any]()
        self.requests.put((image, future))
        return future.result()

    def serve(self) -> None:
        """Takes a request, and with it all that wait, until it is told to stop."""
        while (request := self.requests.get()) is not STOP:
            batch = [request]
            while len(batch) < self.batch_size and not self.requests.empty():
                if (further := self.requests.get()) is STOP:
                    self.requests.put(STOP)
                    break
                batch.append(further)
            images, futures = zip(*batch, strict=True)
            try:
                for future, answered in zip(futures, self.answer(list(images)), strict=True):
                    future.set_result(answered)
            except Exception as error:  # of which each client has to hear
                for future in futures:
                    future.set_exception(error)


def opened(answer: Callable[[Any], Any], photos: Any) -> Any:
    """Answers photos that are opened before, as the stock pipeline takes no bytes."""
    if isinstance(photos, bytes):
        return answer(Image.open(io.BytesIO(photos)))
    return answer([Image.open(io.BytesIO(photo)) for photo in photos])


def ask(answer: Callable[[bytes], Any], photos: list[bytes], args: Arguments) -> list[float]:
    """Sends all requests; returns the seconds that each took, in rising order, and last those of all."""

    def request(number: int) -> float:
        start = perf_counter()
        answer(photos[number % len(photos)])
        return perf_counter() - start

    start = perf_counter()
    with ThreadPoolExecutor(args.num_clients) as clients:
        seconds = sorted(clients.map(request, range(args.num_requests)))
    return [*seconds, perf_counter() - start]


def serve(answer: Callable[[Any], Any], photos: list[bytes], args: Arguments) -> list[float]:
    """Sends all requests to a server."""
    with Server(answer, args.batch_size) as server:
        return ask(server, photos, args)


def in_turn(answer: Callable[[Any], Any], photos: list[bytes], args: Arguments) -> list[float]:
    """Sends all requests to what answers one at a time."""
    lock = threading.Lock()

    def wait(photo: bytes) -> Any:
        with lock:
            return answer(photo)

    return ask(wait, photos, args)


def main(args: Arguments) -> None:
    """Measures and prints."""
    run, photos = describe_run(args, transformers), make_photos(args.photo_size)
    config = HfViTConfig.from_preset(args.preset, image_size=args.image_size, num_labels=1000)
    model = HfViTForImageClassification(config).to(args.device, DTYPES[args.dtype]).eval()
    options: dict[str, Any] = {"image_processor": HfViTImageProcessor.for_model(config), "device": args.device}
    stock = ImageClassificationPipeline(model=model, **options)
    ours = pipeline("image-classification", model=model, **options)
    ways: dict[str, Callable[[], list[float]]] = {
        "stock, one by one": partial(in_turn, partial(opened, stock), photos, args),
        "stock, dynamic batches": partial(
            serve, partial(opened, partial(stock, batch_size=args.batch_size)), photos, args
        ),
        "ours, dynamic batches": partial(serve, ours, photos, args),
    }
    for way in ways.values():
        way()  # once for what is prepared at first use
    rounds = list(in_rounds(ways, args.rounds))
    print_header("", "images/s", *(f"p{100 * share:.0f} ms" for share in PERCENTILES))
    rows: list[list[Any]] = []
    for name in ways:
        seconds = sorted(second for found in rounds for second in found[name][:-1])
        whole = sorted(found[name][-1] for found in rounds)[len(rounds) // 2]
        late = [1000 * seconds[min(len(seconds) - 1, int(share * len(seconds)))] for share in PERCENTILES]
        rows.append([name, args.num_requests / whole, *late])
        print_row(*rows[-1])
    save({**run, "rows": rows}, args.output)
