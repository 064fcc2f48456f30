"""Scoring of a saved model that compares images with texts by a script."""

from dataclasses import dataclass

from ..convert import load_processor
from ..data import ImageTextCollator, load_image_text
from ..modeling_contrastive_hf_vit import HfViTForZeroShotImageClassification
from ..processing_hf_vit import HfViTProcessor
from .checks import check_packages
from .evaluation import Evaluation, ScoredModel
from .image_text_arguments import ImageTextImagesArguments, ImageTextTrainingArguments, ZeroShotArguments
from .image_text_scorer import ImageTextScorer, ImageTextTrainer
from .load_targets import load_scored_targets
from .models import open_trained
from .scored_evaluation import ScoredEvaluationArguments
from .scored_report import score_split
from .zero_shot import load_zero_shot, score_zero_shot


@dataclass
class ImageTextEvaluationArguments(ScoredEvaluationArguments):
    """The library's arguments, of which those on evaluation and hardware count."""

    per_device_eval_batch_size: int = ImageTextTrainingArguments.per_device_eval_batch_size


@dataclass
class ImageTextEvaluation(Evaluation):
    """Scoring of a saved model that compares images with texts; see `Evaluation`.

    Args:
        scored: Which model to score, and on which split.
        data: On which images and captions.
        args: How to score it.
        zero_shot: On which labelled images to score it too.
    """

    argument_types = (ScoredModel, ImageTextImagesArguments, ImageTextEvaluationArguments, ZeroShotArguments)

    scored: ScoredModel
    data: ImageTextImagesArguments
    args: ImageTextEvaluationArguments
    zero_shot: ZeroShotArguments

    def prepare(self) -> tuple[str, int]:
        """Opens model and data."""
        check_packages("matplotlib", *([] if self.zero_shot.zero_shot_dataset is None else ["sklearn"]))
        name, data = self.scored.model_name_or_path, self.data
        self.model = open_trained(HfViTForZeroShotImageClassification, name)
        processor = load_processor(self.model, name, patch_size=self.model.config.patch_size)
        if not isinstance(processor, HfViTProcessor):
            raise ValueError(f"{name} has no tokenizer for its texts. Save its processor there: save_pretrained.")
        self.processor = processor
        self.split, loaded = load_scored_targets(
            lambda: load_image_text(data.dataset_name, **data.source_options()), data, self.scored.split, {}, self.args
        )
        self.dataset = loaded.examples(self.split)
        self.labelled = load_zero_shot(self.zero_shot, data, self.args)
        return self.split, len(self.dataset)

    def score(self) -> dict[str, float]:
        """Writes the scores, a picture of a few images, and all that is said of the labelled ones."""
        trainer = ImageTextTrainer(
            model=self.model,
            args=self.args,
            data_collator=ImageTextCollator(self.processor),
            scorer=ImageTextScorer(self.processor.image_processor),
        )
        scores, _ = score_split(trainer, self.split, self.dataset)
        if self.labelled is not None:
            found = score_zero_shot(self.model, self.processor, self.labelled, self.args)
            scores["zero_shot_accuracy"] = found["accuracy"]
        return scores
