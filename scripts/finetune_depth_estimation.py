r"""Fine-tune a Vision Transformer for monocular depth estimation.

The data is a folder with `train/images`, `train/depths`, `val/images` and `val/depths`, or any other source that
`hf_vit.data.load_depth_estimation` reads. An image and its depth map have the same file name. Integer depth maps (PNG,
TIFF) are in millimeters and floating-point ones (TIFF, `.npy`) in meters; 0 marks pixels of unknown depth. Validation
images select the best epoch. Test images are evaluated once, at the end, at the size of the original images.

Examples:
    python scripts/finetune_depth_estimation.py --model_name_or_path facebook/dinov2-small \
        --dataset_name path/to/rooms --output_dir outputs/rooms --push_to_hub
    torchrun --nproc_per_node 2 scripts/finetune_depth_estimation.py --model_name_or_path facebook/dinov2-small \
        --dataset_name path/to/rooms --bf16
    accelerate launch --config_file scripts/accelerate/eight_gpus.yaml scripts/finetune_depth_estimation.py \
        --dataset_name path/to/streets --depth_scale 256 --max_depth 80 --learning_rate 5e-4
"""

from dataclasses import dataclass, field

from transformers import BaseImageProcessor, HfArgumentParser, set_seed

from hf_vit import HfViTConfig, HfViTForDepthEstimation, HfViTImageProcessor
from hf_vit.convert import load_image_processor
from hf_vit.data import (
    AugmentedDataset,
    DenseAugmentation,
    DensePredictionCollator,
    TargetDataset,
    hold_out,
    load_depth_estimation,
)
from hf_vit.evaluation.depth import DepthMetric
from hf_vit.tasks.depth_estimation import DepthEvaluator
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
        default=448, metadata={"help": "Height and width in pixels, a multiple of the patch size."}
    )
    depth_scale: float | None = field(
        default=None, metadata={"help": "Units per meter of the depth maps, if not the default; 256 for KITTI."}
    )
    max_depth: float | None = field(
        default=None,
        metadata={
            "help": "Largest depth in meters that is trained and evaluated: 10 for rooms, 80 for streets. By "
            "default the limit of the model, which is 10 for a new head."
        },
    )
    train_val_split: float = field(
        default=0.1, metadata={"help": "Share of the training images to hold out if there is no validation split."}
    )


@dataclass
class TrainingArguments(TrainerArguments):
    """Options of `HfViTTrainer` with defaults for fine-tuning."""

    output_dir: str | None = "outputs/finetuned-depth-estimation"
    num_train_epochs: float = 20
    per_device_train_batch_size: int = 16
    per_device_eval_batch_size: int = 16
    learning_rate: float = 1e-4
    layer_decay: float = 0.75
    metric_for_best_model: str | None = "abs_rel"
    load_best_model_at_end: bool = True


def load_model(args: ScriptArguments) -> tuple[HfViTForDepthEstimation, BaseImageProcessor]:
    """Return the model with a depth head, and its image processor."""
    options = {} if args.max_depth is None else {"depth_config": {"max_depth": args.max_depth}}
    if args.model_name_or_path is None:
        config = HfViTConfig.from_preset(args.preset, image_size=args.image_size, **options)
        model = HfViTForDepthEstimation(config)
        image_processor = HfViTImageProcessor.for_model(model)
    else:
        model = HfViTForDepthEstimation.from_pretrained(args.model_name_or_path, image_size=args.image_size, **options)
        image_processor = load_image_processor(args.model_name_or_path, num_channels=model.config.num_channels)
    # Images are resized without a crop, so that the model predicts the depth of every pixel.
    return model, whole_image_processor(image_processor, model.config, keep_aspect_ratio=False)


def main() -> None:
    """Train, evaluate, save and, with --push_to_hub, upload a model."""
    script_args, training_args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    if script_args.model_name_or_path is None:
        training_args.layer_decay = 1.0  # Layer decay is only useful for pretrained layers.
    set_seed(training_args.seed)

    with training_args.main_process_first(desc="loading the data"):
        data = load_depth_estimation(script_args.dataset_name, depth_scale=script_args.depth_scale)
        if "validation" not in data.splits:
            held_out = hold_out(data.splits["train"], script_args.train_val_split)
            data.splits["train"], data.splits["validation"] = held_out["train"], held_out["test"]
    datasets = {split: TargetDataset(rows, data.read_target) for split, rows in data.splits.items()}

    model, image_processor = load_model(script_args)
    # Images are not scaled randomly, because this would change the apparent depth.
    augmentation = DenseAugmentation(
        (script_args.image_size, script_args.image_size),
        num_channels=model.config.num_channels,
        keep_aspect_ratio=False,
        scale_range=(1.0, 1.0),
    )
    # Relative depth has an unknown scale and shift, which are fitted to the targets before scoring.
    is_relative = model.options.depth_estimation_type == "relative"
    metric = DepthMetric(max_depth=model.options.max_depth, alignment="scale_shift" if is_relative else None)
    trainer = EvaluatorTrainer(
        model=model,
        args=training_args,
        train_dataset=AugmentedDataset(datasets["train"], augmentation, training_args.seed, column=None),
        eval_dataset=datasets["validation"],
        data_collator=DensePredictionCollator(image_processor),
        processing_class=image_processor,
        evaluator=DepthEvaluator(image_processor, metric, model.options),
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
        trainer.push_to_hub(tasks="depth-estimation")
    else:
        trainer.create_model_card(tasks="depth-estimation")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
