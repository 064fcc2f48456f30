"""Test that all cells of the quickstart notebook run in order, with a tiny model."""

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from hf_vit import HfViTForImageClassification

from ..helpers.datasets import write_class_folders
from ..helpers.fresh import ROOT, offline
from ..helpers.hub import serve
from ..helpers.models import save_model, small_config


NOTEBOOK = ROOT / "scripts" / "quickstart.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_and_uploads_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_class_folders(tmp_path / "photos", ["cat", "dog"])
    save_model(HfViTForImageClassification(small_config()), tmp_path / "tiny")
    settings = {"PHOTOS": "photos", "MODEL": "tiny", "OUTPUT": "out", "REPOSITORY": "user/photos"}
    settings["OPTIONS"] = json.dumps({"max_steps": 2, "image_size": 32, "per_device_train_batch_size": 2})
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=400, resources={"metadata": {"path": str(tmp_path)}})
    with serve(tmp_path / "hub") as hub:
        client.execute(env=offline({**hub.client, **settings, "PYTHONPATH": str(ROOT)}))
        assert {"README.md", "model.safetensors"} <= hub.find("user/photos").files.keys()
    outputs = {cell["id"]: json.dumps(cell["outputs"]) for cell in notebook.cells if cell["cell_type"] == "code"}
    assert "accuracy" in outputs["fine-tune"]
    assert all("image/png" in outputs[name] for name in ("predict", "attention"))
    assert "'from scratch': " in outputs["from-scratch"]


def test_the_notebook_is_saved_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
