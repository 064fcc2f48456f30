"""Properties of data, model and device that determine default hyperparameters."""

from dataclasses import dataclass
from typing import Literal


Start = Literal["scratch", "backbone", "head"]  # new weights, a saved backbone, or a saved model of this task


@dataclass(frozen=True)
class Facts:
    """Properties of data, model and device.

    Args:
        start: Origin of the weights.
        is_unlabeled: Whether the saved model is a model of this package that was pretrained without labels.
        num_images: Number of training examples: images or, if objects are cropped, objects. None for streams.
        native_size: Median shorter side in pixels of the images or, if objects are cropped, of their boxes.
        is_regression: Whether labels are numbers instead of classes.
        is_gray: Whether the images are grayscale.
        object_share: Median side of objects relative to the shorter side of their image; None without boxes.
        detail_share: Median width of segmentation regions relative to the shorter side; None without masks.
        max_objects: Maximum number of objects or segments in a sampled image; 0 for other tasks.
        num_scored: Number of images in the final evaluation.
        has_validation: Whether there are validation images.
        hidden_size: Width of the model, None if unknown.
        num_layers: Depth of the saved model, None if unknown.
        has_gpu: Whether training runs on a GPU or another accelerator.
        has_bf16: Whether the device is faster in bfloat16.
        has_slow_sdpa: Whether SDPA has no fused backward pass in bfloat16.
        num_patches: Number of patches of an image of the given size, None if unknown.
        image_size: Shorter side in pixels of the training images of the saved model, None if unknown.
        patch_size: Side in pixels of the patches of the saved model, None if unknown.
        num_processes: Number of training processes.
        spare_cores: CPU cores per process that are available for data loading.
    """

    start: Start = "scratch"
    is_unlabeled: bool = False
    num_images: int | None = 1000
    native_size: int = 224
    is_regression: bool = False
    is_gray: bool = False
    object_share: float | None = None
    detail_share: float | None = None
    max_objects: int = 0
    num_scored: int = 100
    has_validation: bool = True
    hidden_size: int | None = None
    num_layers: int | None = None
    has_gpu: bool = False
    has_bf16: bool = False
    has_slow_sdpa: bool = False
    num_patches: int | None = None
    image_size: int | None = None
    patch_size: int | None = None
    num_processes: int = 1
    spare_cores: int = 0

    def epochs_of(self, steps: int, batch: int) -> float:
        """Return the number of epochs of `steps` steps with `batch` images each."""
        return 0.0 if self.num_images is None else steps * batch / self.num_images
