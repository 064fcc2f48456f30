"""A small image-text model with random weights."""

from collections.abc import Sequence

from hf_vit import HfViTForZeroShotImageClassification, HfViTImageProcessor, HfViTProcessor
from hf_vit.tasks import train_tokenizer

from .models import encoder_shape, small_config
from .references import draw_weights


SMALL_TEXT = encoder_shape(16, 1, 24)


def build_processor(texts: Sequence[str]) -> HfViTProcessor:
    """Return a processor with a tokenizer that is trained on the given texts."""
    return HfViTProcessor(HfViTImageProcessor.for_model(small_config()), train_tokenizer([*texts] * 3, 400, 40))


def build_model(processor: HfViTProcessor) -> HfViTForZeroShotImageClassification:
    """Return an image-text model whose text tower fits the tokenizer of the processor."""
    model = HfViTForZeroShotImageClassification(small_config(text_config={**SMALL_TEXT, **processor.text_options()}))
    draw_weights(model)
    return model.eval()
