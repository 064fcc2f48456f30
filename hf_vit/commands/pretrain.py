"""Pretrains on your images without their labels, and measures with the labels what that is worth.

Three fifths of the time go to pretraining. The rest goes to two trainings with labels, one from scratch before it and
one from the pretrained encoder after it, whose scores are compared. Without labels it ends with the encoder.

Examples:
    hf-vit pretrain photos --minutes 60
    hf-vit pretrain photos more_photos --labels labeled_photos --task semantic-segmentation
"""

from ..pretraining import pretrain


__all__ = ["pretrain"]
