"""Parameter groups, and the optimizer Muon."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers.pytorch_utils import Conv1D

from ..model.encoder import HfViTLayer
from ..model.modeling_hf_vit import HfViTModel
from ..model.pretrained import MASK_TOKEN, HfViTPreTrainedModel
from ..model.task_joint_embedding import HfViTForJointEmbedding
from ..model.task_masked_image_modeling import HfViTForMaskedImageModeling


# Weight decay only applies to the matrices of these layers. All other parameters are added to activations (biases,
# tokens, positions), multiplied with activations (norms, LayerScale, temperatures), or looked up in a table (queries,
# word embeddings).
DECAYED = (nn.Linear, nn.modules.conv._ConvNd, Conv1D)
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Newton-Schulz polynomial, which is steep at zero to converge fast
NUM_STEPS = 5
MIN_NORM = 1e-7


def find_backbone(model: nn.Module) -> HfViTModel | None:
    """Return the backbone of this package in a model (possibly the model itself), or None if there is none."""
    shared = vars(model).get("model")  # a head of a multi-task model refers to the backbone without registering it
    return next((module for module in (*model.modules(), shared) if isinstance(module, HfViTModel)), None)


def may_lack_gradients(model: nn.Module) -> bool:
    """Return whether trained parameters, such as a mask token or the last blocks, may get no gradient in a step."""
    if not isinstance(model, HfViTPreTrainedModel):
        return True
    objectives = HfViTForMaskedImageModeling | HfViTForJointEmbedding
    is_masked = isinstance(model, objectives) and model.options.objective in ("simmim", "dino")
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    reads_blocks = ("out_indices" in task for task in model.config.to_dict().values() if isinstance(task, dict))
    return any(reads_blocks) or not (is_masked or all(not name.endswith(MASK_TOKEN) for name in trained))


def decayed_parameter_names(model: nn.Module) -> list[str]:
    """Return the names of parameters with weight decay: matrices of linear layers and convolutions.

    As in big_vision (https://arxiv.org/abs/2205.01580), weight decay applies to the kernels of layers.
    """
    modules = dict(model.named_modules())
    places = ((name, *name.rpartition(".")[::2]) for name, _ in model.named_parameters())
    return [name for name, owner, leaf in places if leaf == "weight" and isinstance(modules[owner], DECAYED)]


def number_layers(backbone: HfViTModel | None) -> tuple[dict[Tensor, int], int]:
    """Return the layer index of each backbone parameter: 0 for embeddings and i + 1 for block number i.

    The final norm has the index of the last block. The function also returns the layer index of all other parameters
    (pooling, heads, decoders, text tower).
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
    """Map each attention and MLP weight of the blocks to its number of stacked matrices, which is 3 for qkv."""
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
    lr_factors: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Return optimizer groups for a model of any task; each trainable parameter is in one group.

    Args:
        model: The model. Frozen parameters are excluded.
        learning_rate: Learning rate of the heads, before `head_lr_multiplier`.
        weight_decay: Weight decay of matrices of linear layers and convolutions; other parameters have none.
        layer_decay: Learning rate of a layer divided by the learning rate of the next layer. Layers are the
            embeddings, the blocks and the heads (https://arxiv.org/abs/2106.08254).
        head_lr_multiplier: Factor of the learning rate of heads.
        use_muon: Whether the matrices of blocks are in separate groups for `Muon`.
        lr_factors: Learning rate factors by prefix of parameter names. For heads, they replace `head_lr_multiplier`.

    Returns:
        Groups with `params`, `lr`, `weight_decay`, the learning rate factor `lr_scale`, a readable `name`, and
        `num_matrices`, the number of matrices stacked in each parameter for Muon, 0 for AdamW.

    Raises:
        ValueError: If an option requires a backbone of this package, or blocks to train, and the model has none.
    """
    backbone = find_backbone(model)
    if backbone is None and (layer_decay, head_lr_multiplier) != (1.0, 1.0):
        raise ValueError(
            f"layer_decay={layer_decay} and head_lr_multiplier={head_lr_multiplier} require an HfViTModel as "
            f"backbone, which {type(model).__name__} does not have. Set both to 1."
        )
    numbers, head = number_layers(backbone)
    decayed = set(decayed_parameter_names(model))
    matrices = hidden_matrices(model) if use_muon else {}
    members: dict[tuple[float, bool, int], list[tuple[int, Tensor]]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            number = numbers.get(parameter, head)
            factors = (factor for prefix, factor in (lr_factors or {}).items() if name.startswith(prefix))
            usual = head_lr_multiplier if number == head else 1.0
            scale = layer_decay ** (head - number) * next(factors, usual)
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
        raise ValueError(f"use_muon=True requires trainable blocks. {type(model).__name__} has none. Remove use_muon.")
    return groups


def name_group(numbers: set[int], head: int, is_decayed: bool, num_matrices: int) -> str:
    """Return the name of a group: its layers and special settings, such as "embeddings to head, no decay"."""

    def name(number: int) -> str:
        return "head" if number == head else f"block {number - 1}" if number else "embeddings"

    first, last = name(min(numbers)), name(max(numbers))
    layers = first if first == last else f"{first} to {last}"
    kind = ", Muon" if num_matrices else ""
    stacked = " of stacked matrices" if num_matrices > 1 else ""
    return f"{layers}{kind}{stacked}{'' if is_decayed else ', no decay'}"


def freeze(model: nn.Module, prefixes: Sequence[str] = (), trainable_blocks: int | None = None) -> list[nn.Module]:
    """Freeze parts of a model.

    Args:
        model: The model.
        prefixes: Prefixes of the names of the parameters to freeze, without the final dot, such as `model.embeddings`.
        trainable_blocks: Number of last blocks of the backbone that are trained, together with the final norm and the
            heads. 0 freezes the whole backbone.

    Returns:
        The largest modules without trainable parameters, see `frozen_modules`.

    Raises:
        ValueError: If a prefix matches no parameter, the backbone has fewer than `trainable_blocks` blocks, or all
            parameters would be frozen.
    """
    parameters = dict(model.named_parameters())
    for prefix in prefixes:
        matching = [name for name in parameters if f"{name}.".startswith(f"{prefix}.")]
        if not matching:
            starts = dict.fromkeys(".".join(name.split(".")[:2]) for name in parameters)
            raise ValueError(
                f"freeze={prefix!r} matches no parameter of {type(model).__name__}. Parameter names start with "
                f"{', '.join(starts)}; model.named_parameters() lists all."
            )
        for name in matching:
            parameters[name].requires_grad_(False)
    if trainable_blocks is not None:
        freeze_blocks(model, trainable_blocks)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ValueError(f"All parameters of {type(model).__name__} are frozen. Freeze fewer parameters.")
    return frozen_modules(model)


def freeze_blocks(model: nn.Module, trainable_blocks: int) -> None:
    """Freeze the backbone of a model except for its last blocks and the final norm; see `freeze`."""
    backbone = find_backbone(model)
    if backbone is None:
        raise ValueError(
            f"trainable_blocks={trainable_blocks} requires an HfViTModel as backbone, which {type(model).__name__} "
            "does not have. Remove trainable_blocks."
        )
    blocks = list(backbone.encoder.layers)
    if trainable_blocks > len(blocks):
        raise ValueError(
            f"trainable_blocks={trainable_blocks} exceeds the {len(blocks)} blocks of the model. Use a smaller number."
        )
    kept = blocks[: len(blocks) - trainable_blocks]
    for part in [backbone.embeddings, backbone.pre_norm, *kept] if trainable_blocks else [backbone]:
        part.requires_grad_(False)


def frozen_modules(module: nn.Module) -> list[nn.Module]:
    """Return the largest submodules (or `module` itself) that have no trainable parameters."""
    parameters = list(module.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        return [module]
    return [part for child in module.children() for part in frozen_modules(child)]


def is_fast_in_bf16(device: torch.device) -> bool:
    """Return whether a device has hardware instructions for bfloat16 matrix products."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0) or torch.version.hip is not None
    # Without these instructions, bfloat16 is emulated and slower than float32.
    return device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def orthogonalize(matrices: Tensor) -> Tensor:
    """Orthogonalize matrices (n, A, B) by Newton-Schulz steps, after which singular values are between 0.7 and 1.2.

    The steps run in bfloat16, which is precise enough, unless the matrices are in float64 or the device emulates
    bfloat16, which is slower than float32.

    Source: https://kellerjordan.github.io/posts/muon/.
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    fast = torch.bfloat16 if is_fast_in_bf16(matrices.device) else torch.float32
    result = matrices if matrices.dtype == torch.float64 else matrices.to(fast)
    result = result.mT if is_tall else result
    result = result / result.norm(dim=(1, 2), keepdim=True).clamp_min(MIN_NORM)
    a, b, c = COEFFICIENTS
    for _ in range(NUM_STEPS):
        gram = result @ result.mT  # (n, A, A), where A is the shorter side of the matrices
        result = torch.baddbmm(result, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), result, beta=a)
    return (result.mT if is_tall else result).to(matrices.dtype)


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor if FSDP2 has sharded the tensor; otherwise return it unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread_as(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Shard a full tensor in the same way as a parameter, and return the shard of this process."""
    if not isinstance(parameter, DTensor):
        return tensor
    mesh = parameter.device_mesh
    replicated = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=parameter.placements)


class Muon(torch.optim.Optimizer):
    """Optimizer that applies Muon to groups with `num_matrices` above 0, and AdamW to all other groups.

    Muon's steps for a matrix (A, B) are scaled by 0.2·sqrt(max(A, B)). They are then as large as AdamW's steps, so
    that both can use the same learning rate and weight decay (https://arxiv.org/abs/2502.16982). Matrices stacked in
    one parameter (query, key and value) are orthogonalized separately. All matrices of the same shape are processed at
    once.

    If FSDP2 has sharded the matrices, their momenta are gathered for a step, and each process orthogonalizes all of
    them; between steps, weights, gradients and momenta stay sharded.

    Args:
        groups: Parameter groups returned by `make_parameter_groups`.
        lr: Learning rate of groups without `lr`.
        momentum: Nesterov momentum of Muon.
        **adamw: Other arguments of `torch.optim.AdamW`.

    Raises:
        ValueError: If there are no parameters for AdamW.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float = 0.95, **adamw: Any) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "momentum": momentum, "num_matrices": 0})
        # AdamW adds missing options to the groups.
        self._adamw = torch.optim.AdamW(self._groups_of_adamw(), lr=lr, **adamw)

    def _groups_of_adamw(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if not group["num_matrices"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Run an optimizer step; return the value of `closure`, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Pass groups and state to AdamW again, because `load_state_dict` may have replaced them.
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
        """Update the momenta. Return parameters, groups and momenta (n, A, B), by matrix shape and `num_matrices`."""
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
