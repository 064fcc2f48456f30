"""Callbacks with state in checkpoints."""

from pathlib import Path

from transformers import TrainerCallback


class StatefulCallback(TrainerCallback):
    """A callback that saves its state with checkpoints and loads it again.

    `HfViTTrainer` calls both methods for every one of its callbacks. What is a few numbers is an `ExportableState` of
    the library instead, which keeps them in trainer_state.json.
    """

    is_published = False  # whether the state also stands beside the model that a training ends with

    def save_state(self, folder: Path, is_writer: bool) -> None:
        """Save the state to a folder.

        Args:
            folder: A checkpoint.
            is_writer: Whether this process writes files. All processes call it together.
        """

    def load_state(self, folder: Path) -> None:
        """Load the state from a checkpoint: the one a training resumes from, or the best one when it ends."""
