"""Published recipes: the scripts understand them, and their headers say what came of them."""

import re
from pathlib import Path

import pytest

from hf_vit.training import TASKS, HfViTTrainingArguments, parse_arguments

from ..helpers.fresh import ROOT


RECIPES = sorted((ROOT / "scripts" / "recipes").glob("*.yaml"))
HEADER = re.compile(
    r"# Command: (?:python|torchrun --nproc_per_node \d+) (?P<script>\S+) (?P<file>\S+) --dataset_name path/to/\S+\n"
    r"# Hardware: .+\n# Time: (?P<time>.+)\n# Score: (?P<score>.+)\n"
)


def header_of(file: Path) -> re.Match[str]:
    (header,) = HEADER.finditer(file.read_text())
    return header


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_its_script_understands_a_recipe(file: Path, tmp_path: Path) -> None:
    header = header_of(file)
    assert ROOT / header["file"] == file
    (name,) = re.findall(r"training\.run\(\s*training\.TASKS\[\"(\w+)\"\]", (ROOT / header["script"]).read_text())
    task = TASKS[name]
    command = [str(file), "--dataset_name", "photos", "--output_dir", str(tmp_path)]
    model, *parts = parse_arguments(task.argument_types(), command)
    assert (model.preset is None) == (model.model_name_or_path is not None)
    model.overrides()
    assert [part.seed for part in parts if isinstance(part, HfViTTrainingArguments)] == [0]


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_header_names_the_score_and_its_card_or_what_a_run_needs(file: Path) -> None:
    header = header_of(file)
    if header["score"].startswith("not run: needs "):
        assert header["time"].startswith("not run")
        return
    assert re.fullmatch(r"\d+ s", header["time"])
    card = re.search(r"\((model_cards/\S+\.md)\)$", header["score"])
    assert card is not None
    assert f"scripts/recipes/{file.name}" in (ROOT / card[1]).read_text()


def test_cards_name_recipes_that_are_there() -> None:
    cards = "".join(file.read_text() for file in (ROOT / "model_cards").glob("*.md"))
    named = set(re.findall(r"scripts/recipes/([\w-]+\.yaml)", cards))
    assert named
    assert named <= {file.name for file in RECIPES}
