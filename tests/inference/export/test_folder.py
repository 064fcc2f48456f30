"""Test the folders that exports write, and the errors of exports."""

import json
import os
import re
import runpy
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import Tensor
from transformers import pipeline

import hf_vit
from hf_vit import cli
from hf_vit.convert.export import export_checkpoint
from hf_vit.inference.export import folder as export_folder
from hf_vit.inference.export import formats
from hf_vit.inference.export.folder import missing_script_reason
from hf_vit.inference.export.formats import FORMATS
from hf_vit.inference.export.programs import Run

from ...helpers.fresh import run_python
from ...helpers.images import noise
from ...helpers.models import small_config


LABELS = ["roof", "sky", "tree", "water", "wall"]
# Simulates a machine on which these packages are not installed.
WITHOUT_TORCH = """
import json, runpy, sys
for name in ("torch", "transformers", "torchvision", "hf_vit"):
    sys.modules[name] = None
for arguments in json.loads(sys.argv[1]):
    sys.argv[:] = arguments
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as stopped:
        print(stopped.code, file=sys.stderr)
"""


def run_script(folder: Path, workdir: Path, *inputs: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the script of an exported folder once for each list of files in `workdir`, in one process."""
    calls = [[str(folder / "run.py"), *files] for files in inputs]
    process = run_python("-c", WITHOUT_TORCH, json.dumps(calls), workdir=workdir)
    assert process.returncode == 0, process.stderr
    return process


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a classifier, and an image processor that crops images."""
    torch.manual_seed(0)
    config = small_config(num_hidden_layers=1, id2label=dict(enumerate(LABELS)))
    model = hf_vit.HfViTForImageClassification(config)
    path = tmp_path_factory.mktemp("saved") / "model"
    model.save_pretrained(path)
    hf_vit.HfViTImageProcessorPil(
        size={"shortest_edge": 40}, do_center_crop=True, crop_size=32, image_mean=[0.4, 0.5, 0.6], image_std=0.25
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def exported(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a model with the command. `printed.txt` next to the exported folder contains the output of libraries."""
    path = tmp_path_factory.mktemp("exported") / "onnx"
    kept = [os.dup(stream) for stream in (1, 2)]
    with pytest.MonkeyPatch.context() as patch, (path.parent / "printed.txt").open("w") as printed:
        patch.setattr("sys.argv", ["hf-vit"])
        patch.setattr("sys.stdout", printed)
        patch.setattr("sys.stderr", printed)
        for stream in (1, 2):
            os.dup2(printed.fileno(), stream)
        try:
            cli.main(["export", str(saved), "--output_dir", str(path)])
        finally:
            for stream, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, stream)
                os.close(copy)
    return path


def test_the_script_gives_what_the_pipeline_gives_without_torch(saved: Path, exported: Path, tmp_path: Path) -> None:
    photo, deep = tmp_path / "photo.png", {"I;16": "16.tif", "F": "float.tif", "I": "32.tif"}
    Image.fromarray(load_sample_image("china.jpg")).save(photo)
    for mode, name in deep.items():
        Image.new(mode, (40, 40), 1000).save(tmp_path / name)
    process = run_script(exported, tmp_path, ["photo.png", "outputs.npz"], *([name] for name in deep.values()))
    for mode in deep:
        assert f"has mode '{mode}', whose values do not fit into 8 bits" in process.stderr
    model = hf_vit.HfViTForImageClassification.from_pretrained(saved)
    image_processor = hf_vit.HfViTImageProcessorPil.from_pretrained(saved)
    classify = pipeline("image-classification", model=model, image_processor=image_processor)
    expected = {entry["label"]: entry["score"] for entry in classify(str(photo))}
    found = json.loads(process.stdout)
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, abs=1e-5)
    with torch.no_grad():
        logits = model(**image_processor(Image.open(photo), return_tensors="pt")).logits
    np.testing.assert_allclose(np.load(tmp_path / "outputs.npz")["logits"], logits.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rounding", ["down", "half_to_even"])
def test_the_script_crops_as_the_image_processor_does(rounding: str, tmp_path: Path) -> None:
    size = {"height": 40, "width": 32}  # larger than the image in one direction, smaller in the other one
    processor = hf_vit.HfViTImageProcessorPil(
        do_resize=False, do_center_crop=True, crop_size=size, crop_rounding=rounding
    )
    processor.to_json_file(tmp_path / "preprocessor_config.json")
    for name in ("labels", "config"):
        (tmp_path / f"{name}.json").write_text("{}")
    shutil.copy(export_folder.RUN, tmp_path / "run.py")
    image = Image.fromarray(noise(35, 39, 3))
    image.save(tmp_path / "photo.png")
    found = runpy.run_path(str(tmp_path / "run.py"))["read_pixels"](str(tmp_path / "photo.png"))
    expected = processor(image, return_tensors="pt").pixel_values.numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


WHOLE = {"size": {"shortest_edge": 36}, "do_center_crop": False, "do_pad": True, "ensure_multiple_of": 8}
CROPPED = {"size": {"height": 40, "width": 32}, "do_center_crop": False, "do_affine_crop": True}


@pytest.mark.parametrize(
    ("model_class", "options", "output"),
    [
        (hf_vit.HfViTForSemanticSegmentation, WHOLE, "logits"),
        pytest.param(
            *(hf_vit.HfViTForUniversalSegmentation, WHOLE, "masks_queries_logits"), marks=pytest.mark.nightly
        ),
        (hf_vit.HfViTForKeypointDetection, CROPPED, "heatmaps"),
    ],
)
def test_the_script_of_pixels_and_points(
    model_class: Any, options: dict[str, Any], output: str, tmp_path: Path
) -> None:
    overrides = {"num_hidden_layers": 1, "universal_segmentation_config": {"num_queries": 6, "num_blocks": 1}}
    model = model_class(small_config(id2label=dict(enumerate(LABELS)), **overrides)).eval()
    model.save_pretrained(tmp_path / "model")
    hf_vit.HfViTImageProcessorPil(**options).save_pretrained(tmp_path / "model")
    hf_vit.export_model(tmp_path / "model", tmp_path / "onnx", report=lambda line: None)
    photo = Image.fromarray(load_sample_image("flower.jpg")).resize((61, 47))
    photo.save(tmp_path / "photo.png")
    for changes in ({}, {"box_padding": 1.0}) if "do_affine_crop" in options else ({},):
        image_processor = hf_vit.HfViTImageProcessorPil(**options, **changes)
        image_processor.to_json_file(tmp_path / "onnx" / "preprocessor_config.json")
        process = run_script(tmp_path / "onnx", tmp_path, ["photo.png", "outputs.npz"])
        with torch.no_grad():
            expected = model(**image_processor(photo, return_tensors="pt"))[output]
        np.testing.assert_allclose(np.load(tmp_path / "outputs.npz")[output], expected.numpy(), rtol=0, atol=1e-4)
        assert any(label in process.stdout for label in LABELS)


def test_the_folder_holds_what_running_takes_and_open_sizes_have_names(exported: Path) -> None:
    printed = (exported.parent / "printed.txt").read_text()
    assert "Failed to infer" not in printed
    assert "experimental" not in printed
    graph = onnx.load(exported / "model.onnx", load_external_data=False).graph
    sizes = {
        value.name: [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    assert sizes == {"pixel_values": ["batch", 3, "height", "width"], "logits": ["batch", len(LABELS)]}
    inner = {size.dim_param for value in graph.value_info for size in value.type.tensor_type.shape.dim}
    assert not any(re.search(r"\bs\d+\b", name) for name in inner)

    files = {"README.md", "config.json", "labels.json", "model.onnx", "model.onnx.data", "preprocessor_config.json"}
    assert {file.name for file in exported.iterdir()} == {*files, "run.py"}
    assert json.loads((exported / "labels.json").read_text()) == {str(i): name for i, name in enumerate(LABELS)}
    card = (exported / "README.md").read_text()
    opset = onnx.load(exported / "model.onnx").opset_import[0].version
    assert f"opset {opset}" in card
    assert f"torch {torch.__version__.partition('+')[0]}" in card
    rows = [line for line in card.splitlines() if line.endswith("e-07 |") or line.endswith("e-06 |")]
    assert len(rows) == 3
    assert "path" not in card  # the model card must not contain local paths
    assert str(exported.parent.parent) not in card


def test_a_program_that_differs_is_not_written(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = FORMATS["torch"]

    def open_wrong(file: Path, outputs: tuple[str, ...]) -> Run:
        run = right.open(file, outputs)

        def run_wrong(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            results = run(inputs)
            if len(inputs["pixel_values"]) == 4:
                results["logits"][-1, 0] += 1e-2
            return results

        return run_wrong

    monkeypatch.setitem(formats.FORMATS, "torch", replace(right, open=open_wrong))
    monkeypatch.setattr("sys.argv", ["hf-vit"])
    output = tmp_path / "outputs" / "wrong"
    with pytest.raises(SystemExit) as left:
        cli.main(["export", str(saved), "--format", "torch", "--output_dir", str(output)])
    assert str(left.value).startswith(
        "hf-vit: The outputs of the program differ from those of the model, so nothing was written: 4 x "
    )
    assert not list(tmp_path.iterdir())
    # The command prints the comparison of outputs before it fails.
    assert "1 x 32x32  logits" in capsys.readouterr().out


def test_mistakes_are_found_before_tracing(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("No operator for this.\nAnd much more.")

    monkeypatch.setattr(export_folder, "write_program", fail)
    message = "The format onnx does not support HfViTForImageClassification .* No operator for this. Choose openvino"
    with pytest.raises(ValueError, match=f"{message} or"):
        hf_vit.export_model(saved, tmp_path / "onnx")
    assert not list(tmp_path.iterdir())

    monkeypatch.setattr(export_folder, "write_program", None)
    with pytest.raises(ValueError, match=r"Unknown export format 'onyx'\. Choose one of onnx, openvino"):
        hf_vit.export_model(saved, tmp_path / "new", "onyx")
    with pytest.raises(ValueError, match="exists and is not empty"):
        hf_vit.export_model(saved, saved)
    with pytest.raises(OSError, match="There is no folder or file '/nowhere/at/all'"):
        hf_vit.export_model("/nowhere/at/all", tmp_path / "new")
    theirs = tmp_path / "theirs"
    processor = hf_vit.HfViTImageProcessorPil.from_pretrained(saved)
    model = hf_vit.HfViTForImageClassification.from_pretrained(saved)
    export_checkpoint(model, theirs, "vit", processor)
    with pytest.raises(ValueError, match="is ViTForImageClassification of model_type 'vit', which cannot be exported"):
        hf_vit.export_model(theirs, tmp_path / "new")
    monkeypatch.setattr(hf_vit.extras, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'needs onnx and .* Install: pip install "\.\[export\]"'):
        hf_vit.export_model(saved, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_torch_writes_programs_without_exporters(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "has_exporters", lambda: False)
    with pytest.raises(ImportError, match=r"executorch needs (executorch|transformers 5.23)"):
        hf_vit.export_model(saved, tmp_path / "new", "executorch")
    assert formats.check_format("onnx").write is formats.write_onnx
    written = hf_vit.export_model(saved, tmp_path / "torch", "torch", report=lambda line: None)
    assert (written / "model.pt2").is_file()
    card = (written / "README.md").read_text()
    assert card.index("can contain executable code") < card.index("outputs = torch.export.load(")
    readme = (Path(export_folder.__file__).parent / "README.md").read_text()
    assert "`model.pt2` can contain executable code" in readme


SEMANTIC, KEYPOINTS, MASKED = (
    hf_vit.HfViTForSemanticSegmentation,
    hf_vit.HfViTForKeypointDetection,
    hf_vit.HfViTForMaskedImageModeling,
)


def test_there_is_no_script_where_it_would_process_images_otherwise() -> None:
    for model_class, options, reason in (
        (SEMANTIC, {"do_resize": True, "size": {"height": 32, "width": 48}}, None),
        (SEMANTIC, {"do_resize": True, "size": {"longest_edge": 48}}, "processor size"),
        (SEMANTIC, {"do_resize": True, "size": {"shortest_edge": 48}, "ensure_multiple_of": 8}, None),
        (SEMANTIC, {"do_pad": True, "pad_size": {"height": 64, "width": 64}}, "pad_size"),
        (KEYPOINTS, {"do_resize": True, "do_affine_crop": True, "size": {"height": 32, "width": 24}}, None),
        (MASKED, {}, "inputs other than images"),
    ):
        model = model_class(small_config(use_mask_token=model_class is MASKED))
        found = missing_script_reason(model, "onnx", options)
        assert found is None if reason is None else reason in str(found)
        assert missing_script_reason(model, "openvino", options) == "it supports ONNX only"
