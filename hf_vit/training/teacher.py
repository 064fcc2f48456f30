"""Teacher models for knowledge distillation, from this or any other library, and the conversion of student images.

In shapes, B is the batch size, C the number of channels, (H, W) the size of student images, L the number of tokens,
D the width of the teacher, and (h, w) its patch grid.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    BaseImageProcessor,
    PreTrainedModel,
)
from transformers.utils import CONFIG_NAME

from ..convert import load_image_processor
from ..convert.image_processor import timm_image_processor_options
from ..convert.loading import find_family_by_config
from ..convert.source import find_file, read_json
from ..model.configuration_hf_vit import HfViTConfig, to_pair
from ..model.image_processing_hf_vit import HfViTImageProcessor
from ..model.modeling_hf_vit import HfViTModel
from ..model.pretrained import check_trained
from ..model.remote_code import RemoteCodeError, raising_remote_code_error
from ..model.task_image_classification import HfViTForImageClassification
from ..tasks.common.models import load_with_info, shorten, without_load_report


CONSENT = "Read the code and, if you trust it, set --teacher_trust_remote_code true."
FEATURES_INSTEAD = "Its features can still be distilled: set --distillation_type features."
# Prefixes of the names of timm architectures that can be converted to `HfViTModel`
TIMM_VITS = ("vit_", "deit", "flexivit_")


class Features(NamedTuple):
    """Tokens of an image encoder: patches (B, D, h, w), and the CLS token (B, D) if the encoder has one."""

    cls: Tensor | None
    patches: Tensor


class TeacherPreprocessing(nn.Module):
    """Convert images preprocessed for the student into images preprocessed for the teacher.

    Images are resized bilinearly with antialiasing. Interpolation weights sum to 1, so that resizing commutes with
    undoing the student's color normalization and applying the teacher's. Both normalizations are merged into one
    multiplication and one addition.
    """

    gain: Tensor
    offset: Tensor

    def __init__(self, student: BaseImageProcessor, teacher: BaseImageProcessor, num_channels: int) -> None:
        super().__init__()
        (own_scale, own_mean, own_std), (scale, mean, std) = (
            read_colors(processor.to_dict(), num_channels) for processor in (student, teacher)
        )
        gain, offset = own_std * scale / (own_scale * std), (own_mean * scale / own_scale - mean) / std
        self.register_buffer("gain", gain[:, None, None], persistent=False)
        self.register_buffer("offset", offset[:, None, None], persistent=False)
        self.size = read_size(teacher.to_dict())

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Convert student images (B, C, H, W) into teacher images (B, C, *size)."""
        if self.size is not None and pixel_values.shape[-2:] != self.size:
            pixel_values = F.interpolate(pixel_values, self.size, mode="bilinear", align_corners=False, antialias=True)
        return pixel_values * self.gain + self.offset


def read_colors(options: dict[str, Any], num_channels: int) -> tuple[float, Tensor, Tensor]:
    """Return the scale that an image processor applies to colors in [0, 1], and its mean (C,) and deviation (C,)."""
    scale = 255 * (options["rescale_factor"] if options.get("do_rescale") else 1.0)
    if not options.get("do_normalize"):
        return scale, torch.zeros(num_channels), torch.ones(num_channels)
    mean, std = (torch.tensor(options[name], dtype=torch.float32).reshape(-1) for name in ("image_mean", "image_std"))
    if {len(mean), len(std)} - {1, num_channels}:
        raise ValueError(
            f"The image processor normalizes {len(mean)} channels (image_mean={options['image_mean']}), but images "
            f"have {num_channels}. Save the teacher with an image processor for {num_channels} channels."
        )
    return scale, mean.expand(num_channels), std.expand(num_channels)


def check_colors(processor: BaseImageProcessor, num_channels: int) -> None:
    """Raise `ValueError` if an image processor changes colors other than by rescaling and normalization.

    An example of another change is swapping RGB for BGR. The check processes an image of a single color, because
    resizing does not change such an image.
    """
    options = processor.to_dict()
    scale, mean, std = read_colors(options, num_channels)
    levels = torch.linspace(40, 220, num_channels).round()
    expected = (levels / 255 * scale - mean) / std  # (C,)
    picture = levels[:, None, None].expand(-1, *(read_size(options) or (64, 64)))  # (C, H, W)
    images = processor(picture.byte().numpy(), return_tensors="pt", input_data_format="channels_first")["pixel_values"]
    made = images[
        0, :, images.shape[-2] // 2, images.shape[-1] // 2
    ].float()  # color (C,) of the center pixel, which is never padding
    if ((made - expected).abs() > 0.01 * scale / std).any():
        raise ValueError(
            f"The teacher's {type(processor).__name__} converts the color {levels.tolist()} to {made.tolist()}, not "
            f"{expected.tolist()}. Distillation supports only rescaling and normalization of colors. Save the teacher "
            "with an image processor that only rescales and normalizes, or choose another teacher."
        )


