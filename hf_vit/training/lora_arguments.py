"""How a training can leave the weights of a model as they are, and learn small changes of them (LoRA)."""

from dataclasses import dataclass, field


# The linear layers of attention and MLP in every tower of this package, plain and gated.
LORA_TARGETS = (
    *("attention.qkv", "attention.projection"),
    *("mlp.fc1", "mlp.fc2", "mlp.gate", "mlp.up", "mlp.down"),
)


@dataclass
class LoraArguments:
    """Which changes of low rank a model learns (https://arxiv.org/abs/2106.09685)."""

    lora_rank: int | None = field(
        default=None,
        metadata={
            "help": "Rank of the changes that the linear layers of attention and MLP learn, the head aside, which "
            "learns in full; 8 is usual. All weights learn unless said."
        },
    )
    lora_alpha: int | None = field(
        default=None, metadata={"help": "Changes count alpha / rank times; twice the rank unless said."}
    )
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout rate of what the changes see."})
    lora_target_modules: list[str] = field(
        default_factory=lambda: list(LORA_TARGETS),
        metadata={"help": "How the names of the linear layers end that learn them."},
    )

    def check_lora(self) -> None:
        """Raises `ValueError` if a value is out of range."""
        if self.lora_rank is None:
            return
        if self.lora_rank < 1:
            raise ValueError(f"lora_rank={self.lora_rank} leaves nothing to learn. Give at least 1; 8 is usual.")
        if self.lora_alpha is not None and self.lora_alpha < 1:
            raise ValueError(f"lora_alpha={self.lora_alpha} takes the changes away. Give at least 1.")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout={self.lora_dropout} must lie in [0, 1). 0.1 drops a tenth.")
