"""Test the conversion command with transformers folders and with weight files."""

import json
import re
from pathlib import Path

import pytest
import timm
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from hf_vit import HfViTForImageClassification, HfViTImageProcessor, HfViTModel, HfViTProcessor, cli, list_families
from hf_vit.convert import families_table, parity
from hf_vit.convert.families import FAMILIES
from hf_vit.tasks import train_tokenizer
from hf_vit.training.hub import check_upload

from ..helpers.fresh import run_with_package
from ..helpers.models import small_config
from ..helpers.references import draw_weights
from .comparisons import assert_same_outputs
from .sources import CASES, draw_images, run_source, save_source
from .test_convert_contrastive import save_source as save_pair
from .test_convert_tasks import save_masked
from .test_convert_timm import saved as save_timm


SHAPE = {name: value for name, value in small_config().to_dict().items() if name in transformers.ViTConfig().to_dict()}


@pytest.fixture
def vit(tmp_path):
    """Return a folder with a transformers classifier and its image processor."""
    config = transformers.ViTConfig(**{**SHAPE, "id2label": {i: f"label {i}" for i in range(5)}})
    model = transformers.ViTForImageClassification(config)
    draw_weights(model)
    model.save_pretrained(tmp_path / "vit")
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.4] * 3)
    processor.save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


def convert(*arguments):
    cli.main(["convert", *map(str, arguments)])


def test_converted_folder_is_whole(vit, tmp_path, capsys):
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


# Name of the source model -> outputs that are compared for each image size, and a text in the model card.
TOWERS = ("hidden_states", "image_embeds", "text_embeds", "logits_per_image")
PAIRS = ({"32x32": TOWERS, "24x40": TOWERS}, 'pipeline("zero-shot-image-classification"')
MASKED = "AutoModelForMaskedImageModeling"
COMPARED = {
    "LW-DETR": ({"32x32": ("hidden_states", "logits", "pred_boxes")}, "pipeline_tag: object-detection"),
    "ViTPose+, third expert": ({"48x32": ("heatmaps",)}, "pipeline_tag: keypoint-detection"),
    "mae": ({"32x32": ("logits",), "24x40": ("hidden_states",)}, MASKED),
    "simmim": ({"32x32": ("reconstruction",), "24x40": ("hidden_states",)}, MASKED),
    **dict.fromkeys(("clip", "siglip", "siglip2"), PAIRS),
}


@pytest.mark.parametrize("name", COMPARED)
def test_outputs_of_every_task_are_compared(name, tmp_path, capsys):
    (compared, words), case, (theirs, ours) = COMPARED[name], CASES.get(name), (tmp_path / "theirs", tmp_path / "ours")
    save = save_source if case else save_masked if words == MASKED else save_pair
    source = save(name, theirs)
    if name == "clip":
        train_tokenizer(["a dog", "a cat"], 300, 7).save_pretrained(theirs)
    if "ViTPose" in name:
        transformers.VitPoseImageProcessor(size={"height": 48, "width": 32}).save_pretrained(theirs)
    chosen = (case and case.chosen) or {}
    convert(theirs, ours, *(f"--{option}={value}" for option, value in chosen.items()))
    said, card = capsys.readouterr().out, (ours / "README.md").read_text()
    for size, outputs in compared.items():
        for output in outputs:
            assert re.search(rf"{size}  {output} .* equal", said), output
    assert words in card
    if case:
        model, images = case.our_class.from_pretrained(ours), draw_images(case.sizes[0])
        assert_same_outputs(case.run_ours(model, images), run_source(case, source, images), 1e-4)
    else:
        convert(theirs, tmp_path / "features", "--task", "features", "--skip_parity")
        config = HfViTModel.from_pretrained(tmp_path / "features").config
        assert (config.hidden_size, config.use_mask_token) == (32, name == "simmim")
    if name == "clip":
        assert HfViTProcessor.from_pretrained(ours).tokenizer.eos_token == "<eos>"
    if "ViTPose" in name:
        assert "dataset_index = 2" in card
        assert json.loads((ours / "preprocessor_config.json").read_text())["do_affine_crop"] is True


