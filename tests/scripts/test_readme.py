"""The Python code of the README runs as it stands, block after block, in one folder."""

import os
import re
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[2]


def test_readme_code_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 2
    with_package, without_package = blocks
    assert "hf_vit" not in without_package
    block_package = "import sys; sys.modules['hf_vit'] = None\n"
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    for code in (with_package, block_package + without_package):
        finished = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**environment, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr
    assert "'score'" in finished.stdout
