"""Runs model.onnx on an image. Requires only numpy, PIL and onnxruntime.

python run.py photo.jpg              prints the prediction
python run.py photo.jpg outputs.npz  also writes the outputs
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
MOST = 5  # Maximum number of printed classes, objects or segments


def read_pixels(file: str) -> np.ndarray:
    """Reads an image file, applies the image processor options, and returns the model input (1, C, H, W) float32."""
    opened = Image.open(file)
    if opened.mode in ("I", "F") or opened.mode.startswith("I;16"):
        sys.exit(f"{file} has mode {opened.mode!r}, whose values do not fit into 8 bits. Convert it to 8 bits.")
    image = ImageOps.exif_transpose(opened).convert("L" if OPTIONS["num_channels"] == 1 else "RGB")
    size, pixels = {name: side for name, side in OPTIONS["size"].items() if side}, np.asarray(image)
    rows, columns = np.broadcast_to(OPTIONS.get("ensure_multiple_of") or 1, 2).tolist()
    if OPTIONS.get("do_affine_crop"):
        pixels = crop_whole(pixels, size["height"], size["width"])
    elif OPTIONS["do_resize"]:
        short = min(image.size)
        width, height = (side * size.get("shortest_edge", 0) // short for side in image.size)
        width, height = size.get("width", width), size.get("height", height)
        width, height = max(1, round(width / columns)) * columns, max(1, round(height / rows)) * rows
        pixels = np.asarray(image.resize((width, height), OPTIONS["resample"]))
    if OPTIONS.get("do_center_crop"):
        height, width = OPTIONS["crop_size"]["height"], OPTIONS["crop_size"]["width"]
        missing = max(0, height - pixels.shape[0]), max(0, width - pixels.shape[1])
        borders = [(side // 2, side - side // 2) for side in missing]
        pixels = np.pad(pixels, [*borders, (0, 0)][: pixels.ndim])
        halve = round if OPTIONS.get("crop_rounding") == "half_to_even" else int
        top, left = halve((pixels.shape[0] - height) / 2), halve((pixels.shape[1] - width) / 2)
        pixels = pixels[top : top + height, left : left + width]
    pixels = pixels.reshape(*pixels.shape[:2], -1) * np.float32(
        OPTIONS["rescale_factor"] if OPTIONS["do_rescale"] else 1
    )
    if OPTIONS["do_normalize"]:
        pixels = (pixels - np.float32(OPTIONS["image_mean"])) / np.float32(OPTIONS["image_std"])
    if OPTIONS.get("do_pad"):
        pixels = np.pad(pixels, ((0, -pixels.shape[0] % rows), (0, -pixels.shape[1] % columns), (0, 0)))
    return np.ascontiguousarray(pixels.astype(np.float32).transpose(2, 0, 1)[None])


def crop_whole(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resizes an image (H, W) or (H, W, C) to fit into the center of a black image (height, width)."""
    rows, columns = pixels.shape[:2]
    down = max(rows, columns * height / width) * OPTIONS["box_padding"] / 2
    across = down * width / height
    vertical, horizontal = sampling(rows, down, height), sampling(columns, across, width)
    crop = np.einsum("hy,yx...,wx->hw...", vertical, pixels, horizontal, optimize=True)
    return np.floor(crop + 0.5)


def sampling(side: int, half: float, count: int) -> np.ndarray:
    """Returns bilinear interpolation weights (count, side) for `count` equidistant points along an image side.

    The points range from `half` pixels before to `half` pixels after the center of the side.
    """
    places = np.linspace(side / 2 - half, side / 2 + half, count)
    is_inside = (places >= -1e-3) & (places <= side - 1 + 1e-3)
    distances = np.abs(np.clip(places, 0, side - 1)[:, None] - np.arange(side))
    return np.maximum(0, 1 - distances) * is_inside[:, None]


def describe(outputs: dict[str, np.ndarray]) -> dict[str, object]:
    """Returns the best predictions for one image or, if there are no classes, the shape and range of each output."""
    if CONFIG["architectures"][0].endswith("ImageClassification") and CONFIG.get("problem_type") != "regression":
        logits = outputs["logits"][0].astype(np.float64)
        several = CONFIG.get("problem_type") == "multi_label_classification"
        scores = 1 / (1 + np.exp(-logits)) if several else np.exp(logits - logits.max())
        scores = scores if several else scores / scores.sum()
        return {LABELS[str(number)]: round(float(scores[number]), 6) for number in np.argsort(-scores)[:MOST]}
    if "probabilities" in outputs:  # Object detection
        scores, boxes = outputs["probabilities"][0], outputs["pred_boxes"][0]
        best = np.argsort(-scores.max(axis=1))[:MOST]
        found = [(LABELS[str(scores[i].argmax())], float(scores[i].max()), boxes[i].tolist()) for i in best]
        return {"label, score, box as center and size relative to the image": found}
    if "heatmaps" in outputs:  # Keypoint detection
        maps = outputs["heatmaps"][0]
        places = [np.unravel_index(one.argmax(), one.shape) for one in maps]
        points = {LABELS[str(k)]: (int(x), int(y), float(maps[k].max())) for k, (y, x) in enumerate(places)}
        return {f"x, y on heatmaps of {maps.shape[2]}x{maps.shape[1]}, and score": points}
    if "class_queries_logits" in outputs:  # Universal segmentation; the last class means "no segment".
        logits = outputs["class_queries_logits"][0].astype(np.float64)
        scores = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))[:, :-1]
        best = np.argsort(-scores.max(axis=1))[:MOST]
        return {"segments": [(LABELS[str(scores[i].argmax())], float(scores[i].max())) for i in best]}
    if CONFIG["architectures"][0].endswith("SemanticSegmentation"):
        numbers, counts = np.unique(outputs["logits"][0].argmax(axis=0), return_counts=True)
        return {LABELS[str(number)]: count / counts.sum() for number, count in zip(numbers, counts, strict=True)}
    return {name: f"{value.shape} from {value.min():.4g} to {value.max():.4g}" for name, value in outputs.items()}


if __name__ == "__main__":
    session = onnxruntime.InferenceSession(FOLDER / "model.onnx", providers=["CPUExecutionProvider"])
    arrays = session.run(None, {"pixel_values": read_pixels(sys.argv[1])})
    results = dict(zip([output.name for output in session.get_outputs()], arrays, strict=True))
    sys.stdout.write(json.dumps(describe(results), indent=2) + "\n")
    if len(sys.argv) > 2:
        np.savez(sys.argv[2], **results)
