"""Facts that defaults are chosen by: where a model starts, what the data are like, what the device can do."""

from dataclasses import dataclass
from typing import Literal


Start = Literal["scratch", "backbone", "head"]  # from fresh weights, from a backbone, from a model of the same task


@dataclass(frozen=True)
class Facts:
    """What defaults are chosen by.

    Args:
        start: What the weights come from.
        is_unlabeled: Whether it is a model of this package that has learned without labels.
        num_images: Number of training images, or of objects that are trained on one by one; None of a stream.
        native_size: Shorter side of most images in pixels, or of the boxes that are cut out.
        is_regression: Whether the labels are values rather than classes.
        is_gray: Whether the images have no colors.
        object_share: Median side of objects, as a share of the shorter side of their image; None without boxes.
        detail_share: Median width of what the classes of masks cover, as a share of the shorter side; None without.
        max_objects: Most objects or segments in an image of the sample, 0 for tasks without.
        num_scored: Images that are evaluated at the end.
        has_validation: Whether there are images to evaluate in between.
        hidden_size: Width of the model to start from, or of the size that is given; None if it is not known.
        num_layers: Depth of the saved model; None if it is not known.
        has_gpu: Whether there is a GPU or another accelerator to train on.
        has_bf16: Whether the device is faster in bfloat16.
        has_slow_sdpa: Whether that is without the backward pass of fused attention (SDPA).
        num_patches: Patches of an image of the size that is given; None if it is not known.
        image_size: Shorter side in pixels of the images that the saved model was trained on; None if it is not known.
        patch_size: Side in pixels of the patches of the saved model; None if it is not known.
        num_processes: How many processes train.
        spare_cores: Cores of a process on a CPU beside the one that trains, for worker processes that read images.
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
        """Returns how often each image is trained on in steps of `batch` images on all processes."""
        return 0.0 if self.num_images is None else steps * batch / self.num_images
