"""Key maps: rules that convert the tensors of a published checkpoint (the source) to tensors of hf_vit."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers.utils import logging

from .source import Weights


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Joined:
    """Rule: concatenate source tensors along the first dimension."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Rows:
    """Rule: split a source tensor into `of` equal parts along the first dimension and keep parts[start:stop]."""

    names: tuple[str, ...]
    start: int
    stop: int
    of: int


@dataclass(frozen=True)
class Made:
    """Rule: compute the tensor from source tensors with the function `make`. Export does not support this rule."""

    names: tuple[str, ...]
    make: Callable[..., Tensor]


@dataclass(frozen=True)
class Reshaped:
    """Rule: reshape a source tensor."""

    names: tuple[str, ...]
    order: tuple[int, ...] | None = None  # order of the dimensions in the source; None if hf_vit uses this order
    back: tuple[int, ...] | None = None  # shape of the source tensor, restored on export


@dataclass(frozen=True)
class Zeros:
    """Rule: fill a bias that does not exist in the source with zeros."""

    names: tuple[str, ...] = ()


Rule = str | Joined | Rows | Made | Reshaped | Zeros
# Maps names in hf_vit to rules that contain names in the source. A name refers to a tensor or a module; the rule of a
# module applies to its `weight` and `bias`. A `*` in a name matches a number, such as the index of a block.
KeyMap = Mapping[str, Rule]

# Names of the modules of a block in hf_vit, in the order in which `block_keys` expects their rules
PARTS = (
    *("norm1", "attention.qkv", "attention.projection", "norm2", "mlp.fc1", "mlp.fc2"),
    *("layer_scale1.scale", "layer_scale2.scale"),
)
GATED = ((0, "gate"), (1, "up"))  # position of each projection in a fused source layer


def parts(ours: str, theirs: str, names: str) -> KeyMap:
    """Return the key map entries for the submodules and tensors of a module.

    Args:
        ours: Name of the module in hf_vit; "" is the model itself.
        theirs: Name of the module in the source; "" is the model itself.
        names: Entries of the form "name in hf_vit=name in the source", separated by spaces. An entry without "=" is a
            name that hf_vit and the source share.
    """
    before, before_theirs = (module and f"{module}." for module in (ours, theirs))
    entries = (entry.partition("=") for entry in names.split())
    return {before + own: before_theirs + (other or own) for own, _, other in entries}


def block_keys(ours: str, theirs: str, rules: Sequence[Rule]) -> KeyMap:
    """Return the key map entries of all blocks.

    Args:
        ours: Name of a block in hf_vit.
        theirs: Name of a block in the source.
        rules: Rules for the first modules in `PARTS`, in the same order. Names in the rules are relative to `theirs`.
    """
    pairs = zip(PARTS, rules, strict=False)
    return {f"{ours}.{part}": renamed(rule, lambda name: f"{theirs}.{name}") for part, rule in pairs}


def gated_mlp_keys(mlp: str, gate_and_up: str, down: str) -> KeyMap:
    """Return the key map entries of gated MLPs. The source layer `gate_and_up` stores gate and up projection."""
    halves = {f"encoder.layers.*.mlp.{part}": Rows((f"{mlp}.{gate_and_up}",), i, i + 1, 2) for i, part in GATED}
    return {**halves, "encoder.layers.*.mlp.down": f"{mlp}.{down}"}


def join_qkv(prefix: str, names: Sequence[str] = ("q_proj", "k_proj", "v_proj")) -> Joined:
    """Return the rule that joins the query, key and value projections of the source, named `prefix` + `names`."""
    return Joined(tuple(prefix + name for name in names))


def renamed(rule: Rule, rename: Callable[[str], str]) -> Rule:
    """Return a copy of a rule with the function `rename` applied to the source names."""
    return rename(rule) if isinstance(rule, str) else replace(rule, names=tuple(map(rename, rule.names)))


def find_rule(keys: KeyMap, name: str) -> Rule | None:
    """Return the rule for the hf_vit tensor `name`, with each `*` replaced by a number, or None if no rule matches."""
    numbers = re.findall(r"(?<=\.)\d+(?=\.)", name)
    pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
    module, _, leaf = pattern.rpartition(".")
    rule, suffix = (keys[pattern], "") if pattern in keys else (keys.get(module), f".{leaf}")

    def concrete(theirs: str) -> str:
        for number in numbers:
            theirs = theirs.replace("*", number, 1)
        return theirs + suffix

    return None if rule is None else renamed(rule, concrete)


def names_of(rule: Rule) -> tuple[str, ...]:
    """Return the names of the source tensors that a rule reads."""
    return (rule,) if isinstance(rule, str) else rule.names


