"""Sizes of the images of whole batches."""

from math import ceil


def size_of_height(height: int, size: tuple[int, int], multiple: tuple[int, int]) -> tuple[int, int]:
    """Returns a height, and the width that comes closest to the proportions of a size, all in pixels.

    Args:
        height: The height.
        size: Height and width.
        multiple: What height and width must be multiples of. The width is rounded to it.
    """
    return height, max(1, round(height * size[1] / size[0] / multiple[1])) * multiple[1]


def multi_scale_sizes(
    size: tuple[int, int], multiple: tuple[int, int], smallest: float = 0.75, largest: float = 1.25
) -> list[tuple[int, int]]:
    """Returns the sizes around one that a model takes, for training on batches of several sizes.

    Args:
        size: Height and width in pixels.
        multiple: What height and width must be multiples of, in pixels: the patch size, times the rows and columns of
            a window if the model has windows.
        smallest: Smallest height as a share of that in `size`.
        largest: Largest height as a share of that in `size`.

    Raises:
        ValueError: if there is none.
    """
    rows = range(max(1, ceil(smallest * size[0] / multiple[0])), int(largest * size[0] / multiple[0]) + 1)
    heights = [row * multiple[0] for row in rows]
    sizes = [size_of_height(height, size, multiple) for height in heights]
    if not sizes:
        raise ValueError(
            f"No multiple of {multiple[0]} lies between {smallest} and {largest} times the height {size[0]}. Take a "
            "larger size, or widen the range."
        )
    return sizes
