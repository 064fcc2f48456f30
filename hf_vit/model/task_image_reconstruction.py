"""Image reconstruction: an autoencoder whose latents are a few numbers per patch, with its loss.

Shapes: B batch, C channels, H W pixels, p q patch height and width, h w patch grid, N = h·w patches, L
tokens, D hidden size, E hidden size of the decoder, Z latents per patch.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask
from transformers.processing_utils import Unpack
from transformers.utils import ModelOutput, TransformersKwargs
from transformers.utils.generic import maybe_autocast
from transformers.utils.output_capturing import capture_outputs

from .configuration_hf_vit import HfViTConfig, to_pair
from .embeddings import Grid
from .layers import HfViTInitialized, HfViTNamedHead
from .modeling_hf_vit import HfViTModel, check_images
from .patch_decoder import HfViTMaeDecoder, HfViTPixelPredictor, patchify, unpatchify
from .pretrained import HfViTPreTrainedModel
from .shared import to_float32_or_higher, to_maps
from .task_configurations import HfViTReconstructionConfig


FIRST_LOGVAR = -9.0  # initial log variance of latents: the noise is small compared with their variance of about 1
LOGVAR_RANGE = -30.0, 20.0  # limits of log variances, as in diffusers


class HfViTLatentDistribution:
    """Normal distribution of latents, like `DiagonalGaussianDistribution` in diffusers.

    The attributes `std` and `var` are the standard deviations and variances (B, Z, h, w).

    Args:
        mean: Means (B, Z, h, w).
        logvar: Logarithms of the variances (B, Z, h, w); `None` for latents without noise.
    """

    def __init__(self, mean: Tensor, logvar: Tensor | None = None) -> None:
        self.mean = mean
        self.logvar = None if logvar is None else logvar.clamp(*LOGVAR_RANGE)
        self.std = torch.zeros_like(mean) if self.logvar is None else (0.5 * self.logvar).exp()
        self.var = torch.zeros_like(mean) if self.logvar is None else self.logvar.exp()

    def mode(self) -> Tensor:
        """Returns the most likely latents (B, Z, h, w)."""
        return self.mean

    def sample(self, generator: Generator | None = None) -> Tensor:
        """Draws latents (B, Z, h, w), on the device of the `generator` if it is given."""
        if self.logvar is None:
            return self.mean
        device = self.mean.device if generator is None else generator.device
        noise = torch.randn(self.mean.shape, generator=generator, device=device, dtype=self.mean.dtype)
        return self.mean + self.std * noise.to(self.mean.device)

    def divergences(self) -> Tensor:
        """Returns the KL divergence (B, Z, h, w) of each latent from a standard normal distribution."""
        if self.logvar is None:
            return torch.zeros_like(self.mean)
        mean, logvar = to_float32_or_higher(self.mean), to_float32_or_higher(self.logvar)
        return 0.5 * (mean.square() + logvar.exp() - 1 - logvar)

    def nll(self, sample: Tensor, dims: tuple[int, ...] = (1, 2, 3)) -> Tensor:
        """Returns the negative log-likelihood of latents (B, Z, h, w), summed over `dims`; 0 without noise."""
        if self.logvar is None:
            return torch.zeros_like(self.mean).sum(dim=dims)
        mean, logvar, sample = map(to_float32_or_higher, (self.mean, self.logvar, sample))
        return 0.5 * (math.log(2 * math.pi) + logvar + (sample - mean).square() / logvar.exp()).sum(dim=dims)

    def kl(self) -> Tensor:
        """Returns the KL divergence (B,) of each image, summed over latents."""
        return self.divergences().flatten(1).sum(dim=1)


@dataclass
class HfViTLatentOutput(ModelOutput):
    """Output of `HfViTForImageReconstruction.encode`: `latent_dist`, a `HfViTLatentDistribution`."""

    latent_dist: HfViTLatentDistribution = None  # type: ignore[assignment]  # outputs need defaults


@dataclass
class HfViTImageSampleOutput(ModelOutput):
    """Output of `HfViTForImageReconstruction.decode`: `sample`, images (B, C, H, W) in units of `pixel_values`."""

    sample: Tensor = None  # type: ignore[assignment]  # outputs need defaults


@dataclass
class HfViTImageReconstructionOutput(ModelOutput):
    """Output of image reconstruction.

    Args:
        loss: Scalar loss, if requested; see `HfViTForImageReconstruction.loss`.
        reconstruction: Images (B, C, H, W) in the units of `pixel_values`.
        latents: Latents (B, Z, h, w) from which the images were reconstructed.
        hidden_states: If requested, tokens (B, L, D) before the first block of the encoder and after each block.
        attentions: If requested, attention weights (B, heads, L, L) of each block of the encoder.
    """

    loss: Tensor | None = None
    reconstruction: Tensor | None = None
    latents: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class HfViTLatentLayer(nn.Linear, HfViTInitialized):
    """Layer that maps tokens to the mean and log variance of latents; initially, mean 0 and low variance."""

    def initialize(self, std: float) -> None:
        """Sets the weights to 0, and the log variances to `FIRST_LOGVAR`."""
        init.zeros_(self.weight)
        half = self.out_features // 2
        init.copy_(self.bias, torch.cat((torch.zeros(half), torch.full((half,), FIRST_LOGVAR))))


class HfViTZeroPixelPredictor(HfViTPixelPredictor, HfViTInitialized):
    """Last layer of a decoder with a shortcut. Initially, its outputs are 0, so only the shortcut has an effect."""

    def initialize(self, std: float) -> None:
        """Sets the weights to 0."""
        init.zeros_(self.weight)
        init.zeros_(self.bias)


class HfViTKlAutoencoder(nn.Module):
    """Maps tokens to normally distributed latents, and latents to pixels, both with a linear shortcut.

    A linear layer maps latents to pixels, and the same matrix maps pixels to latents by projection onto its columns.
    If the columns are the principal directions of patches, training starts from principal component analysis, on which
    encoder and decoder then improve. Source of the shortcut: DC-AE, https://arxiv.org/abs/2410.10733.
    """

    def __init__(self, config: HfViTConfig, options: HfViTReconstructionConfig) -> None:
        super().__init__()
        size = options.latent_channels
        self.to_latents = HfViTLatentLayer(config.hidden_size, 2 * size)
        self.shortcut = HfViTPixelPredictor(size, config)
        self.decoder = HfViTMaeDecoder(config, options, size)
        self.decoder.predictor = HfViTZeroPixelPredictor(self.decoder.hidden_size, config)

    def encode(self, levels: list[Tensor], patches: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns mean and log variance (B, N, Z) for the tokens of one block (B, N, D) and pixels (B, N, p·q·C)."""
        mean, logvar = self.to_latents(levels[-1]).chunk(2, dim=-1)
        weight = self.shortcut.weight  # (p·q·C, Z)
        lengths = weight.square().sum(dim=0).clamp_min(1e-6)
        with maybe_autocast(weight.device.type, enabled=False):  # autocast would round small pixel differences
            projected = (patches.to(weight.dtype) - self.shortcut.bias) @ weight / lengths
        return projected + mean, logvar

    def decode(self, latents: Tensor, grid: Grid, padding: Tensor | None, attention_mask: Any) -> Tensor:
        """Maps latents (B, N, Z) to pixels (B, N, p·q·C)."""
        tokens = self.decoder.embedding(latents)
        with maybe_autocast(latents.device.type, enabled=False):
            linear = self.shortcut(latents.to(self.shortcut.weight.dtype))
        return linear + self.decoder.decode(tokens[:, :0], tokens, grid, padding, attention_mask)


