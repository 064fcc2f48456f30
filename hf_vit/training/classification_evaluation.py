"""Scoring of a saved image classifier by a script."""

from dataclasses import dataclass
from pathlib import Path

from ..convert import load_image_processor
from ..data import ImageClassificationCollator
from ..modeling_hf_vit import HfViTForImageClassification
from .arguments import DataArguments
from .evaluation import Evaluation, EvaluationArguments, ScoredModel
from .load_data import load_scored_split
from .metrics import image_classification_metrics
from .models import open_trained
from .recipe import begun_with
from .report import write_scores
from .trainer import HfViTTrainer


@dataclass
class ImageClassificationEvaluation(Evaluation):
    """Scoring of a saved image classifier; see `Evaluation`.

    Args:
        scored: Which model to score, and on which split.
        data: On which images.
        args: How to score it.
    """

    argument_types = (ScoredModel, DataArguments, EvaluationArguments)

    scored: ScoredModel
    data: DataArguments
    args: EvaluationArguments

    def prepare(self) -> tuple[str, int]:
        """Opens model and images."""
        name = self.scored.model_name_or_path
        self.model = open_trained(HfViTForImageClassification, name)
        self.processor = load_image_processor(name, patch_size=self.model.config.patch_size)
        label2id = self.model.config.label2id
        was_streamed = begun_with(Path(name)).get("streaming", False)
        self.split, self.images = load_scored_split(self.data, self.scored.split, label2id, self.args, was_streamed)
        return self.split, len(self.images)

    def score(self) -> dict[str, float]:
        """Writes the scores, the confusion matrix and the answer for every image."""
        trainer = HfViTTrainer(
            model=self.model,
            args=self.args,
            data_collator=ImageClassificationCollator(self.processor),
            compute_metrics=image_classification_metrics,
        )
        output = trainer.predict(self.images, metric_key_prefix=self.split)
        if not trainer.is_world_process_zero():
            return {}
        names = self.images.features["label"].names
        return write_scores(Path(self.args.output_dir), self.split, output, names, self.images["file"])
