"""The library's Trainer, whose saved model holds no file that runs code when opened."""

from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.trainer import TRAINING_ARGS_NAME


class HfViTTrainer(Trainer):
    """`transformers.Trainer`, except that the arguments of a training are saved as training_args.json.

    The library pickles them into training_args.bin, and unpickling a file from someone else can run any code.
    """

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Saves the model, its image processor and the arguments."""
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            folder = Path(output_dir if output_dir is not None else self.args.output_dir)
            (folder / TRAINING_ARGS_NAME).unlink()
            (folder / "training_args.json").write_text(self.args.to_json_string() + "\n", encoding="utf-8")
