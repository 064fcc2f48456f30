"""Images and targets that cannot be trained on: found before a training starts rather than in the middle of it."""

from functools import partial

from transformers.utils import logging

from ..image_inputs_hf_vit import read_image
from .checks import MAX_NAMED, find_faults
from .target_dataset import TargetDataset
from .wording import in_lines


logger = logging.get_logger(__name__)


def check_dense(dataset: TargetDataset, num_threads: int | None = None, show_progress: bool = True) -> dict[int, str]:
    """Reads every image with its target, as training will.

    Found are files that cannot be read, an image and a target of different sizes, images of another size than the
    annotations of their objects say, labels or colours of no class, and targets of a wrong type. Depth maps without a
    valid pixel are warned of.

    Args:
        dataset: What will be trained on. On several processes, each may check a shard of its rows.
        num_threads: How many examples are read at a time; by default as many as Python thinks fit.
        show_progress: Whether to draw a progress bar.

    Returns:
        For the index of each example that is wrong, its file and the reason.
    """
    without_depth: list[str] = []
    faults = find_faults(len(dataset), partial(_faults_among, dataset, without_depth), num_threads, show_progress)
    if without_depth:
        logger.warning(
            "%d of %d depth maps have no valid pixel, and nothing is learned from them:%s",
            len(without_depth),
            len(dataset),
            in_lines(sorted(without_depth), MAX_NAMED),
        )
    return faults


def _faults_among(dataset: TargetDataset, without_depth: list[str], indices: range) -> dict[int, str]:
    faults: dict[int, str] = {}
    for index in indices:
        try:
            example = dataset[index]
            read_image(example["image"], example["file"], num_channels=3)
        except (OSError, TypeError, ValueError) as error:
            faults[index] = str(error)
        else:
            if "depth_map" in example and not example["depth_map"].any():
                without_depth.append(example["file"])
    return faults
