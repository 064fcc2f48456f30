"""Optimizers: parameter groups, Muon, and a schedule whose length may change during the run."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers.pytorch_utils import Conv1D

from ..model.encoder import HfViTLayer
from ..model.modeling_hf_vit import HfViTModel
from ..model.pretrained import MASK_TOKEN, HfViTPreTrainedModel
from ..model.task_joint_embedding import HfViTForJointEmbedding
from ..model.task_masked_image_modeling import HfViTForMaskedImageModeling


# What multiplies its input by a matrix. All else is added (biases, tokens, positions), scales (norms, LayerScale,
# temperatures) or is looked up (queries, tables of words), and shrinking it does not make a model simpler.
DECAYED = (nn.Linear, nn.modules.conv._ConvNd, Conv1D)
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steep at zero, so that few steps are enough
NUM_STEPS = 5
MIN_NORM = 1e-7


def find_backbone(model: nn.Module) -> HfViTModel | None:
    """Returns the image tower of a model, which may be the model itself, or None if it has none of ours."""
    return next((module for module in model.modules() if isinstance(module, HfViTModel)), None)


def may_lack_gradients(model: nn.Module) -> bool:
    """Returns whether a step may leave parameters that train without a gradient: a mask token, or the last blocks."""
    if not isinstance(model, HfViTPreTrainedModel):
        return True
    objectives = HfViTForMaskedImageModeling | HfViTForJointEmbedding
    is_masked = isinstance(model, objectives) and model.options.objective in ("simmim", "dino")
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    reads_blocks = ("out_indices" in task for task in model.config.to_dict().values() if isinstance(task, dict))
    return any(reads_blocks) or not (is_masked or all(not name.endswith(MASK_TOKEN) for name in trained))


def decayed_parameter_names(model: nn.Module) -> list[str]:
    """Lists the parameters that weight decay is for: the matrices of linear layers and convolutions, and no others.

    So it is in big_vision (https://arxiv.org/abs/2205.01580), whose weight decay is that of kernels.
    """
    modules = dict(model.named_modules())
    places = ((name, *name.rpartition(".")[::2]) for name, _ in model.named_parameters())
    return [name for name, owner, leaf in places if leaf == "weight" and isinstance(modules[owner], DECAYED)]


def number_layers(backbone: HfViTModel | None) -> tuple[dict[Tensor, int], int]:
    """Returns the number of each parameter of embeddings (0), block i (i + 1) and final norm (that of the last block).

    With them comes the number of what is not among them: pooling, heads, decoders, a tower for texts.
    """
    if backbone is None:
        return {}, 1
    blocks = list(backbone.encoder.layers)
    layers = [(backbone.embeddings, 0), (backbone.pre_norm, 0)]
    layers += [(block, number) for number, block in enumerate(blocks, 1)]
    layers += [(backbone.norm, len(blocks))]
    numbers: dict[Tensor, int] = {parameter: number for layer, number in layers for parameter in layer.parameters()}
    return numbers, len(blocks) + 1


def hidden_matrices(model: nn.Module) -> dict[Tensor, int]:
    """Returns the matrices of attention and MLP of all blocks and how many each stacks: 3 for query, key and value."""
    matrices: dict[Tensor, int] = {}
    for block in model.modules():
        if isinstance(block, HfViTLayer):
            layers = [*block.attention.modules(), *block.mlp.modules()]
            matrices |= {
                layer.weight: 3 if layer is block.attention.qkv else 1
                for layer in layers
                if isinstance(layer, nn.Linear)
            }
    return matrices


def make_parameter_groups(
    model: nn.Module,
    learning_rate: float,
    weight_decay: float,
    *,
    layer_decay: float = 1.0,
    head_lr_multiplier: float = 1.0,
    use_muon: bool = False,
) -> list[dict[str, Any]]:
    """Returns the groups of an optimizer for a model of any task, with each trainable parameter in one of them.

    Args:
        model: The model. What is frozen stays out.
        learning_rate: Of the heads, before `head_lr_multiplier`.
        weight_decay: Of the matrices of linear layers and convolutions; everything else has none.
        layer_decay: Factor on the learning rate from each layer to the one before it: heads, blocks from the last to
            the first, embeddings (https://arxiv.org/abs/2106.08254).
        head_lr_multiplier: Factor on the learning rate of heads.
        use_muon: Whether the matrices of blocks get groups for `Muon`.

    Returns:
        Groups with `params`, `lr`, `weight_decay`, the factor `lr_scale` of their learning rate, a `name` to read, and
        `num_matrices`, how many matrices are stacked in each parameter for Muon, 0 for AdamW.

    Raises:
        ValueError: if layers shall differ and the model has no backbone of ours, or no blocks are there for Muon.
    """
    backbone = find_backbone(model)
    if backbone is None and (layer_decay, head_lr_multiplier) != (1.0, 1.0):
        raise ValueError(
            f"layer_decay={layer_decay} and head_lr_multiplier={head_lr_multiplier} need to know backbone and head, "
            f"but {type(model).__name__} has no HfViTModel in it. Leave them at 1."
        )
    numbers, head = number_layers(backbone)
    decayed = set(decayed_parameter_names(model))
    matrices = hidden_matrices(model) if use_muon else {}
    members: dict[tuple[float, bool, int], list[tuple[int, Tensor]]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            number = numbers.get(parameter, head)
            scale = head_lr_multiplier if number == head else layer_decay ** (head - number)
            members[scale, name in decayed, matrices.get(parameter, 0)].append((number, parameter))
    groups = [
        {
            "params": [parameter for _, parameter in numbered],
            "lr": learning_rate * scale,
            "weight_decay": weight_decay if is_decayed else 0.0,
            "lr_scale": scale,
            "num_matrices": num_matrices,
            "name": name_group({number for number, _ in numbered}, head, is_decayed, num_matrices),
        }
        for (scale, is_decayed, num_matrices), numbered in members.items()
    ]
    if use_muon and not any(group["num_matrices"] for group in groups):
        raise ValueError(
            f"use_muon=True is for the matrices of blocks, but {type(model).__name__} has none to train. Leave it out."
        )
    return groups


def name_group(numbers: set[int], head: int, is_decayed: bool, num_matrices: int) -> str:
    """Names a group by its layers, and by what sets it apart: "block 3", "embeddings to head, no decay"."""

    def name(number: int) -> str:
        return "head" if number == head else f"block {number - 1}" if number else "embeddings"

    first, last = name(min(numbers)), name(max(numbers))
    layers = first if first == last else f"{first} to {last}"
    kind = ", Muon" if num_matrices else ""
    stacked = " of stacked matrices" if num_matrices > 1 else ""
    return f"{layers}{kind}{stacked}{'' if is_decayed else ', no decay'}"


def freeze(model: nn.Module, prefixes: Sequence[str] = (), trainable_blocks: int | None = None) -> list[nn.Module]:
    """Lets parts of a model keep their weights.

    Args:
        model: The model.
        prefixes: What the names of their parameters start with, as whole words between dots: `model.embeddings`.
        trainable_blocks: Number of blocks of the backbone that learn, counted from its end, together with the norm
            after them and the heads. With 0 nothing of the backbone learns.

    Returns:
        The modules without anything that learns, the largest ones. See `frozen_modules`.

    Raises:
        ValueError: if a prefix matches nothing, there are fewer blocks, or nothing is left to learn.
    """
    parameters = dict(model.named_parameters())
    for prefix in prefixes:
        matching = [name for name in parameters if f"{name}.".startswith(f"{prefix}.")]
        if not matching:
            starts = dict.fromkeys(".".join(name.split(".")[:2]) for name in parameters)
            raise ValueError(
                f"freeze: no parameter of {type(model).__name__} starts with {prefix!r}. It has {', '.join(starts)}, "
                "and what model.named_parameters() lists below these."
            )
        for name in matching:
            parameters[name].requires_grad_(False)
    if trainable_blocks is not None:
        freeze_blocks(model, trainable_blocks)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ValueError(f"Nothing of {type(model).__name__} is left to learn. Freeze less of it.")
    return frozen_modules(model)


def freeze_blocks(model: nn.Module, trainable_blocks: int) -> None:
    """Freezes the backbone of a model but for its last blocks and the norm after them; see `freeze`."""
    backbone = find_backbone(model)
    if backbone is None:
        raise ValueError(f"trainable_blocks={trainable_blocks}: {type(model).__name__} has no HfViTModel in it.")
    blocks = list(backbone.encoder.layers)
    if trainable_blocks > len(blocks):
        raise ValueError(f"trainable_blocks={trainable_blocks}, but the model has {len(blocks)} blocks.")
    kept = blocks[: len(blocks) - trainable_blocks]
    for part in [backbone.embeddings, backbone.pre_norm, *kept] if trainable_blocks else [backbone]:
        part.requires_grad_(False)


def frozen_modules(module: nn.Module) -> list[nn.Module]:
    """Returns the largest modules in one, itself included, that have parameters, none of which learns."""
    parameters = list(module.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        return [module]
    return [part for child in module.children() for part in frozen_modules(child)]


def orthogonalize(matrices: Tensor) -> Tensor:
    """Brings the singular values of (n, A, B) matrices near 1, between about 0.7 and 1.2, by Newton-Schulz steps.

    They are in bfloat16, whose precision is enough, unless the matrices are in float64.

    Source: https://kellerjordan.github.io/posts/muon/.
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    result = matrices if matrices.dtype == torch.float64 else matrices.bfloat16()
    result = result.mT if is_tall else result
    result = result / result.norm(dim=(1, 2), keepdim=True).clamp_min(MIN_NORM)
    a, b, c = COEFFICIENTS
    for _ in range(NUM_STEPS):
        gram = result @ result.mT  # (n, A, A), A the shorter side
        result = torch.baddbmm(result, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), result, beta=a)
    return (result.mT if is_tall else result).to(matrices.dtype)


def whole(tensor: Tensor) -> Tensor:
    """Returns all of what FSDP2 may have spread over processes."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread_as(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Returns of what all processes have the part that this one has of a parameter."""
    if not isinstance(parameter, DTensor):
        return tensor
    mesh = parameter.device_mesh
    replicated = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=parameter.placements)


