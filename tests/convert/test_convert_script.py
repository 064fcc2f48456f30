"""Tests of the command that converts checkpoints, with transformers folders and with weight files."""

import json
import re
from pathlib import Path

import pytest
import timm
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from hf_vit import HfViTForImageClassification, HfViTImageProcessor, HfViTModel, cli, list_families
from hf_vit.convert import families_table, parity
from hf_vit.convert.families import FAMILIES
from hf_vit.training.publishing.hub import check_upload

from ..helpers.fresh import run_command, run_without_package
from ..helpers.models import small_config
from ..helpers.references import draw_weights


SHAPE = {name: value for name, value in small_config().to_dict().items() if name in transformers.ViTConfig().to_dict()}


@pytest.fixture
def vit(tmp_path: Path) -> Path:
    """Return the folder of a transformers classifier with its image processor."""
    config = transformers.ViTConfig(**{**SHAPE, "id2label": {i: f"label {i}" for i in range(5)}})
    model = transformers.ViTForImageClassification(config)
    draw_weights(model)
    model.save_pretrained(tmp_path / "vit")
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.4] * 3).save_pretrained(
        tmp_path / "vit"
    )
    return tmp_path / "vit"


def convert(*arguments: str | Path) -> None:
    cli.main(["convert", *map(str, arguments)])


