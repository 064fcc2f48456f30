"""Image-text contrastive training: options, towers, tokenizer, evaluator and model card texts.

In shapes, B is the batch size, K the number of classes, and E the width of the embeddings.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from datasets import DatasetDict
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..convert.processors import load_tokenizer
from ..convert.source import find_file
from ..data import ImageClassificationCollator
from ..data.augmentation.classification import cropped_example_augmentation
from ..data.collators import ImageTextCollator, draw_caption
from ..data.datasets import TargetData
from ..evaluation.base import BaseEvaluator, Batch, File, ImageResult, Images
from ..evaluation.classification import ClassificationMetric
from ..evaluation.features import ComparedImage, RetrievalMetric, random_retrieval_recall
from ..extras import check_packages
from ..model.calibration import calibrate
from ..model.configuration_hf_vit import PRESETS, HfViTConfig
from ..model.processing_hf_vit import HfViTProcessor, text_options_of
from ..model.remote_code import raising_remote_code_error
from ..model.task_zero_shot_image_classification import HfViTForZeroShotImageClassification, contrastive_loss
from ..options.field import evaluation_option, model_option, start_option
from ..options.training_arguments import HfViTTrainingArguments
from ..visualize.pretraining import NUM_CAPTIONS, draw_captions
from .base import MoreEvaluation
from .common.arguments import ClassificationArguments
from .common.card import Usage, public_name
from .common.defaults import IMAGE_TEXT
from .common.load_data import evaluation_images, open_data
from .common.models import load_model
from .image_classification import ClassificationEvaluator, open_labeled
from .shared import HAS_VOCABULARY, CaptionArguments, CaptionedTask


@dataclass
class ImageTextArguments(CaptionArguments):
    """Options of image-text training: image and text towers, captions, and labeled images for the evaluation."""

    task_config = "contrastive_config"
    task_options = ("loss",)

    model_name_or_path: str | None = start_option(
        None,
        "Initial model: any saved or published ViT, which gets a new text tower, or an image-text model with its "
        "tokenizer (saved by hf-vit, CLIP, SigLIP).",
        group="Model",
    )
    text_model_name_or_path: str | None = model_option(
        None, "Initial text encoder of any transformers class, with its tokenizer: a folder, or a Hub name."
    )
    tokenizer_name: str | None = model_option(
        None,
        "Tokenizer of a new text tower: a folder, or a Hub name. By default, one is trained on the captions.",
        conflicts=HAS_VOCABULARY,
    )
    text_preset: str | None = model_option(
        None,
        "Size of a new text tower, with the values of --preset; by default that of --preset, or small.",
        choices=(*PRESETS,),
        conflicts=HAS_VOCABULARY,
    )
    loss: str | None = model_option(
        None, "Loss: sigmoid (SigLIP) or softmax (CLIP); by default sigmoid, or the loss of the saved model."
    )
    freeze_vision: bool = model_option(
        False, "Freeze the image tower of the saved model; only the text tower is trained (LiT)."
    )
    zero_shot_dataset: str | None = evaluation_option(
        None,
        "Labeled images for zero-shot evaluation, in any format of image classification: a path, or a Hub name.",
        resume="free",
    )
    zero_shot_config_name: str | None = evaluation_option(
        None, "Configuration of the zero-shot dataset on the Hub.", resume="free", essential=False
    )
    zero_shot_label_column_name: str | None = evaluation_option(
        None, "Label column of the zero-shot dataset, if it is not detected.", resume="free", essential=False
    )
    zero_shot_split: str | None = evaluation_option(
        None,
        "Split of the zero-shot dataset; by default test, else validation, else train.",
        resume="free",
        essential=False,
    )
    prompt_templates: list[str] = evaluation_option(
        ["a photo of a {}."], "Texts with {} for the class name; the embeddings of several texts are averaged."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.freeze_vision and self.model_name_or_path is None:
            raise ValueError("--freeze_vision would freeze an untrained tower. Set --model_name_or_path.")
        if wrong := [template for template in self.prompt_templates if template.count("{}") != 1]:
            raise ValueError(
                f"prompt_templates contains {', '.join(map(repr, wrong))}. Each template needs one {{}} for the class "
                "name."
            )


VOCAB_SIZE, MAX_TEXT_LENGTH = 8192, 64


def has_tokenizer(name_or_path: str) -> bool:
    """Return whether a saved or published model has a tokenizer, which means that it has a text tower."""
    return not Path(name_or_path).is_file() and find_file(name_or_path, "tokenizer_config.json") is not None


def make_tokenizer(args: ImageTextArguments, captions: Iterable[str]) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a new text tower or of a text encoder; raise `ValueError` if it is unsuitable."""
    name = args.text_model_name_or_path or args.tokenizer_name
    if name is None:
        return train_tokenizer(captions, args.vocab_size or VOCAB_SIZE, args.max_text_length or MAX_TEXT_LENGTH)
    with raising_remote_code_error(name, "Choose a tokenizer that is part of transformers."):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"The tokenizer {name} has no padding token, so texts cannot be batched. Use another tokenizer."
        )
    longest = tokenizer.model_max_length
    if args.text_model_name_or_path is not None and (args.max_text_length or 0) > longest:
        raise ValueError(f"max_text_length={args.max_text_length} exceeds the {longest} tokens that {name} supports.")
    tokenizer.model_max_length = args.max_text_length or min(MAX_TEXT_LENGTH, longest)
    return tokenizer


