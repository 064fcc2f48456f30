"""Colors of classes and of depth: those of the pictures that a training writes, where `hf_vit` is installed."""

import numpy as np


IGNORED = (128, 128, 128)  # of pixels that belong to no class

# segmentation_palette(255) of hf_vit.visualize: red, green and blue of each class
CLASS_COLORS = bytes.fromhex(
    "0072b2e69f00009e73d55e00f0e442cc79a7f000ff1e3cff0fd2ffa50f964bf0a5c3004bffa596b487f000d21e870fd2ffb4ffff2dc3"
    "69692d2d87ffa5c3c3009600ff5a7800fff000a5b496b469964b78f0d287f00f87b44bd200a5f04bff00b4785ac30f009669b4007887"
    "a5a5d2a5ff87005ad2c3e1ffff0f3ca55affd2e1c3ff785aff78e1c39696965a5a00c3a5ffa5c300785af05af096872da5d25a784bb4"
    "ffd2e1d200967878e187a5008700ff96b4ffffa569b400690fd2695a87b469e1c3ff5ab400d2d2b44b3cffc34b1ef069c3c3963c873c"
    "c35a78695a87ff78a5ff780fc35aa5c3f0a5c33cb496e11e00b469f000d2c387d287a587f01e695a3ce1c3965ab400f087ffd278785a"
    "a500b45a69698787d2e1877878965a0069ffa55a0ff096d2c369d278a5a500b43ce15a4b3cd296787896e196ff5ab4e1b4c3f0964b96"
    "785ae16996ff0078d2c3b44b96e1e100f0ffa578fff0c3b4d2b4d25a5aa5b4ff5a69780096d287b47878c3c300c3a587d24b5ac38700"
    "c33c87009687d296b4ff4b2da53c5a96c3a59687b4ff00a5e12d00ffc3f0f04b87c3783c00ff962d6996c300d2e169c3d25affe17887"
    "d20f6969a54b3c87d2ffe178a5698796693cd21e3c784bff78c33cd2b4b4ff78ffc3a5f05a69c369b4c3a58796f0d2a578e178965ac3"
    "963ca5d278ff1e780fff96f0d2b478c3f0e14b8769783cc36969a5ff1ef0a569e1ff96a5a53ce1e14bd2c300b4a52d87ff5ae178c3e1"
    "00783ce14b96d269692db487e1873ca59669c3e1784b5ac300a5d2d2d2d2ff1e5a7878ffd2f069a596e187b44bff69698796f0a596b4"
    "ff96785ac378a5b400e16996e100b46978c3f0b45aa5e1a587ffb46996a587d2ff00f03c875a69f078b4e14bb469ff69d23ce1789687"
    "b43c4b69961e0087a57896c3d287c3875a3cb44b78ff963ca5695a875a1ec35a2d9687695ab4ff008787d21eff87b4a596b487960fc3"
    "e15a78a5874b875ad2963cc3b4c3690096f0b44ba5e1e1f0d2f000ffb48700ffc3b42d2d1ee187e178e187d2e1b4d2b400b4b487f096"
    "b4963ca55a964b7869"
)
# From far to near: matplotlib's viridis at even steps
DEPTH_COLORS = bytes.fromhex(
    "44015447186a472c7b4240853a528b32628d2c728e26818e20908c1e9f8828ae7f3ebc735ec96183d34baddc30d7e219fde724"
)


def class_color(number: int) -> tuple[int, int, int]:
    """Returns the color of a class; beyond 255 classes they come again."""
    red, green, blue = CLASS_COLORS[3 * number % len(CLASS_COLORS) :][:3]
    return red, green, blue


def depth_colors(nearness: np.ndarray) -> np.ndarray:
    """Returns values (H, W) from 0, far, to 1, near, in colors (H, W, 3) uint8; others are those of the ends."""
    steps = np.frombuffer(DEPTH_COLORS, dtype=np.uint8).reshape(-1, 3)
    places = np.linspace(0, 1, len(steps))
    levels = [np.interp(nearness, places, column) for column in steps.T]
    return np.stack(levels, axis=-1).round().astype(np.uint8)
