"""Trains an image classifier, from scratch or from a saved or published one, and writes all that publishing needs.

The output folder then holds the model with its image processor and code, scores, curves, a confusion matrix and a
model card. Killed, it goes on from its last checkpoint, to the same weights.

Examples:
    python scripts/train_image_classification.py --dataset_name path/to/photos --output_dir outputs/photos
    python scripts/train_image_classification.py recipe.yaml --learning_rate 5e-4
    python scripts/train_image_classification.py recipe.yaml --resume_from_checkpoint last
    torchrun --nproc_per_node 2 scripts/train_image_classification.py recipe.yaml --use_cpu
"""

import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from accelerate import PartialState
from transformers import set_seed

from hf_vit import training


TYPES = (
    training.ModelArguments,
    training.TrainingDataArguments,
    training.AugmentationArguments,
    training.HfViTTrainingArguments,
)


def main(arguments: list[str]) -> None:
    """Trains, scores, saves and, on request, publishes."""
    try:
        model_args, data_args, augmentation, args = training.parse_arguments(TYPES, arguments, description=__doc__)
        checkpoint = training.checkpoint_to_resume(args)
        splits = training.load_splits(data_args, args)
        names = splits["train"].features["label"].names
        if checkpoint is not None:
            training.check_labels(checkpoint, names)
        set_seed(args.seed)
        model, processor = training.load_classifier(model_args, names)
        trainer = training.make_trainer(model, processor, splits, augmentation, args)
        if trainer.is_world_process_zero():
            training.begin_recipe(Path(args.output_dir), arguments, is_resumed=checkpoint is not None)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"{os.path.basename(sys.argv[0])}: {error}")
    if trainer.is_world_process_zero():
        sizes = ", ".join(f"{len(images):,} for {name}" for name, images in splits.items())
        print(f"Images: {sizes}. Model: {model.num_parameters():,} parameters. Output: {args.output_dir}", flush=True)
    result = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("train", result.metrics)
    launcher = ["python"] if args.world_size == 1 else ["torchrun", "--nproc_per_node", str(args.world_size)]
    scores = training.write_report(
        trainer,
        splits,
        data_args,
        recipe={"augmentation": ", ".join(f"{name} {value}" for name, value in asdict(augmentation).items())},
        command=shlex.join([*launcher, sys.argv[0], *training.without_secrets(arguments)]),
        license=model_args.license,
        base_model=model_args.model_name_or_path,
    )
    if trainer.is_world_process_zero():
        print("Scores: " + ", ".join(f"{name} {value:.4f}" for name, value in scores.items()))
        print(f"The model, its scores and its card: {args.output_dir}")
    if args.push_to_hub:
        trainer.push_to_hub()
    PartialState().destroy_process_group()  # else several processes can abort while they exit


if __name__ == "__main__":
    main(sys.argv[1:])
