"""The arguments of an extraction of features."""

from dataclasses import dataclass

import torch

from ..data.checks import check_apart
from ..options.field import COUNT, NOT_NEGATIVE, option
from ..training.arguments import UnlabeledImagesArguments
from .encoder import FEATURES


@dataclass
class ExtractionArguments(UnlabeledImagesArguments):
    """Which features to extract, and from which images."""

    model_name_or_path: str = option(
        default="",
        help="Saved or published model: a folder, a file or a name on the Hub.",
        group="Extraction",
        essential=True,
        synonyms="weights pretrained checkpoint ckpt initial_checkpoint backbone",
    )
    output_dir: str = option(
        default="outputs/features",
        help="Folder for the parquet files.",
        group="Output",
        essential=True,
        synonyms="output out save_dir out_dir project_dir name",
        resume="free",
    )
    features: list[str] = option(
        default_factory=lambda: ["mean"],
        help="Some of: " + "; ".join(f"{name}, {what}" for name, what in FEATURES.items()) + ".",
        group="Extraction",
        essential=True,
    )
    dtype: str = option(
        default="float32", help="Type of the numbers that are written, or float16.", group="Extraction", essential=True
    )
    batch_size: int = option(
        default=32, help="Images that go through the model at a time.", range=COUNT, group="Extraction", essential=True
    )
    rows_per_shard: int = option(
        default=4096,
        help="Images of a file: what one process does, and at most loses if it is killed.",
        range=COUNT,
        group="Extraction",
        essential=True,
    )
    num_workers: int = option(
        default=0,
        help="Processes that read images, for each that runs the model.",
        range=NOT_NEGATIVE,
        group="Extraction",
        essential=True,
        synonyms="workers",
    )
    skip_unreadable: bool = option(
        default=False,
        help="Leave images out that cannot be read, rather than stop.",
        group="Extraction",
        essential=True,
        resume="free",
    )
    use_cpu: bool = option(
        default=False,
        help="Leave GPUs alone.",
        brief="Leave GPUs alone.",
        group="Extraction",
        essential=True,
        synonyms="cpu no_cuda",
        resume="free",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model_name_or_path:
            raise ValueError("No model is given. Set --model_name_or_path path/to/model, or to a name on the Hub.")
        if not self.features or {*self.features} - {*FEATURES}:
            raise ValueError(f"features={self.features} are not all known. Choose among {', '.join(FEATURES)}.")
        if len({*self.features}) < len(self.features):
            raise ValueError(f"features={self.features} names one twice.")
        check_apart(self.sources, self.output_dir)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not known. Choose {' or '.join(DTYPES)}.")


DTYPES = {"float32": torch.float32, "float16": torch.float16}
