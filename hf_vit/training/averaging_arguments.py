"""What trainings can be told about an average of the weights."""

from dataclasses import dataclass, field


@dataclass
class AveragingArguments:
    """Whether weights are averaged."""

    ema_decay: float | None = field(
        default=None,
        metadata={
            "help": "Also keep, score and save an exponential moving average of the weights, of about the last "
            "1 / (1 - decay) steps: 0.9999 for long trainings, 0.99 for a few hundred steps."
        },
    )

    def check_averaging(self, optimizer: str) -> None:
        """Raises `ValueError` if the weights cannot be averaged like that, given the name of the optimizer."""
        if self.ema_decay is None:
            return
        if not 0 < self.ema_decay < 1:
            raise ValueError(f"ema_decay={self.ema_decay} must lie between 0 and 1. 0.999 averages about 1000 steps.")
        if "schedule_free" in optimizer.lower():
            raise ValueError(
                f"The weights of optim={optimizer} are an average already, so that ema_decay={self.ema_decay} would "
                "average twice. Leave one of the two out."
            )
