"""The Trainer that also looks at the neighbours of images."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput

from ..data import TargetDataset
from .masked_image_scorer import MaskedImageScorer
from .scoring_trainer import ScoringTrainer


class NeighbourTrainer(ScoringTrainer):
    """`ScoringTrainer`, whose evaluations begin with the features of training images whose class is known.

    Every process describes a share of these images and gets the features of all, and then looks for the neighbours of
    those that it scores.
    """

    scorer: MaskedImageScorer

    def __init__(self, *args: Any, known: TargetDataset, **kwargs: Any) -> None:
        """Takes the arguments of `ScoringTrainer`.

        Args:
            *args: Passed on.
            known: Training images with `class_number`; may be empty.
            **kwargs: Passed on.
        """
        super().__init__(*args, **kwargs)
        self.known = known

    def score_weights(self, dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Scores all images."""
        if len(self.known):
            self.scorer.known = self.describe_known()
        return super().score_weights(dataloader, *args, **kwargs)

    @torch.no_grad()
    def describe_known(self) -> tuple[Tensor, Tensor]:
        """Returns the features (M, D) and the classes (M,) of the training images whose class is known."""
        self.model.eval()
        features, classes = [], []
        for batch in self.get_test_dataloader(self.known):
            inputs = self._prepare_inputs(batch)
            described = self.scorer.features(self.model, inputs["pixel_values"])
            numbers = torch.tensor(inputs["targets"], device=described.device)
            described, numbers = self.accelerator.gather_for_metrics((described, numbers))
            features.append(described)
            classes.append(numbers)
        return torch.cat(features), torch.cat(classes)
