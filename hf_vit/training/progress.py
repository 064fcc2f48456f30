"""The progress bar of a training."""

from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback


class TrainingProgress(ProgressCallback):
    """The library's bar of steps with the time left, which also shows loss, images per second and peak memory.

    In a training that is taken up again it begins where that was, and tells the time from there.
    """

    training_bar: Any
    prediction_bar: Any

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Draws the bar."""
        super().on_train_begin(args, state, control, **kwargs)
        self.current_step = state.global_step
        if self.training_bar is not None:
            bar = self.training_bar
            bar.unit = "step"
            bar.initial = bar.n = bar.last_print_n = state.global_step
            bar.refresh()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any],
        **kwargs: Any,
    ) -> None:
        """Writes what is logged above the bar, and the latest of it beside the bar."""
        super().on_log(args, state, control, logs=logs, **kwargs)
        if self.training_bar is not None and "images_per_second" in logs:
            shown = {"loss": f"{logs['loss']:.4g}", "img/s": f"{logs['images_per_second']:.4g}"}
            self.training_bar.set_postfix(**shown, memory=f"{logs['peak_memory_mib']} MiB")

    def close(self) -> None:
        """Leaves the bars as they are, so that what is said next begins on a line of its own."""
        for bar in (self.prediction_bar, self.training_bar):
            if bar is not None:
                bar.close()
        self.prediction_bar = self.training_bar = None