class HfViTRepresentationAutoencoder(HfViTInitialized):
    """Uses standardized tokens of the encoder as latents (RAE, https://arxiv.org/abs/2510.11690)."""

    latent_mean: Tensor
    latent_std: Tensor

    def __init__(self, config: HfViTConfig, options: HfViTReconstructionConfig) -> None:
        super().__init__()
        self.register_buffer("latent_mean", torch.zeros(config.hidden_size))
        self.register_buffer("latent_std", torch.ones(config.hidden_size))
        self.decoder = HfViTMaeDecoder(config, options, config.hidden_size)

    def initialize(self, std: float) -> None:
        """Sets mean 0 and standard deviation 1. Training runs replace them by statistics of the training images."""
        init.zeros_(self.latent_mean)
        init.ones_(self.latent_std)

    def encode(self, levels: list[Tensor], patches: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the standardized sum (B, N, D) of the tokens of several blocks, and None in place of variances."""
        return (torch.stack(levels).sum(dim=0) - self.latent_mean) / self.latent_std, None

    def decode(self, latents: Tensor, grid: Grid, padding: Tensor | None, attention_mask: Any) -> Tensor:
        """Maps latents (B, N, D) to pixels (B, N, p·q·C)."""
        tokens = self.decoder.embedding(latents)
        return self.decoder.decode(tokens[:, :0], tokens, grid, padding, attention_mask)


AUTOENCODERS = {"kl": HfViTKlAutoencoder, "rae": HfViTRepresentationAutoencoder}


class HfViTReconstructionHead(HfViTNamedHead):
    """Head that contains the autoencoder of type `options.latent_type`."""

    def __init__(self, config: HfViTConfig, options: HfViTReconstructionConfig) -> None:
        if options.latent_type == "rae" and options.num_latent_layers > config.num_hidden_layers:
            raise ValueError(
                f"num_latent_layers={options.num_latent_layers} exceeds num_hidden_layers={config.num_hidden_layers}. "
                "Reduce it."
            )
        super().__init__(options.latent_type, AUTOENCODERS[options.latent_type](config, options))


class HfViTForImageReconstruction(HfViTPreTrainedModel):
    """Autoencoder, whose encoder maps an image to latents per patch, and whose decoder maps latents to images.

    The methods `encode` and `decode` follow `AutoencoderKL` of diffusers. Images have any size that is a multiple of
    the patch size.
    """

    supports_stored_features = False  # the images are also the targets

    def __init__(self, config: HfViTConfig) -> None:
        super().__init__(config)
        self.options = HfViTReconstructionConfig.of(config.reconstruction_config)
        self.model = HfViTModel(config, add_pooling_layer=False)
        self.reconstruction_head = HfViTReconstructionHead(config, self.options)
        # Frozen encoder for the loss term of `feature_weight`, set by training runs. It is wrapped in a tuple, so that
        # it is not saved with the model.
        self.feature_encoder: tuple[HfViTModel, ...] = ()
        self.post_init()
        self._output_capturing_hooks_installed = True  # outputs are recorded by the hooks of `self.model`

    @property
    def autoencoder(self) -> HfViTKlAutoencoder | HfViTRepresentationAutoencoder:
        """Module that maps encoder tokens to latents, and latents to pixels."""
        return self.reconstruction_head.decoder  # type: ignore[return-value]

    def encode(
        self, pixel_values: Tensor, patch_attention_mask: Tensor | None = None, **kwargs: Any
    ) -> HfViTLatentOutput:
        """Encodes images (B, C, H, W); `patch_attention_mask` (B, h, w) is False for padding.

        `kwargs` may contain `output_attentions`, which uses eager attention.

        Returns:
            A `HfViTLatentOutput`; its `latent_dist` has the methods `mode`, `sample`, `kl` and `nll`.

        Raises:
            ValueError: if the images do not fit the model; the message names valid values.
        """
        pixel_values = check_images(pixel_values)
        model, head = self.model, self.autoencoder
        grid = model.embeddings.check(pixel_values, patch_attention_mask)
        hidden_states, blocks = model.start_blocks(pixel_values, patch_attention_mask, **kwargs)  # (B, L, D)
        masks, last, levels = blocks.masks(hidden_states), len(model.encoder.layers), list[Tensor]()
        count = self.options.num_latent_layers if self.options.latent_type == "rae" else 1
        starts = [0, *range(last - count + 1, last)]
        for start, stop in zip(starts, [*starts[1:], last], strict=True):
            hidden_states = blocks.run(hidden_states, start, stop, **masks)
            levels.append(model.norm(hidden_states)[:, self.config.num_prefix_tokens :])  # (B, N, D)
        mean, logvar = head.encode(levels, patchify(pixel_values, to_pair(self.config.patch_size)))  # (B, N, Z)
        variances = None if logvar is None else to_maps(logvar, grid)
        return HfViTLatentOutput(latent_dist=HfViTLatentDistribution(to_maps(mean, grid), variances))

    def decode(self, latents: Tensor, patch_attention_mask: Tensor | None = None) -> HfViTImageSampleOutput:
        """Decodes latents (B, Z, h, w) to a `HfViTImageSampleOutput`; `patch_attention_mask` as in `encode`.

        To draw images from the prior of a "kl" model, pass latents from `torch.randn`.

        Raises:
            ValueError: if the latents have another number of channels than the model.
        """
        size = self.autoencoder.decoder.embedding.in_features
        if latents.ndim != 4 or latents.shape[1] != size:
            raise ValueError(f"latents must be (batch, {size}, rows, columns), not {tuple(latents.shape)}.")
        grid = (latents.shape[-2], latents.shape[-1])
        tokens = latents.flatten(2).transpose(1, 2)  # (B, N, Z)
        mask: Any = None
        if patch_attention_mask is not None:
            visible = patch_attention_mask.flatten(1).bool()
            mask = create_bidirectional_mask(self.config, inputs_embeds=tokens, attention_mask=visible)
        pixels = self.autoencoder.decode(tokens, grid, patch_attention_mask, mask)
        return HfViTImageSampleOutput(sample=unpatchify(pixels, grid, to_pair(self.config.patch_size)))

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: Tensor | None = None,
        patch_attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        return_loss: bool = True,
        **kwargs: Unpack[TransformersKwargs],
    ) -> HfViTImageReconstructionOutput:
        """Reconstructs images, in training mode from sampled latents, in evaluation mode from the most likely ones.

        Args:
            pixel_values: Images (B, C, H, W), H and W multiples of the patch size.
            patch_attention_mask: (B, h, w) bool, False for padding on the right and at the bottom.
            interpolate_pos_encoding: Ignored, for compatibility; position embeddings are always interpolated.
            return_loss: Whether to compute the loss. `transformers.Trainer` checks for this argument to decide
                whether it can evaluate the loss of a model without labels.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            A `HfViTImageReconstructionOutput`.

        Raises:
            ValueError: if an input does not fit the model; the message names valid values.
        """
        pixel_values = check_images(pixel_values)
        latent_dist = self.encode(pixel_values, patch_attention_mask, **kwargs).latent_dist
        latents = latent_dist.sample() if self.training else latent_dist.mode()
        if self.training and self.options.noise_std:
            levels = self.options.noise_std * torch.randn(len(latents), 1, 1, 1, device=latents.device).abs()
            latents = latents + levels.to(latents) * torch.randn_like(latents)
        reconstruction = self.decode(latents, patch_attention_mask).sample
        loss = self.loss(reconstruction, pixel_values, latent_dist, patch_attention_mask) if return_loss else None
        return HfViTImageReconstructionOutput(loss=loss, reconstruction=reconstruction, latents=latents)

    def loss(
        self,
        reconstruction: Tensor,
        pixel_values: Tensor,
        latent_dist: HfViTLatentDistribution,
        patch_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Returns the scalar loss of reconstructions of images, both (B, C, H, W).

        The loss is the mean over images of the mean pixel difference without padding, plus `kl_weight` times the
        mean KL divergence per latent, plus `feature_weight` times the cosine distance of the features, if
        `feature_encoder` is set.
        """
        patch_size, options = to_pair(self.config.patch_size), self.options
        difference = F.l1_loss if options.pixel_loss == "l1" else F.mse_loss
        found, true = (patchify(to_float32_or_higher(images), patch_size) for images in (reconstruction, pixel_values))
        errors = difference(found, true, reduction="none").mean(dim=-1)  # (B, N)
        if options.latent_type == "kl":
            errors = errors + options.kl_weight * latent_dist.divergences().mean(dim=1).flatten(1)
        if patch_attention_mask is None:
            total = errors.mean()
        else:
            is_seen = patch_attention_mask.flatten(1).bool()
            total = (errors.where(is_seen, 0).sum(dim=1) / is_seen.sum(dim=1)).mean()
        if options.feature_weight and self.feature_encoder:
            encoder = self.feature_encoder[0].to(reconstruction.device)
            with torch.no_grad():
                wanted = encoder(pixel_values, patch_attention_mask=patch_attention_mask).last_hidden_state
            reached = encoder(reconstruction, patch_attention_mask=patch_attention_mask).last_hidden_state
            total = total + options.feature_weight * (1 - F.cosine_similarity(reached, wanted, dim=-1)).mean()
        return total
