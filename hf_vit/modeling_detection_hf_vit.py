"""The Vision Transformer that finds objects.

Shapes: B batch, C channels, H W pixels, h w patch grid, P prefix tokens, L tokens, D hidden size, Q queries.
"""

from typing import Any

from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.output_capturing import capture_outputs

from .configuration_hf_vit import HfViTConfig
from .configuration_objects_hf_vit import HfViTDetectionConfig
from .decoders_hf_vit import to_maps
from .modeling_hf_vit import HfViTModel
from .outputs_hf_vit import DetectionPrediction, HfViTObjectDetectionOutput
from .pretrained_hf_vit import HfViTPreTrainedModel
from .task_deformable import HfViTDeformableDecoder
from .task_detection import (
    HfViTQueryDecoder,
    check_labels,
    class_loss_of,
    class_probabilities,
    count_boxes,
    detection_loss,
)


class HfViTForObjectDetection(HfViTPreTrainedModel):
    """Finds objects: boxes, each with a class.

    Its losses are sums over boxes, divided by the number of boxes of the whole global batch where the Trainer says it.
    """

    accepts_loss_kwargs = True

    def __init__(self, config: HfViTConfig) -> None:
        """Builds a model with fresh weights."""
        super().__init__(config)
        if not config.num_labels:
            raise ValueError("num_labels=0 leaves the objects no class. Set num_labels.")
        self.options = HfViTDetectionConfig.of(config.detection_config)
        self.model = HfViTModel(config, add_pooling_layer=False)
        is_deformable = self.options.decoder == "deformable"
        self.detection_head = (HfViTDeformableDecoder if is_deformable else HfViTQueryDecoder)(config, self.options)
        self.post_init()
        self._output_capturing_hooks_installed = True  # those of the model inside record for this one too

    @staticmethod
    def count_items(labels: list[dict[str, Tensor]]) -> int:
        """Returns the number of boxes in labels."""
        return sum(len(target["class_labels"]) for target in labels)

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: list[dict[str, Tensor]] | None = None,
        patch_attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> HfViTObjectDetectionOutput:
        """Runs the model.

        Args:
            pixel_values: (B, C, H, W), H and W multiples of the patch size.
            labels: For each image a dictionary of `class_labels` (objects,) and `boxes` (objects, 4): centre x, centre
                y, width and height relative to the image without its padding. There may be no object.
            patch_attention_mask: (B, h, w) bool, False for padding on the right and at the bottom.
            interpolate_pos_encoding: Accepted for compatibility; the positions always follow the image.
            num_items_in_batch: Number of boxes that the loss is divided by, such as those of all batches of a step on
                all processes; by default those of this batch, in training averaged over processes.
            **kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            See `HfViTObjectDetectionOutput`; for the loss `detection_loss`. In training it counts what all layers with
            queries predict; otherwise the result alone.

        Raises:
            ValueError: if an input does not fit the model, saying what would.
        """
        if labels is not None and pixel_values is not None:
            check_labels(len(pixel_values), self.config.num_labels, labels)
        predictions, last_hidden_state = self._predict(pixel_values, patch_attention_mask, labels, **kwargs)
        loss = loss_dict = None
        if labels is not None:
            num_boxes = count_boxes(labels, self.training) if num_items_in_batch is None else num_items_in_batch
            num_groups = self.options.num_groups if self.training and self.options.decoder == "deformable" else 1
            loss, loss_dict = detection_loss(predictions, labels, self.options, num_boxes, num_groups)
        *earlier, result = predictions
        return HfViTObjectDetectionOutput(
            loss=loss,
            loss_dict=loss_dict,
            logits=result.logits,
            pred_boxes=result.boxes,
            probabilities=class_probabilities(result.logits, class_loss_of(self.options)),
            auxiliary_outputs=[{"logits": logits, "pred_boxes": boxes} for logits, boxes in earlier] or None,
            last_hidden_state=last_hidden_state,
        )

    def _predict(
        self,
        pixel_values: Tensor | None,
        patch_attention_mask: Tensor | None,
        labels: list[dict[str, Tensor]] | None,
        **kwargs: Any,
    ) -> tuple[list[DetectionPrediction], Tensor]:
        """Returns what is predicted after the last block, before that in training only, and the last tokens."""
        model = self.model
        head: Any = self.detection_head  # not to be known by its class, for which peft may stand in
        if self.options.decoder == "deformable":
            return self._predict_from_levels(head, pixel_values, patch_attention_mask, labels, **kwargs)
        hidden_states, blocks = model.begin(pixel_values, patch_attention_mask, **kwargs)
        start = self.config.num_hidden_layers - head.num_blocks
        hidden_states = blocks.run(hidden_states, stop=start, **blocks.masks(hidden_states))  # (B, P + N, D)
        hidden_states = head.join_queries(hidden_states)  # (B, L, D)
        masks = blocks.masks(hidden_states)
        states = []
        for block, positions in enumerate(head.mid_positions(blocks.grid, patch_attention_mask), start=start):
            hidden_states = blocks.run(hidden_states, block, block + 1, **masks)
            states.append(hidden_states)
            hidden_states = hidden_states if positions is None else hidden_states + positions
        whole = {"attention_mask": masks["attention_mask"]}
        for layer in range(len(head.layers.layers)):
            hidden_states = blocks.run(hidden_states, layer, layer + 1, head.layers, **whole)
            states.append(hidden_states)
        hidden_states = model.norm(hidden_states)
        earlier = [head(model.norm(state)) for state in states[:-1]] if self.training else []
        return [*earlier, head(hidden_states)], hidden_states

    def _predict_from_levels(
        self,
        head: HfViTDeformableDecoder,
        pixel_values: Tensor | None,
        patch_attention_mask: Tensor | None,
        labels: list[dict[str, Tensor]] | None,
        **kwargs: Any,
    ) -> tuple[list[DetectionPrediction], Tensor]:
        """The same of a decoder behind the encoder, which sees the patches of several blocks.

        Blocks that it does not see run only for what is asked of them, and no result depends on them: under DDP a
        weight with a part in the outputs has to have one in the loss.
        """
        model, config = self.model, self.config
        hidden_states, blocks = model.begin(pixel_values, patch_attention_mask, **kwargs)
        masks = blocks.masks(hidden_states)
        wants_states = kwargs.get("output_hidden_states")
        wants_states = config.output_hidden_states if wants_states is None else wants_states
        num_blocks = config.num_hidden_layers if wants_states or blocks.output_attentions else max(head.out_indices)
        states = [hidden_states]
        for block in range(num_blocks):
            states.append(blocks.run(states[-1], block, block + 1, **masks))
        seen = {number: states[number] for number in head.out_indices}
        if config.apply_layernorm:
            seen = {number: model.norm(state) for number, state in seen.items()}
        maps = [to_maps(seen[number][:, config.num_prefix_tokens :], blocks.grid) for number in head.out_indices]
        predictions = head(maps, patch_attention_mask, labels)
        return predictions if self.training else predictions[-1:], seen[max(seen)]


# The stock pipeline reads this list, not what is registered, and calls models that are not in it unsupported.
MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES["hf_vit"] = HfViTForObjectDetection.__name__