def convert_weights(
    weights: Weights,
    keys: KeyMap,
    expected: Mapping[str, tuple[int, ...]],
    *,
    prefixes: Iterable[str] = (),
    dropped: Mapping[str, str],
) -> dict[str, Tensor]:
    """Convert the weights of a published checkpoint to tensors of hf_vit.

    Args:
        weights: The source tensors.
        keys: The key map.
        expected: Shapes of all resulting tensors by name. Names have no base model prefix.
        prefixes: Optional prefixes of the source tensor names.
        dropped: Maps regular expressions to reasons. Source tensors with a matching name are ignored.

    Raises:
        ValueError: If source tensors are missing or unused, or have an unexpected shape.
    """
    # Empty tensors are ignored, because DINOv3 files without registers contain an empty register tensor.
    theirs = {strip_prefix(name, prefixes): name for name, shape in weights.shapes.items() if 0 not in shape}
    rules = {name: find_rule(keys, name) for name in expected}
    used = {name for rule in rules.values() if rule is not None for name in names_of(rule)}
    left_out = {pattern: [name for name in theirs.keys() - used if re.fullmatch(pattern, name)] for pattern in dropped}
    unknown = sorted(theirs[name] for name in theirs.keys() - used - set().union(*left_out.values()))
    missing = sorted(used - theirs.keys()) + sorted(name for name, rule in rules.items() if rule is None)
    if missing or unknown:
        raise ValueError(mismatch_message(weights, missing, unknown))
    for pattern, names in left_out.items():
        if names:
            logger.info(f"Ignored {len(names)} tensors {pattern} of {str(weights.files[0])!r}: {dropped[pattern]}.")
    converted = {}
    for name, rule in rules.items():
        assert rule is not None
        sources = {theirs[source]: weights.shapes[theirs[source]] for source in names_of(rule)}
        try:
            tensor = read_rule(weights, rule, theirs, expected[name])
        except RuntimeError as error:  # torch raises RuntimeError if shapes are incompatible.
            raise ValueError(f"{describe_shapes(weights, sources)} cannot be converted to {name}: {error}") from error
        if tuple(tensor.shape) != expected[name]:
            raise ValueError(
                f"{describe_shapes(weights, sources)} is converted to {name} of shape {tuple(tensor.shape)}, but the "
                f"configuration requires {expected[name]}. Weights and configuration belong to different models, or "
                "the file is damaged."
            )
        converted[name] = tensor
    return converted


def read_rule(weights: Weights, rule: Rule, theirs: Mapping[str, str], shape: tuple[int, ...]) -> Tensor:
    """Return the hf_vit tensor that a rule computes from source tensors.

    Args:
        weights: The source tensors.
        rule: The rule to apply.
        theirs: Maps the source names in the rule to names with prefix.
        shape: Expected shape of the result. The rule `Reshaped` reshapes only if the number of elements matches.
    """
    match rule:
        case str():
            return weights.read(theirs[rule])
        case Zeros():
            return torch.zeros(shape)
        case Joined(names):
            return torch.cat(weights.read_temporary([theirs[name] for name in names]))
        case Rows(names, start, stop, of):
            (tensor,) = weights.read_temporary([theirs[name] for name in names])
            return tensor.unflatten(0, (of, -1))[start:stop].flatten(0, 1).clone()
        case Made(names, make):
            return make(*weights.read_temporary([theirs[name] for name in names])).contiguous()
        case Reshaped(names, order, _):
            (tensor,) = weights.read_temporary([theirs[name] for name in names])
            if tensor.numel() != math.prod(shape):
                return tensor
            order = order or tuple(range(len(shape)))
            back = sorted(range(len(order)), key=order.__getitem__)
            return tensor.reshape([shape[dimension] for dimension in order]).permute(back).contiguous()


def export_weights(weights: Mapping[str, Tensor], keys: KeyMap) -> dict[str, Tensor]:
    """Rename hf_vit tensors to the source names of a key map, without changing their values.

    The names in `weights` have no base model prefix.
    """
    exported: dict[str, Tensor] = {}
    parts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in weights.items():
        match find_rule(keys, name):
            case str(theirs):
                exported[theirs] = tensor
            case Joined(names):
                exported.update(zip(names, (part.clone() for part in tensor.chunk(len(names))), strict=True))
            case Rows((theirs,), start, _, _):
                parts.setdefault(theirs, {})[start] = tensor
            case Reshaped((theirs,), None, tuple(shape)):
                exported[theirs] = tensor.reshape(shape)
            case _:
                raise ValueError(f"The layout has no tensor for {name}.")
    exported.update({name: torch.cat([rows[start] for start in sorted(rows)]) for name, rows in parts.items()})
    return exported


def strip_prefix(name: str, prefixes: Iterable[str]) -> str:
    """Return `name` without the first matching prefix in `prefixes`."""
    for prefix in prefixes:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def describe_shapes(weights: Weights, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return a text with the file, names and shapes of tensors, for error messages."""
    file = weights.file_of(next(iter(shapes)))
    return f"{str(file)!r}: {', '.join(f'{name!r} {shape}' for name, shape in shapes.items())}"


def mismatch_message(weights: Weights, missing: list[str], unknown: list[str], limit: int = 12) -> str:
    """Return an error message that lists at most `limit` missing and at most `limit` unused tensors."""

    def joined(names: list[str]) -> str:
        return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")

    parts = [f"The weights in {', '.join(repr(str(file)) for file in weights.files)} do not match the configuration."]
    if missing:
        parts.append(f"Missing: {joined(missing)}.")
    if unknown:
        parts.append(f"Left over: {joined(unknown)}.")
    return " ".join([*parts, "The file is incomplete or belongs to another model."])
