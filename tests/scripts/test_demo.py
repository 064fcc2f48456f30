"""Test the demo: a complete run with few training steps, and the model card that it writes."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from huggingface_hub import ModelCard
from PIL import Image

from hf_vit.visualize.figures import TILE_SIZE

from ..helpers.fresh import ROOT, run_python


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_demo_saves_a_model_and_a_card_and_prints_progress_and_predictions(tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    options = ("--max_steps", "3", "--output_dir", str(folder), "--use_cpu", "true")
    places = {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "hf_home")}
    finished = run_python("scripts/demo.py", *options, workdir=ROOT, fresh=True, **places)
    said = finished.stdout
    assert finished.returncode == 0, finished.stderr
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "preprocessor_config.json", "README.md", "training_args.json"} <= names
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pth", ".pkl"))]
    config = json.loads((folder / "config.json").read_text())
    assert config["label2id"] == {str(digit): digit for digit in range(10)}
    card = ModelCard.load(folder / "README.md")
    assert card.data.pipeline_tag == "image-classification"
    score = card.data.eval_results[0].metric_value
    assert f"Accuracy {score:.2%} ({round(360 * (1 - score))} of 360 wrong)" in said
    assert re.search(rf"\| accuracy \| \**{score:.4f}\** \| \**0\.1028\** \|", card.content)
    assert "python scripts/demo.py --max_steps 3" in card.content

    # The demo predicts in a new process, which prints one line per image.
    lines = [line for line in said.splitlines() if ".png: " in line]
    assert [line.split(":")[0].strip() for line in lines] == [f"{digit}.png" for digit in range(10)]
    with Image.open(folder / "predictions.png") as picture:
        assert min(picture.size) > 2 * TILE_SIZE
        assert len(picture.getcolors(maxcolors=10**6)) > 50
    assert "3/3" in finished.stderr
    assert not re.search("warn|error", said + finished.stderr, flags=re.IGNORECASE)


def test_demo_scores_a_peer_on_held_out_images_and_saves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("demo")
    script.main(["--peer", "--held_out", "--max_steps", "1", "--output_dir", str(tmp_path), "--use_cpu", "true"])
    assert "of 144 wrong" in capsys.readouterr().out
    assert not list(tmp_path.glob("**/*.safetensors"))
    ours, peer = (script.make_model(list("0123456789"), peer=peer) for peer in (False, True))
    assert ours.num_parameters() == peer.num_parameters()
    assert (ours.config.model_type, peer.config.model_type) == ("hf_vit", "vit")
    assert peer.config.id2label == ours.config.id2label


def test_committed_card_is_valid_and_compares_with_peer_and_majority() -> None:
    card = ModelCard.load(ROOT / "model_cards" / "digits.md")
    assert (card.data.license, card.data.pipeline_tag) == ("apache-2.0", "image-classification")
    result = card.data.eval_results[0]
    assert result.metric_type == "accuracy"
    assert 0.975 <= result.metric_value <= 1
    parts = ("make demo", "CC BY 4.0", "AMD EPYC, 2 cores", "ViTForImageClassification", "most frequent", "five seeds")
    assert all(part in card.content for part in parts)
