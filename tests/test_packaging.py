"""Test the packaging: tested versions, links on the package page, and install commands in error messages."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hf_vit.extras import check_packages


ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
NOT_IN_DEV = {"executorch"}


def test_every_dependency_has_a_tested_version_inside_its_range() -> None:
    lines = (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    tested = {
        canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines if not line.startswith("#")
    }
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *(line for lines in extras.values() for line in lines)]
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        if name not in {"hf-vit", *NOT_IN_DEV}:
            assert requirement.specifier.contains(tested[name]), f"{name} {tested.get(name)}"


def test_links_of_the_package_page_are_absolute() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    relative = re.compile(r"\]\((?!https?://|#)([^)#]+)")
    targets = relative.findall(text)
    for rule in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    assert not relative.findall(text)
    for target in targets:
        folder = "raw.githubusercontent.com/hf-vit/hf-vit/main" if target.endswith(".png") else "blob/main"
        assert f"{folder}/{target}" in text


def test_missing_packages_are_installed_from_a_checkout() -> None:
    command = r'A plot needs no_such_package\. Install: pip install "\.\[train\]" \(in a checkout of hf-vit\)'
    with pytest.raises(ImportError, match=command):
        check_packages("A plot", "json", "no_such_package")
    files = [*(ROOT / "hf_vit").rglob("*.py"), *(ROOT / "hf_vit").rglob("*.md"), ROOT / "README.md"]
    found = [file for file in files if re.search(r"pip install \W?hf-vit", file.read_text(encoding="utf-8"))]
    assert not found
