"""Muon: the matrices of blocks step by orthogonal matrices, everything else by AdamW."""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steep at zero, so that few steps are enough
NUM_STEPS = 5
MIN_NORM = 1e-7


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
