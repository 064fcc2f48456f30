"""Training runs that must give the same result in one process, in several processes, and when resumed.

`python -m tests.helpers.trainings JOB FOLDER ...` runs one of the jobs and writes its results to FOLDER.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import EvalPrediction, Trainer, TrainerCallback, TrainingArguments

import hf_vit
from hf_vit.data import AugmentedDataset, ImageClassificationCollator
from hf_vit.data.augmentation.classification import small_affine
from hf_vit.model.pretrained import HfViTPreTrainedModel
from hf_vit.model.task_image_classification import classification_loss
from hf_vit.training import HfViTTrainer, HfViTTrainingArguments, NotFiniteError, Preempted, last_checkpoint
from hf_vit.training.regularization import resize_batch

from . import contrastive, dense, objects
from .averaged_shards import EMA_DECAY, EMA_STEPS, average_shards, train_shards_with_muon
from .datasets import load_digits
from .dense_trainings import A_FEW_STEPS, run_task, scores_at_all_batch_sizes
from .image_text_trainings import train_as_one
from .models import TRAINING_CASES, encoder_shape, small_config
from .pretraining import train_all_ways
from .references import draw_weights
from .regularization import train_regularized
from .teachers import DISTILLED_CASES, TEACHER_LOSSES, small_distillation


TRAINERS: dict[str, type[Trainer]] = {"HfViTTrainer": HfViTTrainer, "transformers.Trainer": Trainer}
GLOBAL_BATCH = 8  # Images per training step, summed over all processes and accumulation steps
NUM_TRAIN, NUM_TEST = 44, 37  # Numbers of images that are not divisible by the batch size
DTYPES = {"float64": torch.float64, "float32": torch.float32}
# Number of processes -> pairs of the batch size per process and the number of accumulation steps.
SPLITS = {1: ((8, 1), (1, 8)), 2: ((4, 1), (2, 2)), 4: ((2, 1),)}
AUGMENTED_SAVE_STEP = 8  # Step in the middle of the second epoch; an epoch has 5 steps
EVAL_BATCHES = {1: (NUM_TEST, 5), 2: (5, 8), 4: (5,)}
DIGITS_CONFIG = encoder_shape(16, 2, 16)


COUNTING = hf_vit.HfViTForObjectDetection | hf_vit.HfViTForKeypointDetection | hf_vit.HfViTForImageTextToText
JOBS: dict[str, Callable[..., None]] = {}


def job(work: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function as a job for the command line. Each process writes the return value to a file."""

    def run(folder: Path, *arguments: str) -> None:
        results = work(folder, *arguments)
        if results is not None:
            torch.save(results, folder / f"process_{torch.distributed.get_rank()}.pt")
            torch.distributed.destroy_process_group()

    JOBS[work.__name__] = run
    return work


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set the default dtype, which also applies to the tensor in which the Trainer accumulates losses."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def flatten(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


class GradientRecorder(TrainerCallback):
    """Callback that records the gradients of each optimizer step."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []

    def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        self.gradients.append(flatten([parameter.grad for parameter in model.parameters()]))


def build(model_class: type[HfViTPreTrainedModel], config: hf_vit.HfViTConfig) -> HfViTPreTrainedModel:
    """Return a model with fixed nonzero weights. The zero weights of new heads would block gradients."""
    model = model_class(config)
    draw_weights(model)
    return model


def training_arguments(
    folder: Path, arguments_class: type[TrainingArguments] = TrainingArguments, **options: Any
) -> TrainingArguments:
    defaults = {"remove_unused_columns": False, "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
    return arguments_class(str(folder), use_cpu=True, **{**defaults, **options})


def logged(trainer: HfViTTrainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def splits(name: str, processes: int) -> list[tuple[int, int]]:
    """Return ways to split a batch, as in `SPLITS`. For several processes, return only the finest split."""
    own = [split for split in SPLITS[processes] if split[1] == 1 or TRAINING_CASES[name].accumulates]
    return own if processes == 1 else own[-1:]


def collate(examples: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate examples: tensors are stacked, and dictionaries are collected in a list."""
    batch = {key: [example[key] for example in examples] for key in examples[0]}
    return {key: values if isinstance(values[0], dict) else torch.stack(values) for key, values in batch.items()}


