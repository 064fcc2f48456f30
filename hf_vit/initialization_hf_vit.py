"""Layers that start in a way of their own."""

from torch import nn


# The library initialises no module of remote code that has no weights of its own, so only such modules belong here.
class HfViTOwnStart(nn.Module):
    """A layer that says itself which weights it has before training; those of all others follow from their kind."""

    def initialize(self, std: float) -> None:
        """Sets the weights that this very layer holds, not those of layers within it.

        It has to go through `transformers.initialization`, which leaves alone what a checkpoint has filled.

        Args:
            std: `config.initializer_range`.
        """
        raise NotImplementedError
