"""Test that invalid arguments of all commands raise one-line errors before any image is read."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

from hf_vit import HfViTForDepthEstimation, HfViTForImageClassification, HfViTImageProcessor, tasks
from hf_vit.options.library import LIBRARY_FIELDS, LIBRARY_OPTIONS
from hf_vit.runs import build_run
from hf_vit.training import HfViTTrainingArguments

from ..helpers.datasets import write_class_folders
from ..helpers.models import SMALL, small_config
from ..helpers.options import opened_run
from .table import Row, assert_refused, parametrize, rows, script


SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "image_size", "patch_size")
CONFIG = {name: SMALL[name] for name in SIZES}


def with_folder(*arguments: str) -> Callable[[Path], list[str]]:
    """Return a function that writes unreadable images to a folder and replaces FOLDER in the arguments with it."""

    def make(folder: Path) -> list[str]:
        for name in ("train/cat", "train/dog", "validation/cat", "validation/dog"):
            (folder / "data" / name).mkdir(parents=True)
            (folder / "data" / name / "0.png").touch()
        (folder / "file.txt").write_text("This is no folder.")
        (folder / "empty").mkdir()
        return [argument.replace("FOLDER", str(folder)) for argument in arguments]

    return make


def split(line: str) -> list[str]:
    """Split a command line at spaces. JSON values in it must not contain spaces."""
    return line.split(" ")


DATA = ("--dataset_name", "FOLDER/data", "--output_dir", "FOLDER/output", "--use_cpu", "--report_to", "none")


def training_rows(task: str, table: list[tuple[str, str]], *base: str) -> list[Row]:
    """Return test cases for a training command. `table` contains pairs of options and parts of the error message."""
    named = [(f"{task}: {line}", with_folder(*DATA, *base, *split(line)), words) for line, words in table]
    return rows(script(f"train {task}"), SystemExit, named)


def given(*pairs: str) -> list[tuple[str, str]]:
    """Return table rows for options such as "epochs -1". The error message must contain "epochs=-1"."""
    return [(f"--{pair}", pair.replace(" ", "=")) for pair in pairs]


# `test_invalid_numbers_raise_for_every_numeric_option` tests large negative numbers and NaN.
LIBRARY = [
    ("--learning_rate -1", "learning_rate=-1.0 must be more than 0 | default is 0.001"),
    ("--learning_rate fast", "--learning_rate | invalid float value: 'fast'"),
    ("--max_steps 0", "max_steps=0 must be at least 1, or -1"),
    ("--dataloader_num_workers 1 --dataloader_prefetch_factor 0", "dataloader_prefetch_factor=0"),
    ("--label_smoothing_factor 2", "label_smoothing_factor=2.0 must lie in [0, 1)"),
    *given(
        "learning_rate inf", "num_train_epochs 0", "per_device_train_batch_size 0", "gradient_accumulation_steps 0"
    ),
    *given("adam_beta1 5", "adam_beta2 1", "adam_epsilon 0", "save_steps 0", "logging_steps 0", "ddp_timeout 0"),
    *given("data_seed 99999999999", "minutes inf"),
    ("--seed -1", "seed=-1 must lie in [0, 4294967295]"),
    ("--lr_scheduler_type sometimes", "--lr_scheduler_type | invalid choice: 'sometimes'"),
    ("--lr_scheduler_kwargs sometimes", "lr_scheduler_kwargs='sometimes' is not valid JSON"),
    ('--lr_scheduler_kwargs {"cycles"', "lr_scheduler_kwargs | JSON"),
    ('--lr_scheduler_kwargs {"cycles":1}', "lr_scheduler_type=cosine | cycles"),
    ('--lr_scheduler_type polynomial --lr_scheduler_kwargs {"lr_end":5}', "lr_end (5)"),
    ("--optim best", "--optim | invalid choice: 'best'"),
    ("--optim galore_adamw", "galore_torch"),
    ("--optim_args momentum", "optim_args='momentum' | momentum=0.9"),
    ("--report_to paper", "report_to=paper | none"),
    ("--report_to wandb", "report_to=wandb | pip install wandb | --report_to none"),
    ("--report_to none,trackio", "report_to=trackio | pip install trackio"),
    ("--resume_from_checkpoint last", "output contains no training run to resume | --output_dir"),
    ("--minutes 1e-9", "minutes=1e-09 must be at least 0.01"),
    ("--label_names truth", "label_names=['truth'] | HfViTForImageClassification"),
    ("--use_liger_kernel true", "use_liger_kernel=True"),
    ('--accelerator_config {"speed":9}', "speed"),
    ('--gradient_checkpointing true --gradient_checkpointing_kwargs {"often":1}', "often | use_reentrant"),
    ("--speed 9", "--speed"),
    ("--output_dir FOLDER/file.txt", "Nothing can be written to | file.txt | --output_dir"),
    ("--output_dir FOLDER/file.txt/output", "Nothing can be written to | file.txt/output"),
]
OURS = [
    ("--preset giant", "no preset 'giant' | small"),
    ("--image_size 30", "30 is not a multiple of the patch"),
    ("--config_overrides patch_size=8", "is not a JSON object"),
    ('--config_overrides {"patch_size":8,"patch_size":16}', "'patch_size' occurs 2 times"),
    ('--config_overrides {"patches":8}', "no field patches"),
    ('--config_overrides {"hidden_size":63}', "hidden_size=63"),
    ('--config_overrides {"hidden_size":"63"}', "hidden_size | '63'"),
    ('--config_overrides {"hidden_dropout_prob":NaN}', "hidden_dropout_prob=nan"),
    ('--config_overrides {"id2label":{"0":"cat"}}', "id2label | the data determine the classes"),
    ('--config_overrides {"num_labels":7}', "num_labels | the data determine the classes"),
    ('--config_overrides {"problem_type":"regression"}', "problem_type"),
    ("--model_name_or_path FOLDER/nothing", "is not a model | nothing"),
    ("--model_name_or_path FOLDER/data --preset small", "Remove one of the two"),
    ("--teacher FOLDER/nothing", "is not a model | nothing"),
    ("--distillation_alpha 0.5", "requires a teacher"),
    ("--teacher FOLDER/data --distillation_type soft --distillation_temperature 0", "distillation_temperature=0.0"),
    ("--teacher FOLDER/data --teacher_dtype float8", "--teacher_dtype | invalid choice: 'float8'"),
    ("--min_crop_scale 0", "min_crop_scale=0.0 must lie in (0, 1]"),
    ("--auto_augment wild", "--auto_augment | invalid choice: 'wild' | trivialaugment"),
    *given("image_size 0", "horizontal_flip 2", "randaugment_magnitude 99", "mixup_alpha inf", "mixing_probability 2"),
    *given("token_drop_rate 1", "ema_decay 1", "layer_decay 0", "lora_rank 0", "repeated_augmentations 0"),
    *given("train_val_split 1", "max_train_samples 0"),
    ("--use_muon true --optim sgd", "use_muon=True | optim=sgd"),
    ("--lora_rank 4 --lora_dropout 1", "lora_dropout=1.0"),
    ("--progressive_sizes 16 -32", "progressive_sizes=[16, -32]"),
    ("--streaming --shuffle_buffer_size 0", "shuffle_buffer_size=0"),
    ("--resume_from_checkpoint FOLDER/data", "Cannot resume from"),
    ("FOLDER/nothing.yaml", "nothing.yaml"),
]
OF_TASKS = {
    "semantic_segmentation": [
        *given("eval_window_size 0", "max_class_share 0", "max_rotation 720"),
    ],
    "depth_estimation": [
        ("--min_eval_depth 9 --max_eval_depth 3", "min_eval_depth=9.0"),
        ("--eval_crop half", "--eval_crop | invalid choice: 'half'"),
        ("--annotation_orientation up", "invalid choice: 'up'"),
    ],
    "object_detection": [("--box_errors hide", "invalid choice: 'hide'"), *given("iou_crop 2")],
    "keypoint_detection": given("box_padding 0", "max_shift 1"),
    "masked_image_modeling": given("mask_ratio 1"),
    "image_reconstruction": [
        *given("latent_channels 0", "kl_weight -1", "num_latent_layers 0", "min_crop_scale 0"),
        ("--latent_type vq", "latent_type | 'kl', 'rae' | got vq"),
        ("--pixel_loss l3", "pixel_loss | 'l1', 'l2' | got l3"),
        ("--feature_weight 1 --feature_model FOLDER/nothing", "nothing"),
    ],
}
TRAININGS = {"image_classification": [*LIBRARY, *OURS], **OF_TASKS}


def broken_teacher(*options: str) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        model = HfViTForImageClassification(small_config())
        with torch.no_grad():
            model.model.encoder.layers[1].mlp.fc1.weight[3, 4] = float("nan")
        model.save_pretrained(folder / "teacher")
        HfViTImageProcessor.for_model(model.config).save_pretrained(folder / "teacher")
        return with_folder(*DATA, "--teacher", "FOLDER/teacher", *options)(folder)

    return make


TEACHERS = [
    ("teacher-of-nan", broken_teacher(), "layers.1.mlp.fc1.weight | infinite or NaN"),
    ("teacher-of-features", broken_teacher("--distillation_type", "features"), "fc1.weight | infinite or NaN"),
]


def recipe(text: str) -> Callable[[Path], list[str]]:
    """Return a function that writes a recipe of several heads, whose data are in FOLDER."""

    def make(folder: Path) -> list[str]:
        options = with_folder("FOLDER/tasks.yaml", "--use_cpu", "--output_dir", "FOLDER/output")(folder)
        (folder / "tasks.yaml").write_text(f"tasks:\n{text}".replace("FOLDER", str(folder)))
        return options

    return make


HEAD = "{task: image-classification, data: FOLDER/data"
RECIPES = [
    ("head-named-twice", recipe(f"  pets: {HEAD}}}\n  pets: {HEAD}}}\n"), "tasks.yaml, line 3 | 'pets' occurs twice"),
    ("head-named-alike", recipe(f"  my-pets: {HEAD}}}\n  my_pets: {HEAD}}}\n"), "'my-pets' and 'my_pets'"),
    ("infinite-weight", recipe(f"  pets: {HEAD}, weight: .inf}}\n"), "pets has the weight inf"),
    ("true-weight", recipe(f"  pets: {HEAD}, weight: true}}\n"), "pets has the weight True"),
    ("option-named-twice", recipe(f"  pets: {HEAD}, weight: 1, weight: 2}}\n"), "line 2 | 'weight' occurs twice"),
]


@parametrize(
    [
        *rows(script("train multi-task"), SystemExit, RECIPES),
        *(row for task, table in TRAININGS.items() for row in training_rows(task, table)),
        *rows(script("train image-classification"), SystemExit, TEACHERS),
    ]
)
def test_training_command_rejects_invalid_options(row: Row, tmp_path: Path) -> None:
    assert_refused(row, tmp_path)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output folder of a training run of one step, which contains a checkpoint."""
    folder = tmp_path_factory.mktemp("begun")
    data = write_class_folders(folder / "data", ["cat", "dog"])
    arguments = ["--dataset_name", str(data), "--output_dir", str(folder / "output"), *RESUMED, *model_of()]
    task = opened_run(tasks.TASKS["image-classification"], arguments)
    build_run(task).trainer.train()
    return folder / "output"


