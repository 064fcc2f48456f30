"""Reference implementations of contrastive losses, and losses of image-text pairs split between processes."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hf_vit.model.task_zero_shot_image_classification import contrastive_loss


LOSSES = ("sigmoid", "softmax")
SHARES = ((3, 3), (1, 5), (4, 2))  # number of image-text pairs in each of two processes


def naive_loss(images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the loss computed from the full matrix of logits with the formula of the paper."""
    logits = images @ texts.T * scale.exp()
    targets = torch.arange(len(logits))
    if bias is None:
        return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2
    return -F.logsigmoid((2 * torch.eye(len(logits)) - 1) * (logits + bias)).sum() / len(logits)


def draw(count: int, loss: str, dtype: torch.dtype = torch.float64, width: int = 5) -> list[Tensor | None]:
    """Returns random embeddings with an L2 norm of 1, and the scale and bias of the logits."""
    generator = torch.Generator().manual_seed(count)
    images, texts = (F.normalize(torch.randn(count, width, generator=generator).to(dtype)) for _ in range(2))
    numbers = [torch.tensor([1.5], dtype=dtype), torch.tensor([-2.0], dtype=dtype) if loss == "sigmoid" else None]
    return [tensor if tensor is None else tensor.requires_grad_() for tensor in (images, texts, *numbers)]


def train_step(loss: str, start: int, stop: int) -> dict[str, Tensor]:
    """Returns the loss and gradients for the image-text pairs `start` to `stop` of a batch of six.

    Gradients are averaged over processes, as in DDP.
    """
    images, texts, scale, bias = draw(6, loss)
    weight = torch.eye(5, dtype=torch.float64).requires_grad_()
    own = [F.normalize(part.detach()[start:stop] @ weight, dim=-1) for part in (images, texts)]
    value = contrastive_loss(*own, scale, bias, max_logits=7)
    value.backward()
    gradients = [part.grad for part in (weight, scale, bias) if part is not None]
    if dist.is_initialized():
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
    return {"loss": value.detach(), **{str(number): gradient for number, gradient in enumerate(gradients)}}


def losses_per_distribution() -> dict[Any, Any]:
    """Returns the losses of this process for each distribution of six image-text pairs to two processes.

    The result also contains the error message of a process without pairs.
    """
    rank, results = dist.get_rank(), {}
    for loss in LOSSES:
        for shares in SHARES:
            start = sum(shares[:rank])
            results[loss, shares] = train_step(loss, start, start + shares[rank])
    try:
        train_step("sigmoid", 0, 6 * rank)
    except ValueError as error:
        results["nothing"] = str(error)
    return results
