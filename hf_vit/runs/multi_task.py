"""Run of several tasks: a list of specifications and one trainer."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from ..data.augmentation.multi_task import MultiTaskDataset
from ..model.task_multi_task import HfViTForMultiTask
from ..options.library import conflicting_options, options_of
from ..options.training_arguments import check_training
from ..tasks.common.defaults import PROBED_RATE, TUNED_RATE
from ..tasks.common.defaults import choose as choose_hyperparameters
from ..tasks.common.models import without_load_report
from ..tasks.multi_task import MultiTask, MultiTaskData
from ..training.multi_task import LossWeights, MultiTaskCollator, MultiTaskTrainer
from .build import Run, build_trainer, open_task, start
from .plan.gather import gather_facts


def open_heads(run: Run) -> Run:
    """Open and check the data of all heads. Raises the errors of `open_task`."""
    task, heads = run.task, dict[str, Run]()
    assert isinstance(task, MultiTask)
    for name, head in task.make_heads(run.args).items():
        task.check_saved_head(name)
        heads[name] = open_task(Run(head, task.arguments_of_head(name, run.args)))
    notes = [f"{name}: {note}" for name, head in heads.items() for note in head.notes]
    data = MultiTaskData.join({name: head.data for name, head in heads.items()})
    return replace(run, data=data, notes=notes, heads=heads)


def build_heads(run: Run) -> Run:
    """Open the model with several heads, and return the run with its trainer. Raises the errors of `build_task`."""
    task, args, opened = run.task, run.args, dict[str, tuple[Any, Any]]()
    assert isinstance(task, MultiTask)
    heads = {}
    for name, part in task.make_heads(args, choose_options(run)).items():
        head = replace(run.heads[name], task=part, args=task.arguments_of_head(name, args))
        with without_load_report(hides_warnings=False) if opened else nullcontext():
            model, processor = part.open_model(head.data, head.args)
        head.args.trainable_blocks = None  # `MultiTaskTrainer` freezes blocks
        heads[name] = start(head, model, processor)
        if opened:  # the backbones of new models have different weights
            model.model.load_state_dict(next(iter(opened.values()))[0].model.state_dict(), strict=False)
        opened[name] = model, processor
    models, processors = ({name: pair[index] for name, pair in opened.items()} for index in (0, 1))
    learns = task.options.loss_weighting == "uncertainty"
    combined = HfViTForMultiTask.combine(next(iter(models.values())), models, processors, learns)
    heads = {name: build_trainer(head, combined.heads[name], processors[name]) for name, head in heads.items()}
    trainer = build_multi_task_trainer(replace(run, heads=heads), combined)
    return replace(run, trainer=trainer, heads=heads)


def build_multi_task_trainer(run: Run, model: HfViTForMultiTask) -> MultiTaskTrainer:
    """Return the trainer of a model with several heads, given a run whose heads have trainers that evaluate them."""
    options, trainers = run.task.options, {name: head.trainer for name, head in run.heads.items()}
    for name, trainer in trainers.items():
        if trainer.batch_transforms.transforms or trainer.compute_loss_func is not None:
            raise ValueError(f"tasks: {name} has an option that changes batches or losses. Remove it.")
    first = trainers[min(trainers)]
    callbacks = check_training(run.args, run.data.num_train, first.eval_dataset is not None, {"loss"})
    for name, head in run.heads.items():
        own = head.task.trainer_arguments(model.heads[name], trainers[name].processing_class, head.data, head.args)
        callbacks += own.get("callbacks", [])
    return MultiTaskTrainer(
        model=model,
        args=run.args,
        train_dataset=MultiTaskDataset(
            dataset=[],
            transform=dict,
            seed=run.args.seed,
            parts={name: trainer.train_dataset for name, trainer in trainers.items()},
            shares={name: float(options.heads[name]["share"]) for name in trainers},
        ),
        eval_dataset=first.eval_dataset,
        data_collator=MultiTaskCollator({name: trainer.data_collator for name, trainer in trainers.items()}),
        processing_class=first.processing_class,
        callbacks=callbacks,
        weights=LossWeights(
            {name: float(options.heads[name]["weight"]) for name in trainers}, options.loss_weighting == "scaled"
        ),
        parts=trainers,
        lr_factors=find_lr_factors(run),
    )


def find_lr_factors(run: Run) -> dict[str, float]:
    """Return learning rate factors by prefix of parameter names."""
    factors = {
        f"heads.{name}.": PROBED_RATE / TUNED_RATE for name, head in run.heads.items() if head.probe is not None
    }
    if run.task.options.model_name_or_path is not None:
        # The steps of all heads together move a trained backbone about as far as the steps of one model.
        factors["model."] = 1 / len(run.heads)
    return factors


def choose_options(run: Run) -> dict[str, dict[str, Any]]:
    """Choose the options of each head that the user did not give, with the defaults of its task."""
    task, args = run.task, run.args
    if args.choose_defaults is False:
        return {}
    chosen, total = {}, sum(head["share"] for head in task.options.heads.values())
    for name, part in run.heads.items():
        head, options = task.options.heads[name], part.task.options
        overrides, config = options.overrides(), options.config_overrides or {}
        nested = [key for value in overrides.values() if isinstance(value, dict) for key in value]
        steps = max(1, round(args.max_steps * head["share"] / total)) if args.max_steps > 0 else None
        facts, given = gather_facts(part.task, part.args, part.data), {*head, *overrides, *nested}
        table = part.task.find_defaults(part.args)
        found = choose_hyperparameters(table, facts, given, config, steps=steps, batch=args.images_per_step)
        config = found.pop("config_overrides", {})
        nested_options = {key: value for key, value in config.items() if isinstance(value, dict)}
        kind = type(options)
        allowed = options_of(kind).keys() - conflicting_options("cached_views", kind) - head.keys()
        chosen[name] = {key: value for key, value in found.items() if key in allowed}
        chosen[name]["config_overrides"] = {**(head.get("config_overrides") or {}), **nested_options}
    return chosen
