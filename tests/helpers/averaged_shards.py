"""Training runs with weights sharded over processes by FSDP2, and the same runs in a single process."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_vit import HfViTForImageClassification
from hf_vit.training import make_parameter_groups
from hf_vit.training.callbacks.ema import WeightAverage
from hf_vit.training.optimizer import Muon

from .models import TRAINING_CASES, small_config
from .references import draw_weights


EMA_DECAY = 0.4  # the decay reaches this value after a warm-up of five steps
EMA_STEPS = 7
MUON_STEPS = 3
BATCH = 8


def train_by_hand(
    model: HfViTForImageClassification, share: slice = slice(BATCH)
) -> tuple[WeightAverage, dict[str, Tensor]]:
    """Trains on a slice of each batch.

    Returns the averaged weights, and the logits computed with the model weights and with the averaged weights.
    """
    batch = TRAINING_CASES["class_numbers"].make_batch(model.config, BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = WeightAverage(model, EMA_DECAY)
    for step in range(1, EMA_STEPS + 1):
        model(**{name: values[share] for name, values in batch.items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update(step)
    said = {}
    model.eval()
    with torch.no_grad():
        said["raw"] = model(batch["pixel_values"]).logits
        with average.applied():
            said["averaged"] = model(batch["pixel_values"]).logits
        said["raw again"] = model(batch["pixel_values"]).logits
    return average, said


def train_with_muon(model: HfViTForImageClassification, share: slice = slice(BATCH)) -> Muon:
    """Trains with Muon on a slice of each batch. Muon computes in float64, because bfloat16 would hide differences."""
    batch = TRAINING_CASES["class_numbers"].make_batch(model.config, BATCH)
    batch["pixel_values"] = batch["pixel_values"].double()
    optimizer = Muon(make_parameter_groups(model, 0.1, 0.1, use_muon=True), lr=0.1, fused=True)
    for _ in range(MUON_STEPS):
        model(**{name: values[share] for name, values in batch.items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def small_model() -> HfViTForImageClassification:
    model = HfViTForImageClassification(small_config())
    draw_weights(model)
    return model


def spread(model: HfViTForImageClassification) -> slice:
    """Shards a model over all processes and returns the slice of each batch that this process trains on."""
    rank, processes = distributed.get_rank(), distributed.get_world_size()
    mesh = init_device_mesh("cpu", (processes,))
    for module in (*model.model.encoder.layers, model):
        fully_shard(module, mesh=mesh)
    size = BATCH // processes
    return slice(rank * size, (rank + 1) * size)


def train_shards_with_muon() -> dict[str, Tensor]:
    """Trains sharded weights with Muon on all processes. Returns the full weights in the first process."""
    model = small_model().double()
    train_with_muon(model, spread(model))
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def average_shards(folder: Path) -> dict[str, Any]:
    """Trains on all processes, and saves the weights with and without averaging. Returns logits and averaged weights.

    The averaged weights of this process are returned twice: after training, and after saving and loading them.
    """
    model = small_model()
    average, said = train_by_hand(model, spread(model))
    raw = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    averaged = dict(average.whole_weights())
    if distributed.get_rank() == 0:
        model.save_pretrained(folder / "raw", state_dict=raw)
        model.save_pretrained(folder / "averaged", state_dict=averaged)
    distributed.barrier()
    again = WeightAverage(model, EMA_DECAY)
    again.load(folder / "averaged")
    parts = [[part.to_local() for part in each.averages.values()] for each in (average, again)]
    return {"said": said, "parts": parts, "whole": sum(part.numel() for part in average.averages)}
