"""Plan a training run: once the data is loaded, choose and report the options that the user did not give."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import psutil
from transformers.utils import logging

from ...model.configuration_hf_vit import PRESETS
from ...options.library import conflicting_options, options_of
from ...options.recipe import savable_values
from ...options.training_arguments import HfViTTrainingArguments
from ...processes import on_first_process
from ...tasks.base import Task
from ...tasks.common.defaults import (
    TOO_FEW_STEPS,
    Options,
    Size,
    choose,
    choose_batch,
    choose_steps,
    is_settled,
    needed_steps,
)
from ...tasks.common.facts import Facts
from ...tasks.common.load_data import chooses_step
from ...training.callbacks.progress import LEAST_STEPS
from ...training.checkpoints import read_conditions
from ...training.finetuning.probe import MOST_IMAGES
from ..build import Run
from ..choose import count_choosing_images
from .budget import STORING_GAIN, TIMING_SHARE, Budget, Candidate, Pace, measure_pace
from .gather import find_start, gather_facts


logger = logging.get_logger(__name__)
DEFAULT_MINUTES = 10.0
FRESH_SECONDS = 60.0  # a process older than this, in seconds, was not started for this run
# Options of runs that are not planned: runs with a recipe, and runs resumed from checkpoints without chosen options
UNPLANNED: Options = {"train_val_split": 0.1}
PLANNING = {"minutes", "choose_defaults"}
LENGTHS = {"max_steps", "num_train_epochs"}
# If the user gives one of these options, which set the trained parts, features are not stored by default.
FROZEN_BY = {"trainable_blocks", "freeze", "lora_rank", "use_muon", "cached_views"}
# Environment variables that launchers set, and the equivalent options
LAUNCHED = {"ACCELERATE_USE_DEEPSPEED": "deepspeed", "ACCELERATE_USE_FSDP": "fsdp"}


class Planner:
    """Plan one training run.

    Args:
        task: Specification with the given options.
        args: Training arguments.
        given: Given options by name, including those of a recipe.
        report: Function that prints the chosen options.
        has_recipe: Whether a recipe is given.

    Raises:
        ValueError: If a time budget is given together with a number of steps or epochs.
    """

    def __init__(
        self,
        task: Task,
        args: HfViTTrainingArguments,
        given: Mapping[str, Any],
        report: Callable[[str], None],
        has_recipe: bool = False,
    ) -> None:
        self.started = time.monotonic() - import_seconds()
        self.budget: tuple[Budget, Pace] | None = None  # options that are set once the run is planned
        self.task, self.args, self.options, self.report, self.has_recipe = task, args, given, report, has_recipe
        overrides = task.options.overrides()
        nested = [name for value in overrides.values() if isinstance(value, dict) for name in value]
        launched = [option for variable, option in LAUNCHED.items() if os.environ.get(variable) == "true"]
        self.given = {*given, *overrides, *nested, *launched, *PRESETS.get(task.options.preset or "", ())}
        # Options that change images in each step, so that features cannot be stored
        self.unstored = conflicting_options("cached_views", *task.argument_types())
        self.overrides: Options = task.options.config_overrides or {}
        if args.minutes is not None and (lengths := sorted(LENGTHS & self.given)):
            raise ValueError(
                f"--minutes {args.minutes:g} determines the number of steps, so --{lengths[0]} "
                f"{given.get(lengths[0])} cannot be given as well. Remove one of the two options."
            )

    @property
    def is_planned(self) -> bool:
        """Whether options are chosen automatically."""
        args = self.args
        if args.choose_defaults is not None or args.minutes is not None:
            return bool(args.choose_defaults is not False)
        return not self.has_recipe

    def start(self, checkpoint: str | None) -> Options:
        """Return the options chosen before the data is loaded; for a resumed run, those of its checkpoint."""
        if checkpoint is not None:
            chosen: Options = read_conditions(checkpoint).get("chosen", UNPLANNED)
            return chosen
        if not self.is_planned:
            return UNPLANNED
        can_probe = self.task.defaults.probes and "probe_classifier" not in self.given
        return {"probe_classifier": True} if can_probe and find_start(self.task)[0] == "backbone" else {}

    def plan(self, run: Run) -> Options:
        """Choose the options that the user did not give, given the data of a run, and report them."""
        if not self.is_planned:
            return UNPLANNED
        task, args, data = run.task, run.args, run.data
        facts = on_first_process(args, lambda: gather_facts(task, args, data))
        batch = self.known_batch(task, args, facts)
        held_out = {name: vars(data.division)[name] for name in ("train_val_split", "validation_as_test")}
        minutes = self.minutes(facts)
        if minutes is None:
            sizes = self.sizes(task, facts)
            size = sizes[-1 if facts.has_gpu else min(1, len(sizes) - 1)]
            chosen = self.choose(task, args, facts, size=size, steps=self.known_steps(task, facts, batch), batch=batch)
        else:
            chosen = self.fit(run, facts, minutes, batch)
        chosen |= {name: value for name, value in held_out.items() if name not in self.given and value is not None}
        self.report(describe_choice(task, chosen))
        return chosen

    def choose(self, task: Task, args: HfViTTrainingArguments, facts: Facts, **known: Any) -> Options:
        """Return the chosen options. `known` contains values that are already fixed, such as size, steps or batch."""
        chosen = choose(task.find_defaults(args), facts, self.given, self.overrides, **known)
        changing = self.unstored if known.get("views") else ()
        return {name: value for name, value in chosen.items() if name not in changing}

    def minutes(self, facts: Facts) -> float | None:
        """Return the time budget in minutes, None without a budget."""
        if self.args.minutes is not None:
            return self.args.minutes
        is_open = not LENGTHS & self.given
        return DEFAULT_MINUTES if is_open and not facts.has_gpu and facts.num_images is not None else None

    def sizes(self, task: Task, facts: Facts) -> Sequence[Size | None]:
        """Return the candidate sizes of model and images in ascending order; None stands for the given size."""
        has_preset = task.options.preset is not None
        return [None] if has_preset else task.defaults.sizes(facts, task.options.overrides())

    def known_batch(self, task: Task, args: HfViTTrainingArguments, facts: Facts) -> int:
        """Return the number of images per step on all processes."""
        accumulated = args.gradient_accumulation_steps
        if "per_device_train_batch_size" in self.given:
            return args.train_batch_size * accumulated * facts.num_processes
        return choose_batch(task.defaults, facts) * accumulated

    def known_steps(self, task: Task, facts: Facts, batch: int) -> int:
        """Return the number of steps of a run without a time budget."""
        if "max_steps" in self.given and self.args.max_steps > 0:
            return self.args.max_steps
        if "num_train_epochs" in self.given and facts.num_images is not None:
            return max(1, math.ceil(self.args.num_train_epochs * (facts.num_images // batch or 1)))
        return choose_steps(task.defaults, facts)

    def seconds(self) -> float:
        """Return the elapsed seconds of the first process."""
        return on_first_process(self.args, lambda: time.monotonic() - self.started)

    def fit(self, run: Run, facts: Facts, minutes: float, batch: int) -> Options:
        """Return the options that fit into a time budget, and report them."""
        task, args, data = run.task, run.args, run.data
        table = task.find_defaults(args)
        num_validated = data.count_evaluated("validation") if facts.has_validation else 0
        passes = task.report_passes + (args.ema_decay is not None)
        needed = needed_steps(table, facts)
        num_chosen = count_choosing_images(run, needed * batch)
        num_scored = round(passes * facts.num_scored) + num_chosen
        trained, most_bytes = facts.num_images or 0, 10**9 * args.cache_gigabytes
        num_probed = min(MOST_IMAGES, trained) if facts.start == "backbone" and table.probes else 0
        of_data = num_scored, num_validated, num_probed, self.seconds, trained, batch, most_bytes
        budget = Budget(60 * minutes, *of_data)
        seconds = TIMING_SHARE * budget.seconds / 4

        frozen, kept = dict[str, Any](), table.stores  # `kept`: number of last blocks that are trained, None for all
        unstored = self.unstored | FROZEN_BY - ({"trainable_blocks"} if args.trainable_blocks == kept else set())
        can_store = facts.start == "backbone" and not facts.has_gpu and trained and unstored.isdisjoint(self.given)
        # Number of stored views of each image in timing runs
        views = int(bool(can_store) and kept is not None and kept < (facts.num_layers or 0))

        def measure(size: Size | None) -> Pace:
            trial = self.choose(task, args, facts, size=size, steps=needed, batch=batch, views=views) | frozen
            return measure_pace(replace(run, **self.with_chosen(trial)), seconds)

        sizes, paces = self.sizes(task, facts), dict[Size | None, Pace]()
        # On a CPU, time both bfloat16 and float32, because bfloat16 may be slower.
        if facts.has_bf16 and not facts.has_gpu and not is_settled("bf16", self.given):
            in_bf16 = measure(sizes[0])
            facts = replace(facts, has_bf16=False)
            in_float32 = measure(sizes[0])
            paces[sizes[0]] = max(in_bf16, in_float32, key=lambda pace: budget.plan(sizes[0], pace).steps)
            facts = replace(facts, has_bf16=paces[sizes[0]] is in_bf16)
        choice = budget.choose(sizes, needed, lambda size: paces.get(size) or measure(size))
        if views and not choice.views:  # features are not stored if there are too many images
            views, paces = 0, {}
            choice = budget.choose(sizes, needed, measure)
        if choice.views and table.probes:
            views = 0
            whole = budget.plan(choice.size, measure(choice.size))
            choice = choice if choice.steps >= STORING_GAIN * whole.steps else whole
        starts_as_probe, least = facts.start == "backbone" and table.probes, LEAST_STEPS
        if choice.steps < LEAST_STEPS and starts_as_probe and not is_settled("trainable_blocks", self.given):
            frozen, least = {"trainable_blocks": 0}, 1  # train only the head, which is initialized as a linear probe
            choice = budget.choose(sizes[:1], LEAST_STEPS, measure)
            choice = choice._replace(steps=min(choice.steps, LEAST_STEPS))
        if choice.steps < least:
            raise ValueError(
                f"--minutes {minutes:g} is too short: {choice.steps} steps of {choice.pace.step:.3g} s fit, and at "
                f"least {least} are needed. Increase --minutes, reduce --image_size, or set --max_steps {LEAST_STEPS}."
            )
        evaluations = max(choice.evaluations, 2) if chooses_step(args) else choice.evaluations
        known = {"size": choice.size, "steps": choice.steps, "evaluations": evaluations, "views": choice.views}
        chosen = self.choose(task, args, facts, batch=batch, **known) | frozen
        self.report(describe_budget(minutes, choice, facts, batch, budget.seconds - budget.clock()))
        for sentence in describe_few_steps(task, choice.steps):
            logger.warning(sentence)
        self.budget = budget, choice.pace
        return chosen

    def with_chosen(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields `task` and `args` of a run with the given and the chosen options."""
        values = {**chosen, **self.options}
        if "config_overrides" in chosen:  # these chosen fields include those that the user gave
            values["config_overrides"] = chosen["config_overrides"]
        task, args = type(self.task).from_options(values)
        return {"task": task, "args": args}

    def recipe(self, chosen: Mapping[str, Any]) -> Options:
        """Return the recipe that repeats the run. It contains the given and the chosen options, but no time budget."""
        given = savable_values(self.options, self.task.argument_types())
        added = {name: value for name, value in chosen.items() if name not in given or name == "config_overrides"}
        return {**{name: value for name, value in given.items() if name not in PLANNING}, **added}