def model_and_batch(name: str, num_images: int) -> tuple[HfViTPreTrainedModel, dict[str, Any]]:
    """Return the model of a training case, and a batch of `num_images` images."""
    case = TRAINING_CASES[name]
    config = small_config(**case.overrides)
    return build(case.model_class, config), case.make_batch(config, num_images)


def examples_of(batch: dict[str, Any]) -> list[dict[str, Any]]:
    return [{key: value[i] for key, value in batch.items()} for i in range(len(batch["pixel_values"]))]


def backward_of_parts(name: str, size: int, counts_all: bool = False) -> dict[str, Tensor]:
    """Split the batch of a training case into parts. Return the mean loss of the parts and its gradient.

    If `counts_all`, losses of models that support it are normalized by the item count of the whole batch, and summed.
    """
    with default_dtype(torch.float64):
        model, batch = model_and_batch(name, 2 * GLOBAL_BATCH)
        starts = range(0, GLOBAL_BATCH, size)
        parts = [{key: value[start : start + size] for key, value in batch.items()} for start in starts]
        model.train()
        if counts_all and isinstance(model, COUNTING):
            count = model.count_items(batch["labels"][:GLOBAL_BATCH])
            loss = torch.stack([model(**part, num_items_in_batch=count).loss for part in parts]).sum()
        else:
            loss = torch.stack([model(**part).loss for part in parts]).mean()
        loss.backward()
        gradients = flatten([parameter.grad for parameter in model.parameters()])
    return {"losses": loss.detach()[None], "gradients": gradients[None]}


def loss_of_evaluation(folder: Path, name: str, trainer: str) -> tuple[float, float]:
    """Return the evaluation loss that one of `TRAINERS` reports, and the loss that the model returns."""
    with default_dtype(torch.float64):
        model, batch = model_and_batch(name, GLOBAL_BATCH)
        evaluating = TRAINERS[trainer](
            model=model,
            args=training_arguments(folder, per_device_eval_batch_size=GLOBAL_BATCH, prediction_loss_only=True),
            eval_dataset=examples_of(batch),
            data_collator=collate,
        )
        found = evaluating.evaluate()["eval_loss"]
        with torch.no_grad():
            return found, float(model.eval()(**batch).loss)


def train_case(
    folder: Path,
    name: str,
    dtype: str,
    batch_size: int,
    accumulate: int,
    num_images: int = 2 * GLOBAL_BATCH,
    kind: str | None = None,
    trainer_class: type[Trainer] = HfViTTrainer,
    **options: Any,
) -> dict[str, Any]:
    """Train a training case with SGD for one epoch (two steps by default). Return the losses, gradients and weights.

    Images are not shuffled. If a `kind` of distillation is given, the model also learns from a teacher.
    """
    recorder = GradientRecorder()
    with default_dtype(DTYPES[dtype]):
        model, batch = model_and_batch(name, num_images)
        sgd = {"optim": "sgd", "learning_rate": 0.1, "per_device_train_batch_size": batch_size}
        sgd |= {"gradient_accumulation_steps": accumulate, "train_sampling_strategy": "sequential"}
        teaching = {} if kind is None else {"distillation": small_distillation(kind, model)}
        trainer = trainer_class(
            model=model,
            **teaching,
            args=training_arguments(folder, **sgd, max_grad_norm=0.0, num_train_epochs=1, **options),
            train_dataset=examples_of(batch),
            data_collator=collate,
            callbacks=[recorder],
        )
        trainer.train()
    return {
        "world_size": trainer.args.world_size,
        "losses": torch.tensor(logged(trainer, "loss"), dtype=torch.float64),
        "parts": {part: logged(trainer, part) for part in TEACHER_LOSSES},
        "gradients": torch.stack(recorder.gradients),
        "weights": flatten(list(trainer.model.parameters())),
        "buffers": flatten([torch.zeros(1), *trainer.model.buffers()]),
    }


