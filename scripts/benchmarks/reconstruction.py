"""Compare an autoencoder with JPEG at an equal number of bytes per image.

Each latent value takes one byte. The headers of JPEG files are not counted.
"""

import io
from dataclasses import dataclass, field

import numpy as np
import PIL
import torch
from PIL import Image

from hf_vit import HfViTForImageReconstruction, HfViTImageProcessor
from hf_vit.data.loaders.unlabeled_images import load_unlabeled_images

from .harness import OutputArguments, describe_run, print_header, print_row, save


LEVELS = 127  # quantization steps on each side of 0 for a latent in one byte
RANGE = 4.0  # clipping range of a latent in one byte, in standard deviations


@dataclass(kw_only=True)
class Arguments(OutputArguments):
    """Options of the comparison."""

    model: str = field(metadata={"help": "folder of a model of image reconstruction with latent_type kl"})
    dataset_name: str = field(metadata={"help": "folder of images; the test split is used"})
    max_images: int = field(default=500, metadata={"help": "number of images"})


def jpeg_of(pixels: np.ndarray, most_bytes: float) -> np.ndarray:
    """Return pixels, uint8 of shape (H, W, 3), after JPEG compression to a scan of at most `most_bytes` bytes.

    The highest possible quality is used.
    """
    low, high, best = 1, 95, None
    while low <= high or best is None:
        quality, stream = (low + high) // 2, io.BytesIO()
        Image.fromarray(pixels).save(stream, "JPEG", quality=max(1, quality), optimize=True)
        content = stream.getvalue()
        fits = len(content) - content.index(b"\xff\xda") <= most_bytes  # size without file headers
        if fits or quality <= 1:
            best = np.asarray(Image.open(stream))
        low, high = (quality + 1, high) if fits else (low, quality - 1)
    return best


def psnr(found: np.ndarray, true: np.ndarray) -> float:
    """Return the peak signal-to-noise ratio in dB for pixel values in [0, 255]."""
    return float(10 * np.log10(255**2 / max(np.square(found.astype(float) - true).mean(), 1e-9)))


@torch.no_grad()
def main(args: Arguments) -> None:
    """Print the mean PSNR of the model, of the model with one-byte latents, and of JPEG."""
    run = describe_run(args, PIL)
    model, processor = (
        kind.from_pretrained(args.model) for kind in (HfViTForImageReconstruction, HfViTImageProcessor)
    )
    model.eval()
    mean, std = (torch.tensor(values)[:, None, None] for values in (processor.image_mean, processor.image_std))
    images = load_unlabeled_images([args.dataset_name])["test"]["image"]
    scores = []
    for number in range(min(args.max_images, len(images))):
        inputs = processor(images[number], return_tensors="pt")["pixel_values"]

        def pixels_of(values: torch.Tensor) -> np.ndarray:
            return ((values[0] * std + mean) * 255).round().clamp(0, 255).permute(1, 2, 0).byte().numpy()

        latents = model.encode(inputs).latent_dist.mode()
        step = RANGE / (LEVELS * model.options.scaling_factor)
        coarse = (latents / step).round().clamp(-LEVELS, LEVELS) * step
        true = pixels_of(inputs)
        decoded = [pixels_of(model.decode(each).sample) for each in (latents, coarse)]
        scores.append([psnr(each, true) for each in (*decoded, jpeg_of(true, latents.numel()))])
    print_header("numbers per image", "PSNR", "PSNR, one byte each", "PSNR, JPEG of as many bytes")
    row = [latents.numel(), *np.mean(scores, axis=0).tolist()]
    print_row(*row)
    save({**run, "row": row}, args.output)
