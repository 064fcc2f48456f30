"""Handwritten digits that come with scikit-learn: real images for a first training, without a download."""

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image
from PIL import Image as PILImage

from ..datasets import DatasetInfo
from ..hold_out import SPLIT_SEED


DIGITS = tuple("0123456789")
NUM_TEST_DIGITS = 360
DIGITS_INFO = DatasetInfo(
    name="Optical Recognition of Handwritten Digits (UCI), as in scikit-learn",
    identifier="load_digits",
    license="CC BY 4.0",
    description=(
        "E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998 "
        "(https://doi.org/10.24432/C50P49); the 1797 images of its test set, by 13 writers, that are part of "
        "scikit-learn (`sklearn.datasets.load_digits`). They are 8x8 pixels, enlarged to 28x28, light on dark. 1437 "
        "are for training and 360 for testing, every digit with the same share of both; the split is random, so the "
        "same writers can be in both."
    ),
    test=f"the {NUM_TEST_DIGITS} test images",
)


def load_digits_dataset(image_size: int = 28) -> DatasetDict:
    """Loads the 1797 digits of `sklearn.datasets.load_digits`, 1437 to train and 360 to test.

    The originals are 8x8 pixels of 17 gray levels, light on dark. Every digit has the same share of both splits, which
    are always the same.

    Args:
        image_size: Height and width in pixels that the images are enlarged to.

    Returns:
        Splits "train" and "test" with the columns `image` (PIL, mode L) and `label` (class number, names "0" to "9").

    Raises:
        ImportError: if scikit-learn is not installed.
        ValueError: if `image_size` is below 8, which would throw pixels away.
    """
    if image_size < 8:
        raise ValueError(f"image_size={image_size} is smaller than the digits, which are 8x8 pixels. Use 8 or more.")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError('The digits come with scikit-learn. Install it: pip install "hf-vit[train]".') from error
    digits = load_digits()
    gray = np.round(digits.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8), from 0 to 16
    size = (image_size, image_size)
    images = [PILImage.fromarray(image).resize(size, PILImage.Resampling.BICUBIC) for image in gray]
    dataset = Dataset.from_dict(
        {"image": images, "label": digits.target.tolist()},
        features=Features({"image": Image(), "label": ClassLabel(names=list(DIGITS))}),
    )
    return dataset.train_test_split(test_size=NUM_TEST_DIGITS, stratify_by_column="label", seed=SPLIT_SEED)
