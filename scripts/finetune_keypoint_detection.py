r"""Fine-tune a Vision Transformer for keypoint detection.

The data is a folder of keypoints in COCO format, a table of landmarks, or any other source that
`hf_vit.data.load_keypoint_detection` reads. The input of the model is a crop of one object, given by the box of the
object. The validation split selects the best epoch and the score threshold. Test objects are evaluated once, at the
end.

Examples:
    python scripts/finetune_keypoint_detection.py --model_name_or_path facebook/dinov2-small \
        --dataset_name path/to/people --output_dir outputs/people --push_to_hub
    torchrun --nproc_per_node 2 scripts/finetune_keypoint_detection.py --model_name_or_path facebook/dinov2-small \
        --dataset_name path/to/faces.csv --whole_image --bf16
    accelerate launch --config_file scripts/accelerate/eight_gpus.yaml scripts/finetune_keypoint_detection.py \
        --dataset_name path/to/people --learning_rate 5e-4 --num_train_epochs 200
"""

from dataclasses import dataclass, field

from transformers import BaseImageProcessor, HfArgumentParser, set_seed

from hf_vit import HfViTConfig, HfViTForKeypointDetection, HfViTImageProcessor
from hf_vit.convert import load_image_processor
from hf_vit.data import (
    AugmentedDataset,
    KeypointAugmentation,
    KeypointDetectionCollator,
    TargetDataset,
    hold_out,
    load_keypoint_detection,
)
from hf_vit.data.datasets import KeypointData
from hf_vit.evaluation.keypoints import KeypointMetric
from hf_vit.tasks.keypoint_detection import KeypointEvaluator
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
    image_size: int = field(default=224, metadata={"help": "Side of crops in pixels, a multiple of the patch size."})
    whole_image: bool = field(
        default=False,
        metadata={"help": "Use whole images instead of boxes, for images that show a single object."},
    )
    train_val_split: float = field(
        default=0.1, metadata={"help": "Share of the training images to hold out if there is no validation split."}
    )


@dataclass
class TrainingArguments(TrainerArguments):
    """Options of `HfViTTrainer` with defaults for fine-tuning."""

    output_dir: str | None = "outputs/finetuned-keypoint-detection"
    num_train_epochs: float = 30
    per_device_train_batch_size: int = 32
    per_device_eval_batch_size: int = 32
    learning_rate: float = 2e-4
    layer_decay: float = 0.75
    metric_for_best_model: str | None = "nme"
    load_best_model_at_end: bool = True


def load_model(args: ScriptArguments, data: KeypointData) -> tuple[HfViTForKeypointDetection, BaseImageProcessor]:
    """Return the model with a head for the keypoints of the data, and its image processor."""
    names = data.names
    options = {
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
        "keypoint_config": {
            "flip_pairs": data.flip_pairs,
            "skeleton": data.skeleton,
            "oks_sigmas": data.oks_sigmas,
        },
    }
    box_padding = 1.0 if args.whole_image else 1.25  # size of the crop relative to the box
    if args.model_name_or_path is None:
        config = HfViTConfig.from_preset(args.preset, image_size=args.image_size, **options)
        model = HfViTForKeypointDetection(config)
        return model, HfViTImageProcessor.for_model(model, box_padding=box_padding)
    model = HfViTForKeypointDetection.from_pretrained(args.model_name_or_path, image_size=args.image_size, **options)
    pretrained = load_image_processor(args.model_name_or_path, num_channels=model.config.num_channels)
    normalization = {"image_mean": pretrained.image_mean, "image_std": pretrained.image_std}
    return model, HfViTImageProcessor.for_model(model, box_padding=box_padding, **normalization)


def main() -> None:
    """Train, evaluate, save and, with --push_to_hub, upload a model."""
    script_args, training_args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    if script_args.model_name_or_path is None:
        training_args.layer_decay = 1.0  # Layer decay is only useful for pretrained layers.
    set_seed(training_args.seed)

    with training_args.main_process_first(desc="loading the data"):
        data = load_keypoint_detection(script_args.dataset_name, whole_image=script_args.whole_image)
        if "validation" not in data.splits:
            held_out = hold_out(data.splits["train"], script_args.train_val_split)
            data.splits["train"], data.splits["validation"] = held_out["train"], held_out["test"]
    datasets = {split: TargetDataset(rows, data.read_target) for split, rows in data.splits.items()}

    model, image_processor = load_model(script_args, data)
    augmentation = KeypointAugmentation(
        (script_args.image_size, script_args.image_size),
        num_channels=model.config.num_channels,
        box_padding=image_processor.box_padding,
        flip_pairs=data.flip_pairs,
    )
    metric = KeypointMetric(data.names, data.oks_sigmas)
    trainer = EvaluatorTrainer(
        model=model,
        args=training_args,
        train_dataset=AugmentedDataset(datasets["train"], augmentation, training_args.seed, column=None),
        eval_dataset=datasets["validation"],
        data_collator=KeypointDetectionCollator(image_processor),
        processing_class=image_processor,
        evaluator=KeypointEvaluator(image_processor, metric, data.skeleton),
    )
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.choose_threshold()  # on the validation split; pipelines omit keypoints of lower score
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
        trainer.push_to_hub(tasks="keypoint-detection")
    else:
        trainer.create_model_card(tasks="keypoint-detection")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