def loss_and_accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Compute the loss and accuracy over all images. The loss of the Trainer would be a mean over batches."""
    logits, labels = torch.from_numpy(prediction.predictions).double(), torch.from_numpy(prediction.label_ids)
    return {
        "loss": float(classification_loss(logits, labels, None)),
        "accuracy": float((logits.argmax(dim=1) == labels).double().mean()),
    }


def digits_trainer(
    folder: Path,
    trainer_class: type[HfViTTrainer] = HfViTTrainer,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> HfViTTrainer:
    """Return the Trainer of a small model with fixed weights on a few augmented digits."""
    digits = load_digits()
    model_config = hf_vit.HfViTConfig.from_preset("mnist", **{**DIGITS_CONFIG, **(config or {})})
    image_processor = hf_vit.HfViTImageProcessor.for_model(model_config)
    return trainer_class(
        model=build(hf_vit.HfViTForImageClassification, model_config),
        args=training_arguments(folder, num_train_epochs=3, **options),
        train_dataset=AugmentedDataset(digits["train"].select(range(NUM_TRAIN)), small_affine(), seed=0),
        eval_dataset=digits["test"].select(range(NUM_TEST)),
        data_collator=ImageClassificationCollator(image_processor),
        compute_metrics=loss_and_accuracy,
    )


def metrics(trainer: HfViTTrainer) -> dict[str, float]:
    scores = trainer.evaluate()
    return {name: scores[name] for name in ("eval_loss", "eval_accuracy")}


def train_augmented(folder: Path, batch_size: int, checkpoint: str | None = None, **options: Any) -> dict[str, Any]:
    """Train on augmented digits, optionally from a checkpoint; return the losses, weights and metrics."""
    trainer = digits_trainer(
        folder,
        optim="sgd",
        learning_rate=0.1,
        per_device_train_batch_size=batch_size,
        dataloader_drop_last=True,
        save_strategy="steps",
        save_steps=AUGMENTED_SAVE_STEP,
        **options,
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    return {
        "losses": torch.tensor(logged(trainer, "loss")),
        "weights": flatten(list(trainer.model.parameters())),
        "metrics": metrics(trainer),
    }


def storing(**kwargs: Any) -> HfViTTrainer:
    """Return a Trainer that stores frozen features in the output folder."""
    trainer = HfViTTrainer(**kwargs)
    if trainer.options.cached_views:
        trainer.open_features(folder=Path(trainer.args.output_dir) / "features")
    return trainer


class OfSavedModel(HfViTTrainer):
    """Trainer that saves the model configuration first, because adapters refer to a saved base model."""

    def __init__(self, model: hf_vit.HfViTForImageClassification, **kwargs: Any) -> None:
        base = f"{kwargs['args'].output_dir}-base"
        model.config.save_pretrained(base)  # otherwise, PEFT searches for the base model on the Hub
        model.config._name_or_path = base
        torch.manual_seed(0)  # adapter weights are initialized randomly
        super().__init__(model=model, **kwargs)


def train_adapter(folder: Path, batch_size: int) -> dict[str, Any]:
    options = {"arguments_class": HfViTTrainingArguments, "warmup_steps": 0, "eval_strategy": "no", "lora_rank": 2}
    return train_augmented(folder, batch_size, trainer_class=OfSavedModel, **options)


def evaluate(folder: Path, batch_size: int) -> dict[str, float]:
    """Return the metrics of a model with fixed weights. In float64, they do not depend on the batch size."""
    with default_dtype(torch.float64):
        trainer = digits_trainer(folder, per_device_eval_batch_size=batch_size)
        collate = trainer.data_collator
        trainer.data_collator = lambda examples: {
            key: value.double() if value.is_floating_point() else value for key, value in collate(examples).items()
        }
        return metrics(trainer)


def draw_size(batch: dict[str, Any], progress: float) -> dict[str, Any]:
    """Resize a batch to a random size, as a batch transform."""
    side = (16, 28, 36)[int(torch.randint(3, ()))]
    return resize_batch(batch, (side, side))


class AtManySizes(HfViTTrainer):
    """Trainer that draws a random image size for every batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, batch_transforms=[draw_size], **kwargs)


