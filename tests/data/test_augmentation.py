"""Test the augmentation of training images."""

import pickle

import numpy as np
import torch
from PIL import Image

from hf_vit.data.augmentation.classification import image_classification_augmentation

from .errors import expect_error


GRADIENT = Image.fromarray(np.linspace(0, 255, 60 * 80).reshape(60, 80).astype(np.uint8))
OFF = {"min_crop_scale": 1.0, "horizontal_flip": 0.0, "auto_augment": "none", "random_erasing": 0.0}


def draws(count: int = 40, **options: object) -> torch.Tensor:
    """Return `count` random augmentations of an image. Only the given options are enabled."""
    transform = image_classification_augmentation((32, 48), num_channels=1, **{**OFF, **options})
    torch.manual_seed(0)
    return torch.stack([transform(GRADIENT) for _ in range(count)])


def test_without_any_change_images_are_only_resized_and_crops_keep_at_least_their_share() -> None:
    images = draws()
    assert (images.shape, images.dtype) == ((40, 1, 32, 48), torch.uint8)
    assert (images == images[0]).all()
    expected = np.asarray(GRADIENT.resize((48, 32), Image.Resampling.BILINEAR), dtype=int)
    assert np.abs(images[0, 0].numpy().astype(int) - expected).max() <= 1
    spreads = [int(image.max()) - int(image.min()) for image in draws(min_crop_scale=0.3)]
    assert len(set(spreads)) > 20
    # The image is a vertical gradient over almost all gray levels. A crop with 30 % of the area and an aspect ratio
    # of at most 4/3 contains at least 40 % of the rows.
    assert min(spreads) > 255 * 0.4
    assert max(spreads) < 256


def test_half_of_the_images_are_mirrored() -> None:
    plain, images = draws()[0], draws(horizontal_flip=0.5)
    mirrored = [bool((image == plain.flip(-1)).all()) for image in images]
    assert 10 < sum(mirrored) < 30
    assert all((image == plain).all() for image, is_mirrored in zip(images, mirrored, strict=True) if not is_mirrored)


def test_automatic_augmentation_changes_most_images_as_much_as_is_said() -> None:
    plain = draws()[0].float()
    for name in ("trivialaugment", "randaugment", "affine", "3augment"):
        assert sum(bool((image != plain).any()) for image in draws(auto_augment=name)) > 20, name
    changes = []
    for number, magnitude in ((1, 3), (1, 25), (4, 25)):
        options = {"randaugment_num_ops": number, "randaugment_magnitude": magnitude}
        changes.append(float((draws(auto_augment="randaugment", **options) - plain).abs().mean()))
    assert 1.5 * changes[0] < changes[1] < changes[2]
    # Color jitter changes the brightness by at most the given strength.
    for strength in (0.1, 0.4):
        means = draws(color_jitter=strength).float().mean(dim=(1, 2, 3))
        assert float((means / plain.mean() - 1).abs().max()) < strength + 0.05
        assert len(means.unique()) > 20


def test_padded_crops_are_windows_and_erasing_blanks_a_rectangle() -> None:
    padded = np.pad(draws()[0, 0].numpy(), 3, mode="reflect")
    windows = {padded[top : top + 32, left : left + 48].tobytes(): (top, left) for top, left in np.ndindex(7, 7)}
    places = [windows[image.numpy().tobytes()] for image in draws(crop_padding=3)[:, 0]]
    assert len(set(places)) > 20
    # Random erasing fills a rectangle with gray.
    plain, image = draws()[0], draws(random_erasing=1.0)[0]
    changed = (image != plain)[0]
    rows, columns = changed.any(dim=1).sum(), changed.any(dim=0).sum()
    assert (image[0][changed] == 128).all()
    assert 0.02 * 32 * 48 * 0.8 < changed.sum() <= rows * columns < 0.4 * 32 * 48


def test_3augment_takes_colors_away_solarizes_or_blurs() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    transform = image_classification_augmentation((16, 16), **{**OFF, "auto_augment": "3augment"})
    torch.manual_seed(0)
    images = [transform(Image.fromarray(pixels)) for _ in range(90)]
    solarized = torch.from_numpy(np.where(pixels >= 128, 255 - pixels, pixels)).permute(2, 0, 1)
    colored = [image for image in images if not image[0].equal(image[1])]  # images that are not grayscale
    spreads = [float(image.float().std()) for image in colored if not image.equal(solarized)]  # blurred images
    assert all(20 < count < 40 for count in (90 - len(colored), len(colored) - len(spreads), len(spreads)))
    assert len(set(spreads)) > 10  # the blur radius is random, so the images differ
    assert min(spreads) < 0.4 * float(pixels.std())


def test_colors_and_floats_are_converted_as_by_the_image_processor() -> None:
    transform = image_classification_augmentation((8, 8), **OFF)
    # Images are converted to RGB in the same way as by the image processor.
    assert transform(Image.new("RGBA", (9, 9), (7, 7, 7, 0))).unique().tolist() == [7]
    assert transform(Image.new("I;16", (9, 9), 128)).unique().tolist() == [128]
    assert transform(Image.new("CMYK", (9, 9))).shape == (3, 8, 8)
    # Float images are rounded to integers, not clamped to the range from 0 to 1.
    gray = np.linspace(0, 255, 60 * 80).reshape(60, 80).astype(np.float32)
    transform = image_classification_augmentation((60, 80), num_channels=1, **{**OFF, "auto_augment": "randaugment"})
    # PIL truncates floats in images of mode "F" instead of rounding them.
    for floats, whole in ((gray, gray.round()), (Image.fromarray(gray), gray)):
        torch.manual_seed(0)
        image = transform(floats)
        torch.manual_seed(0)
        assert image.equal(transform(Image.fromarray(whole.astype(np.uint8))))


def test_images_of_other_channels_may_be_moved_and_mistakes_are_explained() -> None:
    image = Image.new("RGBA", (9, 9))
    transform = image_classification_augmentation((8, 8), num_channels=4, auto_augment="affine")
    # Transforms can be pickled, which worker processes require.
    assert pickle.loads(pickle.dumps(transform))(image).shape == (4, 8, 8)
    for options, message in (
        ({"min_crop_scale": 0}, r"min_crop_scale=0 must lie in \(0, 1\]"),
        ({"horizontal_flip": 2}, r"horizontal_flip=2 is a probability"),
        ({"random_erasing": -1}, r"random_erasing=-1 is a probability"),
        ({"crop_padding": 8}, r"crop_padding=8 must lie between 0 and 7"),
        ({"color_jitter": -1}, r"color_jitter=-1 must lie in \[0, 1\]"),
        ({"auto_augment": "randaugment", "randaugment_num_ops": 0}, r"randaugment_num_ops=0 must be at least 1"),
        ({"auto_augment": "randaugment", "randaugment_magnitude": 31}, r"=31 must lie between 0 and 30"),
        (
            {"num_channels": 4, "auto_augment": "randaugment"},
            r"changes colors, .*num_channels=4.*Set auto_augment to none",
        ),
        ({"auto_augment": "auto"}, r"'auto' is unknown. Choose one of none, trivialaugment, randaugment, affine"),
    ):
        expect_error(message, image_classification_augmentation, (8, 8), **options)
