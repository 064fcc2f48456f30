"""Parameter groups of an optimizer: weight decay, learning rate by layer, frozen parts."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ...model.encoder import HfViTLayer
from ...model.modeling_hf_vit import HfViTModel
from ...model.pretrained import MASK_TOKEN, HfViTPreTrainedModel
from ...model.task_joint_embedding import HfViTForJointEmbedding
from ...model.task_masked_image_modeling import HfViTForMaskedImageModeling


# What multiplies its input by a matrix. All else is added (biases, tokens, positions), scales (norms, LayerScale,
# temperatures) or is looked up (queries, tables of words), and shrinking it does not make a model simpler.
DECAYED = (nn.Linear, nn.modules.conv._ConvNd, Conv1D)


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
    check_coverage(model, groups)
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


def check_coverage(model: nn.Module, groups: list[dict[str, Any]]) -> None:
    """Asserts that each trainable parameter is in one group, once."""
    grouped = [parameter for group in groups for parameter in group["params"]]
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(grouped) == len(trainable), f"{len(grouped)} of {len(trainable)} parameters are in groups"
    assert set(grouped) == set(trainable), "a parameter is in two groups, and another one in none"


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
