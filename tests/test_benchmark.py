"""The benchmark script, at its smallest."""

import json
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[1]


def test_benchmark_measures_all_three_libraries(tmp_path: Path) -> None:
    options = "--presets tiny --batch_sizes 1 --dtypes float32 --rounds 1 --min_seconds 0.01 --output"
    command = [sys.executable, "scripts/benchmark.py", *options.split(), str(tmp_path / "table.json")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env={"PYTHONPATH": str(ROOT)})
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert [row["mode"] for row in rows] == ["forward", "train"]
    for row in rows:
        assert all(row[f"{library} images/s"] > 0 for library in ("hf_vit", "transformers", "timm"))
        assert row["ratio to timm"] > 0
