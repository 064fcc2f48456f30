"""Teachers of any library: how they are opened, and how their images are made of those of their student.

Shapes: B batch, C channels, H W pixels of the student's images, L tokens, D width, h w patch grid.
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
from ..convert.loading import find_configured
from ..convert.source import find_file, read_json
from ..model.configuration_hf_vit import HfViTConfig, to_pair
from ..model.image_processing_hf_vit import HfViTImageProcessor
from ..model.modeling_hf_vit import HfViTModel
from ..model.pretrained import check_trained
from ..model.remote_code import RemoteCodeError, refusing_code
from ..model.task_image_classification import HfViTForImageClassification
from .models import load_with_info, shorten, without_load_report


CONSENT = "Read it, and if you trust it say --teacher_trust_remote_code true."
FEATURES_INSTEAD = "It can teach its features all the same: --distillation_type features."
# How timm calls those of its models that our converter reads.
TIMM_VITS = ("vit_", "deit", "flexivit_")


class Features(NamedTuple):
    """Tokens of images from an encoder: the CLS token (B, D), if it has one, and the patches (B, D, h, w)."""

    cls: Tensor | None
    patches: Tensor


class TeacherView(nn.Module):
    """Turns the student's pixels into those that the teacher knows, its colors at its size, by both image processors.

    Between the two lie [0, 1] and a bilinear resampling with antialiasing. As its weights sum up to 1, what is done to
    the colors before and after it is done at once.
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
        """(B, C, H, W) images of the student to those of the teacher, (B, C, *size)."""
        if self.size is not None and pixel_values.shape[-2:] != self.size:
            pixel_values = F.interpolate(pixel_values, self.size, mode="bilinear", align_corners=False, antialias=True)
        return pixel_values * self.gain + self.offset


def read_colors(options: dict[str, Any], num_channels: int) -> tuple[float, Tensor, Tensor]:
    """Returns what an image processor multiplies colors in [0, 1] by, and then their mean (C,) and deviation (C,)."""
    scale = 255 * (options["rescale_factor"] if options.get("do_rescale") else 1.0)
    if not options.get("do_normalize"):
        return scale, torch.zeros(num_channels), torch.ones(num_channels)
    mean, std = (torch.tensor(options[name], dtype=torch.float32).reshape(-1) for name in ("image_mean", "image_std"))
    if {len(mean), len(std)} - {1, num_channels}:
        raise ValueError(
            f"An image processor normalizes {len(mean)} channels (image_mean={options['image_mean']}), and the images "
            f"of student and teacher have {num_channels}. Save the teacher with an image processor of as many."
        )
    return scale, mean.expand(num_channels), std.expand(num_channels)


