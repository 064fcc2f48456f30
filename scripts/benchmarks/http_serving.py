"""Compare our pipeline and the stock pipeline behind `hf-vit serve`, under many clients over HTTP.

The server runs in its own process on one core. Clients send photos of several sizes, and wait for the response before
they send the next request. `--soak_minutes` runs a soak test instead, which sends valid and invalid requests and
records the memory of the server: images in several formats, truncated files, decompression bombs, large bodies, slow
clients and disconnects.
"""

import asyncio
import io
import multiprocessing
import os
import random
import struct
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
import torch
import transformers
from PIL import Image
from transformers import ImageClassificationPipeline

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor

from .harness import DTYPES, RoundArguments, describe_run, in_rounds, make_photos, print_header, print_row, save
from .serving import PERCENTILES, open_and_answer


OURS, OPTIMIZED, IN_BATCHES, ONE_BY_ONE = "ours", "ours, --optimize", "stock, in batches", "stock, one by one"
SIZES = ((320, 240), (500, 375), (640, 427), (1024, 768), (1600, 1200))  # widths and heights of photos
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
EXPECTED = {200, 408, 413, 422, 429, 503}  # status codes in the soak test that are not server errors
TIMEOUT = 5.0  # time limit of the server in seconds in the soak test


@dataclass(kw_only=True)
class Arguments(RoundArguments):
    """Options of the benchmark."""

    preset: str = field(default="tiny", metadata={"help": "size of the model"})
    dtype: str = field(default="float32", metadata={"help": ", ".join(DTYPES)})
    image_size: int = field(default=224, metadata={"help": "height and width of resized images in pixels"})
    num_clients: int = field(default=64, metadata={"help": "number of simultaneous clients"})
    num_requests: int = field(default=256, metadata={"help": "number of requests per measurement"})
    batch_size: int = field(default=16, metadata={"help": "maximum number of images per batch"})
    core: int = field(default=0, metadata={"help": "number of the core that the server uses"})
    soak_minutes: float = field(default=0.0, metadata={"help": "duration of the soak test; 0 measures throughput"})
    rounds: int = 3


def serve(args: Arguments, folder: str, channel: Connection) -> None:
    """Serve one model with each kind of pipeline, or only ours in the soak test; send the address to `channel`."""
    os.sched_setaffinity(0, {args.core})
    torch.set_num_threads(1)
    from hf_vit.inference.serving import prepare_process

    with prepare_process():
        from hf_vit.inference.serving.app import Limits
        from hf_vit.inference.serving.page import run_server
        from hf_vit.inference.serving.served_model import ServedModel, open_models

        (ours,) = open_models([folder], {}, args.batch_size)
        assert ours.predictor is not None
        ours.predictor.pipe.model.to(DTYPES[args.dtype])
        pipe = ours.predictor.pipe
        stock = ImageClassificationPipeline(model=pipe.model, image_processor=pipe.image_processor)
        models = []
        if not args.soak_minutes:
            (fast,) = open_models([folder], {}, args.batch_size, optimize=True)
            models.append(ServedModel(OPTIMIZED, folder, fast.predictor, None, args.batch_size))
        for name, size in ((OURS, args.batch_size), (IN_BATCHES, args.batch_size), (ONE_BY_ONE, 1)):
            model = ServedModel(name, folder, ours.predictor, ours.embedder if name == OURS else None, size)
            if name != OURS:
                answer = partial(open_and_answer, partial(stock, batch_size=size))
                model.threads["predictions"].answer = partial(predict_by_stock, answer)
            models.append(model)
        limits = Limits(timeout=TIMEOUT if args.soak_minutes else 60)
        run_server(models, limits, None, "127.0.0.1", 0, lambda text: channel.send(text.split()[-1]))


def predict_by_stock(answer: Callable[[list[bytes]], Any], images: list[bytes]) -> list[tuple[dict[str, Any], Any]]:
    """Return the predictions of the stock pipeline in the format of our endpoint."""
    return [({**labels[0], "top_k": labels}, labels) for labels in answer(images)]


