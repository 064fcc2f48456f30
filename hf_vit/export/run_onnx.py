"""Runs model.onnx on an image, with numpy, PIL and onnxruntime alone.

python run.py photo.jpg              prints what is found
python run.py photo.jpg outputs.npz  writes the outputs too
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


FOLDER = Path(__file__).parent
OPTIONS = json.loads((FOLDER / "preprocessor_config.json").read_text(encoding="utf-8"))
LABELS = json.loads((FOLDER / "labels.json").read_text(encoding="utf-8"))
CONFIG = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
MOST = 5  # what is printed of each output


def read_pixels(file: str) -> np.ndarray:
    """Returns an image file as the model takes it, (1, C, H, W) float32, resized and normalized as in its training."""
    image = ImageOps.exif_transpose(Image.open(file)).convert("L" if OPTIONS["num_channels"] == 1 else "RGB")
    size, pixels = OPTIONS["size"], np.asarray(image)
    if OPTIONS["do_resize"]:
        short = min(image.size)
        width, height = (side * size.get("shortest_edge", 0) // short for side in image.size)
        width, height = size.get("width", width), size.get("height", height)
        wide = image.resize((width, image.height), OPTIONS["resample"])
        pixels = np.asarray(wide.resize((width, height), OPTIONS["resample"]))
    if OPTIONS.get("do_center_crop"):
        height, width = OPTIONS["crop_size"]["height"], OPTIONS["crop_size"]["width"]
        top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
        pixels = pixels[top : top + height, left : left + width]
    pixels = pixels.reshape(*pixels.shape[:2], -1) * np.float32(
        OPTIONS["rescale_factor"] if OPTIONS["do_rescale"] else 1
    )
    if OPTIONS["do_normalize"]:
        pixels = (pixels - np.float32(OPTIONS["image_mean"])) / np.float32(OPTIONS["image_std"])
    return np.ascontiguousarray(pixels.astype(np.float32).transpose(2, 0, 1)[None])


def describe(outputs: dict[str, np.ndarray]) -> dict[str, object]:
    """Returns what the outputs of one image come to: classes by probability, or the shape and range of each."""
    if CONFIG["architectures"][0].endswith("ImageClassification") and CONFIG.get("problem_type") != "regression":
        logits = outputs["logits"][0].astype(np.float64)
        several = CONFIG.get("problem_type") == "multi_label_classification"
        scores = 1 / (1 + np.exp(-logits)) if several else np.exp(logits - logits.max())
        scores = scores if several else scores / scores.sum()
        return {LABELS[str(number)]: round(float(scores[number]), 6) for number in np.argsort(-scores)[:MOST]}
    if "probabilities" in outputs:  # of objects
        scores, boxes = outputs["probabilities"][0], outputs["pred_boxes"][0]
        best = np.argsort(-scores.max(axis=1))[:MOST]
        found = [(LABELS[str(scores[i].argmax())], float(scores[i].max()), boxes[i].tolist()) for i in best]
        return {"label, score, box as center and size relative to the image": found}
    return {name: f"{value.shape} from {value.min():.4g} to {value.max():.4g}" for name, value in outputs.items()}


if __name__ == "__main__":
    session = onnxruntime.InferenceSession(FOLDER / "model.onnx", providers=["CPUExecutionProvider"])
    arrays = session.run(None, {"pixel_values": read_pixels(sys.argv[1])})
    results = dict(zip([output.name for output in session.get_outputs()], arrays, strict=True))
    sys.stdout.write(json.dumps(describe(results), indent=2) + "\n")
    if len(sys.argv) > 2:
        np.savez(sys.argv[2], **results)
