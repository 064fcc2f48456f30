"""Images beside texts: what sums up a text, how both are compared, and the losses over the batch of all processes.

Shapes: B images or texts of a process, N of all processes, S tokens, D hidden size, E width of what is compared.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import initialization as init

from .configuration_hf_vit import HfViTConfig
from .configuration_text_hf_vit import HfViTContrastiveConfig
from .decoders_hf_vit import in_full_precision, sum_over_processes
from .initialization_hf_vit import HfViTOwnStart


# How many logits of a loss are there at once: 16 MiB in float32
MAX_LOGITS = 2**22


# Texts


def pool_tokens(
    hidden_states: Tensor, input_ids: Tensor, attention_mask: Tensor | None, pooling: str, eos_token_id: int | None
) -> Tensor:
    """Sums up texts.

    Args:
        hidden_states: (B, S, D).
        input_ids: (B, S) int64.
        attention_mask: (B, S), 1 where a token is text, 0 where it is padding; `None` if all are text.
        pooling: "eos", "last", "first" or "mean", see `HfViTTextConfig`.
        eos_token_id: Number of the token that ends a text, for "eos".

    Returns:
        (B, D).
    """
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if pooling == "first":
        return hidden_states[:, 0]
    if pooling == "mean":
        shown = attention_mask.to(hidden_states.dtype)[..., None]  # (B, S, 1)
        return (hidden_states * shown).sum(dim=1) / shown.sum(dim=1).clamp_min(1)
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    index = (positions * attention_mask).argmax(dim=1)  # (B,)
    if pooling == "eos":
        assert eos_token_id is not None  # refused by the configuration
        is_end = input_ids == eos_token_id
        index = torch.where(is_end.any(dim=1), is_end.int().argmax(dim=1), index)
    return hidden_states[torch.arange(len(index), device=index.device), index]


# Head


class HfViTContrastiveHead(HfViTOwnStart):
    """Brings what sums up images and texts to one width, and says how alike they are."""

    def __init__(self, config: HfViTConfig, options: HfViTContrastiveConfig, text_size: int) -> None:
        """Builds the layers.

        Args:
            config: The configuration, which tells the width of pooled images.
            options: Those of the comparison.
            text_size: Width D of pooled texts.
        """
        super().__init__()
        self.options = options
        size = options.projection_dim
        self.image_projection = nn.Identity() if size is None else nn.Linear(config.pooled_size, size, bias=False)
        self.text_projection = nn.Linear(text_size, size or config.pooled_size, bias=size is None)
        # Of one dimension: FSDP2 takes no parameter without.
        self.logit_scale = nn.Parameter(torch.full((1,), options.initial_scale))
        has_bias = options.loss == "sigmoid"
        self.logit_bias = nn.Parameter(torch.full((1,), options.initial_bias)) if has_bias else None

    def initialize(self, std: float) -> None:
        """Sets the numbers that the comparison starts from."""
        init.constant_(self.logit_scale, self.options.initial_scale)
        if self.logit_bias is not None:
            init.constant_(self.logit_bias, self.options.initial_bias)

    def forward(self, image_embeds: Tensor, text_embeds: Tensor) -> Tensor:
        """Compares each image (B, E) with each text (B', E), both of length 1; returns the logits (B, B')."""
        logits = image_embeds @ text_embeds.T * self.logit_scale.exp()
        return logits if self.logit_bias is None else logits + self.logit_bias


# Losses


@in_full_precision
def contrastive_loss(
    image_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: Tensor,
    logit_bias: Tensor | None = None,
    max_logits: int = MAX_LOGITS,
) -> Tensor:
    """How wrong it is which images and texts are alike, of the pairs of all processes.

    With a bias it is the loss of SigLIP: the cross-entropy of each of the N·N pairs, summed and divided by N. Without,
    it is that of CLIP: the mean cross-entropy of the text of an image among all texts, and of the image of a text
    among all images. It is the same on all processes, which must all call it. DDP, which takes the mean of gradients
    over the processes, then has those of one process with all pairs. At no time are there more logits than
    `max_logits`, or those of one row: they are computed in rows, and once more in the backward pass.

    Args:
        image_embeds: (B, E) of length 1; processes may have another number of them each, but one at least.
        text_embeds: (B, E) of length 1, that of each image.
        logit_scale: (1,), the logarithm of the factor.
        logit_bias: (1,) or None.
        max_logits: The most logits at once.

    Returns:
        Scalar in float32 at least.

    Raises:
        ValueError: if there are not as many images as texts, or a process has none.

    Source: https://arxiv.org/abs/2303.15343 and https://arxiv.org/abs/2103.00020.
    """
    if image_embeds.shape != text_embeds.shape:
        raise ValueError(
            f"The loss needs a text for each image, but there are {len(image_embeds)} images and {len(text_embeds)} "
            "texts. Give as many, or leave return_loss out."
        )
    precision = torch.promote_types(image_embeds.dtype, torch.float32)
    images, texts = image_embeds.to(precision), text_embeds.to(precision)
    everything = gather_pairs(images, texts)
    total = share_of_loss(images, texts, *everything, logit_scale, logit_bias, max_logits)
    return sum_over_processes(total) / len(everything[0])


@in_full_precision
def loss_of_pairs(
    image_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: Tensor,
    logit_bias: Tensor | None = None,
    max_logits: int = MAX_LOGITS,
) -> Tensor:
    """The loss of pairs that this process has all of, whatever others have; otherwise as `contrastive_loss`."""
    pairs = image_embeds, text_embeds
    return share_of_loss(*pairs, *pairs, 0, logit_scale, logit_bias, max_logits) / len(image_embeds)


def share_of_loss(
    images: Tensor,
    texts: Tensor,
    all_images: Tensor,
    all_texts: Tensor,
    start: int,
    logit_scale: Tensor,
    logit_bias: Tensor | None,
    max_logits: int,
) -> Tensor:
    """Returns what images and texts (B, E), of which the first is number `start` of all (N, E), add to the loss."""
    scale = logit_scale.to(images.dtype).exp()
    if logit_bias is None:
        rows = partial(sum_over_rows, softmax_rows, start=start, max_logits=max_logits)
        return (rows(images * scale, all_texts) + rows(texts * scale, all_images)) / 2
    bias = logit_bias.to(images.dtype)
    return sum_over_rows(sigmoid_rows, images * scale, all_texts, bias, start=start, max_logits=max_logits)


def gather_pairs(images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, int]:
    """Returns images and texts (N, E) of all processes, with their gradients, and where those of this one start."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        check_counts([len(images)])
        return images, texts, 0
    counts = torch.zeros(dist.get_world_size(), dtype=torch.long, device=images.device)
    counts[dist.get_rank()] = len(images)
    dist.all_reduce(counts)
    shares = counts.tolist()
    check_counts(shares)
    start = sum(shares[: dist.get_rank()])
    own = torch.cat((images, texts), dim=1)  # (B, 2·E)
    others = (0, 0, start, sum(shares) - start - len(own))
    all_images, all_texts = sum_over_processes(F.pad(own, others)).chunk(2, dim=1)
    return all_images, all_texts, start