@contextmanager
def running(args: Arguments) -> Iterator[tuple[str, psutil.Process]]:
    """Context manager that runs the server and returns its address and process."""
    with TemporaryDirectory() as folder:
        config = HfViTConfig.from_preset(args.preset, image_size=args.image_size, num_labels=1000)
        HfViTForImageClassification(config).save_pretrained(folder)
        HfViTImageProcessor.for_model(config).save_pretrained(folder)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(args, folder, theirs))
        process.start()
        theirs.close()
        try:
            yield ours.recv(), psutil.Process(process.pid)
        finally:
            process.terminate()
            process.join()


async def send_all(
    address: str, server: psutil.Process, photos: list[bytes], args: Arguments, model: str
) -> list[float]:
    """Send all requests; return the sorted latencies, the total time, and the CPU time of the server, in seconds."""
    numbers, latencies = iter(range(args.num_requests)), list[float]()

    async def client(http: httpx.AsyncClient) -> None:
        for number in numbers:
            start = time.perf_counter()
            response = await http.post(
                "/v1/predict", files={"image": photos[number % len(photos)]}, data={"model": model}
            )
            response.raise_for_status()
            latencies.append(time.perf_counter() - start)

    start, used = time.perf_counter(), sum(server.cpu_times()[:2])
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=httpx.Limits(max_connections=None)) as http:
        await asyncio.gather(*(client(http) for _ in range(args.num_clients)))
    return [*sorted(latencies), time.perf_counter() - start, sum(server.cpu_times()[:2]) - used]


def measure(args: Arguments) -> list[list[Any]]:
    """Measure all pipelines in interleaved rounds, and return the rows of the table."""
    photos = [photo for size in SIZES for photo in make_photos(size, count=4)]
    random.Random(0).shuffle(photos)
    names = (ONE_BY_ONE, IN_BATCHES, OURS, OPTIMIZED)
    with running(args) as (address, server):
        send = partial(send_all, address, server, photos, args)
        ways = {name: partial(lambda name: asyncio.run(send(name)), name) for name in names}
        for way in ways.values():
            way()  # warm up
        rounds = list(in_rounds(ways, args.rounds))
    rows: list[list[Any]] = []
    for name in names:
        seconds = sorted(second for found in rounds for second in found[name][:-2])
        late = [1000 * seconds[min(len(seconds) - 1, int(share * len(seconds)))] for share in PERCENTILES]
        whole, used = (median(found[name][place] for found in rounds) for place in (-2, -1))
        ratio = median(found[ONE_BY_ONE][-2] / found[name][-2] for found in rounds)
        rows.append([name, args.num_requests / whole, *late, args.num_requests / used, ratio])
    return rows


# --- Soak test


def encoded(photo: bytes, image_format: str) -> bytes:
    """Return a photo in another image format."""
    stream = io.BytesIO()
    Image.open(io.BytesIO(photo)).save(stream, image_format)
    return stream.getvalue()


