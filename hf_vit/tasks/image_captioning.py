"""Image captioning: options, tokenizer, evaluator, baselines and model card texts.

In shapes, N is the number of images and D the width of the encoder.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from accelerate.utils import send_to_device
from tokenizers import decoders, processors
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..data.augmentation.classification import cropped_example_augmentation
from ..data.collators import MOST_CAPTIONS, CaptionCollator, sample_captions
from ..data.datasets import TargetData
from ..evaluation.base import BaseEvaluator, Batch, File, ImageResult, Images
from ..evaluation.captions import CaptionMetric
from ..model.processing_hf_vit import HfViTProcessor
from ..model.task_image_captioning import IGNORED_TOKEN, HfViTForImageTextToText, token_losses
from ..options.training_arguments import HfViTTrainingArguments
from ..visualize.pretraining import draw_captions
from .base import plain_batches
from .common.card import Usage
from .common.defaults import CAPTIONS
from .common.models import load_model, open_processor, read_config_of
from .shared import BATCH_OF_16, CaptionArguments, CaptionedTask
from .zero_shot_image_classification import BEGIN, MAX_TEXT_LENGTH, VOCAB_SIZE, train_tokenizer


MOST_COMPARED = 1000  # maximum number of training images that are searched for the nearest image
INPUTS = ("pixel_values", "patch_attention_mask")


@dataclass
class CaptioningArguments(CaptionArguments):
    """Options of captioning: encoder, decoder and captions."""

    task_config = "caption_config"


def train_prompt_tokenizer(captions: Iterable[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer for generation: like `train_tokenizer`, but without an end token and with left padding."""
    tokenizer = train_tokenizer(captions, vocab_size, max_length)
    own = tokenizer.backend_tokenizer
    own.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.bos_token_id)]
    )
    # Texts are tokenized with a space before the first word, so remove this space when decoding.
    own.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    tokenizer.padding_side = "left"
    return tokenizer


@dataclass(eq=False)
class CaptionEvaluator(BaseEvaluator):
    """Generate and score a caption for each image."""

    caption = "Images, their captions, and generated captions"
    tokenizer: PreTrainedTokenizerBase

    def predict(self, model: PreTrainedModel, batch: Batch) -> list[ImageResult]:
        """Return the generated caption of each image, with the loss of the tokens of its captions."""
        states, _ = model.encode_images(**{name: batch[name] for name in INPUTS if name in batch})
        given = {"image_states": states, "patch_attention_mask": batch.get("patch_attention_mask")}
        logits = model(input_ids=batch["input_ids"], return_dict=True, **given).logits
        labels = batch["labels"]
        counted = labels[:, 1:] != IGNORED_TOKEN
        sums, counts = (
            values.reshape(len(states), -1).double().sum(dim=1).tolist()
            for values in (token_losses(logits, labels), counted)
        )
        texts = self.tokenizer.batch_decode(model.generate(**given), skip_special_tokens=True)
        return [ImageResult(*parts) for parts in zip(texts, sums, counts, strict=True)]

    def describe(self, prediction: str, target: Any) -> dict[str, Any]:
        """Return the captions of an image and the generated caption."""
        return {"captions": target["captions"], "prediction": prediction}

    def draw(self, images: Images, predictions: list[str], targets: list[Any], file: File) -> None:
        """Draw each image with its captions and the generated caption."""
        captions = [target["captions"] for target in targets]
        draw_captions(images, captions, [[text] for text in predictions], file, are_retrieved=False)

    def describe_evaluation(self) -> str:
        """Return a description of the scores."""
        return "bleu_4: against all captions of an image, in lower case; rouge_l: F1 of the best of them"


