"""Joint embeddings: projector, losses and model. Views of one image are to say the same, and all images to differ.

Shapes: B images of a process, V views of an image, G of them global ones, C channels, H W pixels, D hidden size, E
embedding size, S slices, T points of a characteristic function.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Generator, Tensor, nn
from transformers import initialization as init
from transformers.processing_utils import Unpack
from transformers.utils import ModelOutput, TransformersKwargs, can_return_tuple

from .configuration_hf_vit import HfViTConfig
from .layers import HfViTBatchNorm2d, HfViTInitialized, sum_over_processes, without_autocast
from .modeling_hf_vit import HfViTModel, check_images
from .pretrained import HfViTPreTrainedModel
from .task_configurations import HfViTJointEmbeddingConfig


# Where characteristic functions are compared: as the paper's code has it
LARGEST_POINT, NUM_POINTS = 3.0, 17
Sum = Callable[[Tensor], Tensor]


class HfViTProjectorLayer(HfViTInitialized, nn.Linear):
    """A linear layer that keeps the deviation of what comes in, whatever that of the blocks' weights is."""

    def initialize(self, std: float) -> None:
        """Draws weights by fan-in (LeCun), and sets the bias to zero."""
        init.trunc_normal_(self.weight, mean=0.0, std=self.in_features**-0.5)
        init.zeros_(self.bias)


class HfViTProjector(nn.Module):
    """Pooled features to embeddings, by an MLP of three layers with batch norm over the views of all processes."""

    def __init__(self, config: HfViTConfig, options: HfViTJointEmbeddingConfig) -> None:
        super().__init__()
        size = options.projector_hidden_size
        self.inner = nn.ModuleList(HfViTProjectorLayer(width, size) for width in (config.pooled_size, size))
        self.norms = nn.ModuleList(HfViTBatchNorm2d(size) for _ in self.inner)
        self.last = HfViTProjectorLayer(size, options.embedding_size)

    def forward(self, features: Tensor) -> Tensor:
        """(..., D) to (..., E)."""
        rows = features.flatten(0, -2)
        for layer, norm in zip(self.inner, self.norms, strict=True):
            rows = norm(layer(rows)[..., None, None]).flatten(1).relu()
        embeds: Tensor = self.last(rows)
        return embeds.unflatten(0, features.shape[:-1])


def draw_slices(size: int, count: int, device: torch.device, generator: Generator | None = None) -> Tensor:
    """Returns random directions of length 1 in columns (E, S), the same on all processes."""
    slices = torch.randn(size, count, generator=generator).to(device)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(slices, src=0)
    return slices / slices.norm(dim=0)


@without_autocast
def gaussian_loss(embeds: Tensor, slices: Tensor, add: Sum = sum_over_processes) -> Tensor:
    """Returns how far embeddings (B, V, E) are from a standard normal distribution, seen along slices (E, S).

    It is SIGReg (https://arxiv.org/abs/2511.08544): for each view and slice the statistic of Epps and Pulley, which is
    the number of images times the squared distance of their characteristic function from that of a Gaussian,
    integrated over [-3, 3] by the trapezoidal rule under a Gaussian weight; of these the mean. The images are those of
    all processes, on which the loss is the same; with another `add`, those that it adds up.
    """
    values = embeds.to(torch.promote_types(embeds.dtype, torch.float32))
    points = torch.linspace(0, LARGEST_POINT, NUM_POINTS, dtype=values.dtype, device=values.device)  # (T,)
    gaussian = (-points.square() / 2).exp()
    weights = gaussian * 2 * LARGEST_POINT / (NUM_POINTS - 1)  # those of negative points included
    weights = torch.cat((weights[:1] / 2, weights[1:-1], weights[-1:] / 2))
    angles = (values @ slices.to(values.dtype))[..., None] * points  # (B, V, S, T)
    sums = torch.stack((angles.cos().sum(dim=0), angles.sin().sum(dim=0)))  # (2, V, S, T)
    count = add(values.new_tensor(float(len(values))))
    cosine, sine = add(sums) / count
    distance = (cosine - gaussian).square() + sine.square()
    return (distance @ weights).mean() * count


@without_autocast
def view_loss(embeds: Tensor, num_global: int, add: Sum = sum_over_processes) -> Tensor:
    """Returns the mean squared distance of embeddings (B, V, E) from the mean of the first G views of their image.

    The mean is over the images of all processes, on which the loss is the same; with another `add`, those that it
    adds up.
    """
    values = embeds.to(torch.promote_types(embeds.dtype, torch.float32))
    centers = values[:, :num_global].mean(dim=1, keepdim=True)
    total = add((values - centers).square().mean(dim=(1, 2)).sum())
    return total / add(values.new_tensor(float(len(values))))