def test_converted_folder_is_whole_and_opens_without_the_package(
    vit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "ours"
    convert(vit, output)
    said = capsys.readouterr().out
    for size in ("32x32", "24x40"):
        for name in ("hidden_states", "logits"):
            assert re.search(rf"{size}  {name} +absolute \d\.\de[-+]\d\d  relative \d\.\de[-+]\d\d  equal", said)
    assert re.search(r"Peak memory of conversion and parity: \d+ MiB, including \d+ MiB before the start", said)
    assert not list(tmp_path.glob(".*"))
    check_upload(output)  # the upload must contain weights, code, image processor and model card
    card = (output / "README.md").read_text()
    assert "| 24x40 | logits |" in card
    assert "No weights were trained or changed" in card
    assert str(tmp_path) not in card
    assert HfViTImageProcessor.from_pretrained(output).image_mean == (0.4, 0.4, 0.4)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.save(images, tmp_path / "images.pt")
    expected = transformers.ViTForImageClassification.from_pretrained(vit)(images).logits
    printed = run_without_package(
        f"""
import json, torch
from transformers import AutoModelForImageClassification, pipeline
model = AutoModelForImageClassification.from_pretrained({str(output)!r}, trust_remote_code=True)
pipeline("image-classification", model={str(output)!r}, trust_remote_code=True)
print(json.dumps(model(torch.load({str(tmp_path / "images.pt")!r})).logits.tolist()))
""",
        tmp_path / "fresh",
    ).stdout
    torch.testing.assert_close(torch.tensor(json.loads(printed.splitlines()[-1])), expected, atol=1e-5, rtol=1e-5)


def test_differing_outputs_are_not_written_unless_told(
    vit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parity, "TOLERANCE", -1.0)  # a negative tolerance rejects all outputs
    with pytest.raises(SystemExit, match=r"Outputs differ .* nothing was written"):
        convert(vit, tmp_path / "ours")
    assert "DIFFERENT" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["vit"]
    convert(vit, tmp_path / "ours", "--write_anyway")
    assert (tmp_path / "ours" / "model.safetensors").is_file()


def test_changes_on_the_way_in(vit: Path, tmp_path: Path) -> None:
    overrides = {"image_size": 64, "patch_size": 16, "num_channels": 1}
    convert(vit, tmp_path / "ours", "--config_overrides", json.dumps(overrides), "--task", "features")
    model = HfViTModel.from_pretrained(tmp_path / "ours")
    processor = HfViTImageProcessor.from_pretrained(tmp_path / "ours")
    assert (model.config.image_size, model.config.patch_size, model.config.num_channels) == (64, 16, 1)
    assert dict(processor.size) == {"height": 64, "width": 64}
    assert processor.image_mean == pytest.approx((0.4,))
    assert "image_size = 64, patch_size = 16, num_channels = 1" in (tmp_path / "ours" / "README.md").read_text()


def test_half_precision_and_a_checkpoint_without_image_processor(vit: Path, tmp_path: Path) -> None:
    (vit / "preprocessor_config.json").unlink()
    convert(vit, tmp_path / "ours", "--dtype", "bfloat16", "--skip_parity")
    assert {tensor.dtype for tensor in load_file(tmp_path / "ours" / "model.safetensors").values()} == {torch.bfloat16}
    processor = HfViTImageProcessor.from_pretrained(tmp_path / "ours")
    assert dict(processor.size) == {"height": 32, "width": 32}
    assert processor.image_mean == (0.5, 0.5, 0.5)


def test_out_and_in_again(tmp_path: Path) -> None:
    model = HfViTForImageClassification(small_config(position_antialias=True))
    draw_weights(model)
    model.save_pretrained(tmp_path / "ours")
    HfViTImageProcessor.for_model(model.config).save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", "--to", "timm")
    convert(tmp_path / "theirs", tmp_path / "again")
    state = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_mistakes_are_explained(vit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--config_overrides", "image_size=384"], r"'image_size=384' is not a JSON object"),
        (["--config_overrides", "[1]"], r"'\[1\]' is not a JSON object"),
        (["--config_overrides", '{"hiden_size": 3}'], r"HfViTConfig has no field hiden_size"),
        (["--to", "timm"], r"is not an hf_vit model. Convert it first"),
        (["--config_overrides", '{"num_hidden_layers": 9}'], r"initialized randomly: .*encoder\.layers\.3"),
    ):
        with pytest.raises(SystemExit) as stopped:
            convert(vit, tmp_path / "deep" / "ours", "--skip_parity", *arguments)
        assert re.search(message, f"{stopped.value.code} {capsys.readouterr().err}")
    assert [path.name for path in tmp_path.iterdir()] == ["vit"]
    HfViTForImageClassification(small_config()).save_pretrained(tmp_path / "ours")
    with pytest.raises(SystemExit, match=r"is already an hf_vit model. Choose an export layout with --to"):
        convert(tmp_path / "ours", tmp_path / "again")
    changes = ("--config_overrides", '{"image_size": 64}', "--dtype", "bfloat16")
    with pytest.raises(SystemExit, match=r"Leave out --config_overrides, --dtype"):
        convert(tmp_path / "ours", tmp_path / "again", "--to", "vit", *changes)


def test_weights_alone_are_converted_without_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = timm.create_model("vit_base_patch16_224", img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=1)
    torch.save({"model": model.state_dict()}, tmp_path / "weights.pth")
    convert(tmp_path / "weights.pth", tmp_path / "ours")
    assert "Outputs were not compared: " in capsys.readouterr().out
    assert (
        "The outputs were not compared with the original implementation."
        in (tmp_path / "ours" / "README.md").read_text()
    )
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    actual = HfViTForImageClassification.from_pretrained(tmp_path / "ours").eval()(images).logits
    torch.testing.assert_close(actual, model.eval()(images), atol=1e-5, rtol=1e-4)


def test_images_that_are_no_whole_patches_are_made_to_fit(tmp_path: Path) -> None:
    """For example, SigLIP has patches of 14 pixels and images of 384 pixels."""
    shape = {name: value for name, value in SHAPE.items() if name in transformers.SiglipVisionConfig().to_dict()}
    config = transformers.SiglipVisionConfig(**{**shape, "image_size": 36})
    transformers.SiglipVisionModel(config).save_pretrained(tmp_path / "theirs")
    transformers.SiglipImageProcessor(size={"height": 36, "width": 36}).save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    model = HfViTModel.from_pretrained(tmp_path / "ours")
    processor = HfViTImageProcessor.from_pretrained(tmp_path / "ours")
    assert (model.config.image_size, dict(processor.size)) == (32, {"height": 32, "width": 32})
    model(**processor(Image.new("RGB", (50, 40)), return_tensors="pt"))


def test_conversion_takes_little_more_memory_than_the_checkpoint(tmp_path: Path) -> None:
    # In a separate process, with a checkpoint of 100 MiB.
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
    with torch.device("meta"):
        model = transformers.ViTModel(transformers.ViTConfig(**shape))
    model.to_empty(device="cpu").save_pretrained(tmp_path / "vit")
    folders = (str(tmp_path / name) for name in ("vit", "ours"))
    finished = run_command("convert", tmp_path, *folders, "--skip_parity", fresh=True)
    found = re.search(r"Peak memory of conversion: (\d+) MiB, including (\d+) MiB", finished.stdout)
    assert found, finished.stderr
    size = (tmp_path / "vit" / "model.safetensors").stat().st_size / 2**20
    assert int(found[1]) - int(found[2]) <= 1.2 * size


def test_errors_leave_nothing_behind(vit: Path, tmp_path: Path) -> None:
    weights = vit / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SystemExit, match=r"model\.safetensors.* is damaged or truncated"):
        convert(vit, tmp_path / "ours")
    weights.write_bytes(whole)
    tensors = load_file(weights)
    del tensors["vit.encoder.layer.1.output.dense.bias"]
    save_file(tensors, weights)
    with pytest.raises(SystemExit, match=r"Missing: .*encoder\.layer\.1\.output\.dense\.bias"):
        convert(vit, tmp_path / "ours")
    weights.write_bytes(whole)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(SystemExit, match="is not empty"):
        convert(vit, tmp_path / "full", "--skip_parity")
    with pytest.raises(SystemExit, match="There is no folder or file"):
        convert(tmp_path / "nowhere", tmp_path / "ours")
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "config.json", "full", "mine.txt", "model.safetensors", "preprocessor_config.json", "vit"
    ]  # fmt: skip


def test_families_are_listed_once_and_as_in_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    convert("--list")
    table = capsys.readouterr().out.strip()
    assert table == families_table()
    assert len(table.splitlines()) == 2 + len(FAMILIES)
    assert all(family.name and family.source and family.outputs for family in FAMILIES)
    assert table in (Path(__file__).parents[2] / "hf_vit" / "convert" / "README.md").read_text(encoding="utf-8")
    names = list_families()
    assert {"ViT", "DINOv2", "DINOv2 with registers", "CLIP", "plain ViTs of timm"} <= {*names}
    assert sorted(names) == sorted({family.name for family in FAMILIES})
