"""Images that are named where they cannot be read."""

from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset


class NamedImages(torch.utils.data.Dataset[dict[str, Any]]):
    """Examples of a dataset; the error of one whose image cannot be read says which it is."""

    def __init__(self, examples: Dataset) -> None:
        """Wraps examples.

        Args:
            examples: Have images, and may have the column `file` with their names.
        """
        self.examples = examples

    def __len__(self) -> int:
        """Returns the number of examples."""
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns an example.

        Raises:
            IndexError: if there is none, which ends a loop over all.
            OSError: if its image cannot be read.
        """
        if index >= len(self):
            raise IndexError(f"Example {index} of {len(self)}.")
        try:
            return self.examples[index]
        except Exception as error:  # PIL fails on damaged images in many ways
            raise OSError(f"{self._name(index)} cannot be read: {error}") from error

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Returns several examples, as loaders ask for them."""
        try:
            return self.examples.__getitems__(indices)
        except Exception:
            return [self[index] for index in indices]  # which finds out which of them it is

    def _name(self, index: int) -> str:
        if "file" not in self.examples.column_names:
            return f"image {index}"
        return str(self.examples.select_columns("file")[index]["file"])