@dataclass(frozen=True)
class ImageCaptioning(CaptionedTask):
    """Image captioning."""

    model_class = HfViTForImageTextToText
    collator_class = CaptionCollator
    augment = staticmethod(partial(cropped_example_augmentation, sample_captions))
    limits = (
        "The model describes what images of its training data show, in words of their captions. It may name things "
        "that an image does not show."
    )
    pipeline = "image-text-to-text"
    usage = Usage(
        name="describe",
        stock="""print(describe("image.png", text="")[0]["generated_text"])""",
        own="""tokens = model.generate(**processor(images=image, text="", return_tensors="pt"))
print(processor.batch_decode(tokens, skip_special_tokens=True)[0])""",
        processor="processor",
        inputs='images=image, text=""',
    )
    defaults = CAPTIONS
    packages = ("matplotlib", "torchmetrics")
    argument_defaults: ClassVar[dict[str, Any]] = {**BATCH_OF_16, "metric_for_best_model": "bleu_4"}

    options: CaptioningArguments

    def open_model(
        self, data: TargetData, args: HfViTTrainingArguments
    ) -> tuple[HfViTForImageTextToText, HfViTProcessor]:
        """Return the model to train and its processor. The tokenizer of a new decoder is trained on the captions."""
        own, name = self.options, self.options.model_name_or_path
        if name is not None and self.model_class.__name__ in (read_config_of(name).get("architectures") or ()):
            own.refuse_beside("model_name_or_path", "vocab_size", "max_text_length")
            model, image_processor = load_model(self.model_class, own)
            return model, HfViTProcessor(image_processor, open_processor(model, name, has_texts=True).tokenizer)
        captions = chain.from_iterable(data.splits["train"]["captions"])
        sizes = own.vocab_size or VOCAB_SIZE, own.max_text_length or MAX_TEXT_LENGTH
        tokenizer, fields = train_prompt_tokenizer(captions, *sizes), own.config_overrides or {}
        tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        sized = {"vocab_size": len(tokenizer), "max_position_embeddings": tokenizer.model_max_length, **tokens}
        fields = {**fields, "caption_config": {**sized, **(fields.get("caption_config") or {})}}
        model, image_processor = load_model(self.model_class, replace(own, config_overrides=fields))
        for name, number in tokens.items():  # prevents a warning of the transformers Trainer
            setattr(model.config, name, number)
        return model, HfViTProcessor(image_processor, tokenizer)

    def make_evaluator(self, model: PreTrainedModel, processor: HfViTProcessor, data: TargetData) -> CaptionEvaluator:
        """Return the evaluator."""
        return CaptionEvaluator(processor.image_processor, CaptionMetric(), processor.tokenizer)

    def count_choosing_images(self, data: TargetData, args: HfViTTrainingArguments, num_trained: int) -> int:
        """Return the number of training images that the baseline reads."""
        return min(MOST_COMPARED, data.num_train)

    def evaluate_baselines(self, trainer: Any, data: TargetData, split: str) -> dict[str, dict[str, float]]:
        """Evaluate the most frequent caption, and the first caption of the training image with similar features."""
        targets = list(data.examples(split).read_targets())
        known, captions = self.encode(trainer, data, "train", MOST_COMPARED)
        features, _ = self.encode(trainer, data, split, len(targets))
        nearest = (features @ known.T).argmax(dim=1).tolist()
        counts = Counter(chain.from_iterable(data.splits["train"]["captions"]))
        ((usual, _),) = counts.most_common(1)
        return {
            "most frequent caption": score([usual] * len(targets), targets),
            "caption of the nearest image": score([captions[number] for number in nearest], targets),
        }

    @torch.no_grad()
    def encode(self, trainer: Any, data: TargetData, split: str, most_images: int) -> tuple[Tensor, list[str]]:
        """Return the features (N, D) of at most `most_images` images of a split, and their first captions."""
        model, features, captions = trainer.plain_model.eval(), list[Tensor](), list[str]()
        size = trainer.args.per_device_eval_batch_size
        for batch in plain_batches(self, model, trainer.processing_class, data, most_images, size, split):
            inputs = send_to_device({name: batch[name] for name in INPUTS if name in batch}, model.device)
            tokens = model.model(**inputs, return_dict=True).last_hidden_state
            features.append(F.normalize(tokens.mean(dim=1), dim=1))
            first = batch["input_ids"][:: len(batch["input_ids"]) // len(tokens)]
            captions += trainer.processing_class.batch_decode(first, skip_special_tokens=True)
        return torch.cat(features), captions

    def describe_model(
        self, model: PreTrainedModel, processor: Any, data: TargetData, args: HfViTTrainingArguments
    ) -> dict[str, str]:
        """Return the table rows of the model card about decoder and texts."""
        own, tokenizer = model.options, processor.tokenizer
        count = sum(map(len, data.splits["train"]["captions"]))
        return {
            "decoder": f"{own.num_hidden_layers} blocks of width {own.hidden_size} with cross-attention; "
            f"{model.generation_config.num_beams} beams",
            "texts": f"{len(tokenizer):,} tokens, cut off after {tokenizer.model_max_length}",
            "captions": f"{count:,}, of which up to {MOST_CAPTIONS} of each image are read in every epoch",
        }


def score(texts: list[str], targets: list[Any]) -> dict[str, float]:
    """Return the scores of captions, given the targets of their images."""
    metric = CaptionMetric()
    metric.update(map(metric.record, texts, targets))
    return metric.compute()