class Muon(torch.optim.Optimizer):
    """Muon for groups with `num_matrices`, AdamW for the others, as one optimizer.

    The steps of a matrix (A, B) are scaled by 0.2·sqrt(max(A, B)), to the size of AdamW's, so that learning rate and
    weight decay are those of AdamW (https://arxiv.org/abs/2502.16982). Matrices that are stacked in one parameter,
    query, key and value, are each brought to an orthogonal one by itself. All of one shape are so at once.

    Where FSDP2 has spread the matrices over processes, their momenta are gathered for a step and each process makes
    all of them orthogonal: what FSDP2 saves of weights, gradients and momenta between the steps stays saved.

    Args:
        groups: From `make_parameter_groups`.
        lr: Learning rate of groups that do not have their own.
        momentum: Of Muon, in the manner of Nesterov.
        **adamw: Further arguments of `torch.optim.AdamW`.

    Raises:
        ValueError: if no parameters are there for AdamW.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float = 0.95, **adamw: Any) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "momentum": momentum, "num_matrices": 0})
        self._adamw = torch.optim.AdamW(self._groups_of_adamw(), lr=lr, **adamw)  # completes these groups

    def _groups_of_adamw(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if not group["num_matrices"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Makes a step; returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Loading a state has put others in their place.
        self._adamw.param_groups, self._adamw.state = self._groups_of_adamw(), self.state
        self._adamw.step()
        for matrices in self._momenta().values():
            directions = orthogonalize(torch.cat([momentum for _, _, momentum in matrices]))
            sizes = [len(momentum) for _, _, momentum in matrices]
            for (parameter, group, _), direction in zip(matrices, directions.split(sizes), strict=True):
                scale = 0.2 * math.sqrt(max(direction.shape[1:]))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                direction = spread_as(direction.reshape(parameter.shape), parameter)
                parameter.add_(direction, alpha=-group["lr"] * scale)
        return loss

    def _momenta(self) -> dict[Any, list[tuple[Tensor, dict[str, Any], Tensor]]]:
        """Takes the gradients in; returns parameter, group and momentum (n, A, B), by shape and kind of matrix."""
        momenta = defaultdict(list)
        for group in self.param_groups:
            for parameter in group["params"] if group["num_matrices"] else ():
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                average = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                momentum = whole(parameter.grad.lerp(average, group["momentum"]))
                momentum = momentum.unflatten(0, (group["num_matrices"], -1))  # (n, A, B)
                momenta[momentum.shape[1:], momentum.dtype, momentum.device].append((parameter, group, momentum))
        return momenta


def planned_step(step: int, lengths: Mapping[int, int]) -> float:
    """Returns the step of the planned schedule whose learning rate a step has, the same number without changes.

    Args:
        step: Of the training.
        lengths: All steps of the training by the step from which on there are so many; by 0 those that were planned.
            From a change on, what is left of the planned schedule is spread evenly over the steps that are left.
    """
    start, place, length = 0, 0.0, lengths[0]
    for changed, new_length in sorted(lengths.items()):
        if 0 < changed <= step:
            place += (changed - start) * (lengths[0] - place) / max(length - start, 1)
            start, length = changed, new_length
    return place + (step - start) * (lengths[0] - place) / max(length - start, 1) if start else step


def follow_lengths(scheduler: LRScheduler, lengths: Mapping[int, int]) -> None:
    """Lets a schedule follow `lengths`, see `planned_step`, also as they change; one that goes by scores does not."""

    def follow(factor: Callable[[Any], float], step: int) -> float:
        return factor(planned_step(step, lengths))

    if isinstance(scheduler, LambdaLR):
        scheduler.lr_lambdas = [partial(follow, factor) for factor in scheduler.lr_lambdas]