def averaging_trainer(folder: Path, trainer_class: type[HfViTTrainer] = HfViTTrainer, **options: Any) -> HfViTTrainer:
    """Return a Trainer that averages weights. Its learning rate is large, so that average and weights differ."""
    defaults = {"ema_decay": EMA_DECAY, "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    defaults |= {"warmup_steps": 0, "per_device_train_batch_size": GLOBAL_BATCH, "eval_strategy": "no"}
    options = {**defaults, "report_to": "none", **options}
    return digits_trainer(folder, trainer_class, arguments_class=HfViTTrainingArguments, **options)


def averages(trainer: HfViTTrainer) -> dict[str, Tensor]:
    return {
        "weights": flatten(list(trainer.model.parameters())),
        "average": flatten(list(trainer.average.averages.values())),
    }


def average_and_die(folder: Path) -> None:
    """Train with averaged weights twice: the first run is killed and resumed in another process, the second is not."""
    options = {"save_strategy": "steps", "save_steps": SAVE_STEPS, "max_steps": KILL_STEP + 2}
    status = in_a_fork(lambda: averaging_trainer(folder / "killed", KilledInEpoch, **options).train())
    results = {"killed_by": os.WTERMSIG(status), "checkpoint": last_checkpoint(folder / "killed")}
    for name, checkpoint in ("killed", results["checkpoint"]), ("whole", None):
        trainer = averaging_trainer(folder / name, **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        results[name] = averages(trainer)
    torch.save(results, folder / "alone.pt")


def in_a_fork(work: Callable[[], Any]) -> int:
    """Run a function in a forked process, which need not import libraries again. Return the exit status."""
    if child := os.fork():
        return os.waitpid(child, 0)[1]
    work()
    os._exit(0)


@job
def average_on_processes(folder: Path) -> dict[str, Any]:
    """Train with averaged weights in one process, and in two processes with DDP and with FSDP2."""
    if os.environ["RANK"] == "0":
        launched = {name: os.environ.pop(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        assert in_a_fork(lambda: average_and_die(folder)) == 0
        os.environ.update(launched)
    trainer = averaging_trainer(folder, per_device_train_batch_size=GLOBAL_BATCH // 2, max_steps=EMA_STEPS)
    trainer.train()
    results = {"ddp": averages(trainer), "metrics": trainer.evaluate(), "fsdp": average_shards(folder)}
    return {**results, "muon": train_shards_with_muon()}


class SlowSecondProcess(HfViTTrainer):
    """Trainer in which the second process saves its random state slowly. The first process checks that it is saved."""

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.process_index == 1:
            time.sleep(1)
        super()._save_rng_state(output_dir)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.process_index == 0:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            assert sorted(path.name for path in folder.glob("rng_state*")) == ["rng_state_0.pth", "rng_state_1.pth"]


def train_twice(folder: Path) -> dict[str, Any]:
    """Train on augmented digits from the start and from a checkpoint, with persistent worker processes."""
    options = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    checkpoint = str(folder / f"checkpoint-{AUGMENTED_SAVE_STEP}")
    return {
        "augmented": train_augmented(folder, GLOBAL_BATCH // 2, **options),
        "resumed": train_augmented(folder, GLOBAL_BATCH // 2, checkpoint, **options),
    }


def train_cases(folder: Path, processes: int, cases: tuple[str, ...]) -> dict[tuple[str, str], Any]:
    """Train `cases` (name=dtype) of `TRAINING_CASES` in several processes, with the finest split of the batch."""
    assert training_arguments(folder).world_size == torch.distributed.get_world_size() == processes
    pairs = [tuple(case.split("=")) for case in cases]
    return {(name, dtype): train_case(folder, name, dtype, *splits(name, processes)[-1]) for name, dtype in pairs}


@job
def compare_processes(folder: Path, *cases: str) -> dict[str, Any]:
    """Run training in two processes. The results must match those of one process."""
    half, unwarned = GLOBAL_BATCH // 2, {"ddp_find_unused_parameters": False}
    stored = {"trainer_class": storing, "arguments_class": HfViTTrainingArguments, "trainable_blocks": 0}
    results = {
        "gradients": train_cases(folder, 2, cases),
        "transformers": {
            name: train_case(folder, name, "float64", half, 1, max_steps=1, **unwarned, trainer_class=Trainer)
            for name in TRAINING_CASES
        },
        **train_twice(folder),
        "regularized": train_regularized(folder, half),
        "many_sizes": train_augmented(folder / "many_sizes", half, trainer_class=AtManySizes),
        "adapter": train_adapter(folder / "adapter", half),
        "stored": train_augmented(folder / "stored", half, **stored, cached_views=3),
        "metrics": {batch_size: evaluate(folder, batch_size) for batch_size in EVAL_BATCHES[2]},
    }
    digits_trainer(folder, SlowSecondProcess, max_steps=1, save_strategy="steps", save_steps=1).train()
    return results


@job
def compare_four_processes(folder: Path, *cases: str) -> dict[str, Any]:
    gradients = train_cases(folder, 4, cases)
    return {"gradients": gradients, "metrics": {size: evaluate(folder, size) for size in EVAL_BATCHES[4]}}


@job
def compare_distillation(folder: Path) -> dict[tuple[str, str, tuple[int, int]], Any]:
    """Run all training cases with distillation in two processes."""
    assert training_arguments(folder).world_size == 2
    return {
        (name, kind, split): train_case(folder, name, "float64", *split, kind=kind)
        for name, kind in DISTILLED_CASES
        for split in SPLITS[2]
    }


@job
def compare_shares(_: Path) -> dict[Any, Any]:
    """Compute contrastive losses of image-text pairs that are split between two processes."""
    torch.distributed.init_process_group("gloo")
    return contrastive.losses_per_distribution()


@job
def score_predictions(folder: Path, kind: str) -> None:
    """Compute metrics of random predictions in two processes. Each process writes its scores."""
    metrics = {"dense": dense.METRICS, "objects": objects.METRICS}[kind]
    scores = dense.scores_of_processes(metrics, batch_size=2)
    assert torch.distributed.get_world_size() == 2
    (folder / f"process_{torch.distributed.get_rank()}.json").write_text(json.dumps(scores))
    torch.distributed.destroy_process_group()


@job
def score_tasks(folder: Path, trained: str, *data: str) -> None:
    """Evaluate a model of each task in `data` (task=path) in two processes, and train one on the task `trained`.

    Each process writes its scores to a file.
    """
    assert training_arguments(folder).world_size == 2
    places = {task: Path(path) for task, path in (item.split("=") for item in data)}
    scores = scores_at_all_batch_sizes(places, folder)
    (folder / f"process_{torch.distributed.get_rank()}.json").write_text(json.dumps(scores))
    run_task(trained, places[trained], folder / "trained", *A_FEW_STEPS, "--per_device_train_batch_size", "2")


@job
def pretrain(folder: Path, data: str) -> dict[str, Any]:
    results = train_all_ways(Path(data), folder, batch_size=4)
    assert torch.distributed.get_world_size() == 2
    return results


@job
def train_pairs(folder: Path, data: str) -> dict[str, Any]:
    results = train_as_one(Path(data), folder, batch_size=4)
    assert torch.distributed.get_world_size() == 2
    return results


# Training runs that are killed and resumed have epochs of 6 steps and use all kinds of dropout.
SAVE_STEPS, KILL_STEP = 4, 10
RESUMABLE_CONFIG = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "drop_path_rate": 0.2}


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class KilledInEpoch(HfViTTrainer):
    """Trainer that is killed in the middle of its second epoch, after its last checkpoint."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.state.global_step == KILL_STEP:
            kill_this_process()
        return super().training_step(*args, **kwargs)


class KilledWhileSaving(HfViTTrainer):
    """Trainer that is killed while writing its second checkpoint."""

    def _save_rng_state(self, output_dir: str) -> None:
        if self.state.global_step == 2 * SAVE_STEPS:
            kill_this_process()
        super()._save_rng_state(output_dir)


KILLED = {"in_epoch": KilledInEpoch, "while_saving": KilledWhileSaving}


def resumable_trainer(folder: Path, workers: int, trainer_class: type[HfViTTrainer] = HfViTTrainer) -> HfViTTrainer:
    return digits_trainer(
        folder,
        trainer_class,
        RESUMABLE_CONFIG,
        per_device_train_batch_size=GLOBAL_BATCH,
        learning_rate=1e-3,
        eval_strategy="epoch",
        save_strategy="steps",
        save_steps=SAVE_STEPS,
        dataloader_num_workers=workers,
        dataloader_persistent_workers=workers > 0,
    )


@job
def train_and_die(folder: Path, how: str, workers: str) -> None:
    resumable_trainer(folder, int(workers), KILLED[how]).train()


@job
def train_to_the_end(folder: Path, *workers: str) -> None:
    """For each argument name=number, train in the subfolder `name` with `number` data loader workers.

    Training resumes from the last checkpoint in the subfolder if there is one.
    """
    for name, number in (item.split("=") for item in workers):
        trainer = resumable_trainer(folder / name, int(number))
        checkpoint = last_checkpoint(folder / name)
        trainer.train(resume_from_checkpoint=checkpoint)
        result = {
            "checkpoint": checkpoint and Path(checkpoint).name,
            "weights": trainer.model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "scheduler": trainer.lr_scheduler.state_dict(),
            "losses": logged(trainer, "loss"),
            "eval_losses": logged(trainer, "eval_loss"),
        }
        torch.save(result, folder / f"{name}.pt")


STOP_STEP = 4  # A step in the second epoch: with two processes, an epoch has 3 steps


class SignaledProcess(HfViTTrainer):
    """Trainer that sends SIGTERM to the last process in the middle of the second epoch."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.state.global_step == STOP_STEP and self.args.process_index == self.args.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(*args, **kwargs)


class SpoiledProcess(HfViTTrainer):
    """Trainer that replaces the images of the last process with NaN in the second epoch."""

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        if self.state.global_step == STOP_STEP and self.args.process_index == self.args.world_size - 1:
            inputs["pixel_values"] = inputs["pixel_values"] * float("nan")
        return super().training_step(model, inputs, *args, **kwargs)


@job
def stop_one_of_two(folder: Path) -> None:
    """Train in two processes, one of which stops or fails. Then start a long training run."""
    results: dict[str, Any] = {}
    for name, trainer_class in (("stopped", SignaledProcess), ("spoiled", SpoiledProcess)):
        try:
            resumable_trainer(folder / name, 0, trainer_class).train()
        except (Preempted, NotFiniteError) as stop:
            results[name] = str(stop)
    for name in ("whole", "stopped"):
        trainer = resumable_trainer(folder / name, 0)
        trainer.train(resume_from_checkpoint=last_checkpoint(folder / name))
        results[f"{name}_losses"] = logged(trainer, "loss")
        results[f"{name}_weights"] = trainer.model.state_dict()
    torch.save(results, folder / f"process_{training_arguments(folder).process_index}.pt")
    digits_trainer(folder / "long", max_steps=10**6, save_strategy="steps", save_steps=2, save_total_limit=1).train()


if __name__ == "__main__":
    JOBS[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
