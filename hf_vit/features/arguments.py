"""The arguments of an extraction of features."""

from dataclasses import dataclass
from functools import partial

import torch

from ..data.checks import check_apart
from ..options.field import COUNT, NOT_NEGATIVE, Names, data_option, option, source_option, start_option
from ..training.arguments import UNLABELED_COLUMN, UNLABELED_SOURCES, SourceArguments
from .encoder import FEATURES


extraction_option = partial(option, group="Extraction", essential=True)


@dataclass
class ExtractionArguments(SourceArguments):
    """Which features to extract, and from which images."""

    loader_options = (*SourceArguments.loader_options, "label_column_name")
    takes_several = True

    dataset_name: str | Names = source_option(UNLABELED_SOURCES)  # type: ignore[assignment]
    label_column_name: str | None = data_option(None, UNLABELED_COLUMN)

    model_name_or_path: str = start_option(
        "", "Saved or published model: a folder, a file or a name on the Hub.", group="Extraction"
    )
    output_dir: str = option(
        "outputs/features",
        "Folder for the parquet files.",
        group="Output",
        essential=True,
        synonyms="output out save_dir out_dir project_dir name",
        resume="free",
    )
    features: list[str] = extraction_option(
        ["mean"], "Some of: " + "; ".join(f"{name}, {what}" for name, what in FEATURES.items()) + "."
    )
    dtype: str = extraction_option("float32", "Type of the numbers that are written, or float16.")
    batch_size: int = extraction_option(32, "Images that go through the model at a time.", COUNT)
    rows_per_shard: int = extraction_option(
        4096, "Images of a file: what one process does, and at most loses if it is killed.", COUNT
    )
    num_workers: int = extraction_option(
        0, "Processes that read images, for each that runs the model.", NOT_NEGATIVE, synonyms="workers"
    )
    skip_unreadable: bool = extraction_option(
        False, "Leave images out that cannot be read, rather than stop.", resume="free"
    )
    use_cpu: bool = extraction_option(
        False, "Leave GPUs alone.", brief="Leave GPUs alone.", synonyms="cpu no_cuda", resume="free"
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
