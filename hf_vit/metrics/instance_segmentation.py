"""Average precision of instance masks, by the COCO evaluator of faster-coco-eval."""

import math
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from importlib.util import find_spec
from operator import itemgetter
from typing import Any

import numpy as np

from .streamed import StreamedMetric, as_array, check_labels, check_same_size, mean_of_known


# Where the evaluator keeps its scores
SCORES = {
    "mask_ap": 0,
    "mask_ap_50": 1,
    "mask_ap_75": 2,
    "mask_ap_small": 3,
    "mask_ap_medium": 4,
    "mask_ap_large": 5,
    "mask_ar_100": 8,
}

Record = dict[str, Any]


class InstanceMetric(StreamedMetric):
    """Mask AP and AR as COCO defines them, with at most 100 detections of a class per image.

    An object's area, which makes it small (below 32² pixels), medium or large (above 96²), is that of its mask.
    Records are run-length encoded masks; they are kept, as average precision has no sums.
    """

    score_names = tuple(SCORES)

    def __init__(self, names: Sequence[str], thing_ids: Iterable[int]) -> None:
        """Starts without images.

        Args:
            names: The K class names.
            thing_ids: Numbers of the classes that are scored. Objects and detections of others do not count.

        Raises:
            ImportError: if faster-coco-eval is not installed.
            ValueError: if a number is none of the classes.
        """
        if find_spec("faster_coco_eval") is None:
            raise ImportError('Mask AP needs faster-coco-eval. Install it: pip install "hf-vit[train]".')
        self.names = list(names)
        self.thing_ids = sorted(set(thing_ids))
        check_labels(as_array(self.thing_ids, np.int64), self.names, "set of thing_ids")
        self.reset()

    def reset(self) -> None:
        """Forgets all images."""
        self._records: list[Record] = []
        self._evaluated: Any = None  # the evaluator of these records, once it was needed

    def record(self, prediction: Mapping[str, Any], target: Mapping[str, Any]) -> Record:
        """Encodes the masks of one image.

        Args:
            prediction: `masks` (M, H, W), `class_labels` (M,) and `scores` (M,). Masks may overlap.
            target: `masks` (N, H, W), `class_labels` (N,) and, optionally, `is_crowd` (N,).

        Returns:
            The size of the image, its objects and its detections, and what images are ordered by.

        Raises:
            ValueError: if sizes differ or class numbers are too large or negative.
        """
        masks, target_masks = as_array(prediction["masks"], np.bool_), as_array(target["masks"], np.bool_)
        check_same_size(masks, target_masks)
        crowd = as_array(target.get("is_crowd", np.zeros(len(target_masks))), np.int64)
        scores = as_array(prediction["scores"], np.float64)
        record: Record = {
            "size": target_masks.shape[-2:],
            "objects": self._encode(target_masks, target["class_labels"], "target", iscrowd=crowd),
            "detections": self._encode(masks, prediction["class_labels"], "prediction", score=scores),
        }
        return {**record, "rank": blake2b(repr(record).encode(), digest_size=16).digest()}

    def update(self, records: Iterable[Record]) -> None:
        """Takes in the records of images."""
        self._records.extend(records)
        self._evaluated = None

    def per_class(self) -> dict[str, dict[str, float]]:
        """Returns `ap` and `ap_50` of each class of `thing_ids`, NaN where there is no object of it."""
        precision = self._evaluate().eval["precision"][..., 0, -1]  # (IoU threshold, recall, class), all areas
        precision = np.where(precision < 0, np.nan, precision)
        return {
            self.names[label]: {
                "ap": mean_of_known(precision[:, :, place].reshape(-1)),
                "ap_50": mean_of_known(precision[0, :, place]),
            }
            for place, label in enumerate(self.thing_ids)
        }

    def compute(self) -> dict[str, float]:
        """Returns the scores of `SCORES`, all in [0, 1]; NaN where there is no object, for example no large one."""
        stats = self._evaluate().stats
        return {name: float(stats[place]) if stats[place] >= 0 else math.nan for name, place in SCORES.items()}

    def _encode(
        self, masks: np.ndarray, class_labels: Any, what: str, **values: np.ndarray
    ) -> list[dict[str, int | float | bytes]]:
        """Returns the masks of classes that are scored as entries of the COCO format, with values (M,) for each."""
        from faster_coco_eval import mask as run_lengths  # here, as only this score needs it

        labels = as_array(class_labels, np.int64)
        check_labels(labels, self.names, what)
        kept = np.flatnonzero(np.isin(labels, self.thing_ids))
        codes = run_lengths.encode(np.asfortranarray(masks[kept].transpose(1, 2, 0)).view(np.uint8))
        return [
            {
                "category_id": labels[i].item(),
                "counts": code["counts"],
                "area": int(run_lengths.area(code)),
                **{name: value[i].item() for name, value in values.items()},
            }
            for i, code in zip(kept, codes, strict=True)
        ]

    def _evaluate(self) -> Any:
        """Returns faster-coco-eval's evaluator of all images."""
        from faster_coco_eval import COCO, COCOeval_faster

        if self._evaluated is None:
            # Equal scores rank by the order of images, which therefore must not depend on who saw them first.
            records = sorted(self._records, key=itemgetter("rank"))
            objects, detections = (COCO(self._dataset(records, part)) for part in ("objects", "detections"))
            self._evaluated = COCOeval_faster(objects, detections, iouType="segm")
            self._evaluated.run()
        return self._evaluated

    def _dataset(self, records: list[Record], part: str) -> dict[str, list[dict[str, Any]]]:
        """Returns the objects or detections of all images in the COCO format."""
        entries = [
            {"image_id": number, "segmentation": {"size": list(record["size"]), "counts": entry["counts"]}, **entry}
            for number, record in enumerate(records, start=1)
            for entry in record[part]
        ]
        return {
            "images": [
                {"id": number, "height": record["size"][0], "width": record["size"][1]}
                for number, record in enumerate(records, start=1)
            ],
            "categories": [{"id": label, "name": self.names[label]} for label in self.thing_ids],
            "annotations": [{"id": number, **entry} for number, entry in enumerate(entries, start=1)],
        }
