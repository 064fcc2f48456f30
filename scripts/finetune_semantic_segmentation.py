r"""Fine-tune a Vision Transformer for semantic segmentation.

The data is a folder with `train/images`, `train/masks`, `val/images`, `val/masks` and a file `classes.txt` that names
the classes, or any other source that `hf_vit.data.load_semantic_segmentation` reads. An image and its mask have the
same file name. The pixel values of a mask are class numbers, or 255 for pixels without a class. Validation images
select the best epoch. Test images are evaluated once, at the end. All scores are computed at the size of the original
images.

Examples:
    python scripts/finetune_semantic_segmentation.py --model_name_or_path facebook/dinov2-small \
        --dataset_name path/to/streets --output_dir outputs/streets --push_to_hub
    torchrun --nproc_per_node 2 scripts/finetune_semantic_segmentation.py --model_name_or_path facebook/dinov2-small \
        --dataset_name path/to/streets --bf16
    accelerate launch --config_file scripts/accelerate/eight_gpus.yaml scripts/finetune_semantic_segmentation.py \
        --dataset_name path/to/streets --learning_rate 1e-3 --num_train_epochs 200
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import BaseImageProcessor, HfArgumentParser, set_seed

from hf_vit import HfViTConfig, HfViTForSemanticSegmentation, HfViTImageProcessor
from hf_vit.convert import load_image_processor
from hf_vit.data import (
    AugmentedDataset,
    DenseAugmentation,
    DensePredictionCollator,
    TargetDataset,
    hold_out,
    load_semantic_segmentation,
)
from hf_vit.evaluation.segmentation import SemanticSegmentationMetric
from hf_vit.tasks.semantic_segmentation import SemanticEvaluator
from hf_vit.training import EvaluatorTrainer, TrainerArguments, whole_image_processor


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
        default=448,
        metadata={
            "help": "Side of training crops, and shorter side of evaluated images, in pixels. A multiple of the "
            "patch size."
        },
    )
    reduce_labels: bool = field(
        default=False, metadata={"help": "Class numbers in masks start at 1, and 0 marks pixels without a class."}
    )
    train_val_split: float = field(
        default=0.1, metadata={"help": "Share of the training images to hold out if there is no validation split."}
    )


@dataclass
class TrainingArguments(TrainerArguments):
    """Options of `HfViTTrainer` with defaults for fine-tuning."""

    output_dir: str | None = "outputs/finetuned-semantic-segmentation"
    num_train_epochs: float = 30
    per_device_train_batch_size: int = 16
    per_device_eval_batch_size: int = 16
    learning_rate: float = 1e-4
    layer_decay: float = 0.75
    metric_for_best_model: str | None = "mean_iou"
    load_best_model_at_end: bool = True


def load_model(args: ScriptArguments, names: Sequence[str]) -> tuple[HfViTForSemanticSegmentation, BaseImageProcessor]:
    """Return the model with a head for the named classes, and its image processor."""
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    if args.model_name_or_path is None:
        config = HfViTConfig.from_preset(args.preset, image_size=args.image_size, **labels)
        model = HfViTForSemanticSegmentation(config)
        image_processor = HfViTImageProcessor.for_model(model)
    else:
        model = HfViTForSemanticSegmentation.from_pretrained(
            args.model_name_or_path, image_size=args.image_size, **labels
        )
        image_processor = load_image_processor(args.model_name_or_path, num_channels=model.config.num_channels)
    # Images keep their aspect ratio in evaluation, and images of a batch are padded to the same size.
    return model, whole_image_processor(image_processor, model.config, keep_aspect_ratio=True)


def main() -> None:
    """Train, evaluate, save and, with --push_to_hub, upload a model."""
    script_args, training_args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    if script_args.model_name_or_path is None:
        training_args.layer_decay = 1.0  # Layer decay is only useful for pretrained layers.
    set_seed(training_args.seed)

    with training_args.main_process_first(desc="loading the data"):
        data = load_semantic_segmentation(script_args.dataset_name, reduce_labels=script_args.reduce_labels)
        if "validation" not in data.splits:
            held_out = hold_out(data.splits["train"], script_args.train_val_split)
            data.splits["train"], data.splits["validation"] = held_out["train"], held_out["test"]
    datasets = {split: TargetDataset(rows, data.read_target) for split, rows in data.splits.items()}

    model, image_processor = load_model(script_args, data.names)
    augmentation = DenseAugmentation(
        (script_args.image_size, script_args.image_size), num_channels=model.config.num_channels
    )
    trainer = EvaluatorTrainer(
        model=model,
        args=training_args,
        train_dataset=AugmentedDataset(datasets["train"], augmentation, training_args.seed, column=None),
        eval_dataset=datasets["validation"],
        data_collator=DensePredictionCollator(image_processor),
        processing_class=image_processor,
        evaluator=SemanticEvaluator(image_processor, SemanticSegmentationMetric(data.names)),
    )
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)

    for split in ("validation", "test"):
        if split in datasets:
            metrics = trainer.evaluate(datasets[split], metric_key_prefix=split)
            trainer.log_metrics(split, metrics)
            trainer.save_metrics(split, metrics)

    if training_args.push_to_hub:
        trainer.push_to_hub(tasks="image-segmentation")
    else:
        trainer.create_model_card(tasks="image-segmentation")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