def make_bomb(side: int) -> bytes:
    """Return a small PNG file of `side` x `side` black pixels."""
    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(3 * side + 1)) for _ in range(side)) + packer.flush()
    parts = (b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0), b"IDAT" + rows, b"IEND")
    chunks = (struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


class Soak:
    """Clients that send valid and invalid requests in random order, and count the status codes of each kind."""

    def __init__(self, address: str) -> None:
        self.address, self.counts, self.random = address, Counter[tuple[str, str]](), random.Random(0)
        photos = [photo for size in SIZES for photo in make_photos(size, count=2)]
        formats = [encoded(photo, name) for photo, name in zip(photos, FORMATS, strict=False)]
        self.good = [*photos, *formats]
        self.bad = [b"no image", b"", *(photo[: len(photo) // 3] for photo in self.good), make_bomb(9_000)]

    async def client(self, end: float) -> None:
        """Send requests until the time `end` of `time.monotonic`."""
        kinds: list[tuple[str, Callable[[httpx.AsyncClient], Awaitable[int]], int]] = [
            ("photo", lambda http: self.post(http, self.random.choice(self.good)), 12),
            ("embedding", lambda http: self.post(http, self.random.choice(self.good), "/v1/embeddings"), 3),
            ("bad file", lambda http: self.post(http, self.random.choice(self.bad)), 4),
            ("large body", lambda http: self.post(http, bytes(21_000_000)), 1),
            ("disconnect", self.disconnect, 2),
            ("slow client", self.send_slowly, 1),
        ]
        async with httpx.AsyncClient(base_url=self.address, timeout=60) as http:
            while time.monotonic() < end:
                name, send, _ = self.random.choices(kinds, [weight for *_, weight in kinds])[0]
                try:
                    status = str(await send(http))
                except (httpx.HTTPError, OSError) as error:
                    status = type(error).__name__
                self.counts[name, status] += 1

    async def post(self, http: httpx.AsyncClient, image: bytes, route: str = "/v1/predict") -> int:
        """Send an image and return the status code."""
        return (await http.post(route, files={"image": image})).status_code

    async def disconnect(self, http: httpx.AsyncClient) -> int:
        """Send an image and disconnect before the response."""
        with suppress(httpx.TimeoutException):
            await http.post("/v1/predict", files={"image": self.good[0]}, timeout=httpx.Timeout(60, read=0.02))
        return 200

    async def send_slowly(self, _: httpx.AsyncClient) -> int:
        """Send an incomplete request and return the status code of the response, which is sent at the time limit."""
        host, port = self.address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = "POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n"
        writer.write(f"{head}Content-Type: multipart/form-data; boundary=x\r\n\r\n--x".encode())
        line = await asyncio.wait_for(reader.readline(), 60)
        writer.close()
        return int(line.split()[1])


async def soak(args: Arguments, address: str, server: psutil.Process) -> tuple[Counter[tuple[str, str]], list[float]]:
    """Run the soak test. Return the status codes, and the memory in MiB at 30 points in time."""
    clients, memory, step = Soak(address), list[float](), args.soak_minutes * 2

    async def watch() -> None:
        for _ in range(30):
            await asyncio.sleep(step)
            memory.append(server.memory_info().rss / 2**20)
            print(f"{len(memory) * step:6.0f} s: {memory[-1]:.1f} MiB, {clients.counts.total()} requests", flush=True)

    end = time.monotonic() + 60 * args.soak_minutes
    await asyncio.gather(watch(), *(clients.client(end) for _ in range(args.num_clients)))
    return clients.counts, memory


def run_soak(args: Arguments) -> list[list[Any]]:
    """Run the soak test, print its log, and return the number of requests of each kind by status code."""
    with running(args) as (address, server):
        counts, memory = asyncio.run(soak(args, address, server))
        is_alive = httpx.get(f"{address}/health").status_code == 200
    rows: list[list[Any]] = [[kind, status, count] for (kind, status), count in sorted(counts.items())]
    print_header("request", "status", "count")
    for row in rows:
        print_row(*row)
    failed = sum(count for _, status, count in rows if not status.isdigit() or int(status) not in EXPECTED)
    warm, late = median(memory[10:15]), median(memory[-5:])  # of 30; the first third is the warm-up
    growth = f"{warm:.1f} MiB after a third of the time, {late:.1f} MiB at the end ({late / warm - 1:+.1%})"
    print(f"Healthy: {is_alive}. Unexpected: {failed}. Memory: {growth}", flush=True)
    return [*rows, ["memory", memory]]


def main(args: Arguments) -> None:
    """Measure throughput and latency, or run the soak test."""
    run = describe_run(args, transformers)
    if args.soak_minutes:
        rows = run_soak(args)
    else:
        rows = measure(args)
        late = (f"p{100 * share:.0f} ms" for share in PERCENTILES)
        print_header("", "images/s", *late, "images per second of CPU time", "ratio")
        for row in rows:
            print_row(*row)
    save({**run, "rows": rows}, args.output)
