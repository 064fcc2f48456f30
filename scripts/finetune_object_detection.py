r"""Fine-tune a Vision Transformer for object detection.

The data is a folder in COCO, Pascal VOC or YOLO format, or any other source that
`hf_vit.data.load_object_detection` reads. Validation images select the best epoch and the score threshold. Test images
are evaluated once, at the end.

Examples:
    python scripts/finetune_object_detection.py --model_name_or_path facebook/dinov2-small \
        --dataset_name path/to/cells --output_dir outputs/cells --push_to_hub
    torchrun --nproc_per_node 2 scripts/finetune_object_detection.py --model_name_or_path facebook/dinov2-small \
        --dataset_name path/to/cells --bf16
    accelerate launch --config_file scripts/accelerate/eight_gpus.yaml scripts/finetune_object_detection.py \
        --dataset_name path/to/cells --learning_rate 2e-4 --num_train_epochs 300
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from transformers import BaseImageProcessor, HfArgumentParser, set_seed

from hf_vit import HfViTConfig, HfViTForObjectDetection, HfViTImageProcessor
from hf_vit.convert import load_image_processor
from hf_vit.data import (
    AugmentedDataset,
    DetectionAugmentation,
    ObjectDetectionCollator,
    TargetDataset,
    hold_out,
    load_object_detection,
)
from hf_vit.evaluation.detection import DetectionMetric
from hf_vit.tasks.object_detection import DetectionEvaluator
from hf_vit.training import EvaluatorTrainer, TrainerArguments


@dataclass
class ScriptArguments:
    """Options that select the model and the data."""

    dataset_name: str = field(metadata={"help": "Folder or file of annotations, or name of a dataset on the Hub."})
    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Published or saved model to fine-tune. By default, a new model of --preset is trained."},
    )
    preset: str = field(default="small", metadata={"help": "Size of a new model: tiny, small, base, large or huge."})
    image_size: int = field(
        default=560, metadata={"help": "Height and width in pixels, a multiple of the patch size."}
    )
    box_errors: Literal["raise", "clip", "drop"] = field(
        default="raise",
        metadata={"help": "Whether boxes that exceed their image are errors, or are clipped or dropped."},
    )
    train_val_split: float = field(
        default=0.1, metadata={"help": "Share of the training images to hold out if there is no validation split."}
    )


@dataclass
class TrainingArguments(TrainerArguments):
    """Options of `HfViTTrainer` with defaults for fine-tuning."""

    output_dir: str | None = "outputs/finetuned-object-detection"
    num_train_epochs: float = 60
    per_device_train_batch_size: int = 16
    per_device_eval_batch_size: int = 16
    learning_rate: float = 1e-4
    weight_decay: float = 1e-4
    max_grad_norm: float = 0.1
    layer_decay: float = 0.8
    metric_for_best_model: str | None = "map"
    load_best_model_at_end: bool = True


def load_model(args: ScriptArguments, names: Sequence[str]) -> tuple[HfViTForObjectDetection, BaseImageProcessor]:
    """Return the model with a decoder for the named classes, and its image processor."""
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    if args.model_name_or_path is None:
        config = HfViTConfig.from_preset(args.preset, image_size=args.image_size, **labels)
        model = HfViTForObjectDetection(config)
        return model, HfViTImageProcessor.for_model(model)
    model = HfViTForObjectDetection.from_pretrained(args.model_name_or_path, image_size=args.image_size, **labels)
    pretrained = load_image_processor(args.model_name_or_path, num_channels=model.config.num_channels)
    # Images are resized without a crop, so that no object is cut off.
    normalization = {"image_mean": pretrained.image_mean, "image_std": pretrained.image_std}
    return model, HfViTImageProcessor.for_model(model, **normalization)


def main() -> None:
    """Train, evaluate, save and, with --push_to_hub, upload a model."""
    script_args, training_args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    if script_args.model_name_or_path is None:
        training_args.layer_decay = 1.0  # Layer decay is only useful for pretrained layers.
    set_seed(training_args.seed)

    with training_args.main_process_first(desc="loading the data"):
        data = load_object_detection(script_args.dataset_name, box_errors=script_args.box_errors)
        if "validation" not in data.splits:
            held_out = hold_out(data.splits["train"], script_args.train_val_split)
            data.splits["train"], data.splits["validation"] = held_out["train"], held_out["test"]
    datasets = {split: TargetDataset(rows, data.read_target) for split, rows in data.splits.items()}

    model, image_processor = load_model(script_args, data.names)
    augmentation = DetectionAugmentation(
        (script_args.image_size, script_args.image_size),
        num_channels=model.config.num_channels,
        scale_range=(0.5, 1.5),
    )
    trainer = EvaluatorTrainer(
        model=model,
        args=training_args,
        train_dataset=AugmentedDataset(datasets["train"], augmentation, training_args.seed, column=None),
        eval_dataset=datasets["validation"],
        data_collator=ObjectDetectionCollator(image_processor),
        processing_class=image_processor,
        evaluator=DetectionEvaluator(image_processor, DetectionMetric(data.names), model.options.num_queries),
    )
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.choose_threshold()  # on the validation split; pipelines omit objects of lower score
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
        trainer.push_to_hub(tasks="object-detection")
    else:
        trainer.create_model_card(tasks="object-detection")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
