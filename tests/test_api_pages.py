"""The API reference: every public name is on a page, has a docstring, and the docstring is laid out as it was meant."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from test_docs import DOCS

import spformat as sf

DIRECTIVE = re.compile(r"^\.\. auto(\w+):: ([\w.]+)(?:\(.*\))?\n((?:   :.*\n)*)", re.MULTILINE)
NEED_TORCH = ("spformat.torch", "spformat.hf")


@pytest.fixture(scope="module")
def docstrings() -> Iterator[ModuleType]:
    """docs/docstrings.py, as Sphinx imports it."""
    sys.path.insert(0, str(DOCS))
    try:
        yield importlib.import_module("docstrings")
    finally:
        sys.path.remove(str(DOCS))


def directives() -> list[tuple[str, str, str]]:
    """(kind, name with its module, options) of every directive of the pages."""
    found = []
    for page in sorted((DOCS / "api").glob("*.md")):
        text = page.read_text()
        module = re.search(r"^\.\. currentmodule:: ([\w.]+)", text, re.MULTILINE)
        for kind, name, options in DIRECTIVE.findall(text):
            found.append((kind, name if "." in name or kind == "module" else f"{module and module[1]}.{name}", options))
    return found


def test_every_public_name_is_on_a_page() -> None:
    listed = {name for _, name, _ in directives()}
    ((_, _, options),) = [d for d in directives() if d[:2] == ("module", "spformat")]
    excluded = set(re.search(r":exclude-members: (.*)", options)[1].split(", "))  # type: ignore[index]
    for name in set(sf.__all__) - {"FORMATS"}:
        assert (f"spformat.{name}" in listed) == (name in excluded), f"{name}: on no page of docs/api, or on two"
    assert excluded <= set(sf.__all__)
    classes = {f"spformat.{f.__name__}" for f in (*sf.FORMATS, sf.Sum, sf.Stack, sf.Format)}
    assert classes <= listed
    assert {
        "spformat.torch",
        "spformat.hf.sparsify",
        "spformat.checkpoint",
        "spformat.errors",
        "spformat.limits",
    } <= listed


@pytest.mark.parametrize("name", [n for kind, n, _ in directives() if kind == "module" and n not in NEED_TORCH])
def test_what_a_page_lists_has_a_docstring(name: str) -> None:
    module = importlib.import_module(name)
    public = getattr(module, "__all__", None) or [
        n for n, x in vars(module).items() if not n.startswith("_") and getattr(x, "__module__", "") == name
    ]
    found = {n: getattr(module, n) for n in public}
    found = {n: x for n, x in found.items() if inspect.isclass(x) or inspect.isfunction(x)}
    assert found, name
    assert [n for n, x in found.items() if not inspect.getdoc(x)] == []


def processed(docstrings: ModuleType, what: str, obj: Any) -> list[str]:
    lines = (inspect.getdoc(obj) or "").split("\n")
    docstrings.process(None, what, obj.__name__, obj, None, lines)
    return lines


def test_lines_of_arguments_are_fields(docstrings: ModuleType) -> None:
    lines = processed(docstrings, "function", sf.convert)
    fields = re.findall(r"^:param (\w+):", "\n".join(lines), re.MULTILINE)
    assert fields == ["x", "target", "dtype", "params"]
    at = next(i for i, line in enumerate(lines) if line.startswith(":param target:"))
    assert lines[at + 1].startswith("    "), "what goes on after a line belongs to its argument"
    assert any(line.startswith("The result has every value") for line in lines)


def test_formulas_are_no_emphasis_and_examples_are_literal(docstrings: ModuleType) -> None:
    assert docstrings.plain("C = A * B and |x|, ``a * b``") == r"C = A \* B and \|x\|, ``a * b``"
    one_block = ["text", "", "::", "", "    a", "", "    b"]
    assert docstrings.literal_blocks(["text", "", "    a", "", "    b"]) == one_block
    assert docstrings.literal_blocks(["text", "", "    rows  of it", "", "more"]) == [
        "text", "", "::", "", "    rows  of it", "", "more",
    ]  # fmt: skip


def test_a_format_has_its_parameters_and_arrays(docstrings: ModuleType) -> None:
    text = "\n".join(processed(docstrings, "class", sf.BSR))
    for name in ("blocksize", "indptr", "indices", "data"):
        assert f"``{name}``" in text
    assert "[nnzb, R, C]" in text
    assert "list-table" not in "\n".join(processed(docstrings, "class", sf.Format))
