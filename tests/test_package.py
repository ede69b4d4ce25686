"""pyproject.toml is complete: every package and device source is shipped, every dependency is used."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

import spformat

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
SOURCES = sorted([*(ROOT / "spformat").rglob("*.py"), *(ROOT / "cli").rglob("*.py")])


def test_every_package_is_listed() -> None:
    found = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "spformat").rglob("__init__.py")}
    assert set(SETUPTOOLS["packages"]) == found | {"spformat_cli"}


def test_every_other_file_is_package_data() -> None:
    shipped = {
        path
        for package, patterns in SETUPTOOLS["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    # All but sources, and what Python and numba cache beside them: other processes may be writing it now, as temporary files.
    files = (p for p in (ROOT / "spformat").rglob("*") if p.is_file())
    others = {p for p in files if p.suffix != ".py" and p.parent.name != "__pycache__"}
    assert others == shipped
    assert len([p for p in shipped if p.suffix == ".cu"]) >= 8


def test_version_is_the_same_everywhere() -> None:
    assert PROJECT["project"]["version"] == spformat.__version__
    assert f"## {spformat.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("requirement", PROJECT["project"]["dependencies"])
def test_dependency_is_imported(requirement: str) -> None:
    name = re.match(r"[\w-]+", requirement)
    assert name is not None
    used = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                used |= {a.name.split(".")[0] for a in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                used.add(node.module.split(".")[0])
    assert name[0].replace("-", "_") in used


def test_the_test_extra_is_light() -> None:
    """No framework and no whole toolkit: `make test` must be quick on a fresh machine."""
    extra = " ".join(PROJECT["project"]["optional-dependencies"]["test"])
    assert not re.search(r"torch|cupy|cuda-toolkit|tensorflow|jax", extra)


def test_public_names_exist_once() -> None:
    assert len(set(spformat.__all__)) == len(spformat.__all__)
    assert [n for n in spformat.__all__ if not hasattr(spformat, n)] == []
