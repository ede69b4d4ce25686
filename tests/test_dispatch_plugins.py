"""A third-party backend is loaded, explained and used."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import spformat as sf
from spformat import backends

PLUGIN = '''
import numpy as np
from spformat.products.kernel import Kernel, spmm_of
from spformat.products.plan import Plan

class Doubled(Kernel):
    """Not the product, so that a test sees who computed it."""
    name = "doubled.spmm"
    takes = spmm_of("csr")

    def unsupported(self, p):
        return [] if p.a_dtype == "float32" else [f"a.dtype must be float32, got {p.a_dtype}"]

    def _plan(self, a, p):
        x = 2 * a.to_dense()
        return Plan(self.name, p, lambda B, out: x @ B)

class DoubledBackend:
    name = "doubled"
    def missing(self): return []
    def kernels(self): return (Doubled(),)

class ElsewhereBackend:
    name = "elsewhere"
    def missing(self): return ["no such machine"]
    def kernels(self): return (Elsewhere(),)

class Elsewhere(Doubled):
    name, takes = "elsewhere.spmm", spmm_of("bsr")
'''
ENTRY_POINTS = """
doubled = doubled_plugin:DoubledBackend
broken = no_such_module:BACKEND
renamed = doubled_plugin:OldName
elsewhere = doubled_plugin:ElsewhereBackend
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package as pip lays it out: modules, and beside them its entry points."""
    (tmp_path / "doubled_plugin.py").write_text(PLUGIN)
    about = tmp_path / "doubled_plugin-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: doubled-plugin\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{backends.ENTRY_POINT_GROUP}]\n" + ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    backends.third_party.cache_clear()
    backends.get.cache_clear()
    yield tmp_path
    backends.third_party.cache_clear()
    backends.get.cache_clear()
    sys.modules.pop("doubled_plugin", None)


def test_a_plugin_is_found_explained_and_used(plugins: Path) -> None:
    x = np.eye(5, dtype=np.float32)
    a = sf.convert(x, "csr")
    assert {"doubled", "broken"} <= set(backends.names())
    np.testing.assert_array_equal(sf.spmm(a, x, backend="doubled"), 2 * x)
    np.testing.assert_array_equal(sf.spmm(a, x), x)
    text = str(sf.explain(a, x))
    assert "doubled.spmm: accepted" in text
    assert "broken: the backend does not load" in text
    assert "renamed: the backend does not load" in text
    lines = [line.strip() for line in text.splitlines()]
    assert [line for line in lines if line.startswith("elsewhere")] == ["elsewhere: no such machine"]
    lines = [line.strip() for line in str(sf.explain(sf.convert(x, "bsr:blocksize=5x5"), x)).splitlines()]
    assert [line for line in lines if line.startswith("elsewhere")] == ["elsewhere.spmm: no such machine"]
    wide = sf.convert(x.astype(np.float64), "csr")
    with pytest.raises(sf.errors.NoKernelError, match=r"a\.dtype must be float32, got float64"):
        sf.spmm(wide, x.astype(np.float64), backend="doubled")


def test_the_command_knows_a_plugin_that_is_installed(plugins: Path) -> None:
    """In a process of its own, with nothing but the files that pip installs."""
    sf.save(plugins / "a.safetensors", {"a": sf.convert(np.eye(5, dtype=np.float32), "csr")})
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(plugins), *sys.path]), "COLUMNS": "200"}

    def told(*words: str) -> str:
        command = [sys.executable, "-m", "spformat", *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True, cwd=plugins).stdout

    known = told("backends")
    assert "doubled" in known
    assert "no_such_module" in known
    assert "doubled.spmm: accepted" in told("explain", "a.safetensors", "-n", "8")
