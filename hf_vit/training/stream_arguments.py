"""What scripts can be told whose training images may come as a stream."""

from dataclasses import dataclass, field


@dataclass
class StreamArguments:
    """Whether and how images are read while a training goes on."""

    streaming: bool = field(
        default=False,
        metadata={
            "help": "Read images while training goes on; needs --max_steps, --save_strategy steps and --eval_strategy "
            "steps, or no. Of what is not on disk, or is held out, --max_eval_samples (1000) images are scored."
        },
    )
    shuffle_buffer_size: int = field(
        default=1000, metadata={"help": "Among how many images of a stream the next one is drawn, on each process."}
    )
    shard_by_process: bool = field(
        default=True,
        metadata={
            "help": "Let each process read its own shards of a stream; false lets the first one read for all, which "
            "is slower, but several processes then train as one would."
        },
    )

    def check_stream(self, max_train_samples: int | None) -> None:
        """Raises `ValueError` if the options of a stream do not go with each other or with the others."""
        if self.shuffle_buffer_size < 1:
            raise ValueError(
                f"shuffle_buffer_size={self.shuffle_buffer_size} must be at least 1, which keeps the order."
            )
        if self.streaming and max_train_samples is not None:
            raise ValueError(
                f"max_train_samples={max_train_samples} are drawn from all images, which a stream does not know. "
                "Leave it out, or --streaming."
            )