def check_colors(processor: BaseImageProcessor, num_channels: int) -> None:
    """Raises `ValueError` if an image processor does not do what `read_colors` tells, as where it turns RGB into BGR.

    It is given a picture of one color, which no resizing changes.
    """
    options = processor.to_dict()
    scale, mean, std = read_colors(options, num_channels)
    levels = torch.linspace(40, 220, num_channels).round()
    expected = (levels / 255 * scale - mean) / std  # (C,)
    picture = levels[:, None, None].expand(-1, *(read_size(options) or (64, 64)))  # (C, H, W)
    images = processor(picture.byte().numpy(), return_tensors="pt", input_data_format="channels_first")["pixel_values"]
    made = images[0, :, images.shape[-2] // 2, images.shape[-1] // 2].float()  # (C,), not of a padded border
    if ((made - expected).abs() > 0.01 * scale / std).any():
        raise ValueError(
            f"The teacher's {type(processor).__name__} makes {made.tolist()} of the color {levels.tolist()}, and not "
            f"{expected.tolist()}: it does not only rescale and normalize, and the teacher would see wrong colors. "
            "Save the teacher with an image processor that does the same by these two alone, or choose another one."
        )


def read_size(options: dict[str, Any]) -> tuple[int, int] | None:
    """Returns height and width of the images that an image processor makes; None if it leaves their size alone."""
    if options.get("do_center_crop"):
        size = options["crop_size"]
    elif options.get("do_resize") or options.get("do_affine_crop"):
        size = options["size"]
    else:
        return None
    height, width = (size.get(side, size.get("shortest_edge")) for side in ("height", "width"))
    if height is None or width is None:
        raise ValueError(
            f"The teacher's image processor resizes to {size}, which is not one size for all images. "
            'Save the teacher with one whose size is {"height": …, "width": …}.'
        )
    return height, width


class Teacher(nn.Module):
    """A trained model that is not trained any more, and takes the pixels of its student.

    It is never a part of the student, so that nobody trains, wraps or saves it.

    Args:
        name: What it was opened from.
        model: The model, which goes into evaluation mode for good. None of its weights gets a gradient from now on.
        view: Makes its images.
    """

    def __init__(self, name: str, model: PreTrainedModel, view: TeacherView) -> None:
        super().__init__()
        self.name = name
        self.model = model.requires_grad_(False)
        self.view = view
        self.eval()

    @torch.no_grad()
    def forward(self, pixel_values: Tensor) -> tuple[Any, Tensor]:
        """(B, C, H, W) images of the student to the model's outputs, and the images that it has seen."""
        images = self.view(pixel_values).to(self.model.dtype)
        return self.model(pixel_values=images), images

    def logits(self, pixel_values: Tensor) -> Tensor:
        """Returns the logits (B, its classes) of images (B, C, H, W)."""
        outputs, _ = self(pixel_values)
        return outputs.logits

    def features(self, pixel_values: Tensor) -> Features:
        """Returns the tokens of images (B, C, H, W)."""
        outputs, images = self(pixel_values)
        return read_features(self.model, outputs.last_hidden_state, images)


def read_features(model: PreTrainedModel, tokens: Tensor, images: Tensor) -> Features:
    """Returns CLS token and patches of any encoder apart; `images` (B, C, H', W') are those that it has seen.

    Tokens are (B, D, h, w), or (B, L, D) with the patches row by row, in front of which are prefix tokens, the CLS
    token first, and behind which may be queries.
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
    """Returns rows and columns of the patches among the tokens of an image of `size` pixels; `ValueError` if unknown.

    Encoders that go from fine to coarse, such as Swin, join two by two patches, of odd grids also those at the border,
    until there are no more than tokens; in front of them then is a CLS token at most.
    """
    patch = model.config.to_dict().get("patch_size")
    cure = "Take a teacher whose last_hidden_state is a map, or a Vision Transformer."
    if patch is None:
        raise ValueError(
            f"{type(model).__name__} has no patch_size, which would tell where on the image its {length} tokens are. "
            f"{cure}"
        )
    height, width = to_pair(patch)
    finest = rows, columns = size[0] // height, size[1] // width
    while rows * columns > length:
        rows, columns = (rows + 1) // 2, (columns + 1) // 2
    if (rows, columns) != finest and length - rows * columns > 1:
        raise ValueError(
            f"It is not known where on an image of {size} the {length} tokens of {type(model).__name__} are: its "
            f"patches of {patch} make a grid of {finest}, which, joined two by two, does not come to them. {cure}"
        )
    return rows, columns


def open_teacher(
    name: str, is_classifier: bool, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Opens any image classifier, or any encoder of images.

    Args:
        name: Folder, file of weights, or name on the Hub.
        is_classifier: Whether it must classify; else its tokens are enough.
        dtype: Its precision.
        trust_remote_code: Whether code that it brings may run.

    Raises:
        OSError: if there is no such model.
        ValueError: if it has learned nothing, or a weight is not finite, as all that is learned from it would be.
    """
    ours = HfViTForImageClassification if is_classifier else HfViTModel
    auto = AutoModelForImageClassification if is_classifier else AutoModel
    with without_load_report():
        if is_of_others(name):
            model, info = open_auto(auto, name, dtype, trust_remote_code)
        else:
            model, info = load_with_info(ours, name, {})
            model = model.to(dtype)
    check_trained(model, f"The teacher {name!r}")
    # The tokens of an encoder do not go through the pooling.
    if missing := sorted(weight for weight in info["missing_keys"] if is_classifier or "pool" not in weight):
        cure = "it would teach what is drawn at random. Give a model that was trained."
        if is_classifier:
            cure = f"it has not learned to classify. {FEATURES_INSTEAD}"
        raise ValueError(
            f"The teacher {name!r} holds no weights for {shorten(missing, 3)} of {type(model).__name__}: {cure}"
        )
    return model


def is_of_others(name: str) -> bool:
    """Returns whether only its own library opens a model."""
    if Path(name).is_file():
        return False
    try:
        file = find_file(name, CONFIG_NAME)
    except OSError:
        return False  # there is no such model: what opens ours tells
    config = {} if file is None else read_json(file)
    is_other_timm = not str(config.get("architecture", TIMM_VITS[0])).startswith(TIMM_VITS)
    is_known = config.get("model_type") == HfViTConfig.model_type or find_configured(config) is not None
    return bool(config) and (is_other_timm or not is_known)


def open_auto(auto_class: Any, name: str, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """Opens a model by an Auto class; returns it with which weights were missing."""
    options = {"dtype": dtype, "trust_remote_code": trust_remote_code, "output_loading_info": True}
    try:
        with refusing_code(name, CONSENT):
            return auto_class.from_pretrained(name, **options)
    except RemoteCodeError:
        raise
    except ValueError as error:
        cure = FEATURES_INSTEAD if auto_class is AutoModelForImageClassification else "Choose another one."
        reason = str(error).splitlines()[0]
        raise ValueError(f"The teacher {name!r} does not open as {auto_class.__name__} ({reason}). {cure}") from error


def with_view(
    name: str, model: PreTrainedModel, student: PreTrainedModel, processor: BaseImageProcessor, trust_remote_code: bool
) -> Teacher:
    """Returns a teacher that sees the images of a student; `ValueError` if it takes other channels or colors."""
    wanted = student.config.num_channels
    channels = model.config.to_dict().get("num_channels", wanted)
    if channels != wanted:
        raise ValueError(
            f"The teacher {name!r} takes images of {channels} channels, the student of {wanted}. Give the student as "
            f"many: --config_overrides '{{\"num_channels\": {channels}}}'."
        )
    own_processor = open_image_processor(name, model, wanted, trust_remote_code)
    return Teacher(name, model, TeacherView(processor, own_processor, wanted))


def open_image_processor(
    name: str, model: PreTrainedModel, num_channels: int, trust_remote_code: bool
) -> BaseImageProcessor:
    """Returns the image processor that belongs to a teacher; `OSError` if there is none.

    Raises `ValueError` if it does to colors what its student's pixels cannot follow.
    """
    if isinstance(model.config, HfViTConfig):
        return load_image_processor(name, patch_size=model.config.patch_size)
    if model.config.model_type == "timm_wrapper":  # whose own is a function of timm
        return HfViTImageProcessor(**timm_image_processor_options(model.config.to_dict().get("pretrained_cfg", {})))
    try:
        with refusing_code(name, CONSENT):
            processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
    except OSError as error:
        raise OSError(
            f"The teacher {name!r} has no image processor, which tells how it sees images. Save one in its folder: "
            "image_processor.save_pretrained."
        ) from error
    check_colors(processor, num_channels)
    return processor


def names_of(model: PreTrainedModel) -> list[str]:
    """Returns the names of a model's classes."""
    return [model.config.id2label[index] for index in range(len(model.config.id2label))]


def match_classes(known: Sequence[str], names: Sequence[str], teacher: str) -> list[int]:
    """Returns the place of each of `names` among those that a teacher knows; `ValueError` unless they are the same."""
    if list(known) == list(names):  # among which there may be twins
        return list(range(len(names)))
    if len(set(known)) < len(known) or set(known) != set(names):
        extra, lacking = (shorten(sorted(alone), 6) or "none" for alone in ({*known} - {*names}, {*names} - {*known}))
        raise ValueError(
            f"The teacher {teacher!r} has other classes than the data. Of the teacher alone: {extra}; of the data "
            f"alone: {lacking}. {FEATURES_INSTEAD}"
        )
    return [list(known).index(name) for name in names]
