"""Parts of a model that a training leaves as they are."""

from collections.abc import Sequence

from torch import nn

from .parameter_groups import find_backbone


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
