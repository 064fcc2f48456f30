"""Create model cards of converted checkpoints and the table of supported model families."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from ..model.pretrained import HfViTPreTrainedModel
from ..model.remote_code import AUTO_MAP, CUSTOM_PIPELINES, FEATURES
from .families import FAMILIES
from .loading import Converted
from .parity import OutputParity


TEMPLATE = Path(__file__).with_suffix(".md")
WARNINGS = "warnings"  # field of the metadata with sentences about the failures of a trained model


def families_table() -> str:
    """Returns a Markdown table with the name, source and verified outputs of each model family."""
    rows = [("family", "source", "equal to the source"), ("---",) * 3]
    rows += [(family.name, family.source, family.outputs) for family in FAMILIES]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def read_card_data(name_or_path: str) -> Any:
    """Returns the metadata of a model card, a `ModelCardData`; without entries if there is no valid card."""
    card = Path(name_or_path) / "README.md"
    try:
        return ModelCard.load(card if Path(name_or_path).exists() else name_or_path).data
    except (OSError, ValueError):  # OSError includes network errors.
        return ModelCardData()


def escape_markdown(text: str) -> str:
    """Returns a text on one line, escaped so that Markdown, HTML and table cells show it literally."""
    line = " ".join(text.split())
    markup = r"[\\`*\[\]|~$@]|(?<![^\W_])_|_(?![^\W_])|(?<=:)//|(?<=www)\."
    line = re.sub(markup, lambda match: "".join(f"\\{character}" for character in match[0]), line, flags=re.I)
    return re.sub(r"&(?=[#\w]+;)", "&amp;", line).replace("<", "&lt;")


def write_conversion_card(
    folder: str | os.PathLike[str],
    name: str,
    model: HfViTPreTrainedModel,
    converted: Converted,
    rows: Sequence[OutputParity],
    changes: dict[str, Any],
) -> None:
    """Writes README.md with the source of the weights, example code, and the measured differences from the source.

    Args:
        folder: Folder of the saved model.
        name: Title of the card.
        model: The saved model.
        converted: The converted checkpoint, before `changes` were applied.
        rows: Differences from the outputs of the source implementation; empty if they were not measured.
        changes: Fields of the configuration that differ from the checkpoint.
    """
    source = converted.name
    class_name = type(model).__name__
    auto_class = next(auto for auto, path in AUTO_MAP.items() if path.endswith(f".{class_name}"))
    # Models without a task head have the pipeline tag "image-feature-extraction".
    pipeline = next(iter(CUSTOM_PIPELINES.get(class_name, {FEATURES: {}})))
    card_data = ModelCardData(
        library_name="transformers",
        pipeline_tag=pipeline,
        tags=["vision", "hf_vit"],
        base_model=None if Path(source).exists() else source,
    )
    card = ModelCard.from_template(
        card_data,
        template_path=str(TEMPLATE),
        name=escape_markdown(name),
        # A local path is shortened to its last part, because the full path does not exist on other machines.
        source=(Path(source).name if Path(source).exists() else source).replace("`", "'"),
        family=converted.family,
        auto_class=auto_class,
        rows=rows,
        changes=escape_markdown(", ".join(f"{field} = {value}" for field, value in changes.items())),
    )
    card.save(Path(folder) / "README.md")
