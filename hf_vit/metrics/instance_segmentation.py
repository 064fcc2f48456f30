"""Average precision of instance masks, by the COCO evaluator of faster-coco-eval."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from .coco import CocoMetric, Record, ranked
from .streamed import as_array, check_labels, check_same_size, mean_of_known


class InstanceMetric(CocoMetric):
    """Mask AP and AR as COCO defines them, with at most 100 detections of a class per image.

    An object's area, which makes it small (below 32² pixels), medium or large (above 96²), is that of its mask.
    Records hold run-length encoded masks.
    """

    iou_type = "segm"
    places: ClassVar[dict[str, int]] = {
        "mask_ap": 0,
        "mask_ap_50": 1,
        "mask_ap_75": 2,
        "mask_ap_small": 3,
        "mask_ap_medium": 4,
        "mask_ap_large": 5,
        "mask_ar_100": 8,
    }
    score_names = tuple(places)

    def __init__(self, names: Sequence[str], thing_ids: Iterable[int]) -> None:
        """Starts without images.

        Args:
            names: The K class names.
            thing_ids: Numbers of the classes that are scored. Objects and detections of others do not count.

        Raises:
            ImportError: if faster-coco-eval is not installed.
            ValueError: if a number is none of the classes.
        """
        self.names = list(names)
        self.thing_ids = sorted(set(thing_ids))
        check_labels(as_array(self.thing_ids, np.int64), self.names, "set of thing_ids")
        super().__init__({label: self.names[label] for label in self.thing_ids})

    def record(self, prediction: Mapping[str, Any], target: Mapping[str, Any]) -> Record:
        """Encodes the masks of one image.

        Args:
            prediction: `masks` (M, H, W), `class_labels` (M,) and `scores` (M,). Masks may overlap.
            target: `masks` (N, H, W), `class_labels` (N,) and, optionally, `is_crowd` (N,).

        Returns:
            The objects and detections, and what images are ordered by.

        Raises:
            ValueError: if sizes differ or class numbers are too large or negative.
        """
        masks, target_masks = as_array(prediction["masks"], np.bool_), as_array(target["masks"], np.bool_)
        check_same_size(masks, target_masks)
        crowd = as_array(target.get("is_crowd", np.zeros(len(target_masks))), np.int64)
        scores = as_array(prediction["scores"], np.float64)
        objects = self._encode(target_masks, target["class_labels"], "target", iscrowd=crowd)
        detections = self._encode(masks, prediction["class_labels"], "prediction", score=scores)
        return ranked({"objects": objects, "detections": detections})

    def per_class(self) -> dict[str, dict[str, float]]:
        """Returns `ap` and `ap_50` of each class of `thing_ids`, NaN where there is no object of it."""
        precision = self._precision()
        return {
            self.names[label]: {
                "ap": mean_of_known(precision[:, :, place].reshape(-1)),
                "ap_50": mean_of_known(precision[0, :, place]),
            }
            for place, label in enumerate(self.thing_ids)
        }

    def _encode(self, masks: np.ndarray, class_labels: Any, what: str, **values: np.ndarray) -> list[dict[str, Any]]:
        """Returns the masks of classes that are scored as entries of the COCO format, with values (M,) for each."""
        from faster_coco_eval import mask as run_lengths  # here, as only this score needs it

        labels = as_array(class_labels, np.int64)
        check_labels(labels, self.names, what)
        kept = np.flatnonzero(np.isin(labels, self.thing_ids))
        codes = run_lengths.encode(np.asfortranarray(masks[kept].transpose(1, 2, 0)).view(np.uint8))
        return [
            {
                "category_id": labels[i].item(),
                "segmentation": code,
                "area": int(run_lengths.area(code)),
                **{name: value[i].item() for name, value in values.items()},
            }
            for i, code in zip(kept, codes, strict=True)
        ]
