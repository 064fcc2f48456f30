"""The model that finds keypoints.

Shapes: B batch, C channels, H W pixels, h w patch grid, K keypoints, s how much finer heatmaps are than the grid.
"""

import torch
from torch import Tensor
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from .configuration_hf_vit import HfViTConfig, to_pair
from .configuration_objects_hf_vit import HfViTKeypointConfig
from .decoders_hf_vit import each_image_alone
from .modeling_hf_vit import HfViTForDensePrediction, HfViTModel
from .outputs_hf_vit import HfViTKeypointDetectionOutput
from .task_keypoints import HfViTKeypointHead, flip_heatmaps, keypoint_loss


class HfViTForKeypointDetection(HfViTForDensePrediction):
    """Says where the keypoints of the one object on an image are, which `config.id2label` names.

    The design is that of ViTPose, https://arxiv.org/abs/2204.12484. Its loss is a sum over images, divided by their
    number in the whole global batch where the Trainer says it.
    """

    accepts_loss_kwargs = True

    def __init__(self, config: HfViTConfig) -> None:
        """Builds a model with fresh weights."""
        super().__init__(config)
        if not config.num_labels:
            raise ValueError("num_labels=0 leaves no keypoint to find. Set num_labels or id2label.")
        self.options = HfViTKeypointConfig.of(config.keypoint_config)
        self.model = HfViTModel(config, add_pooling_layer=False)
        self.keypoint_head = HfViTKeypointHead(config, self.options)
        self.post_init()

    @staticmethod
    def count_items(labels: Tensor) -> int:
        """Returns the number of images in labels."""
        return len(labels)

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        patch_attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> HfViTKeypointDetectionOutput:
        """Runs the model.

        Args:
            pixel_values: (B, C, H, W), H and W multiples of the patch size.
            labels: (B, K, 3) floats: x, y in pixels from the centre of the first one, and visibility, which is 0 (not
                labelled), 1 (hidden) or 2 (visible).
            patch_attention_mask: (B, h, w) bool, False for padding on the right and at the bottom.
            interpolate_pos_encoding: Accepted for compatibility; the positions always follow the image.
            num_items_in_batch: Number of images that the loss is divided by, such as those of all batches of a step on
                all processes; by default those of this batch.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            See `HfViTKeypointDetectionOutput`; for the loss `keypoint_loss`.

        Raises:
            ValueError: if an input does not fit the model, saying what would.
        """
        outputs, (maps,), _ = self.run_encoder(
            pixel_values, [self.config.num_hidden_layers], patch_attention_mask=patch_attention_mask, **kwargs
        )
        assert pixel_values is not None  # refused above
        heatmaps = self.keypoint_head(maps, patch_attention_mask)
        loss = None
        if labels is not None:
            size = (pixel_values.shape[-2], pixel_values.shape[-1])
            loss = keypoint_loss(heatmaps, labels, size, self.options, patch_attention_mask, num_items_in_batch)
        return HfViTKeypointDetectionOutput(
            loss=loss,
            heatmaps=heatmaps,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    @torch.no_grad()
    def predict_flipped(
        self, pixel_values: Tensor, patch_attention_mask: Tensor | None = None
    ) -> HfViTKeypointDetectionOutput:
        """Looks at images and their mirror images, which takes twice as long and is a little more exact.

        Args:
            pixel_values: (B, C, H, W).
            patch_attention_mask: (B, h, w) bool, False for padding on the right and at the bottom. Each image is then
                looked at alone.

        Returns:
            `heatmaps` (B, K, s·h, s·w), the mean of both.

        Raises:
            ValueError: if the model is in training mode.
        """
        if self.training:
            raise ValueError("In training mode chance has a part in the result (dropout). Call model.eval() before.")

        def look(images: Tensor) -> Tensor:
            return (self(images, return_dict=True).heatmaps + self.mirrored_heatmaps(images)) / 2

        mask, patch = patch_attention_mask, to_pair(self.config.patch_size)
        if mask is not None:
            mask = mask.repeat_interleave(patch[0], dim=1).repeat_interleave(patch[1], dim=2)  # (B, H, W)
        heatmaps = each_image_alone(lambda own, _: look(own[0]), [pixel_values], [], mask)
        return HfViTKeypointDetectionOutput(heatmaps=heatmaps)

    def mirrored_heatmaps(self, pixel_values: Tensor) -> Tensor:
        """Returns what the mirror images of images (B, C, H, W) say of them, (B, K, s·h, s·w)."""
        mirrored: Tensor = self(pixel_values.flip(-1), return_dict=True).heatmaps
        return flip_heatmaps(mirrored, self.options.flip_pairs)