def read_size(options: dict[str, Any]) -> tuple[int, int] | None:
    """Return the height and width of the output images of an image processor, or None if it does not resize."""
    if options.get("do_center_crop"):
        size = options["crop_size"]
    elif options.get("do_resize") or options.get("do_affine_crop"):
        size = options["size"]
    else:
        return None
    height, width = (size.get(side, size.get("shortest_edge")) for side in ("height", "width"))
    if height is None or width is None:
        raise ValueError(
            f"The teacher's image processor resizes to {size}, which is not the same size for all images. "
            'Save the teacher with an image processor whose size is {"height": …, "width": …}.'
        )
    return height, width


class Teacher(nn.Module):
    """A frozen, trained model that takes images preprocessed for its student.

    The teacher is not a submodule of the student, so that it is not trained, wrapped or saved with the student.

    Args:
        name: Name or path from which the model was loaded.
        model: The model. It is switched to evaluation mode, and its parameters no longer require gradients.
        view: Conversion of student images into teacher images.
    """

    def __init__(self, name: str, model: PreTrainedModel, view: TeacherPreprocessing) -> None:
        super().__init__()
        self.name = name
        self.model = model.requires_grad_(False)
        if model.config.model_type == HfViTConfig.model_type:
            model.config.calibration_config = None  # distillation uses uncalibrated logits
        self.view = view
        self.eval()

    @torch.no_grad()
    def forward(self, pixel_values: Tensor) -> tuple[Any, Tensor]:
        """Return the outputs of the model for student images (B, C, H, W), and the converted images it received."""
        images = self.view(pixel_values).to(self.model.dtype)
        return self.model(pixel_values=images), images

    def logits(self, pixel_values: Tensor) -> Tensor:
        """Return the logits (B, number of classes of the teacher) of images (B, C, H, W)."""
        outputs, _ = self(pixel_values)
        return outputs.logits

    def features(self, pixel_values: Tensor) -> Features:
        """Return the CLS and patch tokens of images (B, C, H, W)."""
        outputs, images = self(pixel_values)
        return read_features(self.model, outputs.last_hidden_state, images)


def read_features(model: PreTrainedModel, tokens: Tensor, images: Tensor) -> Features:
    """Split the tokens of an image encoder into the CLS token and the patch tokens.

    Args:
        model: The encoder.
        tokens: A feature map (B, D, h, w), or tokens (B, L, D) in this order: CLS token, other prefix tokens, patch
            tokens in row-major order, query tokens. All but the patch tokens are optional.
        images: Images (B, C, H', W') that the encoder received.
    """
    if tokens.ndim == 4:
        return Features(None, tokens)
    if isinstance(model, HfViTModel):
        grid, num_prefix = model.embeddings.patch_embeddings.grid(images), model.config.num_prefix_tokens
        has_cls = model.config.use_cls_token
    else:
        grid = guess_grid(model, tokens.shape[1], (images.shape[-2], images.shape[-1]))
        num_prefix = tokens.shape[1] - grid[0] * grid[1]
        has_cls = num_prefix > 0
    patches = tokens[:, num_prefix : num_prefix + grid[0] * grid[1]]  # (B, h·w, D)
    return Features(tokens[:, 0] if has_cls else None, patches.transpose(1, 2).unflatten(2, grid))


def guess_grid(model: PreTrainedModel, length: int, size: tuple[int, int]) -> tuple[int, int]:
    """Return the numbers of rows and columns of the patch tokens of an image of `size` pixels.

    Hierarchical encoders such as Swin merge 2 x 2 patches per stage and pad odd grids. The function therefore halves
    the grid until it has at most `length` patches. Only a CLS token may precede the patch tokens of a merged grid.

    Raises `ValueError` if the grid cannot be determined.
    """
    patch = model.config.to_dict().get("patch_size")
    cure = "Choose a Vision Transformer, or a teacher whose last_hidden_state is a feature map (B, D, h, w)."
    if patch is None:
        raise ValueError(
            f"The config of {type(model).__name__} has no patch_size, so the patch grid of its {length} tokens is "
            f"unknown. {cure}"
        )
    height, width = to_pair(patch)
    finest = rows, columns = size[0] // height, size[1] // width
    while rows * columns > length:
        rows, columns = (rows + 1) // 2, (columns + 1) // 2
    if (rows, columns) != finest and length - rows * columns > 1:
        raise ValueError(
            f"Unknown patch grid of the {length} tokens of {type(model).__name__} for an image of size {size}: "
            f"patch_size={patch} gives a grid of {finest}, which does not fit, even with 2 x 2 patches merged. {cure}"
        )
    return rows, columns


