r"""Fine-tune a Vision Transformer for image classification.

The data is a folder `train/<class>/<image>` with optional folders `validation/` and `test/`, or any other source that
`hf_vit.data.load_image_classification` reads: parquet files, tar files, tables of labels or a dataset on the Hub.
Validation images select the best epoch. Test images are evaluated once, at the end.

Examples:
    python scripts/finetune_image_classification.py --model_name_or_path facebook/dinov2-small \
        --dataset_name path/to/photos --output_dir outputs/photos --push_to_hub
    torchrun --nproc_per_node 2 scripts/finetune_image_classification.py --model_name_or_path facebook/dinov2-small \
        --dataset_name path/to/photos --bf16
    accelerate launch --config_file scripts/accelerate/eight_gpus.yaml scripts/finetune_image_classification.py \
        --dataset_name path/to/photos --preset base --learning_rate 1e-3 --num_train_epochs 100
"""

from dataclasses import dataclass, field

from transformers import BaseImageProcessor, HfArgumentParser, set_seed

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor
from hf_vit.convert import load_image_processor
from hf_vit.data import (
    AugmentedDataset,
    ImageClassificationCollator,
    hold_out,
    image_classification_augmentation,
    load_image_classification,
)
from hf_vit.training import HfViTTrainer, TrainerArguments, image_classification_metrics


@dataclass
class ScriptArguments:
    """Options that select the model and the data."""

    dataset_name: str = field(metadata={"help": "Folder, parquet file, or name of a dataset on the Hub."})
    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Published or saved model to fine-tune. By default, a new model of --preset is trained."},
    )
    preset: str = field(default="small", metadata={"help": "Size of a new model: tiny, small, base, large or huge."})
    image_size: int = field(
        default=224, metadata={"help": "Height and width in pixels, a multiple of the patch size."}
    )
    train_val_split: float = field(
        default=0.1, metadata={"help": "Share of the training images to hold out if there is no validation split."}
    )


@dataclass
class TrainingArguments(TrainerArguments):
    """Options of `HfViTTrainer` with defaults for fine-tuning."""

    output_dir: str | None = "outputs/finetuned-image-classification"
    num_train_epochs: float = 10
    per_device_train_batch_size: int = 32
    learning_rate: float = 1e-4
    layer_decay: float = 0.75
    metric_for_best_model: str | None = "accuracy"
    load_best_model_at_end: bool = True


def load_model(args: ScriptArguments, names: list[str]) -> tuple[HfViTForImageClassification, BaseImageProcessor]:
    """Return the model with a classifier for the named classes, and its image processor."""
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    if args.model_name_or_path is None:
        config = HfViTConfig.from_preset(args.preset, image_size=args.image_size, **labels)
        return HfViTForImageClassification(config), HfViTImageProcessor.for_model(config)
    model = HfViTForImageClassification.from_pretrained(args.model_name_or_path, image_size=args.image_size, **labels)
    return model, load_image_processor(args.model_name_or_path, args.image_size, patch_size=model.config.patch_size)


def main() -> None:
    """Train, evaluate, save and, with --push_to_hub, upload a model."""
    script_args, training_args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    if script_args.model_name_or_path is None:
        training_args.layer_decay = 1.0  # Layer decay is only useful for pretrained layers.
    set_seed(training_args.seed)

    with training_args.main_process_first(desc="loading the data"):
        splits = load_image_classification(script_args.dataset_name)
        if "validation" not in splits:
            held_out = hold_out(splits["train"], script_args.train_val_split)
            splits["train"], splits["validation"] = held_out["train"], held_out["test"]

    model, image_processor = load_model(script_args, splits["train"].features["label"].names)
    augmentation = image_classification_augmentation(
        (script_args.image_size, script_args.image_size), model.config.num_channels
    )
    trainer = HfViTTrainer(
        model=model,
        args=training_args,
        train_dataset=AugmentedDataset(splits["train"], augmentation, training_args.seed),
        eval_dataset=splits["validation"],
        data_collator=ImageClassificationCollator(image_processor),
        processing_class=image_processor,
        compute_metrics=image_classification_metrics,
    )
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)

    for split in ("validation", "test"):
        if split in splits:
            metrics = trainer.evaluate(splits[split], metric_key_prefix=split)
            trainer.log_metrics(split, metrics)
            trainer.save_metrics(split, metrics)

    if training_args.push_to_hub:
        trainer.push_to_hub(tasks="image-classification")
    else:
        trainer.create_model_card(tasks="image-classification")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
