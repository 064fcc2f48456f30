"""The card of an exported model: what its program takes and returns, how to run it, and how equal it is."""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from ...convert.model_card import escape_markdown
from ...model.configuration_hf_vit import to_pair
from ...model.pretrained import HfViTPreTrainedModel
from .comparison import Difference
from .formats import FORMATS, versions
from .programs import example_inputs, least_grid


TEMPLATE = Path(__file__).with_name("model_card.md")
MEANINGS = {
    "pixel_values": "images (batch, channels, height, width), as the image processor makes them",
    "bool_masked_pos": "(batch, patches), true where a patch is hidden",
    "input_ids": "texts (texts, tokens), as the tokenizer makes them",
    "attention_mask": "the same, 0 where a token is padding",
}


def write_card(
    folder: Path,
    model: HfViTPreTrainedModel,
    source: str,
    format: str,
    rows: Sequence[Difference],
    missing: str | None,
) -> None:
    """Writes README.md.

    Args:
        folder: Where the program is.
        model: Of which it is the program.
        source: Folder or name that the model was opened from.
        format: One of `FORMATS`.
        rows: How equal program and model are.
        missing: Why there is no `run.py`; None if there is one.
    """
    chosen = FORMATS[format]
    name = Path(source).name
    inputs = example_inputs(model, 1, least_grid(model))
    bounds, patch = chosen.bounds(model), to_pair(model.config.patch_size)
    largest = None if bounds.grid is None else [side * size for side, size in zip(bounds.grid, patch, strict=True)]
    card = ModelCard.from_template(
        ModelCardData(tags=["vision", "hf_vit", format], base_model=None if Path(source).exists() else source),
        template_path=str(TEMPLATE),
        name=escape_markdown(name),
        source=name.replace("`", "'") if Path(source).exists() else source.replace("`", "'"),
        architecture=type(model).__name__,
        format=format,
        chosen=chosen,
        inputs={name: (value.dtype, MEANINGS[name]) for name, value in inputs.items()},
        outputs=[row.output for row in rows if row[:3] == rows[0][:3]],
        rows=rows,
        patch=patch,
        least=[side * size for side, size in zip(least_grid(model), patch, strict=True)],
        largest=largest,
        most_images=bounds.batch,
        megabytes=sum(file.stat().st_size for file in folder.iterdir()) / 1e6,
        versions=versions(chosen),
        opset=opset_of(folder / chosen.file) if format == "onnx" else None,
        missing=missing,
    )
    card.save(folder / "README.md")


def opset_of(file: Path) -> int:
    """Returns the opset of an ONNX file."""
    import onnx

    return next(entry.version for entry in onnx.load(file, load_external_data=False).opset_import if not entry.domain)