def check_counts(shares: list[int]) -> None:
    """Raises `ValueError` if a process has nothing; `shares` is how many pairs each has, the same for all of them."""
    if min(shares) == 0:
        raise ValueError(f"The processes have {shares} pairs of image and text. Give each of them one at least.")


def sum_over_rows(
    loss_of: Callable[..., Tensor], own: Tensor, others: Tensor, *args: Tensor, start: int, max_logits: int
) -> Tensor:
    """Adds up the losses of rows, a few at a time, of which nothing is kept for the backward pass.

    Args:
        loss_of: Takes rows of `own`, `others`, where its partner is among them for each row, and `args`.
        own: (B, E).
        others: (N, E), of which number `start` belongs to the first row, and so on.
        *args: What it takes beside.
        start: See `others`.
        max_logits: The most logits at once.
    """
    partners = torch.arange(start, start + len(own), device=own.device)
    size = max(1, max_logits // len(others))
    parts = [
        checkpoint(loss_of, rows, others, index, *args, use_reentrant=False, preserve_rng_state=False)
        for rows, index in zip(own.split(size), partners.split(size), strict=True)
    ]
    return torch.stack(parts).sum()


def softmax_rows(own: Tensor, others: Tensor, partners: Tensor) -> Tensor:
    """Sum over rows (b, E) of the cross-entropy of their partner, a number (b,), among the others (N, E)."""
    return F.cross_entropy(own @ others.T, partners, reduction="sum")


def sigmoid_rows(own: Tensor, others: Tensor, partners: Tensor, bias: Tensor) -> Tensor:
    """Sum over all pairs of rows (b, E) and others (N, E) of their cross-entropy; `partners` (b,) are right."""
    logits = own @ others.T + bias  # (b, N)
    signs = torch.full_like(logits, -1).scatter_(1, partners[:, None], 1)
    return -F.logsigmoid(signs * logits).sum()
