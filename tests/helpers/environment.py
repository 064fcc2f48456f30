"""Environment of the tests: no network, and temporary home, cache and temp folders that are removed after pytest."""

import getpass
import os
import site
import tempfile
from pathlib import Path

from .network import refuse_network
from .processes import NO_COUNTING


PLACE = Path(tempfile.mkdtemp(prefix="hf_vit-tests-"))  # Temporary folder of this test process.
HOME, TEMPORARY = PLACE / "home", PLACE / "tmp"  # Folders that must be empty after the tests.


def isolate() -> None:
    """Blocks the network and replaces the home directory. Must be called before libraries are imported."""
    refuse_network()
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    for name, folder in {
        # Tests use the caches of the user, because filling new ones is slow.
        "MPLCONFIGDIR": Path(caches, "matplotlib"),
        "TORCHINDUCTOR_CACHE_DIR": Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}"),
        "PYTHONUSERBASE": site.getuserbase(),
    }.items():
        os.environ.setdefault(name, str(folder))
    for name in [name for name in os.environ if name.startswith("HF_")]:
        del os.environ[name]
    HOME.mkdir()
    TEMPORARY.mkdir()
    # torch stores compiled headers in the temporary folder, not in its cache. A link keeps them for the next run.
    headers = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    headers.mkdir(exist_ok=True)
    TEMPORARY.joinpath(headers.name).symlink_to(headers)
    folders = {"HF_HOME": "huggingface", "XDG_CACHE_HOME": "cache", "HYPOTHESIS_STORAGE_DIRECTORY": "hypothesis"}
    folders |= {"GRADIO_TEMP_DIR": "gradio"}
    os.environ.update({name: str(PLACE / folder) for name, folder in folders.items()})
    os.environ.update(NO_COUNTING, HOME=str(HOME), NO_PROXY="*")
