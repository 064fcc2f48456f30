r"""Pretrain a Vision Transformer on unlabeled images by masked image modeling (MAE).

The data is one or more folders of images, including subfolders, or any other source that
`hf_vit.data.load_unlabeled_images` reads. If the images are stored in one folder per class, evaluations also report
the accuracy of a nearest neighbor classifier on encoder features. Fine-tune the encoder with one of the fine-tuning
scripts in this folder and `--model_name_or_path outputs/encoder`.

Examples:
    python scripts/pretrain_masked_image_modeling.py --dataset_name path/to/photos path/to/more \
        --output_dir outputs/encoder --push_to_hub
    torchrun --nproc_per_node 2 scripts/pretrain_masked_image_modeling.py --dataset_name path/to/photos --bf16
    accelerate launch --config_file scripts/accelerate/eight_gpus.yaml scripts/pretrain_masked_image_modeling.py \
        --dataset_name path/to/photos --model_name_or_path facebook/vit-mae-base --num_train_epochs 50
"""

from dataclasses import dataclass, field

import numpy as np
from transformers import BaseImageProcessor, HfArgumentParser, set_seed

from hf_vit import HfViTConfig, HfViTForMaskedImageModeling, HfViTImageProcessor
from hf_vit.convert import load_image_processor
from hf_vit.data import AugmentedDataset, TargetDataset, hold_out, load_unlabeled_images
from hf_vit.data.augmentation.classification import cropped_example_augmentation
from hf_vit.data.collators import MaskedImageModelingCollator, draw_mask_seed, masked_image_target
from hf_vit.evaluation.features import NeighborAccuracy
from hf_vit.model.configuration_hf_vit import to_pair
from hf_vit.tasks.masked_image_modeling import MaskedImageEvaluator
from hf_vit.training import EvaluatorTrainer, TrainerArguments


@dataclass
class ScriptArguments:
    """Options that select the model and the data."""

    dataset_name: list[str] = field(metadata={"help": "Folders, parquet files, or names of datasets on the Hub."})
    model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Published or saved model to train further. By default, a new model of --preset is trained."
        },
    )
    preset: str = field(default="small", metadata={"help": "Size of a new model: tiny, small, base, large or huge."})
    image_size: int = field(
        default=224, metadata={"help": "Height and width in pixels, a multiple of the patch size."}
    )
    mask_ratio: float = field(default=0.75, metadata={"help": "Share of masked patches."})
    train_val_split: float = field(
        default=0.05, metadata={"help": "Share of the training images to hold out if there is no validation split."}
    )


@dataclass
class TrainingArguments(TrainerArguments):
    """Options of `HfViTTrainer` with the defaults of MAE (https://arxiv.org/abs/2111.06377)."""

    output_dir: str | None = "outputs/encoder"
    num_train_epochs: float = 400
    per_device_train_batch_size: int = 64
    base_learning_rate: float = field(default=1.5e-4, metadata={"help": "Learning rate for 256 images per step."})
    learning_rate: float = field(default=0.0, init=False)  # computed from base_learning_rate
    adam_beta2: float = 0.95
    warmup_steps: float = 0.05
    metric_for_best_model: str | None = "loss"
    eval_strategy: str = "steps"
    eval_steps: float | None = 0.1
    save_strategy: str = "steps"
    save_steps: float = 0.1


def load_model(args: ScriptArguments) -> tuple[HfViTForMaskedImageModeling, BaseImageProcessor]:
    """Return the model with a decoder, and its image processor."""
    options = {"image_size": args.image_size, "masked_image_modeling_config": {"mask_ratio": args.mask_ratio}}
    if args.model_name_or_path is None:
        config = HfViTConfig.from_preset(args.preset, **options)
        return HfViTForMaskedImageModeling(config), HfViTImageProcessor.for_model(config)
    model = HfViTForMaskedImageModeling.from_pretrained(args.model_name_or_path, **options)
    return model, load_image_processor(args.model_name_or_path, args.image_size, patch_size=model.config.patch_size)


def main() -> None:
    """Train, evaluate, save and, with --push_to_hub, upload a model."""
    script_args, training_args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    images_per_step = training_args.train_batch_size * training_args.gradient_accumulation_steps
    images_per_step *= training_args.world_size
    training_args.learning_rate = training_args.base_learning_rate * images_per_step / 256
    set_seed(training_args.seed)

    with training_args.main_process_first(desc="loading the data"):
        splits = load_unlabeled_images(script_args.dataset_name)
        if "validation" not in splits:
            held_out = hold_out(splits["train"], script_args.train_val_split)
            splits["train"], splits["validation"] = held_out["train"], held_out["test"]
    datasets = {split: TargetDataset(rows, masked_image_target) for split, rows in splits.items()}
    has_classes = "class_number" in splits["train"].column_names
    numbers = np.array(splits["train"]["class_number"][:]) if has_classes else np.array([], dtype=int)
    labeled = np.random.default_rng(0).permutation(np.flatnonzero(numbers >= 0))
    neighbors = datasets["train"].select(labeled[:10_000])

    model, image_processor = load_model(script_args)
    augmentation = cropped_example_augmentation(
        draw_mask_seed,
        (script_args.image_size, script_args.image_size),
        model.config.num_channels,
        min_crop_scale=0.2,
        horizontal_flip=0.5,
    )
    trainer = EvaluatorTrainer(
        model=model,
        args=training_args,
        train_dataset=AugmentedDataset(datasets["train"], augmentation, training_args.seed, column=None),
        eval_dataset=datasets["validation"],
        data_collator=MaskedImageModelingCollator(image_processor, to_pair(model.config.patch_size), model.options),
        processing_class=image_processor,
        evaluator=MaskedImageEvaluator(image_processor, NeighborAccuracy(has_classes), neighbors),
    )
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)

    metrics = trainer.evaluate(metric_key_prefix="validation")
    trainer.log_metrics("validation", metrics)
    trainer.save_metrics("validation", metrics)

    if training_args.push_to_hub:
        trainer.push_to_hub(tasks="image-feature-extraction")
    else:
        trainer.create_model_card(tasks="image-feature-extraction")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
