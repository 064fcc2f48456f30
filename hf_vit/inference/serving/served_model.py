"""A served model: predictions and embeddings of encoded images, computed in batches by threads."""

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import PIL.Image
import torch
from transformers import BatchFeature
from transformers.utils import logging

from ...convert import load_image_processor
from ...model.modeling_hf_vit import HfViTImageFeatureExtractionPipeline, HfViTModel
from ...model.pipeline_hf_vit import ModelInput
from ...model.pretrained import HfViTPreTrainedModel, read_config
from ...model.task_zero_shot_image_classification import HfViTForZeroShotImageClassification
from ..predict import open_predictor
from ..predictor import Inputs, Predictor
from ..sources import Source
from ..writers import ZERO_SHOT, find_writer
from .batching import BatchThread


logger = logging.get_logger(__name__)
# Formats of images that are accepted. PIL starts external programs for some other formats, such as EPS.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "MPO", "AVIF")
NAME = "the image"  # name of an image in error messages


def find_image_error(image: bytes, max_pixels: int) -> str | None:
    """Return why an encoded image is refused, or None. Only the header of the image is read."""
    try:
        with PIL.Image.open(BytesIO(image), formats=FORMATS) as opened:
            width, height = opened.size
    except PIL.Image.DecompressionBombError:
        return f"The image has more than {max_pixels} pixels. Resize it."
    except Exception:  # PIL plugins raise various errors for damaged headers.
        return f"The data is not an image, or its header is damaged. Send one of {', '.join(FORMATS)}."
    if width * height > max_pixels:
        return f"The image has {width} x {height} pixels, but at most {max_pixels} are accepted. Resize it."
    return None


def make_inputs(images: Sequence[bytes], predictor: Predictor) -> Inputs:
    """Return encoded images as inputs of a pipeline."""
    rows = [{"image": {"bytes": image, "path": None}} for image in images]
    return Inputs([Source(NAME, rows, number) for number in range(len(rows))], None, predictor.pipe)


class EmbeddingPipeline(HfViTImageFeatureExtractionPipeline):
    """Pipeline that returns one vector per image.

    It is the projected image feature of an image-text model, the pooled output of other models or, if the model has no
    pooling layer, the mean of the patch tokens.
    """

    def run_model(self, inputs: BatchFeature, *_: Any, **forward: Any) -> Any:
        """Return vectors (B, D) of images, float32."""
        if isinstance(self.model, HfViTForZeroShotImageClassification):
            return self.model.get_image_features(**inputs).pooler_output.float()
        outputs = self.model.base_model(**inputs, return_dict=True)
        if outputs.pooler_output is not None and not self.model.untrained_weights:
            return outputs.pooler_output.float()
        patches = outputs.last_hidden_state[:, self.model.config.num_prefix_tokens :].float()  # (B, N, D)
        mask = inputs.get("patch_attention_mask")
        real = patches.new_ones(patches.shape[:2]) if mask is None else mask.flatten(1).float()  # (B, N)
        return torch.einsum("bnd,bn->bd", patches, real / real.sum(dim=1, keepdim=True))

    def decode(self, outputs: Any, parts: list[ModelInput], *_: Any, **postprocess: Any) -> list[Any]:
        """Return the vector of each image as a list of numbers."""
        return list(outputs.tolist())


@dataclass(eq=False)
class ServedModel:
    """A model with the threads that answer its requests, one for each of "predictions" and "embeddings"."""

    name: str  # name of the model in requests
    source: str  # folder or name on the Hub
    predictor: Predictor | None  # pipeline of the task; None if the model has no head for a task
    embedder: EmbeddingPipeline | None  # pipeline for embeddings; None if the model is not a supported ViT
    batch_size: InitVar[int] = 16  # maximum number of images per batch
    max_queue: InitVar[int] = 256  # maximum number of images per thread that wait or are computed

    def __post_init__(self, batch_size: int, max_queue: int) -> None:
        self.task = "image-feature-extraction" if self.predictor is None else self.predictor.writer.pipeline
        given = {"predictions": (self.predictor, self.predict), "embeddings": (self.embedder, self.embed)}
        answers = {kind: answer for kind, (pipe, answer) in given.items() if pipe is not None}
        self.threads = {kind: BatchThread(answer, batch_size, max_queue) for kind, answer in answers.items()}

    def predict(self, images: Sequence[bytes]) -> list[tuple[dict[str, Any], Any]]:
        """Return the prediction for each image: as JSON-compatible dictionary, and as returned by the pipeline.

        If an image cannot be decoded, the dictionary is `{"error": ...}`.
        """
        assert self.predictor is not None
        inputs = make_inputs(images, self.predictor)
        return [
            (refusal(answer) if "error" in answer else self.predictor.describe(answer, inputs, number), answer)
            for number, answer in enumerate(self.predictor.answers(inputs))
        ]

    def embed(self, images: Sequence[bytes]) -> list[Any]:
        """Return the vector of each image, or `{"error": ...}` if the image cannot be decoded."""
        assert self.embedder is not None
        found = self.embedder(images, on_error="return", batch_size=len(images))
        return [refusal(answer) if "error" in answer else answer for answer in found]


def refusal(answer: Mapping[str, str]) -> dict[str, str]:
    """Return the answer for an image that cannot be decoded."""
    return {"error": f"The image cannot be decoded: {answer['error']}"}


def open_models(
    sources: Sequence[str],
    given: Mapping[str, Any],
    batch_size: int = 16,
    max_queue: int = 256,
    *,
    head: str | None = None,
    **options: Any,
) -> list[ServedModel]:
    """Open models for predictions and embeddings; see `serve_models` for the arguments.

    `given` has the options of pipeline calls, and `options` those of `open_predictor`. Without texts to choose from,
    image-text models only compute embeddings.

    Raises:
        OSError: if a model does not exist.
        ValueError: if two models have the same name, or a model supports neither predictions nor embeddings.
    """
    names = [Path(source).resolve().name if Path(source).exists() else source for source in sources]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"Several models are named {', '.join(sorted(repeated))}. Rename their folders.")
    found = []
    for name, source in zip(names, sources, strict=True):
        writer, predictor = find_writer(read_config(source, head=head), None), None
        is_image_text = writer is not None and writer.pipeline == ZERO_SHOT
        if writer is not None and (not is_image_text or given.get("candidate_labels")):
            predictor = open_predictor(source, writer, given, batch_size=batch_size, head=head, **options)
        embedder = open_embedder(source, is_image_text, predictor)
        if predictor is None and embedder is None:
            raise ValueError(f"{source} supports neither predictions nor embeddings.")
        found.append(ServedModel(name, source, predictor, embedder, batch_size, max_queue))
    return found


def open_embedder(source: str, is_image_text: bool, predictor: Predictor | None) -> EmbeddingPipeline | None:
    """Return the pipeline for embeddings, which shares the weights of an hf_vit model with its predictor.

    If the model is not a supported ViT, log a warning and return None.
    """
    if predictor is not None and isinstance(predictor.pipe.model, HfViTPreTrainedModel):
        pipe = predictor.pipe
        return EmbeddingPipeline(model=pipe.model, image_processor=pipe.image_processor, device=pipe.device)
    try:
        model = (HfViTForZeroShotImageClassification if is_image_text else HfViTModel).from_pretrained(source).eval()
        config = model.config
        processor = load_image_processor(source, num_channels=config.num_channels, patch_size=config.patch_size)
    except ValueError as error:
        logger.warning(f"{source} has no embeddings: {error}")
        return None
    return EmbeddingPipeline(model=model, image_processor=processor)