RESUMED = split("--use_cpu --report_to none --disable_tqdm true --max_steps 1 --save_strategy steps --save_steps 1")
RESUMED += split("--train_val_split 0 --eval_strategy no --per_device_train_batch_size 2")


def model_of(**changes: Any) -> list[str]:
    return ["--preset", "tiny", "--config_overrides", json.dumps({**CONFIG, **changes})]


OTHER_ARCHITECTURES = [
    ("width", model_of(hidden_size=48), "hidden_size 32 then, 48 now | another architecture"),
    ("blocks", model_of(num_hidden_layers=4), "num_hidden_layers 3 then, 4 now"),
    ("patches", model_of(patch_size=16), "patch_size [8, 8] then, [16, 16] now"),
    ("pooling", model_of(pooling="mean"), "pooling cls then, mean now"),
    ("preset", ["--preset", "small"], "hidden_size 32 then, 384 now"),
]
OTHER_TASK = ("task", model_of(), "HfViTForImageClassification | HfViTForDepthEstimation")


@parametrize(
    [
        *rows(script("train image-classification"), SystemExit, OTHER_ARCHITECTURES),
        *rows(script("train depth-estimation"), SystemExit, [OTHER_TASK]),
    ]
)
def test_a_training_is_not_resumed_with_another_architecture_or_task(row: Row, begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path / "output")

    def make(folder: Path) -> list[str]:
        resume = ("--resume_from_checkpoint", "last", *RESUMED)
        return [*with_folder(*DATA, *resume)(folder), *row.make(folder)]

    assert_refused(row._replace(make=make), tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for name, kind in (("classifier", HfViTForImageClassification), ("depth", HfViTForDepthEstimation)):
        model = kind(small_config())
        model.save_pretrained(folder / name)
        HfViTImageProcessor.for_model(model.config).save_pretrained(folder / name)
    return folder


def script_rows(name: str, *table: tuple[str, str], base: tuple[str, ...] = ()) -> list[Row]:
    """Return test cases for a command. SAVED in the options is replaced with the folder of saved models."""
    named = [(f"{name}: {line}", with_folder(*base, *split(line)), words) for line, words in table]
    return rows(script(name), SystemExit, named)


EVALUATED = ("--model_name_or_path", "SAVED/classifier", *DATA)
EXTRACTED = (*EVALUATED[:-2], "--features", "mean")
OTHER_SCRIPTS = [
    *script_rows(
        "evaluate",
        *given("per_device_eval_batch_size 0", "max_eval_samples 0", "train_val_split 2"),
        ("--output_dir FOLDER/file.txt/scores", "Nothing can be written to"),
        ("--model_name_or_path FOLDER/nothing", "is not a model"),
        ("--task juggling", "task='juggling'"),
        ("--max_train_samples 3", "applies only to training"),
        ("--model_name_or_path SAVED/depth --max_eval_depth nan", "max_eval_depth=nan"),
        base=EVALUATED,
    ),
    *script_rows(
        "features extract",
        *given("batch_size 0", "num_workers -1", "rows_per_shard 0"),
        ("--dtype foo", "dtype='foo' | float16"),
        ("--features smell", "features=['smell']"),
        ("--output_dir FOLDER/file.txt", "Nothing can be written to"),
        ("--model_name_or_path FOLDER/nothing", "is not a model"),
        base=EXTRACTED,
    ),
    *script_rows(
        "features evaluate",
        ("FOLDER/nothing", "nothing"),
        ("FOLDER/data --output_dir FOLDER/file.txt", "file.txt"),
    ),
    *script_rows(
        "predict",
        ("SAVED/classifier FOLDER/nothing.png", "There is no file or folder | nothing.png"),
        ("SAVED/classifier FOLDER/file.txt/photo.png", "photo.png"),
        ("SAVED/classifier FOLDER/empty", "contains no image: no file ends in .bmp, .gif"),
        ("FOLDER/nothing FOLDER/data", "nothing"),
        ("FOLDER/data FOLDER/data", "has no config.json, so it is not a saved model. Train one first: hf-vit train"),
        ("SAVED/classifier FOLDER/data --top_k 0", "top_k=0 must be at least 1. The default is 3."),
        ("SAVED/classifier FOLDER/data --batch_size -1", "batch_size=-1"),
        ("SAVED/classifier FOLDER/data --threshold 2", "threshold=2"),
        ("SAVED/classifier FOLDER/data --boxes FOLDER/file.txt", "--boxes | file.txt"),
        ("SAVED/classifier FOLDER/data --subtask guessing", "guessing"),
        ("SAVED/classifier FOLDER/nothing.parquet", "nothing.parquet"),
        ("SAVED/classifier FOLDER/data --picture FOLDER/file.txt", "file.txt | suffix"),
        ("SAVED/classifier FOLDER/data --output_dir FOLDER/file.txt", "Nothing can be written to"),
        ("SAVED/classifier FOLDER/data --picture FOLDER/file.txt/a.png", "Nothing can be written to"),
    ),
    *script_rows(
        "visualize",
        ("FOLDER/nothing FOLDER/data", "nothing"),
        ("SAVED/classifier FOLDER/nothing.png", "nothing.png"),
        ("SAVED/classifier FOLDER/data --image_size 0", "image_size=0"),
        ("SAVED/classifier FOLDER/data --point 3", "--point | '3'"),
        ("SAVED/classifier FOLDER/data --point nan,3", "--point"),
        ("SAVED/classifier FOLDER/data --kinds smell", "'smell'"),
        ("SAVED/classifier FOLDER/data --output_dir FOLDER/file.txt", "Nothing can be written to"),
        base=("--output_dir", "FOLDER/maps"),
    ),
    *script_rows(
        "convert",
        ("FOLDER/nothing FOLDER/output", "nothing"),
        ("FOLDER/data FOLDER/output", "data"),
        ("SAVED/classifier FOLDER/output", "already an hf_vit model"),
        ("SAVED/classifier FOLDER/data --to vit", "data"),
        ("SAVED/classifier FOLDER/output --to mist", "invalid choice: 'mist'"),
        ("SAVED/classifier FOLDER/output --dtype float8", "invalid choice: 'float8'"),
        ("SAVED/classifier FOLDER/output --config_overrides {", "JSON"),
        ('SAVED/classifier FOLDER/output --config_overrides {"patches":8}', "patches"),
    ),
    *script_rows(
        "push",
        ("FOLDER/nothing user/name --dry_run", "nothing"),
        ("FOLDER/data user/name --dry_run", "data"),
        ("SAVED/classifier user/name --dry_run", "README.md"),
    ),
]


@parametrize(OTHER_SCRIPTS)
def test_command_rejects_invalid_options(row: Row, saved: Path, tmp_path: Path) -> None:
    def make(folder: Path) -> list[str]:
        return [argument.replace("SAVED", str(saved)) for argument in row.make(folder)]

    assert_refused(row._replace(make=make), tmp_path)


def test_the_table_of_the_library_names_its_options_only() -> None:
    assert LIBRARY_OPTIONS.keys() <= LIBRARY_FIELDS.keys()


# Numeric options that may be negative.
ANY_NUMBER = {"local_rank"}
HEADS = {"depth-estimation": {"data": "rooms"}}
REQUIRED = {"dataset_name": "photos", "teacher": "model", "use_cpu": True, "tasks": HEADS}


def hostile_numbers(annotation: str) -> list[Any]:
    """Return invalid values for a type annotation: a large negative number, and also NaN for floats."""
    if "Literal" in annotation or not ("int" in annotation or "float" in annotation):
        return []
    numbers = [-1e6, math.nan] if "float" in annotation else [-1_000_000]
    return [[number] for number in numbers] if "list" in annotation else numbers


def refusal(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("task", tasks.TASKS)
def test_invalid_numbers_raise_for_every_numeric_option(task: str, tmp_path: Path) -> None:
    accepted = set()
    for kind in tasks.TASKS[task].argument_types():
        own = {field.name for field in fields(kind) if field.init}
        required = {name: value for name, value in REQUIRED.items() if name in own}
        required |= {"output_dir": str(tmp_path)} if issubclass(kind, HfViTTrainingArguments) else {}
        for name, annotation in get_type_hints(kind).items():
            for value in hostile_numbers(str(annotation)) if name in own else ():
                message = refusal(partial(kind, **{**required, name: value}))
                assert message is None or name in message
                accepted |= {name} if message is None else set()
    assert accepted <= ANY_NUMBER
