"""Test that published recipes have valid options, and that their headers contain the scores of the model cards."""

import re
from pathlib import Path

import pytest

from hf_vit.tasks import TASKS
from hf_vit.training import HfViTTrainingArguments

from ..helpers.fresh import ROOT
from ..helpers.options import parse_arguments


RECIPES = sorted((ROOT / "scripts" / "recipes").glob("*.yaml"))
HEADER = re.compile(
    r"# Command: (?:hf-vit|torchrun --nproc_per_node \d+ -m hf_vit) train (?P<task>\S+) (?P<file>\S+) "
    r"--dataset_name path/to/\S+\n"
    r"# Hardware: .+\n# Time: (?P<time>.+)\n# Score: (?P<score>.+)\n"
)


def header_of(file: Path) -> re.Match[str]:
    (header,) = HEADER.finditer(file.read_text())
    return header


def figures_of(text: str) -> set[str]:
    """Return the numbers with a decimal point in a text."""
    return set(re.findall(r"\d+\.\d+", text))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_the_options_of_a_recipe_are_valid_and_its_header_names_score_and_card(file: Path, tmp_path: Path) -> None:
    header = header_of(file)
    assert ROOT / header["file"] == file
    task = TASKS[header["task"]]
    command = [str(file), "--dataset_name", "photos", "--output_dir", str(tmp_path)]
    model, *parts = parse_arguments(task.argument_types(), command)
    assert (model.preset is None) == (model.model_name_or_path is not None)
    model.overrides()
    assert [part.seed for part in parts if isinstance(part, HfViTTrainingArguments)] == [0]
    if header["score"].startswith("not run: needs "):
        assert header["time"].startswith("not run")
        return
    assert re.fullmatch(r"\d+ s", header["time"])
    card = re.search(r"\((model_cards/\S+\.md)\)$", header["score"])
    assert card is not None
    text = (ROOT / card[1]).read_text()
    assert f"scripts/recipes/{file.name}" in text
    assert figures_of(header["score"]) <= figures_of(text)


def test_cards_and_tables_have_the_scores_of_recipes_and_baselines() -> None:
    cards = "".join(file.read_text() for file in (ROOT / "model_cards").glob("*.md"))
    assert set() < set(re.findall(r"scripts/recipes/([\w-]+\.yaml)", cards)) <= {file.name for file in RECIPES}
    rows = rows_of(ROOT / "scripts" / "recipes" / "README.md", "recipe", "score")
    families = [re.findall(r"`([\w-]+)`", row["recipe"]) for row in rows]
    named = [[name if name[0] != "-" else names[0][: -len(name)] + name for name in names] for names in families]
    assert {name for names in named for name in names} == {file.stem for file in RECIPES}
    for row, names in zip(rows, named, strict=True):
        scores = [header_of(ROOT / "scripts" / "recipes" / f"{name}.yaml")["score"] for name in names]
        assert figures_of(row["score"]) <= figures_of(" ".join(scores))
        assert ("not run" in row["score"]) == all(score.startswith("not run") for score in scores)

    for file in (ROOT / "README.md", ROOT / "model_cards" / "README.md"):
        rows = rows_of(file, "score", "card")
        assert len(rows) > 5
        for row in rows:
            (card,) = re.findall(r"\(([\w/-]+\.md)\)", row["card"])
            score, baseline, peer = (figures_of(row[column]) for column in ("score", "baseline", "peer"))
            assert score
            assert baseline
            assert score | baseline | peer <= figures_of((file.parent / card).read_text())


def rows_of(file: Path, *columns: str) -> list[dict[str, str]]:
    """Return the rows of all Markdown tables in a file that have the given columns, as dictionaries."""
    rows = []
    for table in re.findall(r"(?:^\|.+\|\n)+", file.read_text(), flags=re.MULTILINE):
        names, _, *cells = ([cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines())
        rows += [dict(zip(names, line, strict=True)) for line in cells if {*columns} <= {*names}]
    return rows
