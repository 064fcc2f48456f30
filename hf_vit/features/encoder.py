"""Image features from the tokens of a model, with raw pixels and tokens of an untrained model as baselines.

Shapes: B batch, C channels, H W pixels, h w patch grid, N patches without padding, P prefix tokens, D hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import BaseImageProcessor, BatchFeature

from ..convert import load_image_processor
from ..model.modeling_hf_vit import HfViTModel
from ..model.pretrained import check_trained
from ..training.models import load_with_info, without_load_report
from ..training.tasks.unlabeled import RAW_SIZE, raw_pixels


FEATURES = {
    "cls": "the CLS token",
    "mean": "the mean of the patch tokens",
    "patches": "all patch tokens",
    "pixels": f"raw pixels at {RAW_SIZE} x {RAW_SIZE}",
    "untrained_cls": "the CLS token of the same model with random weights",
    "untrained_mean": "the mean of the patch tokens of the same model with random weights",
}
UNTRAINED = "untrained_"
UNTRAINED_SEED = 0


class ImageEncoder:
    """Computes the features of images.

    Args:
        model: Model that computes the tokens.
        processor: Image processor of the model.
        features: Keys of `FEATURES`.

    Raises:
        ValueError: if a feature needs a CLS token and the model has none.
    """

    def __init__(self, model: HfViTModel, processor: BaseImageProcessor, features: Sequence[str]) -> None:
        if wanted := [name for name in features if name.endswith("cls") and not model.config.use_cls_token]:
            raise ValueError(f"The model has no CLS token, required for {' and '.join(wanted)}. Use --features mean.")
        self.model, self.processor, self.features = model.eval(), processor, tuple(features)
        self.untrained = _untrained(model) if any(name.startswith(UNTRAINED) for name in features) else None

    @property
    def widths(self) -> dict[str, int]:
        """Vector length of each feature. For "patches", it is the vector length of a single patch."""
        config = self.model.config
        pixels = config.num_channels * RAW_SIZE**2
        return {name: pixels if name == "pixels" else config.hidden_size for name in self.features}

    @torch.no_grad()
    def __call__(self, images: Sequence[Tensor]) -> dict[str, Tensor | list[Tensor]]:
        """Computes the features of a batch of images.

        Args:
            images: B tensors (C, H_i, W_i). They are resized by the image processor.

        Returns:
            A dict with a tensor (B, D) for each feature. The feature "patches" is a list with a tensor (N_i, D) per
            image, in row-major order. A further entry "grid" (B, 2) int32 has the numbers of patch rows and columns.
        """
        inputs = self.processor(images=list(images), input_data_format="channels_first", return_tensors="pt")
        inputs = inputs.to(self.model.device)
        grid = self.model.embeddings.patch_embeddings.grid(inputs["pixel_values"])
        real = inputs.get("patch_attention_mask")
        if real is None:
            real = torch.ones(len(images), *grid, dtype=torch.bool, device=self.model.device)
        found: dict[str, Tensor | list[Tensor]] = {"pixels": raw_pixels(inputs["pixel_values"])}
        if {"cls", "mean", "patches"} & {*self.features}:
            found |= _read(self.model, inputs, real)
        if self.untrained is not None:
            found |= {f"{UNTRAINED}{name}": value for name, value in _read(self.untrained, inputs, real).items()}
        grids = ["grid"] * ("patches" in self.features)
        return {name: found[name] for name in (*self.features, *grids)}


def _read(model: HfViTModel, inputs: BatchFeature, real: Tensor) -> dict[str, Tensor | list[Tensor]]:
    """Runs a model and returns its features by name; `real` (B, h, w) is False for padding patches."""
    hidden_states = model(**inputs).last_hidden_state  # (B, P + h·w, D)
    seen = real.flatten(1).bool()  # (B, h·w)
    patches = hidden_states[:, model.config.num_prefix_tokens :]  # (B, h·w, D)
    mean = torch.where(seen[..., None], patches, 0).sum(dim=1) / seen.sum(dim=1, keepdim=True)  # (B, D)
    grids = torch.stack([real.any(dim=2).sum(dim=1), real.any(dim=1).sum(dim=1)], dim=1)  # (B, 2)
    shown = [image[kept] for image, kept in zip(patches, seen, strict=True)]
    return {"cls": hidden_states[:, 0], "mean": mean, "patches": shown, "grid": grids.int()}


def _untrained(model: HfViTModel) -> HfViTModel:
    """Returns a model with the same configuration and random weights from a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(UNTRAINED_SEED)
        fresh = HfViTModel(model.config, add_pooling_layer=False)
    return fresh.to(model.device).eval()


def open_encoder(name_or_path: str, features: Sequence[str], device: torch.device) -> ImageEncoder:
    """Opens a saved or published model.

    Args:
        name_or_path: Model folder, weights file, or name on the Hub.
        features: Keys of `FEATURES`.
        device: Device to run the model on.

    Raises:
        OSError: if there is no such model, or it has no image processor.
        ValueError: if the type of model is not supported, or the model does not provide the features.
    """
    with without_load_report():  # The weights of the head are ignored on purpose and need not be reported as unused.
        model, info = load_with_info(HfViTModel, name_or_path, {})
    # Features do not use pooling layers, so the weights of pooling layers may be missing.
    check_trained(model, name_or_path, [name for name in info["missing_keys"] if "pool" not in name])
    processor = load_image_processor(name_or_path, patch_size=model.config.patch_size)
    return ImageEncoder(model.float().to(device), processor, features)
