"""The arguments of an extraction of features."""

from dataclasses import dataclass, field

import torch

from ..data import check_apart
from ..training.arguments import UnlabeledImagesArguments
from .encoder import FEATURES


@dataclass
class ExtractionArguments(UnlabeledImagesArguments):
    """Which features to extract, and from which images."""

    model_name_or_path: str = field(
        default="",
        metadata={"aliases": ["--model"], "help": "Saved or published model: a folder, a file or a name on the Hub."},
    )
    output_dir: str = field(default="outputs/features", metadata={"help": "Folder for the parquet files."})
    features: list[str] = field(
        default_factory=lambda: ["mean"],
        metadata={"help": "Some of: " + "; ".join(f"{name}, {what}" for name, what in FEATURES.items()) + "."},
    )
    dtype: str = field(default="float32", metadata={"help": "Type of the numbers that are written, or float16."})
    batch_size: int = field(default=32, metadata={"help": "Images that go through the model at a time."})
    rows_per_shard: int = field(
        default=4096, metadata={"help": "Images of a file: what one process does, and at most loses if it is killed."}
    )
    num_workers: int = field(default=0, metadata={"help": "Processes that read images, for each that runs the model."})
    skip_unreadable: bool = field(
        default=False, metadata={"help": "Leave images out that cannot be read, rather than stop."}
    )
    use_cpu: bool = field(default=False, metadata={"help": "Leave GPUs alone."})

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
        if min(self.batch_size, self.rows_per_shard) < 1 or self.num_workers < 0:
            raise ValueError(
                f"batch_size={self.batch_size} and rows_per_shard={self.rows_per_shard} must be at least 1, and "
                f"num_workers={self.num_workers} at least 0."
            )


DTYPES = {"float32": torch.float32, "float16": torch.float16}
