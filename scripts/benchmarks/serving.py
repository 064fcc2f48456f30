"""Compare our pipeline and the stock transformers pipeline under many simultaneous clients.

Each client sends one JPEG, waits for its labels, and sends the next one. With dynamic batches, a server thread
combines all waiting images, up to a limit, into one batch. The stock pipeline is measured with the same server, and
with one request after another. Images per second and latency are reported.
"""

import io
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import transformers
from PIL import Image
from transformers import ImageClassificationPipeline, pipeline

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor
from hf_vit.inference.serving.batching import BatchThread

from .harness import DTYPES, RoundArguments, describe_run, in_rounds, make_photos, print_header, print_row, save


PERCENTILES = (0.5, 0.95, 0.99)


@dataclass(kw_only=True)
class Arguments(RoundArguments):
    """Options of the benchmark."""

    preset: str = field(default="base", metadata={"help": "size of the model"})
    dtype: str = field(default="bfloat16", metadata={"help": ", ".join(DTYPES)})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda"})
    image_size: int = field(default=224, metadata={"help": "height and width of resized images in pixels"})
    photo_size: list[int] = field(default_factory=lambda: [640, 427], metadata={"help": "width and height of JPEGs"})
    num_clients: int = field(default=64, metadata={"help": "number of simultaneous clients"})
    num_requests: int = field(default=512, metadata={"help": "number of requests per measurement"})
    batch_size: int = field(default=64, metadata={"help": "maximum number of images per batch"})
    rounds: int = 3


def open_and_answer(answer: Callable[[Any], Any], photos: Any) -> Any:
    """Open photos and return their answers. Photos are opened because the stock pipeline does not accept bytes."""
    if isinstance(photos, bytes):
        return answer(Image.open(io.BytesIO(photos)))
    return answer([Image.open(io.BytesIO(photo)) for photo in photos])


def send_requests(answer: Callable[[bytes], Any], photos: list[bytes], args: Arguments) -> list[float]:
    """Send all requests; return the latencies in seconds, sorted, followed by the total time in seconds."""

    def request(number: int) -> float:
        start = perf_counter()
        answer(photos[number % len(photos)])
        return perf_counter() - start

    start = perf_counter()
    with ThreadPoolExecutor(args.num_clients) as clients:
        seconds = sorted(clients.map(request, range(args.num_requests)))
    return [*seconds, perf_counter() - start]


def serve(answer: Callable[[Any], Any], photos: list[bytes], args: Arguments) -> list[float]:
    """Send all requests to a thread with dynamic batches, and return the result of `send_requests`."""
    with BatchThread(answer, args.batch_size) as thread:
        return send_requests(lambda photo: thread.submit([photo])[0].result(), photos, args)


def answer_in_turn(answer: Callable[[Any], Any], photos: list[bytes], args: Arguments) -> list[float]:
    """Send all requests to a function that answers one request at a time; return the times as `send_requests` does."""
    lock = threading.Lock()

    def wait(photo: bytes) -> Any:
        with lock:
            return answer(photo)

    return send_requests(wait, photos, args)


def main(args: Arguments) -> None:
    """Measure all ways of serving and print the table."""
    run, photos = describe_run(args, transformers), make_photos(args.photo_size)
    config = HfViTConfig.from_preset(args.preset, image_size=args.image_size, num_labels=1000)
    model = HfViTForImageClassification(config).to(args.device, DTYPES[args.dtype]).eval()
    options: dict[str, Any] = {"image_processor": HfViTImageProcessor.for_model(config), "device": args.device}
    stock = ImageClassificationPipeline(model=model, **options)
    ours = pipeline("image-classification", model=model, **options)
    ways: dict[str, Callable[[], list[float]]] = {
        "stock, one by one": partial(answer_in_turn, partial(open_and_answer, stock), photos, args),
        "stock, dynamic batches": partial(
            serve, partial(open_and_answer, partial(stock, batch_size=args.batch_size)), photos, args
        ),
        "ours, dynamic batches": partial(serve, ours, photos, args),
    }
    for way in ways.values():
        way()  # the first call is a warm-up
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
