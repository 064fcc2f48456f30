"""How images and texts are compared, scored and drawn. Shapes: N images, T texts, n texts of an image, E width."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple

import torch
from PIL.Image import Image
from torch import Tensor
from transformers import BaseImageProcessor, PreTrainedModel

from ..metrics import RetrievalMetric
from ..task_contrastive import loss_of_pairs
from ..visualize import draw_captions
from ..visualize.captions import NUM_CAPTIONS
from .scorer import Batch, ImageScorer, Scored
from .scoring_trainer import ScoringTrainer


class ComparedImage(NamedTuple):
    """What a model makes of an image (E,) and of its texts (n, E), of length 1."""

    image_embeds: Tensor
    text_embeds: Tensor


class ImageTextScorer(ImageScorer):
    """Scores how well captions find their images among all, and images their captions."""

    caption = "Images, their captions, and those that are found for them among all"
    metric: RetrievalMetric

    def __init__(self, processor: BaseImageProcessor) -> None:
        """Begins; `processor` has made the images."""
        super().__init__(processor, RetrievalMetric())

    def predict(self, model: PreTrainedModel, batch: Batch) -> list[Scored]:
        """Returns each image and its captions as the model compares them; they have no loss by themselves."""
        inputs = {name: value for name, value in batch.items() if name not in ("targets", "files")}
        outputs = model(**inputs)
        texts = outputs.text_embeds.split([len(target["captions"]) for target in batch["targets"]])
        return [Scored(ComparedImage(*parts)) for parts in zip(outputs.image_embeds, texts, strict=True)]

    def loss(self, model: PreTrainedModel) -> float:
        """Returns the loss of all images that were scored as one batch, the mean over all captions in turn.

        Each image comes with its first caption, then with its second, ...; one that has fewer begins anew.
        """
        images, texts, counts = self.metric.embeddings()
        first = counts.cumsum(dim=0) - counts
        head = model.contrastive_head
        scale = head.logit_scale.detach().cpu()
        bias = None if head.logit_bias is None else head.logit_bias.detach().cpu()
        with torch.no_grad():
            turns = [texts[first + turn % counts] for turn in range(int(counts.max()))]
            losses = torch.stack([loss_of_pairs(images, chosen, scale, bias) for chosen in turns])
        return float(losses.double().mean())

    def draw(
        self,
        images: list[Image],
        predictions: list[ComparedImage],
        targets: Sequence[Mapping[str, Any]],
        file: str | PathLike[str],
    ) -> None:
        """Draws each image beside its captions and the nearest ones of all that were scored."""
        _, texts, _ = self.metric.embeddings()
        captions = [caption for record in self.metric.records for caption in record.captions]
        embeds = torch.stack([prediction.image_embeds.float().cpu() for prediction in predictions])
        nearest = (embeds @ texts.T).topk(min(NUM_CAPTIONS, len(captions)), dim=1).indices.tolist()
        found = [[captions[number] for number in row] for row in nearest]
        draw_captions(images, [target["captions"] for target in targets], found, file)

    def describe_evaluation(self) -> str:
        """Says what the scores are of."""
        return (
            "each caption looks for its image among all, and each image for any of its captions; what is as near as "
            "the right one counts as nearer. Loss: of all images at once, with each of their captions in turn"
        )

    def describe_limits(self) -> str:
        """Says what the model is not good for."""
        return (
            "It compares images and short texts as those that it was trained on; its scores are for choosing among "
            "candidates and say little by themselves. A model that has seen few captions knows few words, and has "
            "learned whatever bias they have."
        )


class ImageTextTrainer(ScoringTrainer):
    """`ScoringTrainer`, whose evaluations have the loss of all images at once."""

    scorer: ImageTextScorer

    def mean_loss(self) -> float:
        """Returns the loss of all images that have been scored."""
        return self.scorer.loss(self.model)

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        """Leaves the temperature out, as CLIP does."""
        return [name for name in super().get_decay_parameter_names(model) if not name.endswith("logit_scale")]
