"""Saved image processors: file contents, and opening with and without torchvision."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor

from hf_vit import HfViTConfig, HfViTImageProcessor, HfViTImageProcessorPil

from ..helpers.fresh import run_python
from ..helpers.images import BACKENDS
from ..helpers.processes import ROOT


AUTO_MAP = {
    "AutoImageProcessor": {
        "torchvision": "image_processing_hf_vit.HfViTImageProcessor",
        "pil": "image_processing_pil_hf_vit.HfViTImageProcessorPil",
    }
}
OPTIONS = {
    "size": {"longest_edge": 32},
    "resample": 3,
    "num_channels": 1,
    "image_mean": 0.25,
    "image_std": [0.3],
    "do_pad": True,
    "ensure_multiple_of": (4, 8),
    "pad_size": 32,
    "do_convert_rgb": False,
}


# Load a folder without hf_vit and save the result.
ELSEWHERE = """
import json, sys
folder, target, has_torchvision, backends = sys.argv[1], sys.argv[2], sys.argv[3] == "True", json.loads(sys.argv[4])
sys.modules["hf_vit"] = None
if not has_torchvision:
    sys.modules["torchvision"] = None
import numpy as np
# transformers 5.17 keeps the short import for those who have torchvision
from transformers.models.auto.image_processing_auto import AutoImageProcessor
image = (np.arange(20 * 30) % 256).astype(np.uint8).reshape(20, 30)
results = {}
for backend in backends:
    kwargs = {} if backend is None else {"backend": backend}
    processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=True, **kwargs)
    again = f"{target}/{backend}"
    if backend == "torchvision":
        type(processor).register_for_auto_class()
    processor.save_pretrained(again)
    for source in (folder, again):
        for wanted in backends:
            kwargs = {} if wanted is None else {"backend": wanted}
            processor = AutoImageProcessor.from_pretrained(source, trust_remote_code=True, **kwargs)
            results[f"{source}|{wanted}"] = {
                "class": type(processor).__name__,
                "options": processor.to_dict(),
                "mean": float(processor(image, return_tensors="pt").pixel_values.mean()),
            }
if not has_torchvision:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    kind = get_class_from_dynamic_module("image_processing_hf_vit.HfViTImageProcessor", folder)
    try:
        kind()
    except ImportError as error:
        results["error"] = str(error)
    del sys.modules["hf_vit"]
    import hf_vit, hf_vit.data, hf_vit.training  # the package itself needs no torchvision, either
    assert hf_vit.HfViTImageProcessorPil()(image, return_tensors="pt").pixel_values.shape == (1, 3, 224, 224)
json.dump(results, open(f"{target}/results.json", "w"))
"""


@pytest.mark.parametrize(
    ("saver", "options"),
    [("torchvision", OPTIONS), ("pil", {}), ("pil", OPTIONS), ("torchvision", {"do_resize": False, "image_std": 2.0})],
)
def test_saved_options_come_back_under_either_backend(tmp_path, saver, options):
    processor = BACKENDS[saver](**options)
    processor.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert written["auto_map"] == AUTO_MAP
    assert written["image_processor_type"] == "HfViTImageProcessor"
    image = np.random.default_rng(0).integers(0, 256, (30, 50, processor.num_channels), dtype=np.uint8)
    for backend, kind in BACKENDS.items():
        loaded = kind.from_pretrained(tmp_path)
        assert loaded.to_dict() == processor.to_dict()
        assert loaded.to_dict() | kind(**options).to_dict() == processor.to_dict()
        opened = AutoImageProcessor.from_pretrained(tmp_path, backend=backend)
        assert type(opened) is kind
        if backend == saver:
            pixels = [own(image, return_tensors="pt").pixel_values for own in (processor, opened)]
            assert torch.equal(*pixels)
    assert type(AutoImageProcessor.from_pretrained(tmp_path)) is HfViTImageProcessor
    # Load from a single file, and with overrides.
    from_file = BACKENDS[saver].from_json_file(tmp_path / "preprocessor_config.json")
    assert from_file.to_json_string() == processor.to_json_string()
    changed = BACKENDS[saver].from_pretrained(tmp_path, do_normalize=False, size=16, pad_size=None)
    assert (changed.do_normalize, changed.size) == (False, {"height": 16, "width": 16})


def test_registered_class_keeps_the_map_and_its_default_is_not_shared(tmp_path, monkeypatch):
    monkeypatch.setattr(HfViTImageProcessorPil, "_auto_class", None)
    HfViTImageProcessorPil.register_for_auto_class()
    processor = HfViTImageProcessorPil()
    processor.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "preprocessor_config.json").read_text())["auto_map"] == AUTO_MAP
    processor.to_dict()["auto_map"]["AutoImageProcessor"].clear()
    assert HfViTImageProcessor().to_dict()["auto_map"] == AUTO_MAP


def test_a_push_takes_the_code_along(monkeypatch, tmp_path):
    pushed = {}
    for saver in (HfViTImageProcessor(), HfViTConfig()):
        # push_to_hub of transformers saves into an empty folder and uploads its contents.
        monkeypatch.setattr(type(saver), "push_to_hub", lambda self, name, **options: pushed.update({name: options}))
        saver.save_pretrained(tmp_path / "name", push_to_hub=True, private=True)
        saver.save_pretrained(tmp_path / "name", push_to_hub=True, repo_id="user/other")
        assert pushed == {"name": {"private": True}, "user/other": {}}
        pushed.clear()


@pytest.mark.parametrize("has_torchvision", [True, False])
def test_a_saved_folder_opens_where_the_package_is_not_installed(tmp_path, has_torchvision):
    processor = HfViTImageProcessor(**OPTIONS | {"image_std": 0.3})
    processor.save_pretrained(tmp_path / "saved")
    (tmp_path / "elsewhere").mkdir()
    backends = [None, "pil", "torchvision"] if has_torchvision else [None, "pil"]
    arguments = [str(tmp_path / "saved"), str(tmp_path / "elsewhere"), str(has_torchvision), json.dumps(backends)]
    options = {"workdir": tmp_path, "fresh": not has_torchvision, "PYTHONPATH": str(ROOT)}
    run = run_python("-c", ELSEWHERE, *arguments, **options)
    assert run.returncode == 0, run.stderr[-3000:]
    results = json.loads((tmp_path / "elsewhere" / "results.json").read_text())
    image = (np.arange(20 * 30) % 256).astype(np.uint8).reshape(20, 30)
    mean = float(processor(image, return_tensors="pt").pixel_values.mean())
    expected = json.loads(processor.to_json_string())
    error = results.pop("error", "")
    assert ("pip install torchvision" in error) is not has_torchvision
    assert len(results) == len(backends) * (1 + len(backends))
    for place, result in results.items():
        is_pil = place.endswith("|pil") or not has_torchvision
        assert result["class"] == ("HfViTImageProcessorPil" if is_pil else "HfViTImageProcessor"), place
        assert result["options"] == expected
        assert result["mean"] == pytest.approx(mean, abs=0.01)
