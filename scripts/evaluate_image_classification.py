"""Scores a saved image classifier on a labelled dataset, on one process or several.

Prints the scores and writes them with the confusion matrix, its picture and the answer for every image.

Examples (all options of the Trainer's evaluation count, such as --use_cpu and --per_device_eval_batch_size):
    S=scripts/evaluate_image_classification.py
    python $S --model_name_or_path outputs/photos --dataset_name path/to/photos
    python $S --model_name_or_path user/name --dataset_name path/to/photos --split validation
    torchrun --nproc_per_node 2 $S --model_name_or_path outputs/photos --dataset_name path/to/photos --use_cpu
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from accelerate import PartialState

from hf_vit import convert, data, training


@dataclass
class ScoredModel:
    """Which model to score, and on what."""

    model_name_or_path: str = field(
        default="", metadata={"help": "Saved or published model: a folder, a file or a name on the Hub."}
    )
    split: str | None = field(
        default=None,
        metadata={
            "help": "Which images to score: test, validation (held out of train as in training where there is no such "
            "split) or train; by default the first of these that there is."
        },
    )

    def __post_init__(self) -> None:
        """Checks what can be checked without the model."""
        if not self.model_name_or_path:
            raise ValueError("Say what to score: --model_name_or_path path/to/model, or a name on the Hub.")


@dataclass
class EvaluationArguments(training.HfViTTrainingArguments):
    """The library's arguments, of which those on evaluation and hardware count."""

    output_dir: str | None = "outputs/evaluation"
    eval_strategy: str = "no"
    report_to: str = "none"


def main(arguments: list[str]) -> None:
    """Scores."""
    try:
        scored, data_args, args = training.parse_arguments(
            (ScoredModel, training.DataArguments, EvaluationArguments), arguments, description=__doc__
        )
        model = training.open_classifier(scored.model_name_or_path)
        processor = convert.load_image_processor(scored.model_name_or_path, patch_size=model.config.patch_size)
        split, images = training.load_scored_split(data_args, scored.split, model.config.label2id, args)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"{os.path.basename(sys.argv[0])}: {error}")
    trainer = training.HfViTTrainer(
        model=model,
        args=args,
        data_collator=data.ImageClassificationCollator(processor),
        compute_metrics=training.image_classification_metrics,
    )
    output = trainer.predict(images, metric_key_prefix=split)
    if trainer.is_world_process_zero():
        names = images.features["label"].names
        scores = training.write_scores(Path(args.output_dir), split, output, names, images["file"])
        print(f"{len(images):,} {split} images: " + ", ".join(f"{name} {value:.4f}" for name, value in scores.items()))
        print(f"The scores, the confusion matrix and the answers: {args.output_dir}")
    PartialState().destroy_process_group()  # else several processes can abort while they exit


if __name__ == "__main__":
    main(sys.argv[1:])