def text_options(args: ImageTextArguments, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the options of the text tower: a text encoder in transformers, or a new tower of the chosen size."""
    if args.text_model_name_or_path is not None:
        return encoder_options(args.text_model_name_or_path, tokenizer)
    size = HfViTConfig.from_preset(args.text_preset or args.preset or "small").to_dict()
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    return {**{name: size[name] for name in names}, **text_options_of(tokenizer)}


def encoder_options(name: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the options of a text encoder in transformers; raise `ValueError` if it is not supported."""
    with raising_remote_code_error(name, "Choose a text encoder that is part of transformers."):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if "vocab_size" not in config.to_dict():
        raise ValueError(
            f"{name} has the model type {config.model_type!r}, which is not a text encoder. Use a text encoder."
        )
    options: dict[str, Any] = {"encoder_config": config.to_diff_dict()}
    # The first token represents a text, or the last token if the tokenizer has no start token.
    return options if tokenizer.cls_token_id is not None else {**options, "pooling": "last"}


PAD, BEGIN, END = SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")


def train_tokenizer(captions: Iterable[str], vocab_size: int = 8192, max_length: int = 64) -> PreTrainedTokenizerFast:
    """Train a byte-pair tokenizer (https://arxiv.org/abs/1508.07909) that can encode any text.

    Like the tokenizer of CLIP, it converts text to lower case and adds a start and an end token.

    Args:
        captions: Texts of the training split.
        vocab_size: Maximum number of tokens.
        max_length: Maximum number of tokens of a text, including start and end. Longer texts are truncated.

    Raises:
        ValueError: If `vocab_size` is too small for all bytes and special tokens, or `max_length` is below 3.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(SPECIAL_TOKENS) + len(alphabet)
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size={vocab_size} must be at least {smallest}: one token per byte, and three special tokens."
        )
    if max_length < 3:
        raise ValueError(f"max_length={max_length} must be at least 3: a text token, a start token and an end token.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase(), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(captions, trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in (BEGIN, END)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A {END}", special_tokens=ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BEGIN,
        eos_token=END,
        model_max_length=max_length,
        padding_side="right",
        model_input_names=["input_ids", "attention_mask"],
    )


class ImageTextEvaluator(BaseEvaluator):
    """Score the retrieval of images by captions and of captions by images."""

    caption = "Images, their captions, and the most similar captions of all"
    metric: RetrievalMetric
    scale: Tensor  # log of the inverse temperature of the last evaluated model

    def calibration_data(self) -> tuple[Tensor, Tensor]:
        """Return the logits (N, N) of images and the first caption of each image, and the indices (N,) of matches."""
        images, texts, counts = self.metric.embeddings()
        logits = self.scale.exp() * images @ texts[counts.cumsum(dim=0) - counts].T  # (N, N)
        return calibrate(logits, self.calibration), torch.arange(len(images))

    def predict(self, model: PreTrainedModel, batch: Batch) -> list[ImageResult]:
        """Return the embeddings of each image and its captions; the loss is computed for all images together."""
        inputs = {name: value for name, value in batch.items() if name not in ("targets", "files")}
        outputs = model(**inputs)
        texts = outputs.text_embeds.split([len(target["captions"]) for target in batch["targets"]])
        return [ImageResult(ComparedImage(*parts)) for parts in zip(outputs.image_embeds, texts, strict=True)]

    def compute(self, model: PreTrainedModel) -> dict[str, float]:
        """Return the scores, and the loss of all evaluated images as one batch, averaged over the captions.

        Each image is paired with its first caption, then with its second caption, and so on. An image with fewer
        captions than others is paired with its first caption again.
        """
        images, texts, counts = self.metric.embeddings()
        first = counts.cumsum(dim=0) - counts
        head = model.contrastive_head
        self.scale = scale = head.logit_scale.detach().cpu()
        bias = None if head.logit_bias is None else head.logit_bias.detach().cpu()
        with torch.no_grad():
            turns = [texts[first + turn % counts] for turn in range(int(counts.max()))]
            losses = torch.stack([contrastive_loss(images, chosen, scale, bias, is_local=True) for chosen in turns])
        return {"loss": float(losses.double().mean()), **super().compute(model)}

    def draw(self, images: Images, predictions: list[ComparedImage], targets: list[Any], file: File) -> None:
        """Draw each image with its captions, and with the most similar captions among all evaluated captions."""
        _, texts, _ = self.metric.embeddings()
        captions = [caption for record in self.metric.records for caption in record.captions]
        embeds = torch.stack([prediction.image_embeds.float().cpu() for prediction in predictions])
        nearest = (embeds @ texts.T).topk(min(NUM_CAPTIONS, len(captions)), dim=1).indices.tolist()
        found = [[captions[number] for number in row] for row in nearest]
        draw_captions(images, [target["captions"] for target in targets], found, file)

    def describe_evaluation(self) -> str:
        """Return a description of the scores."""
        return (
            "each caption is compared with all images, and each image with all captions; wrong matches that are as "
            "similar as the correct one rank before it. Loss: over all images at once, for each of their captions"
        )


def load_zero_shot(args: ImageTextArguments, training_args: HfViTTrainingArguments) -> TargetData | None:
    """Open a split of the zero-shot dataset, if one is given, with the same checks and limits as for captioned images.

    Raises `ValueError` if the split does not exist.
    """
    if args.zero_shot_dataset is None:
        return None
    check_packages("The zero-shot evaluation", "sklearn")
    data = ClassificationArguments(
        dataset_name=args.zero_shot_dataset,
        dataset_config_name=args.zero_shot_config_name,
        label_column_name=args.zero_shot_label_column_name,
        problem_type="single_label_classification",
        skip_unreadable=args.skip_unreadable,
        check_images=args.check_images,
        max_eval_samples=args.max_eval_samples,
    )
    load = partial(open_labeled, data.dataset_name, **data.source_options())
    opened = open_data(load, training_args)
    split = args.zero_shot_split or opened.evaluated_split
    if split not in opened.splits:
        raise ValueError(f"{data.dataset_name} has no split {split!r}. Choose {' or '.join(opened.splits)}.")
    images = evaluation_images(opened, split, split, data, training_args)
    return replace(opened, splits=DatasetDict({split: images}))


@dataclass(frozen=True, kw_only=True)
class ImageTextData(TargetData):
    """Images with captions, and a split of labeled images for the zero-shot evaluation."""

    labeled: TargetData


@dataclass(eq=False)
class ZeroShotEvaluator(ClassificationEvaluator):
    """Score an image-text model as a classifier that uses the embeddings of the class names as weights.

    Args:
        class_embeds: Embeddings of the K class names, (K, E), of length 1.
    """

    can_split_batch = False
    class_embeds: Tensor

    def logits(self, model: PreTrainedModel, inputs: Batch) -> Tensor:
        """Return the logits (B, K) of a batch of pixels and their mask."""
        features = F.normalize(model.get_image_features(**inputs).pooler_output, dim=-1)  # (B, E)
        logits: Tensor = model.calibrated(features @ self.class_embeds.T * model.contrastive_head.logit_scale.exp())
        return logits


@torch.no_grad()
def embed_classes(
    model: HfViTForZeroShotImageClassification,
    processor: HfViTProcessor,
    names: Sequence[str],
    templates: Sequence[str],
) -> Tensor:
    """Return the embeddings of K classes, (K, E), of length 1: the mean over the templates, as in CLIP."""
    rows = []
    for name in names:
        texts = [template.replace("{}", name.replace("_", " ")) for template in templates]
        tokens = processor(text=texts, return_tensors="pt").to(model.device)
        features = model.get_text_features(**tokens).pooler_output
        rows.append(F.normalize(F.normalize(features, dim=-1).mean(dim=0), dim=-1))
    return torch.stack(rows)


@dataclass(frozen=True)
class ImageTextContrast(CaptionedTask):
    """Image-text contrastive training."""

    model_class = HfViTForZeroShotImageClassification
    collator_class = ImageTextCollator
    augment = staticmethod(partial(cropped_example_augmentation, draw_caption))
    limits = (
        "The model compares images with short texts. Its scores rank candidates and are not probabilities. A model "
        "that was trained on few captions has a small vocabulary, and the biases of these captions."
    )
    pipeline = "zero-shot-image-classification"
    usage = Usage(
        name="classify",
        stock="""names = ["dog", "cat", "car"]
print(classify("image.png", candidate_labels=names, hypothesis_template="a photo of a {}."))""",
        own="""print(outputs.logits_per_image.softmax(dim=1))  # the share of each text""",
        processor="processor",
        inputs='images=image, text=["a dog runs.", "two cats sleep."]',
    )
    published = ("CLIPModel", "SiglipModel", "Siglip2Model")
    defaults = IMAGE_TEXT
    has_scores = True
    argument_defaults: ClassVar[dict[str, Any]] = {
        # Optimizer settings of CLIP (https://arxiv.org/abs/2103.00020)
        "learning_rate": 5e-4,
        "weight_decay": 0.2,
        "adam_beta2": 0.98,
        "metric_for_best_model": "mean_recall",
    }
    argument_help: ClassVar[dict[str, str]] = {
        "per_device_train_batch_size": "Number of image-text pairs per process in a batch. The loss compares the "
        "pairs of all processes.",
        "gradient_accumulation_steps": "Number of batches per step. The loss only compares pairs within a batch, so "
        "4 batches of 16 pairs have a quarter of the comparisons of one batch of 64. "
        "For a larger batch, use more processes or --gradient_checkpointing.",
    }

    options: ImageTextArguments

    def complete_arguments(self, args: HfViTTrainingArguments) -> None:
        """Raise `ValueError` for training arguments with which an image would occur in a batch several times."""
        if args.repeated_augmentations > 1:
            raise ValueError(
                f"repeated_augmentations={args.repeated_augmentations} puts an image into a batch several "
                "times, which the loss would treat as different images. Remove it."
            )
        if not args.dataloader_drop_last:  # with several processes, repeated images would complete the last batch
            raise ValueError(
                "dataloader_drop_last=False could put an image into a batch twice, which the loss would treat as "
                "different images. Remove it; the next epoch shuffles all images again."
            )

    def examine(self, data: TargetData, args: HfViTTrainingArguments) -> TargetData:
        """Return the data with checked labeled images for the zero-shot evaluation, if they are given."""
        labeled = load_zero_shot(self.options, args)
        return data if labeled is None else ImageTextData(**vars(data), labeled=labeled)

    def open_model(
        self, data: TargetData, args: HfViTTrainingArguments
    ) -> tuple[HfViTForZeroShotImageClassification, HfViTProcessor]:
        """Return the model to train and its processor. If no tokenizer is given, one is trained on the captions.

        Raises:
            OSError: If a model or a tokenizer cannot be read.
            ValueError: If model and tokenizer do not match, or an adapter is requested for a new text tower.
        """
        own, name, text_name = self.options, self.options.model_name_or_path, self.options.text_model_name_or_path
        if name is not None and text_name is None and has_tokenizer(name):
            own.refuse_beside("model_name_or_path", "tokenizer_name", "vocab_size", "text_preset", "max_text_length")
            model, image_processor = load_model(self.model_class, own)
            tokenizer = load_tokenizer(model, name)
        else:
            if args.lora_rank is not None and text_name is None:
                raise ValueError(
                    f"lora_rank={args.lora_rank} requires a trained text tower, but a new one would be trained "
                    "from scratch. Give a model with both towers (CLIP, SigLIP), or --text_model_name_or_path."
                )
            tokenizer = make_tokenizer(own, chain.from_iterable(data.splits["train"]["captions"]))
            fields, text = own.config_overrides or {}, text_options(own, tokenizer)
            fields = {**fields, "text_config": {**text, **(fields.get("text_config") or {})}}
            model, image_processor = load_model(self.model_class, replace(own, config_overrides=fields))
            if text_name is not None:
                model.load_text_weights(text_name)
        if own.freeze_vision:
            model.freeze_vision()
        return model, HfViTProcessor(image_processor, tokenizer)

    def make_evaluator(
        self, model: PreTrainedModel, processor: HfViTProcessor, data: TargetData
    ) -> ImageTextEvaluator:
        """Return the evaluator."""
        return ImageTextEvaluator(processor.image_processor, RetrievalMetric())

    def evaluate_baselines(self, trainer: Any, data: TargetData, split: str) -> dict[str, dict[str, float]]:
        """Return the scores of the baseline, which retrieves at random."""
        return {"chance": random_retrieval_recall(list(map(len, data.splits[split]["captions"])))}

    def more_evaluations(self, trainer: Any, data: TargetData) -> dict[str, MoreEvaluation]:
        """Return the zero-shot evaluation on labeled images, if there are any."""
        if not isinstance(data, ImageTextData):
            return {}
        labeled, processor, templates = data.labeled, trainer.processing_class, self.options.prompt_templates
        class_embeds = embed_classes(trainer.model.eval(), processor, labeled.names, templates)
        evaluator = ZeroShotEvaluator(processor.image_processor, ClassificationMetric(labeled.names), class_embeds)
        (split,) = labeled.splits
        source, chance = public_name(str(self.options.zero_shot_dataset)), 1 / len(labeled.names)
        description = (
            f"accuracy {{:.4f}} on {len(labeled.splits[split]):,} {split} images of {source} (chance {chance:.4f}), "
            f"by {', '.join(repr(template.replace('{}', '{{}}')) for template in templates)}"
        )
        collator = ImageClassificationCollator(processor.image_processor)
        return {"zero_shot": MoreEvaluation(evaluator, collator, labeled.examples(split), "accuracy", description)}

    def describe_model(
        self, model: PreTrainedModel, processor: Any, data: TargetData, args: HfViTTrainingArguments
    ) -> dict[str, str]:
        """Return the table rows of the model card about loss, towers, texts and labeled images."""
        batch = args.train_batch_size * args.world_size
        encoder, own, tokenizer = model.text_model.config, model.text_options, processor.tokenizer
        tower = f"{own.num_hidden_layers} blocks of width {own.hidden_size}"
        count = sum(map(len, data.splits["train"]["captions"]))
        return {
            "loss": f"{model.options.loss}, over all images and texts of a batch of {batch}",
            "image tower": "frozen" if self.options.freeze_vision else "trained",
            "text tower": tower if own.encoder_config is None else f"{encoder.model_type}, trained",
            "texts": f"{len(tokenizer):,} tokens, cut off after {tokenizer.model_max_length}",
            "captions": f"{count:,}, of which one of each image is drawn in every epoch",
        }
