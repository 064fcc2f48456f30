"""Which sizes training images have."""

from dataclasses import dataclass, field


@dataclass
class SizeArguments:
    """How large the images of training batches are; those of evaluations have the size of the model."""

    progressive_sizes: list[int] | None = field(
        default=None,
        metadata={
            "help": "Heights in pixels that training images have over equal shares of the steps, the last one that of "
            "image_size: 16 24 32. Small images train several times as fast."
        },
    )
    multi_scale_sizes: list[int] | None = field(
        default=None,
        metadata={
            "help": "Heights in pixels of which one is drawn for every training batch: 24 32 40. Larger ones than "
            "image_size enlarge the images."
        },
    )

    def check_sizes(self) -> None:
        """Raises `ValueError` for what can be found out without the model."""
        if self.progressive_sizes and self.multi_scale_sizes:
            raise ValueError(
                f"progressive_sizes={self.progressive_sizes} and multi_scale_sizes={self.multi_scale_sizes} both say "
                "how large training images are. Give one of the two."
            )

    def describe_sizes(self) -> dict[str, str]:
        """Returns what a model card shall say."""
        if self.progressive_sizes:
            heights = ", ".join(map(str, self.progressive_sizes))
            return {"image heights": f"{heights} pixels, for equal shares of the steps"}
        if self.multi_scale_sizes:
            return {"image heights": f"{', '.join(map(str, self.multi_scale_sizes))} pixels, one drawn for each batch"}
        return {}
