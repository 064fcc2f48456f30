"""What changes whole batches of a training on its device: mixtures of images, other sizes."""

from collections.abc import Sequence
from typing import Any, Protocol

from ..data.augmented_dataset import seeded


class BatchChange(Protocol):
    """Changes a batch of a training."""

    def __call__(self, batch: dict[str, Any], progress: float) -> dict[str, Any]:
        """Returns the changed batch.

        Args:
            batch: What the model takes, on its device.
            progress: Share of the training's steps that are done, in [0, 1).

        Draws its randomness from torch's default generator.
        """


class BatchChanges:
    """Changes the batches of a training one after the other, and in one that is taken up again as it would have.

    What is drawn depends on the seed, the step and the place of the batch in the step alone. So all processes draw the
    same for their batches of one step, which keeps these at one size.
    """

    def __init__(self, changes: Sequence[BatchChange], seed: int) -> None:
        """Begins.

        Args:
            changes: What to do, in this order.
            seed: Another seed draws other changes.
        """
        self.changes = changes
        self.seed = seed
        self._last = (-1, 0)

    def __call__(self, batch: dict[str, Any], step: int, num_steps: int) -> dict[str, Any]:
        """Returns the changed batch of a step out of `num_steps`; those of one step come in their order."""
        last_step, place = self._last
        place = place + 1 if step == last_step else 0
        self._last = step, place
        with seeded(self.seed, step, place):
            for change in self.changes:
                batch = change(batch, step / num_steps)
        return batch