def test_differing_outputs_are_not_written_unless_told(vit, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(parity, "TOLERANCE", -1.0)  # with a negative tolerance, all outputs are reported as different
    with pytest.raises(SystemExit, match=r"Outputs differ .* nothing was written"):
        convert(vit, tmp_path / "ours")
    assert "DIFFERENT" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["vit"]
    convert(vit, tmp_path / "ours", "--write_anyway")
    assert (tmp_path / "ours" / "model.safetensors").is_file()


def test_config_overrides_change_the_converted_model(vit, tmp_path):
    overrides = {"image_size": 64, "patch_size": 16, "num_channels": 1}
    convert(vit, tmp_path / "ours", "--config_overrides", json.dumps(overrides), "--task", "features")
    model = HfViTModel.from_pretrained(tmp_path / "ours")
    processor = HfViTImageProcessor.from_pretrained(tmp_path / "ours")
    assert (model.config.image_size, model.config.patch_size, model.config.num_channels) == (64, 16, 1)
    assert dict(processor.size) == {"height": 64, "width": 64}
    assert processor.image_mean == pytest.approx((0.4,))
    assert "image_size = 64, patch_size = 16, num_channels = 1" in (tmp_path / "ours" / "README.md").read_text()


def test_half_precision_and_a_checkpoint_without_image_processor(vit, tmp_path):
    (vit / "preprocessor_config.json").unlink()
    convert(vit, tmp_path / "ours", "--dtype", "bfloat16", "--skip_parity")
    assert {tensor.dtype for tensor in load_file(tmp_path / "ours" / "model.safetensors").values()} == {torch.bfloat16}
    processor = HfViTImageProcessor.from_pretrained(tmp_path / "ours")
    assert dict(processor.size) == {"height": 32, "width": 32}
    assert processor.image_mean == (0.5, 0.5, 0.5)


def test_export_and_import_restore_the_weights(tmp_path):
    model = HfViTForImageClassification(small_config(position_antialias=True))
    draw_weights(model)
    model.save_pretrained(tmp_path / "ours")
    HfViTImageProcessor.for_model(model.config).save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", "--to", "timm")
    convert(tmp_path / "theirs", tmp_path / "again")
    state = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_mistakes_are_explained(vit, tmp_path, capsys):
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
    with pytest.raises(SystemExit, match=r"Remove --config_overrides, --dtype"):
        convert(tmp_path / "ours", tmp_path / "again", "--to", "vit", *changes)


def test_weights_alone_are_converted_without_a_report(tmp_path, capsys):
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


def test_images_that_are_no_whole_patches_are_made_to_fit(tmp_path):
    """SigLIP models exist with a patch size of 14 and an image size of 384, which is not a multiple of 14."""
    shape = {name: value for name, value in SHAPE.items() if name in transformers.SiglipVisionConfig().to_dict()}
    config = transformers.SiglipVisionConfig(**{**shape, "image_size": 36})
    transformers.SiglipVisionModel(config).save_pretrained(tmp_path / "theirs")
    transformers.SiglipImageProcessor(size={"height": 36, "width": 36}).save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    model = HfViTModel.from_pretrained(tmp_path / "ours")
    processor = HfViTImageProcessor.from_pretrained(tmp_path / "ours")
    assert (model.config.image_size, dict(processor.size)) == (32, {"height": 32, "width": 32})
    model(**processor(Image.new("RGB", (50, 40)), return_tensors="pt"))


WITHOUT_TIMM = """
import sys
sys.modules["timm"] = None
from hf_vit import HfViTModel, cli
cli.main(["convert", "vit", "ours", "--skip_parity"])
print("heads:", HfViTModel.from_pretrained("published").config.num_attention_heads)
"""


def test_conversion_takes_little_more_memory_than_the_checkpoint_and_no_timm(tmp_path):
    # Measure the memory of the conversion in a separate process. The checkpoint has 100 MiB.
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
    with torch.device("meta"):
        model = transformers.ViTModel(transformers.ViTConfig(**shape))
    model.to_empty(device="cpu").save_pretrained(tmp_path / "vit")
    save_timm(tmp_path / "published")
    said = run_with_package(WITHOUT_TIMM, tmp_path, fresh=True).stdout
    found = re.search(r"Peak memory of conversion: (\d+) MiB, including (\d+) MiB", said)
    assert found, said
    assert int(found[1]) - int(found[2]) <= 1.2 * (tmp_path / "vit" / "model.safetensors").stat().st_size / 2**20
    assert said.strip().endswith("heads: 4")


def test_errors_leave_nothing_behind(vit, tmp_path):
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


def test_families_are_listed_once_and_as_in_the_readme(capsys):
    convert("--list")
    table = capsys.readouterr().out.strip()
    assert table == families_table()
    assert len(table.splitlines()) == 2 + len(FAMILIES)
    assert all(family.name and family.source and family.outputs for family in FAMILIES)
    assert table in (Path(__file__).parents[2] / "hf_vit" / "convert" / "README.md").read_text(encoding="utf-8")
    names = list_families()
    assert {"ViT", "DINOv2", "DINOv2 with registers", "CLIP", "plain ViTs of timm"} <= {*names}
    assert sorted(names) == sorted({family.name for family in FAMILIES})
