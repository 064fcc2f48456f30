"""Report of a run of several tasks: one card, and a folder of scores and pictures for each head."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..tasks.common.card import describe_values
from ..visualize.plots import draw_curves
from .build import Run
from .model_card import TrainingInfo, write_model_card
from .report import CURVES, describe_training, report_run


JOINED = ("metrics", "units", "parts")  # fields of `TrainingInfo` with a value for each score or class
OF_HEADS = {"head", "loss", "input size", "augmentation", "score threshold", "evaluation"}  # rows of the card


def write_report_of_heads(run: Run, warnings: Sequence[str] = (), **facts: Any) -> dict[str, float]:
    """Evaluate all heads and write one card. The files of each head are in a folder with its name."""
    trainer, scores, infos = run.trainer, dict[str, float](), dict[str, TrainingInfo]()
    for name, head in run.heads.items():
        own, info = report_run(head, **facts)
        scores |= {f"{name} {score}": value for score, value in own.items()}
        scores["loss"] = scores.get("loss", 0.0) + run.task.options.heads[name]["weight"] * own["loss"]
        if info is not None:
            infos[name] = info
    if infos:
        folder = Path(trainer.args.output_dir)
        (curves,) = CURVES.values()
        draw_curves(trainer.state.log_history, folder / curves)
        failures = [f"{name}: {sentence}" for name, info in infos.items() for sentence in info.warnings]
        write_model_card(folder, join_cards(run, infos, warnings=[*failures, *warnings], **facts))
    return scores


def join(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of all heads, with names that start with the name of the head."""
    return {f"{name} {key}": value for name, own in values.items() for key, value in own.items()}


def join_cards(run: Run, infos: Mapping[str, TrainingInfo], **facts: Any) -> TrainingInfo:
    """Return the facts for the card of all heads, given those for the card of each head."""
    trainer = run.trainer
    purposes = (f"{name} ({head['task'].replace('-', ' ')})" for name, head in run.task.options.heads.items())
    shares = {name: f"{head['share']:g}" for name, head in run.task.options.heads.items()}
    weights = {name: f"{value:.3g}" for name, value in trainer.weights.weights.items()}
    baselines = {name: [*info.baselines.values()][-1] for name, info in infos.items()}
    data = [info.data for info in infos.values()]
    limits = [f"{name}: {info.limits} {info.calibration_note}".strip() for name, info in infos.items()]
    recipes = {
        name: {key: value for key, value in info.recipe.items() if key in OF_HEADS} for name, info in infos.items()
    }
    pictures = {
        f"{name}: {key}": f"{name}/{file}"
        for name, info in infos.items()
        for key, file in info.pictures.items()
        if key not in CURVES
    }
    return TrainingInfo.from_trainer(
        trainer,
        recipe={
            "shares of the steps": describe_values(shares),
            "learning rate of the backbone": f"x {trainer.lr_factors.get('model.', 1):.3g}",
            "loss weights": f"{run.task.options.loss_weighting}: {describe_values(weights)}",
            **join(recipes),
        },
        task=run.task.pipeline,
        purpose=f"several tasks: {', '.join(purposes)}",
        usage=run.task.usage,
        data=replace(
            data[0],
            name=", ".join(dict.fromkeys(own.name for own in data)),
            description=" ".join(f"{name}: {own.description}" for name, own in zip(infos, data, strict=True)),
            test=", ".join(f"{own.test} for {name}" for name, own in zip(infos, data, strict=True)),
        ),
        **{field: join({name: vars(info)[field] for name, info in infos.items()}) for field in JOINED},
        baselines={"baseline without images": join(baselines)},
        lower_is_better={f"{name} {score}" for name, info in infos.items() for score in info.lower_is_better},
        pictures=pictures | CURVES,
        limits=run.task.limits.format(heads=" ".join(limits)),
        **describe_training(trainer, data[0].split),
        **facts,
    )
