"""The demo from end to end in a few steps, and the prediction script with and without mistakes."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from huggingface_hub import ModelCard
from PIL import Image


ROOT = Path(__file__).parents[1]


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


predict = load_script("predict")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("demo") / "digits"
    finished = subprocess.run(
        [sys.executable, "scripts/demo.py", "--max_steps", "3", "--output_dir", str(folder), "--use_cpu", "true"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return folder, finished


# The demo


def test_demo_saves_model_processor_card_and_no_pickle(demo: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = demo
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "preprocessor_config.json", "README.md", "training_args.json"} <= names
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pth", ".pkl"))]
    config = json.loads((folder / "config.json").read_text())
    assert config["label2id"] == {str(digit): digit for digit in range(10)}


def test_demo_prints_what_a_fresh_process_says(demo: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, finished = demo
    lines = [line for line in finished.stdout.splitlines() if ".png: " in line]
    assert [line.split(":")[0].strip() for line in lines] == [f"{digit}.png" for digit in range(10)]
    with Image.open(folder / "predictions.png") as picture:
        assert min(picture.size) > 2 * predict.TILE_SIZE
        assert len(picture.getcolors(maxcolors=10**6)) > 50


def test_demo_shows_progress_and_no_warning(demo: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    _, finished = demo
    assert "3/3" in finished.stderr
    assert "warn" not in (finished.stdout + finished.stderr).lower()
    assert "error" not in (finished.stdout + finished.stderr).lower()


def test_demo_card_holds_the_printed_score(demo: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, finished = demo
    card = ModelCard.load(folder / "README.md")
    assert card.data.pipeline_tag == "image-classification"
    score = card.data.eval_results[0].metric_value
    assert f"Accuracy {score:.2%} ({round(360 * (1 - score))} of 360 wrong)" in finished.stdout
    assert f"| accuracy | **{score:.4f}** | 0.1028 |" in card.content
    assert "python scripts/demo.py --max_steps 3" in card.content


def test_demo_scores_the_peer_on_held_out_images_and_saves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("demo")
    script.main(["--peer", "--held_out", "--max_steps", "1", "--output_dir", str(tmp_path), "--use_cpu", "true"])
    assert "of 144 wrong" in capsys.readouterr().out
    assert not list(tmp_path.glob("**/*.safetensors"))


def test_demo_peer_has_the_same_shape() -> None:
    script = load_script("demo")
    ours, peer = (script.make_model(list("0123456789"), peer=peer) for peer in (False, True))
    assert ours.num_parameters() == peer.num_parameters()
    assert ours.config.model_type == "hf_vit"
    assert peer.config.model_type == "vit"
    assert peer.config.id2label == ours.config.id2label


# The committed card


def test_committed_card_is_valid_and_compares_with_peer_and_majority() -> None:
    card = ModelCard.load(ROOT / "model_cards" / "digits.md")
    assert (card.data.license, card.data.pipeline_tag) == ("apache-2.0", "image-classification")
    result = card.data.eval_results[0]
    assert result.metric_type == "accuracy"
    assert 0.975 <= result.metric_value <= 1
    for part in (
        "make demo",
        "CC BY 4.0",
        "AMD EPYC, 2 cores",
        "ViTForImageClassification",
        "commonest",
        "five seeds",
    ):
        assert part in card.content


# Prediction


def test_predict_needs_only_the_standard_library_transformers_and_pil() -> None:
    imported = set()
    for node in ast.walk(ast.parse((ROOT / "scripts" / "predict.py").read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).split(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"PIL", "transformers"}


def test_predict_prints_json_lines_and_draws(
    demo: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = demo
    picture = tmp_path / "new" / "labelled.png"
    single = folder / "images" / "7.png"
    arguments = ["--top_k", "2", "--batch_size", "4", "--picture", str(picture)]
    predict.main([str(folder), str(single), str(folder / "images"), *arguments])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [Path(line["file"]).name for line in lines] == ["7.png", *(f"{digit}.png" for digit in range(10))]
    for line in lines:
        assert len(line["top_k"]) == 2
        assert line["top_k"][0] == {"label": line["label"], "score": line["score"]}
        assert line["top_k"][0]["score"] >= line["top_k"][1]["score"]
    alone, in_batch = lines[0], lines[8]
    assert alone["label"] == in_batch["label"]
    assert alone["score"] == pytest.approx(in_batch["score"], abs=1e-5)
    with Image.open(picture) as drawn:
        assert drawn.width > 5 * predict.TILE_SIZE
        assert drawn.height > 3 * predict.TILE_SIZE


def test_find_images_searches_folders_in_order_and_leaves_other_files(tmp_path: Path) -> None:
    for name in ("b.PNG", "a.jpg", "notes.txt", "deeper/c.webp"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [path.name for path in predict.find_images([tmp_path])] == ["a.jpg", "b.PNG", "c.webp"]


def test_open_image_turns_photos_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the camera turned by a quarter
    Image.new("RGB", (40, 20)).save(tmp_path / "photo.jpg", exif=exif)
    assert predict.open_image(tmp_path / "photo.jpg").size == (20, 40)


def empty_folder(folder: Path) -> list[str]:
    (folder / "empty").mkdir()
    return ["some/model", str(folder / "empty")]


def missing_folder(folder: Path) -> list[str]:
    return ["some/model", str(folder / "missing")]


def folder_without_model(folder: Path) -> list[str]:
    return [str(folder), str(folder)]


def no_labels(folder: Path) -> list[str]:
    return ["some/model", str(folder), "--top_k", "0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (missing_folder, "There is no file or folder"),
        (empty_folder, "holds no image: no file ends in .bmp, .gif"),
        (folder_without_model, "holds no config.json, so no saved model. Train one first: make demo"),
        (no_labels, "--top_k 0 and --batch_size 8 must be at least 1"),
    ],
)
def test_predict_explains_mistakes(
    arguments: Callable[[Path], list[str]], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        predict.main(arguments(tmp_path))
    assert stopped.value.code not in (0, None)
    assert message in str(stopped.value.code) + capsys.readouterr().err


def test_predict_sees_16_bits_and_puts_the_transparent_on_white(tmp_path: Path) -> None:
    Image.new("I;16", (4, 4), 32768).save(tmp_path / "deep.png")
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert predict.open_image(tmp_path / "deep.png").getpixel((0, 0)) == (128, 128, 128)
    assert predict.open_image(tmp_path / "clear.png").getpixel((0, 0)) == (255, 255, 255)


def test_predict_names_the_file_that_is_no_image(
    demo: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "broken.png").write_text("no image")
    with pytest.raises(SystemExit, match=r"broken\.png cannot be read as an image"):
        predict.main([str(demo[0]), str(tmp_path)])
