"""What the script of masked image modeling can be told beside what all training scripts can."""

from dataclasses import dataclass, field
from typing import Any

from .arguments import SourceArguments, TrainedImagesArguments
from .stream_loader import StreamArguments
from .tasks.arguments import split_sources


POOL = {
    "help": "Folder of images at any depth, whatever classifiers train on, or a Hub name; several, parted by commas, "
    "are one pool."
}


@dataclass
class UnlabeledImagesArguments(SourceArguments):
    """Which images, be they labeled or not."""

    dataset_name: str = field(default="", metadata=POOL)
    label_column_name: str | None = field(
        default=None, metadata={"help": "Column of labels, where there is one and it is not clear by itself."}
    )

    def __post_init__(self) -> None:
        """Checks what can be checked without the data."""
        super().__post_init__()
        if not all(self.sources):
            raise ValueError(
                f"dataset_name={self.dataset_name!r} has a comma with no name before or after it. Leave it out."
            )

    @property
    def sources(self) -> list[str]:
        """The paths or names on the Hub."""
        return split_sources(self.dataset_name)

    def source_options(self) -> dict[str, Any]:
        """Returns the same, with the column of labels."""
        return {**super().source_options(), "label_column_name": self.label_column_name}


@dataclass
class UnlabeledDataArguments(TrainedImagesArguments, UnlabeledImagesArguments, StreamArguments):
    """Which images to learn from."""

    dataset_name: str = field(default="", metadata=POOL)
    max_knn_samples: int = field(
        default=5000,
        metadata={"help": "Training images among which neighbors are looked for, where labels are known; 0 for none."},
    )

    def __post_init__(self) -> None:
        """Checks what can be checked without the data."""
        super().__post_init__()
        if self.max_knn_samples < 0:
            raise ValueError(f"max_knn_samples={self.max_knn_samples} must be 0 or more.")
        self.check_stream(self.max_train_samples)