@dataclass
class HfViTJointEmbeddingOutput(ModelOutput):
    """Embeddings of views, and how well they do.

    Args:
        loss: Scalar: `view_loss` and `gaussian_loss`, weighted by `gaussian_weight`; None for single images.
        view_loss: Scalar, see `view_loss`.
        gaussian_loss: Scalar, see `gaussian_loss`.
        embeds: (B, V, E), the global views first; (B, E) of single images.
        pooler_output: (B, V, D), the features below the projector, which other tasks start from; (B, D).
        hidden_states: On request, of the global views, before the first block and after each one: (B·G, L, D).
        attentions: On request, (B·G, heads, L, L) of each block.
    """

    loss: Tensor | None = None
    view_loss: Tensor | None = None
    gaussian_loss: Tensor | None = None
    embeds: Tensor | None = None
    pooler_output: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class HfViTForJointEmbedding(HfViTPreTrainedModel):
    """Gives views of one image one embedding, and so trains an encoder that opens as every other task.

    It is LeJEPA (https://arxiv.org/abs/2511.08544): the embeddings of all views are drawn to the mean of the global
    ones, and their distribution over images to a standard normal one, so that they cannot all become the same. There
    is no teacher, and no gradient is stopped.
    """

    def __init__(self, config: HfViTConfig) -> None:
        super().__init__(config)
        self.options = HfViTJointEmbeddingConfig.of(config.joint_embedding_config)
        self.model = HfViTModel(config)
        self.projector = HfViTProjector(config, self.options)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        local_pixel_values: Tensor | None = None,
        patch_attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        return_loss: bool = True,
        **kwargs: Unpack[TransformersKwargs],
    ) -> HfViTJointEmbeddingOutput:
        """Runs the model.

        Args:
            pixel_values: Global views (B, G, C, H, W), H and W multiples of the patch size; or single images
                (B, C, H, W), which have embeddings but no loss.
            local_pixel_values: Further views (B, V - G, C, h, w), smaller as a rule.
            patch_attention_mask: (B, h, w) bool of single images, False for padding on the right and at the bottom.
            interpolate_pos_encoding: Accepted for compatibility; the positions always follow the image.
            return_loss: Whether the loss is wanted, which draws slices from torch's global generator.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            See `HfViTJointEmbeddingOutput`.

        Raises:
            ValueError: if an input does not fit the model, saying what would.
        """
        views = check_images(pixel_values)
        if views.ndim != 5:
            return self._describe(views, local_pixel_values, patch_attention_mask, **kwargs)
        if patch_attention_mask is not None:
            raise ValueError("Views have no padding: leave patch_attention_mask out.")
        outputs = self.model(views.flatten(0, 1), return_dict=True, **kwargs)
        features = outputs.pooler_output.unflatten(0, views.shape[:2])  # (B, G, D)
        if local_pixel_values is not None:
            self._check_local(views, local_pixel_values)
            pooled = self.model(local_pixel_values.flatten(0, 1), return_dict=True).pooler_output
            features = torch.cat((features, pooled.unflatten(0, local_pixel_values.shape[:2])), dim=1)
        embeds = self.projector(features)
        losses = self.losses(embeds, views.shape[1]) if return_loss else {}
        return HfViTJointEmbeddingOutput(
            **losses,
            embeds=embeds,
            pooler_output=features,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def losses(self, embeds: Tensor, num_global: int, generator: Generator | None = None) -> dict[str, Tensor]:
        """Returns `loss`, `view_loss` and `gaussian_loss` of embeddings (B, V, E), the first G of global views."""
        if embeds.shape[1] < 2:
            raise ValueError(f"An image has {embeds.shape[1]} view, and the loss compares them: give two at least.")
        weight = self.options.gaussian_weight
        slices = draw_slices(embeds.shape[-1], self.options.num_slices, embeds.device, generator)
        likeness, spread = view_loss(embeds, num_global), gaussian_loss(embeds, slices)
        return {"loss": (1 - weight) * likeness + weight * spread, "view_loss": likeness, "gaussian_loss": spread}

    def _describe(
        self, images: Tensor, local_views: Tensor | None, patch_attention_mask: Tensor | None, **kwargs: Any
    ) -> HfViTJointEmbeddingOutput:
        """Embeds single images."""
        if local_views is not None:
            raise ValueError(
                f"local_pixel_values go with global views (batch, views, channels, height, width), but "
                f"pixel_values are {tuple(images.shape)}. Leave them out, or give such views."
            )
        outputs = self.model(images, patch_attention_mask=patch_attention_mask, return_dict=True, **kwargs)
        return HfViTJointEmbeddingOutput(
            embeds=self.projector(outputs.pooler_output),
            pooler_output=outputs.pooler_output,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _check_local(self, views: Tensor, local_views: Tensor) -> None:
        if local_views.ndim != 5 or len(local_views) != len(views):
            raise ValueError(
                f"local_pixel_values must be (batch, views, channels, height, width) of the {len(views)} images of "
                f"pixel_values, not {tuple(local_views.shape)}."
            )
