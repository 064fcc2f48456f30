"""Joint-embedding pretraining: projector, losses and model. Views of the same image are trained to agree.

Shapes: B images of a process, V views of an image, of which G are global, C channels, H W pixels, D hidden
size, E embedding size, S slices, T points of a characteristic function, K prototypes, N patches, M masked patches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from transformers.processing_utils import Unpack
from transformers.utils import ModelOutput, TransformersKwargs, can_return_tuple

from .configuration_hf_vit import HfViTConfig
from .layers import HfViTBatchNorm2d, HfViTFanInLinear
from .modeling_hf_vit import HfViTModel, check_images
from .pretrained import HfViTPreTrainedModel
from .shared import count_processes, gather_rows, in_float32, sum_over_processes
from .task_configurations import HfViTJointEmbeddingConfig


# Points in [0, 3] at which characteristic functions are compared. By symmetry, they represent 33 points in [-3, 3], as
# in https://github.com/rbalestr-lab/lejepa. The paper lists 17 points on [-5, 5], which is less accurate.
LARGEST_POINT, NUM_POINTS = 3.0, 17
ROUNDS = 3  # Number of Sinkhorn-Knopp iterations.
SMALLEST_DISTANCE = 1e-8  # Constant added to distances before taking the logarithm.
Sum = Callable[[Tensor], Tensor]


class HfViTProjector(nn.Module):
    """Three-layer MLP that maps pooled features to embeddings, with batch norm over the views of all processes."""

    def __init__(self, config: HfViTConfig, options: HfViTJointEmbeddingConfig) -> None:
        super().__init__()
        size = options.projector_hidden_size
        self.inner = nn.ModuleList(HfViTFanInLinear(width, size) for width in (config.pooled_size, size))
        self.norms = nn.ModuleList(HfViTBatchNorm2d(size) for _ in self.inner)
        self.last = HfViTFanInLinear(size, options.embedding_size)

    def forward(self, features: Tensor) -> Tensor:
        """Maps features (..., D) to embeddings (..., E)."""
        rows = features.flatten(0, -2)
        for layer, norm in zip(self.inner, self.norms, strict=True):
            rows = norm(layer(rows)[..., None, None]).flatten(1).relu()
        embeds: Tensor = self.last(rows)
        return embeds.unflatten(0, features.shape[:-1])


class HfViTPrototypes(nn.Module):
    """Three-layer MLP that maps features to cosine similarities with prototypes."""

    def __init__(self, config: HfViTConfig, options: HfViTJointEmbeddingConfig) -> None:
        super().__init__()
        size = options.projector_hidden_size
        widths = (config.pooled_size, size, size, options.embedding_size)
        self.inner = nn.ModuleList(HfViTFanInLinear(one, other) for one, other in pairwise(widths))
        self.prototypes = HfViTFanInLinear(options.embedding_size, options.num_prototypes, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """Maps features (..., D) to cosine similarities (..., K)."""
        *inner, last = self.inner
        for layer in inner:
            features = F.gelu(layer(features))
        return F.linear(F.normalize(last(features), dim=-1), F.normalize(self.prototypes.weight, dim=-1))


@torch.no_grad()
@in_float32
def assign(logits: Tensor, temperature: float, add: Sum = sum_over_processes) -> Tensor:
    """Converts cosine similarities (N, K) to probabilities (N, K) that assign all K prototypes equally often.

    This is the Sinkhorn-Knopp algorithm as in SwAV (https://arxiv.org/abs/2006.09882), over the rows of all processes.
    `add` is the function that sums a tensor over processes.
    """
    scores = logits / temperature
    shares = (scores - 1 / temperature).exp()  # exponents are at most 0, because cosines are at most 1
    for _ in range(ROUNDS):
        shares = shares / add(shares.sum(dim=0)).clamp_min(torch.finfo(shares.dtype).tiny)
        shares = shares / shares.sum(dim=1, keepdim=True).clamp_min(torch.finfo(shares.dtype).tiny)
    return shares


@in_float32
def view_cross_entropy(logits: Tensor, assigned: Tensor, temperature: float, add: Sum = sum_over_processes) -> Tensor:
    """Returns the mean cross-entropy of cosine similarities (B, V, K) and assignments (B, G, K) of global views.

    Each view is compared with all global views except itself, as in DINO (https://arxiv.org/abs/2104.14294). `add`
    sums a tensor over processes.
    """
    scores = logits / temperature
    entropies = -torch.einsum("bgk,bvk->gvb", assigned.to(scores.dtype), scores.log_softmax(dim=-1))  # (G, V, B)
    is_other = ~torch.eye(*entropies.shape[:2], dtype=torch.bool, device=logits.device)
    total = add(entropies[is_other].mean(dim=0).sum())
    return total / add(total.new_tensor(float(len(logits))))


@in_float32
def patch_cross_entropy(logits: Tensor, assigned: Tensor, temperature: float, masks: Tensor) -> Tensor:
    """Returns the cross-entropy of cosine similarities and teacher assignments, both (M, K), of masked patches.

    This is the loss of iBOT (https://arxiv.org/abs/2111.07832) as in DINOv2: the mean over the patches that `masks`
    (V, N) hides in each view, then over the views of all processes. A view without masked patches has a loss of 0.
    """
    scores = logits / temperature
    entropies = -(assigned.to(scores.dtype) * scores.log_softmax(dim=-1)).sum(dim=-1)  # (M,)
    counts = masks.sum(dim=1, keepdim=True).expand_as(masks)[masks]  # (M,)
    total = sum_over_processes((entropies / counts).sum())
    return total / sum_over_processes(total.new_tensor(float(len(masks))))


@in_float32
def koleo_loss(features: Tensor) -> Tensor:
    """Returns a loss that spreads the pooled features (B, G, D) of different images, summed over the G global views.

    This is KoLeo (https://arxiv.org/abs/1806.03198) as in DINOv2: the negative mean logarithm of the distance between
    the normalized feature of an image and the nearest feature of another image on any process. It is 0 for one image.
    """
    own = F.normalize(features, dim=-1)
    (rows,), shares, start = gather_rows(own.flatten(1))
    everything = rows.unflatten(1, own.shape[1:]).transpose(0, 1)  # (G, N, D)
    if len(rows) < 2:
        return rows.sum() * 0
    own = own.transpose(0, 1)
    with torch.no_grad():
        cosines = own @ everything.transpose(1, 2)  # (G, B, N)
        cosines[:, :, start : start + own.shape[1]].diagonal(dim1=1, dim2=2).fill_(-2)
        nearest = cosines.argmax(dim=2)[..., None].expand_as(own)
    distances = (own - everything.gather(1, nearest)).norm(dim=-1)
    return sum_over_processes(-(distances + SMALLEST_DISTANCE).log().sum()) / sum(shares)


def draw_slices(size: int, count: int, device: torch.device, generator: Generator | None = None) -> Tensor:
    """Returns random unit vectors as columns (E, S), identical on all processes."""
    slices = torch.randn(size, count, generator=generator).to(device)
    if count_processes() > 1:
        dist.broadcast(slices, src=0)
    return slices / slices.norm(dim=0)


@in_float32
def gaussian_loss(embeds: Tensor, slices: Tensor, add: Sum = sum_over_processes) -> Tensor:
    """Returns the distance of embeddings (B, V, E) from a standard normal distribution, along slices (E, S).

    This is SIGReg (https://arxiv.org/abs/2511.08544), the mean over views and slices of the Epps-Pulley statistic:
    the number of images times the squared difference between the characteristic function of their embeddings and that
    of a Gaussian, integrated over [-3, 3] by the trapezoidal rule with a Gaussian weight. The loss covers the images
    of all processes and is equal on all processes; `add` sums a tensor over processes.
    """
    points = torch.linspace(0, LARGEST_POINT, NUM_POINTS, dtype=embeds.dtype, device=embeds.device)  # (T,)
    gaussian = (-points.square() / 2).exp()
    weights = gaussian * 2 * LARGEST_POINT / (NUM_POINTS - 1)  # doubled, to include points in [-3, 0]
    weights = torch.cat((weights[:1] / 2, weights[1:-1], weights[-1:] / 2))
    angles = (embeds @ slices.to(embeds.dtype))[..., None] * points  # (B, V, S, T)
    sums = torch.stack((angles.cos().sum(dim=0), angles.sin().sum(dim=0)))  # (2, V, S, T)
    count = add(embeds.new_tensor(float(len(embeds))))
    cosine, sine = add(sums) / count
    distance = (cosine - gaussian).square() + sine.square()
    return (distance @ weights).mean() * count


@in_float32
def view_loss(embeds: Tensor, num_global: int, add: Sum = sum_over_processes) -> Tensor:
    """Returns the mean squared distance of embeddings (B, V, E) from the mean of the G global views of their image.

    The mean covers the images of all processes and is equal on all processes; `add` sums a tensor over processes.
    """
    centers = embeds[:, :num_global].mean(dim=1, keepdim=True)
    total = add((embeds - centers).square().mean(dim=(1, 2)).sum())
    return total / add(embeds.new_tensor(float(len(embeds))))


@dataclass
class HfViTJointEmbeddingOutput(ModelOutput):
    """Output of joint-embedding pretraining: losses, embeddings and features.

    Args:
        loss: Weighted sum of the following losses; None for single images.
        view_loss: Scalar, see `view_loss`; for "dino", see `view_cross_entropy`.
        gaussian_loss: Scalar, see `gaussian_loss`.
        patch_loss: Scalar, see `patch_cross_entropy`.
        koleo_loss: Scalar, see `koleo_loss`.
        embeds: Embeddings (B, V, E), global views first, or (B, E) for single images. For "dino", cosines with
            prototypes, (B, V, K) or (B, K).
        teacher_probs: With `as_teacher`, assignments (B, G, K) of the global views; see `assign`.
        teacher_patch_probs: With `as_teacher`, assignments (M, K) of the masked patches.
        pooler_output: Features (B, V, D) before the projector, used by other tasks; (B, D) for single images.
        hidden_states: If requested, tokens (B·G, L, D) of global views before the first block and after each block.
        attentions: If requested, attention weights (B·G, heads, L, L) of each block.
    """

    loss: Tensor | None = None
    view_loss: Tensor | None = None
    gaussian_loss: Tensor | None = None
    patch_loss: Tensor | None = None
    koleo_loss: Tensor | None = None
    embeds: Tensor | None = None
    teacher_probs: Tensor | None = None
    teacher_patch_probs: Tensor | None = None
    pooler_output: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class HfViTForJointEmbedding(HfViTPreTrainedModel):
    """Pretrains an encoder, which all task models can load, so that views of the same image have equal embeddings.

    The default objective is LeJEPA (https://arxiv.org/abs/2511.08544): embeddings of all views are pulled to the mean
    of the global views, and their distribution over images to a standard normal distribution, so that they cannot
    collapse. LeJEPA needs no teacher and no stopped gradient. The objective "dino" has a teacher, a copy of the model
    with averaged weights that is called with `as_teacher`; see `HfViTJointEmbeddingConfig`.
    """

    supports_stored_features = False  # each step draws new views

    def __init__(self, config: HfViTConfig) -> None:
        super().__init__(config)
        self.options = HfViTJointEmbeddingConfig.of(config.joint_embedding_config)
        self.model = HfViTModel(config)
        is_taught = self.options.objective == "dino"
        masks_patches = is_taught and self.options.patch_weight
        if masks_patches and not config.use_mask_token:
            raise ValueError(
                "objective='dino' needs a mask token, but use_mask_token=False. Set use_mask_token=True or "
                "patch_weight=0."
            )
        if masks_patches and config.pooled_size != config.hidden_size:
            raise ValueError(
                f"pooling={config.pooling!r} gives features of width {config.pooled_size}, but patches have width "
                f"{config.hidden_size}. Set pooling='cls' or 'mean', or patch_weight=0."
            )
        self.projector = (HfViTPrototypes if is_taught else HfViTProjector)(config, self.options)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        local_pixel_values: Tensor | None = None,
        patch_attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        return_loss: bool = True,
        bool_masked_pos: Tensor | None = None,
        teacher_probs: Tensor | None = None,
        teacher_patch_probs: Tensor | None = None,
        as_teacher: bool = False,
        teacher_temperature: float | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> HfViTJointEmbeddingOutput:
        """Runs the model.

        Args:
            pixel_values: Global views (B, G, C, H, W), H and W multiples of the patch size; or single images
                (B, C, H, W), which have embeddings but no loss.
            local_pixel_values: Local views (B, V - G, C, height, width), usually smaller.
            patch_attention_mask: (B, h, w) bool of single images, False for padding on the right and at the bottom.
            interpolate_pos_encoding: Ignored, for compatibility; position embeddings are always interpolated.
            return_loss: Whether to compute the loss, which draws slices with the global random generator of torch.
            bool_masked_pos: (B, G, N) bool, for "dino", True for patches of global views that a mask token replaces.
            teacher_probs: Assignments (B, G, K) of the teacher; by default this model computes them itself.
            teacher_patch_probs: Assignments (M, K) of the teacher for the masked patches, in row-major order.
            as_teacher: Whether to return assignments of views and of `bool_masked_pos` patches, without masking.
            teacher_temperature: Temperature of the assignments, by default `teacher_temperature` of the configuration.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            A `HfViTJointEmbeddingOutput`.

        Raises:
            ValueError: if an input does not fit the model; the message names valid values.
        """
        views = check_images(pixel_values)
        has_views = views.ndim == 5
        self._check_views(views, local_pixel_values, patch_attention_mask, bool_masked_pos)
        masks = None if bool_masked_pos is None or not has_views else bool_masked_pos.flatten(0, 1)
        kwargs.update(bool_masked_pos=None if as_teacher else masks, patch_attention_mask=patch_attention_mask)
        outputs = self.model(views.flatten(0, 1) if has_views else views, return_dict=True, **kwargs)
        features, num_global = outputs.pooler_output, views.shape[1]
        features = features.unflatten(0, views.shape[:2]) if has_views else features  # (B, G, D) or (B, D)
        if local_pixel_values is not None:
            pooled = self.model(local_pixel_values.flatten(0, 1), return_dict=True).pooler_output
            features = torch.cat((features, pooled.unflatten(0, local_pixel_values.shape[:2])), dim=1)
        embeds, found = self.projector(features), dict[str, Tensor]()
        patches = None if masks is None else self.projector(outputs.last_hidden_state[:, -masks.shape[1] :][masks])
        if as_teacher and has_views:
            found = self.assigned(embeds[:, :num_global], patches, teacher_temperature)
        elif return_loss and has_views:
            found = self.compared(embeds, features[:, :num_global], patches, masks, teacher_probs, teacher_patch_probs)
        return HfViTJointEmbeddingOutput(
            **found,
            embeds=embeds,
            pooler_output=features,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def assigned(self, embeds: Tensor, patches: Tensor | None, temperature: float | None = None) -> dict[str, Tensor]:
        """Returns `teacher_probs` and `teacher_patch_probs` for similarities of views (B, G, K) and patches (M, K)."""
        temperature = self.options.teacher_temperature if temperature is None else temperature
        found = {"teacher_probs": assign(embeds.flatten(0, 1), temperature).unflatten(0, embeds.shape[:2])}
        return found if patches is None else {**found, "teacher_patch_probs": assign(patches, temperature)}

    def compared(
        self,
        embeds: Tensor,
        features: Tensor,
        patches: Tensor | None = None,
        masks: Tensor | None = None,
        probs: Tensor | None = None,
        patch_probs: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Returns a dictionary of losses of embeddings (B, V, E) and of features (B, G, D) of the global views.

        For "dino", losses also depend on masks (B·G, N), similarities (M, K) of masked patches, and teacher outputs.
        """
        num_global, options = features.shape[1], self.options
        if options.objective == "lejepa":
            if embeds.shape[1] < 2:
                raise ValueError(f"An image has {embeds.shape[1]} view, but the loss needs two or more views.")
            weight, slices = options.gaussian_weight, draw_slices(embeds.shape[-1], options.num_slices, embeds.device)
            likeness, spread = view_loss(embeds, num_global), gaussian_loss(embeds, slices)
            loss = (1 - weight) * likeness + weight * spread
            return {"loss": loss, "view_loss": likeness, "gaussian_loss": spread}
        if probs is None:
            probs = self.assigned(embeds[:, :num_global], None)["teacher_probs"]
        likeness = view_cross_entropy(embeds, probs, options.student_temperature)
        loss, parts = likeness, {"view_loss": likeness}
        if options.koleo_weight:
            parts["koleo_loss"] = koleo_loss(features)
            loss = loss + options.koleo_weight * parts["koleo_loss"]
        if patches is not None and masks is not None and patch_probs is not None:
            parts["patch_loss"] = patch_cross_entropy(patches, patch_probs, options.student_temperature, masks)
            loss = loss + options.patch_weight * parts["patch_loss"]
        return {"loss": loss, **parts}

    def _check_views(
        self, views: Tensor, local_views: Tensor | None, padding: Tensor | None, masks: Tensor | None
    ) -> None:
        if views.ndim != 5:
            if local_views is not None:
                raise ValueError(
                    "local_pixel_values need pixel_values of shape (batch, views, channels, height, width), not "
                    f"{tuple(views.shape)}."
                )
            return
        if padding is not None:
            raise ValueError("Views cannot have padding. Leave patch_attention_mask out.")
        if local_views is not None and (local_views.ndim != 5 or len(local_views) != len(views)):
            raise ValueError(
                f"local_pixel_values must be (batch, views, channels, height, width) for the {len(views)} images of "
                f"pixel_values, not {tuple(local_views.shape)}."
            )
        if masks is not None and (self.options.objective == "lejepa" or masks.shape[:2] != views.shape[:2]):
            raise ValueError(
                "bool_masked_pos must be (batch, global views, patches) with (batch, global views) = "
                f"{tuple(views.shape[:2])}, not {tuple(masks.shape)}. bool_masked_pos requires objective='dino', not "
                f"{self.options.objective!r}."
            )
