"""Key maps, which say how the tensors of a published layout become ours, and the functions that apply them."""

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
    """Our tensor is several of theirs, concatenated along the first dimension."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Rows:
    """Our tensor is some rows of theirs: parts `start` up to but without `stop` of `of` equal parts."""

    names: tuple[str, ...]
    start: int
    stop: int
    of: int


@dataclass(frozen=True)
class Made:
    """Our tensor is made from theirs by a function; there is no way back."""

    names: tuple[str, ...]
    make: Callable[..., Tensor]


@dataclass(frozen=True)
class Reshaped:
    """Our tensor is one of theirs in another shape."""

    names: tuple[str, ...]
    order: tuple[int, ...] | None = None  # our dimensions in the order in which theirs run, where that differs
    back: tuple[int, ...] | None = None  # their shape, where it is exported, as `Tensor.reshape` takes it


@dataclass(frozen=True)
class Zeros:
    """We have a bias where they have none."""

    names: tuple[str, ...] = ()


Rule = str | Joined | Rows | Made | Reshaped | Zeros
# Ours to theirs. A `*` stands for the number of a block. A name stands for a tensor, or for a module: then the last
# part of the tensor's name (`weight`, `bias`) is the same on both sides.
KeyMap = Mapping[str, Rule]

# Parts of our blocks, in the order in which `block_keys` takes the names of theirs
PARTS = (
    *("norm1", "attention.qkv", "attention.projection", "norm2", "mlp.fc1", "mlp.fc2"),
    *("layer_scale1.scale", "layer_scale2.scale"),
)
GATED = ((0, "gate"), (1, "up"))  # halves of a layer that holds both


def parts(ours: str, theirs: str, names: str) -> KeyMap:
    """Return the keys of parts of the module `ours`, which is named `theirs` there; "" is the model itself.

    `names` holds entries "ours=theirs" separated by spaces. One name alone is the same on both sides.
    """
    before, before_theirs = (module and f"{module}." for module in (ours, theirs))
    entries = (entry.partition("=") for entry in names.split())
    return {before + own: before_theirs + (other or own) for own, _, other in entries}


def block_keys(ours: str, theirs: str, rules: Sequence[Rule]) -> KeyMap:
    """Return the keys of the blocks `ours`: a rule for each of the first `PARTS`, its names relative to `theirs`."""
    pairs = zip(PARTS, rules, strict=False)
    return {f"{ours}.{part}": renamed(rule, lambda name: f"{theirs}.{name}") for part, rule in pairs}


def gated_mlp_keys(mlp: str, gate_and_up: str, down: str) -> KeyMap:
    """Return the keys of gated MLPs named `mlp`, whose layer `gate_and_up` holds two of ours, the gate first."""
    halves = {f"encoder.layers.*.mlp.{part}": Rows((f"{mlp}.{gate_and_up}",), i, i + 1, 2) for i, part in GATED}
    return {**halves, "encoder.layers.*.mlp.down": f"{mlp}.{down}"}


def join_qkv(prefix: str, names: Sequence[str] = ("q_proj", "k_proj", "v_proj")) -> Joined:
    """Return the rule of our joint projection of query, key and value, whose names there begin with `prefix`."""
    return Joined(tuple(prefix + name for name in names))


def renamed(rule: Rule, rename: Callable[[str], str]) -> Rule:
    """Return a rule that reads other names."""
    return rename(rule) if isinstance(rule, str) else replace(rule, names=tuple(map(rename, rule.names)))


def find_rule(keys: KeyMap, name: str) -> Rule | None:
    """Returns the rule for our tensor `name`, its names made concrete; None if there is none."""
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
    """Returns the names of their tensors that a rule reads."""
    return (rule,) if isinstance(rule, str) else rule.names


def convert_weights(
    weights: Weights,
    keys: KeyMap,
    expected: Mapping[str, tuple[int, ...]],
    *,
    prefixes: Iterable[str] = (),
    dropped: Mapping[str, str],
) -> dict[str, Tensor]:
    """Converts published weights to our names; `ValueError` if a tensor is missing, left over or of another shape.

    The error lists all missing and left over ones. `expected` holds names and shapes of ours, without the prefix of
    the base model: the result has all of them. All names of theirs may have one of `prefixes`, and those that match a
    regular expression of `dropped`, which says why, are left out on purpose.
    """
    # An empty tensor has no meaning: DINOv3 without registers keeps one in their place.
    theirs = {strip_prefix(name, prefixes): name for name, shape in weights.shapes.items() if 0 not in shape}
    rules = {name: find_rule(keys, name) for name in expected}
    used = {name for rule in rules.values() if rule is not None for name in names_of(rule)}
    left_out = {pattern: [name for name in theirs.keys() - used if re.fullmatch(pattern, name)] for pattern in dropped}
    unknown = sorted(theirs[name] for name in theirs.keys() - used - set().union(*left_out.values()))
    missing = sorted(used - theirs.keys()) + sorted(name for name, rule in rules.items() if rule is None)
    if missing or unknown:
        raise ValueError(describe_misfit(weights, missing, unknown))
    for pattern, names in left_out.items():
        if names:
            logger.info(f"Left out of {str(weights.files[0])!r}: {len(names)} tensors {pattern}, {dropped[pattern]}.")
    converted = {}
    for name, rule in rules.items():
        assert rule is not None
        sources = {theirs[source]: weights.shapes[theirs[source]] for source in names_of(rule)}
        try:
            tensor = read_rule(weights, rule, theirs, expected[name])
        except RuntimeError as error:  # torch's, for tensors that do not go together
            raise ValueError(f"{describe_shapes(weights, sources)} make no {name}: {error}") from error
        if tuple(tensor.shape) != expected[name]:
            raise ValueError(
                f"{describe_shapes(weights, sources)} make {name} of shape {tuple(tensor.shape)}, but by its "
                f"configuration it is {expected[name]}. Weights and configuration are of different models, or the "
                "file is damaged."
            )
        converted[name] = tensor
    return converted


def read_rule(weights: Weights, rule: Rule, theirs: Mapping[str, str], shape: tuple[int, ...]) -> Tensor:
    """Returns our tensor that `rule` makes, in our `shape` where the sizes agree; `theirs` gives the full names."""
    match rule:
        case str():
            return weights.read(theirs[rule])
        case Zeros():
            return torch.zeros(shape)
        case Joined(names):
            return torch.cat(weights.read_to_change([theirs[name] for name in names]))
        case Rows(names, start, stop, of):
            (tensor,) = weights.read_to_change([theirs[name] for name in names])
            return tensor.unflatten(0, (of, -1))[start:stop].flatten(0, 1).clone()
        case Made(names, make):
            return make(*weights.read_to_change([theirs[name] for name in names])).contiguous()
        case Reshaped(names, order, _):
            (tensor,) = weights.read_to_change([theirs[name] for name in names])
            if tensor.numel() != math.prod(shape):
                return tensor
            order = order or tuple(range(len(shape)))
            back = sorted(range(len(order)), key=order.__getitem__)
            return tensor.reshape([shape[dimension] for dimension in order]).permute(back).contiguous()


def export_weights(weights: Mapping[str, Tensor], keys: KeyMap) -> dict[str, Tensor]:
    """Returns our tensors, named without the prefix of the base model, under published names, bit by bit."""
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
                raise ValueError(f"The format has no place for {name}.")
    exported.update({name: torch.cat([rows[start] for start in sorted(rows)]) for name, rows in parts.items()})
    return exported


def strip_prefix(name: str, prefixes: Iterable[str]) -> str:
    """Returns `name` without the first of `prefixes` that it starts with."""
    for prefix in prefixes:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def describe_shapes(weights: Weights, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Names the file of some tensors, and their shapes, for an error."""
    file = weights.file_of(next(iter(shapes)))
    return f"{str(file)!r}: {', '.join(f'{name!r} {shape}' for name, shape in shapes.items())}"


def describe_misfit(weights: Weights, missing: list[str], unknown: list[str], limit: int = 12) -> str:
    """Returns an error that lists missing and left over tensors."""

    def listed(names: list[str]) -> str:
        return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")

    parts = [f"The weights in {', '.join(repr(str(file)) for file in weights.files)} do not fit their configuration."]
    if missing:
        parts.append(f"Missing: {listed(missing)}.")
    if unknown:
        parts.append(f"Left over: {listed(unknown)}.")
    return " ".join([*parts, "The file is of another model, or incomplete."])