def open_teacher(
    name: str, is_classifier: bool, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load an image classifier or an image encoder as a teacher.

    Args:
        name: Folder, weight file, or model name on the Hub.
        is_classifier: Whether to load a classifier. If False, only the encoder is loaded.
        dtype: Data type of the parameters.
        trust_remote_code: Whether code from the model repository may be executed.

    Raises:
        OSError: if the model does not exist.
        ValueError: if the model is untrained or has missing, infinite or NaN weights.
    """
    ours = HfViTForImageClassification if is_classifier else HfViTModel
    auto = AutoModelForImageClassification if is_classifier else AutoModel
    with without_load_report():
        if needs_own_library(name):
            model, info = open_auto(auto, name, dtype, trust_remote_code)
        else:
            model, info = load_with_info(ours, name, {})
            model = model.to(dtype)
    check_trained(model, f"The teacher {name!r}")
    # The pooling layer of an encoder may be missing, because distillation uses tokens from before pooling.
    if missing := sorted(weight for weight in info["missing_keys"] if is_classifier or "pool" not in weight):
        cure = "they would be initialized randomly. Choose a trained model."
        if is_classifier:
            cure = f"it was not trained as a classifier. {FEATURES_INSTEAD}"
        raise ValueError(
            f"The teacher {name!r} has no weights for {shorten(missing, 3)} of {type(model).__name__}: {cure}"
        )
    return model


def needs_own_library(name: str) -> bool:
    """Return whether a model can only be loaded by the library that it comes from, not by `hf_vit`."""
    if Path(name).is_file():
        return False
    try:
        file = find_file(name, CONFIG_NAME)
    except OSError:
        return False  # loading reports that the model does not exist
    config = {} if file is None else read_json(file)
    is_other_timm = not str(config.get("architecture", TIMM_VITS[0])).startswith(TIMM_VITS)
    is_known = config.get("model_type") == HfViTConfig.model_type or find_family_by_config(config) is not None
    return bool(config) and (is_other_timm or not is_known)


def open_auto(auto_class: Any, name: str, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """Load a model with an Auto class and return it with its loading info, which lists missing weights."""
    options = {"dtype": dtype, "trust_remote_code": trust_remote_code, "output_loading_info": True}
    try:
        with raising_remote_code_error(name, CONSENT):
            return auto_class.from_pretrained(name, **options)
    except RemoteCodeError:
        raise
    except ValueError as error:
        cure = FEATURES_INSTEAD if auto_class is AutoModelForImageClassification else "Choose another teacher."
        reason = str(error).splitlines()[0]
        raise ValueError(f"{auto_class.__name__} cannot load the teacher {name!r} ({reason}). {cure}") from error


def make_teacher(
    name: str, model: PreTrainedModel, student: PreTrainedModel, processor: BaseImageProcessor, trust_remote_code: bool
) -> Teacher:
    """Return a teacher that takes student images; raise `ValueError` if its channels or colors are incompatible."""
    wanted = student.config.num_channels
    channels = model.config.to_dict().get("num_channels", wanted)
    if channels != wanted:
        raise ValueError(
            f"The teacher {name!r} expects images with {channels} channels, but the student expects {wanted}. Set the "
            f"channels of the student: --config_overrides '{{\"num_channels\": {channels}}}'."
        )
    own_processor = open_image_processor(name, model, wanted, trust_remote_code)
    return Teacher(name, model, TeacherPreprocessing(processor, own_processor, wanted))


def open_image_processor(
    name: str, model: PreTrainedModel, num_channels: int, trust_remote_code: bool
) -> BaseImageProcessor:
    """Load the image processor of a teacher.

    Raises `OSError` if the teacher has no image processor, and `ValueError` if `check_colors` rejects it.
    """
    if isinstance(model.config, HfViTConfig):
        return load_image_processor(name, patch_size=model.config.patch_size)
    if model.config.model_type == "timm_wrapper":  # the default processor of timm models wraps timm transforms
        return HfViTImageProcessor(**timm_image_processor_options(model.config.to_dict().get("pretrained_cfg", {})))
    try:
        with raising_remote_code_error(name, CONSENT):
            processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
    except OSError as error:
        raise OSError(
            f"The teacher {name!r} has no image processor, which defines its preprocessing. Save one in its folder "
            "with image_processor.save_pretrained."
        ) from error
    check_colors(processor, num_channels)
    return processor


def match_classes(known: Sequence[str], names: Sequence[str], teacher: str) -> list[int]:
    """Return the index of each of `names` among the classes of a teacher; raise `ValueError` if the sets differ."""
    if list(known) == list(names):  # two equal lists of names may contain duplicates
        return list(range(len(names)))
    if len(set(known)) < len(known) or set(known) != set(names):
        extra, lacking = (shorten(sorted(alone), 6) or "none" for alone in ({*known} - {*names}, {*names} - {*known}))
        raise ValueError(
            f"The classes of the teacher {teacher!r} differ from the classes of the data. Only in the teacher: "
            f"{extra}; only in the data: {lacking}. {FEATURES_INSTEAD}"
        )
    return [list(known).index(name) for name in names]