def import_seconds() -> float:
    """Return the age of this process in seconds, or 0 if the process was not started for this run."""
    age = time.time() - psutil.Process().create_time()
    return age if age <= FRESH_SECONDS else 0.0


def describe_choice(task: Task, chosen: Mapping[str, Any]) -> str:
    """Return the chosen options as text, one line per help group."""
    lines = ["Options chosen for this data and device. Each of them can be given; recipe.yaml contains all of them:"]
    groups: dict[str, list[str]] = {}
    for name, metadata in options_of(*task.argument_types()).items():
        if name in chosen:
            group = metadata["group"].partition(" (")[0]  # omit the class name in parentheses from the group name
            groups.setdefault(group, []).append(f"{name} {short_text(chosen[name])}")
    lines += [f"  {group}: {', '.join(options)}" for group, options in groups.items()]
    return "\n".join(lines)


def short_text(value: Any) -> str:
    """Return a short text for the value of an option."""
    return f"{value:.3g}" if isinstance(value, float) else json.dumps(value).replace('"', "")


def describe_budget(minutes: float, choice: Candidate, facts: Facts, batch: int, left: float) -> str:
    """Describe the planned run in three lines: size of model and images, steps, and end time."""
    size, pace = choice.size, choice.pace
    model = "as given"
    if size is not None:
        shape = "the saved model" if size.hidden_size is None else f"width {size.hidden_size}, depth {size.num_layers}"
        model = (
            f"{shape}; images of {size.image_size} pixels (most have "
            f"{facts.native_size}) in patches of {size.patch_size}"
        )
    if choice.views:
        model += f"; features of frozen blocks are stored for {choice.views} views of each image"
    epochs = facts.epochs_of(choice.steps, batch)
    end = datetime.now() + timedelta(seconds=left)
    return (
        f"Size: {model}.\n"
        f"Steps: {choice.steps:,} of {batch} images ({epochs:.3g} epochs), {pace.step:.3g} s each.\n"
        f"End: about {end:%H:%M:%S}, {minutes:g} min after the start, including evaluation and report."
    )


def describe_few_steps(task: Task, steps: int) -> list[str]:
    """Return a sentence if there are too few steps to train a model from scratch or a new head, else no sentence."""
    start, needed = find_start(task)[0], task.defaults.tuned_steps
    if start == "scratch" and steps < TOO_FEW_STEPS:
        return [
            f"{steps} steps are too few to train a model from scratch. Set --max_steps {task.defaults.steps} or "
            "--minutes 10, or start from a trained model with --model_name_or_path."
        ]
    # A head that starts as a linear probe needs few steps.
    if start == "backbone" and not task.defaults.probes and steps < needed / 2:
        return [f"{steps} steps are too few to train a new head. Set --max_steps {needed}, or increase --minutes."]
    return []
