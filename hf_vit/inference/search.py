"""Search images by text. Image features are stored in an index that later searches reuse."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file, save_file
from torch import Tensor
from transformers.utils import logging

from ..convert import load_processor
from ..data.fingerprint import FEATURE_FOLDER, digest, digest_model
from ..model.processing_hf_vit import HfViTProcessor
from ..model.task_zero_shot_image_classification import HfViTForZeroShotImageClassification
from ..options.field import COUNT
from ..outputs import check_outputs, find_intact, recorded_file
from ..visualize.figures import draw_label_tile
from .predict import check_places, list_pages, save_pages
from .sources import Source, find_sources


logger = logging.get_logger(__name__)


def search_images(
    model: str | Path,
    inputs: str | Path,
    text: str,
    *,
    top_k: Annotated[int, COUNT] = 20,
    batch_size: Annotated[int, COUNT] = 16,
    picture: str | Path | None = None,
    overwrite: bool = False,
) -> list[dict[str, Any]]:
    """Rank images by their similarity to a text. Equivalent to `hf-vit search`.

    The features of images are stored in the cache folder of `datasets`. The key is the content of the image file and
    the model, so later searches encode only new or changed images.

    Args:
        model: Folder of a saved image-text model, or name on the Hub, such as CLIP or SigLIP.
        inputs: Folder of images, image file, parquet file, tar file or table with images.
        text: Text to search for, such as "a dog on grass".
        top_k: Number of images to return.
        batch_size: Number of images per forward pass.
        picture: File for a contact sheet of the images found; further pages are named `name-2.png` and so on.
        overwrite: Replace the contact sheet of an earlier run.

    Returns:
        For each image, most similar first, a dictionary with `file` and `score` (cosine similarity in [-1, 1]).

    Raises:
        OSError: if there is no such model or file.
        ValueError: if there are no images, or the model does not compare images with texts.
    """
    model, picture = str(model), None if picture is None else Path(picture)
    check_places(None, picture)
    sources = list(find_sources([str(inputs)]))
    pages = list_pages(picture, min(len(sources), top_k))
    check_outputs(pages, [Path(source.file) for source in sources], overwrite)
    encoder = HfViTForZeroShotImageClassification.from_pretrained(model).eval()
    processor = load_text_processor(encoder, model)
    sources, features = index_images(encoder, processor.image_processor, sources, batch_size)
    scores = features @ encode_texts(encoder, processor, [text])[0].double()
    ranked = scores.argsort(descending=True, stable=True)[:top_k].tolist()
    if picture is not None:
        tiles = [
            draw_label_tile(sources[number].decode(), f"{scores[number]:.3f}", sources[number].caption)
            for number in ranked
        ]
        save_pages(tiles, pages)
    return [{"file": str(sources[number].file), "score": round(float(scores[number]), 6)} for number in ranked]


def load_text_processor(model: HfViTForZeroShotImageClassification, name_or_path: str) -> HfViTProcessor:
    """Return image processor and tokenizer of a checkpoint; raise `ValueError` if it has no tokenizer."""
    processor = load_processor(model, name_or_path, patch_size=model.config.patch_size)
    if not isinstance(processor, HfViTProcessor):
        raise ValueError(f"{name_or_path} has no tokenizer, which is needed for texts. Give an image-text model.")
    return processor


@torch.no_grad()
def encode_texts(model: HfViTForZeroShotImageClassification, processor: HfViTProcessor, texts: list[str]) -> Tensor:
    """Return the normalized features (T, E) of texts."""
    inputs = processor.tokenizer(texts, return_tensors="pt", padding=True, truncation=True)
    return F.normalize(model.get_text_features(**inputs).pooler_output, dim=-1)


def index_images(
    model: HfViTForZeroShotImageClassification, processor: Any, sources: Sequence[Source], batch_size: int
) -> tuple[list[Source], Tensor]:
    """Return the M readable images and their normalized features, float64 of shape (M, E).

    Features are read from the index. Features that are not in the index are computed and added to it.
    """
    key = digest(digest_model(model, processor).values())
    file = Path(datasets.config.HF_DATASETS_CACHE) / FEATURE_FOLDER / f"search-{key}.safetensors"
    known: dict[str, np.ndarray] = load_file(file) if find_intact(file.parent, [file.name]) else {}
    contents = [(source, name) for source in sources if (name := name_of_content(source)) is not None]
    missing = list({name: source for source, name in contents if name not in known}.items())
    broken = set[str]()
    progress = logging.tqdm(total=len(missing), desc="Encoding images", unit=" images", disable=not missing)
    with progress, torch.no_grad():
        for start in range(0, len(missing), batch_size):
            batch = dict(missing[start : start + batch_size])
            images = {name: image for name, source in batch.items() if (image := decoded(source)) is not None}
            broken |= batch.keys() - images.keys()
            if images:
                inputs = processor(images=list(images.values()), return_tensors="pt")
                vectors = F.normalize(model.get_image_features(**inputs).pooler_output.float(), dim=-1).numpy()
                known |= dict(zip(images, vectors, strict=True))
            progress.update(len(batch))
    if missing:
        file.parent.mkdir(parents=True, exist_ok=True)
        with recorded_file(file) as unfinished:
            save_file(known, unfinished)
    found = [(source, name) for source, name in contents if name not in broken]
    if not found:
        raise ValueError("None of the images can be read. The warnings name the reason for each file.")
    return [source for source, _ in found], torch.from_numpy(np.stack([known[name] for _, name in found])).double()


def name_of_content(source: Source) -> str | None:
    """Return a digest of the content of an image file. If the file cannot be read, log a warning and return None."""
    try:
        content = source.read()
        return digest([Path(content).read_bytes() if isinstance(content, str) else content])
    except OSError as error:
        logger.warning(f"Skipping {source.file}, which cannot be read: {error}")
        return None


def decoded(source: Source) -> Any:
    """Return the decoded image. If the image cannot be decoded, log a warning and return None."""
    try:
        return source.decode()
    except Exception as error:  # Decoders raise many types of errors.
        logger.warning(f"Skipping {source.file}, which cannot be read as an image: {error}")
        return None
