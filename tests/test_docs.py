"""The documentation holds: tables equal the declarations, code runs, links lead somewhere, commands exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from spformat_cli import main
from typer.main import get_command

from spformat import backends, errors
from spformat.backends.cuda import KERNELS
from spformat.errors import StructureError
from spformat.formats import COMPOSED, FORMATS, registered, unregister
from spformat.formats.base import Format
from spformat.formats.convert import convert
from spformat.formats.meta_orders import reorder_meta
from spformat.formats.two_four import TwoFour
from spformat.products import operations

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")

FORMAT_IDS = pytest.mark.parametrize("fmt", [*FORMATS, *COMPOSED], ids=lambda f: f.name)
PAGE_IDS = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())


def tables() -> ModuleType:
    """docs/tables.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("docs_tables", DOCS / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """(rest of the info string, code) of every fenced block in a language."""
    return [(m[2].strip(), m[3]) for m in BLOCK.finditer(page.read_text()) if m[1] == language]


@FORMAT_IDS
def test_page_shows_what_the_class_declares(fmt: type[Format]) -> None:
    page = (DOCS / "formats" / f"{fmt.name}.md").read_text()
    assert tables().with_tables(page, fmt) == page, "docs/tables.py writes the tables: make docs"
    for a in fmt.declared_arrays():
        assert a.doc, f"{fmt.name}: {a.name} is declared without a meaning"


@FORMAT_IDS
def test_page_has_an_example_and_is_listed(fmt: type[Format]) -> None:
    assert blocks(DOCS / "formats" / f"{fmt.name}.md", "python")
    assert f"[`{fmt.name}`]({fmt.name}.md)" in (DOCS / "formats" / "index.md").read_text()


@PAGE_IDS
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page, one after another in one namespace and an empty folder; "python gpu" needs a GPU,
    "python torch", which test_torch_docs.py runs, needs torch, and "python hf" a checkpoint: test_hf_models.py has its calls. "python page" runs between commands: test_pages.py."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": __name__}
    known, known_backends, known_operations = registered(), backends.names(), operations.registered()
    try:
        for info, code in blocks(page, "python"):
            if info not in ("gpu", "torch", "hf", "page"):
                exec(compile(code, str(page), "exec"), names)
    finally:
        for fmt in set(registered()) - set(known):
            unregister(fmt.name)
        for backend in set(backends.names()) - set(known_backends):
            backends.unregister(backend)
        for added in {o.name for o in operations.registered()} - {o.name for o in known_operations}:
            operations.unregister(added)


@PAGE_IDS
def test_links_lead_somewhere(page: Path) -> None:
    targets = [t for t in LINK.findall(page.read_text()) if "://" not in t]
    assert [t for t in targets if not (page.parent / t).exists()] == []


@PAGE_IDS
def test_commands_exist(page: Path) -> None:
    """Every `spformat VERB` and `make TARGET` of a shell block exists."""
    verbs = {p.stem for p in (ROOT / "cli").glob("*.py") if "\nEPILOG = " in p.read_text()}
    goals = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for _, code in blocks(page, "sh"):
        assert set(re.findall(r"^spformat (\w+)", code, re.MULTILINE)) <= verbs
        assert set(re.findall(r"^make (\w+)", code, re.MULTILINE)) <= goals


def test_two_four_page_lists_the_right_nibbles() -> None:
    """The table of 16 masks against the converter."""
    cells = re.findall(r"^\| (\d+) \| `([x.]{4})` \|(.*)\| \|", page_text("two-four"), re.MULTILINE)
    rows = [(x, mask, *(c.strip() for c in rest.split("|"))) for x, mask, rest in cells]
    assert [int(r[0]) for r in rows] == list(range(16))
    for x, mask, kept, nibble, pair in rows:
        assert mask == "".join("x" if int(x) >> i & 1 else "." for i in range(4))
        group = np.array([[i + 1 if c == "x" else 0 for i, c in enumerate(mask)]], np.float16)
        if kept == "refused":
            with pytest.raises(StructureError) as refusal:
                convert(group, "two-four")
            assert f"{refusal.value.fields['found']} nonzeros" == pair
            continue
        made = convert(group, "two-four:meta_order=logical")
        first, second = (int(v) for v in re.findall(r"\d", kept))
        assert int(made.meta[0]) & 15 == int(nibble.split("0x")[1], 16) == first + 4 * second
        shown = [0 if v == "0" else int(v[1]) + 1 for v in pair.strip("()").split(", ")]
        assert made.data[0, :2].tolist() == shown


def test_two_four_page_lists_the_right_offsets() -> None:
    found = re.finditer(r"^\| \((\d+), (\d)\)" + 4 * r" \| (\d+)", page_text("two-four"), re.MULTILINE)
    rows = [m.groups() for m in found]
    assert len(rows) == 9
    words = np.arange(256, dtype=np.uint16)  # word(r, q) of a 32 x 128 matrix, 8 words a row
    for i, order in enumerate(TwoFour.declared_params()[0].choices):
        stored = reorder_meta(words, (32, 128), "logical", order).tolist()
        for row in rows:
            r, q, *offsets = (int(v) for v in row)
            assert stored[offsets[i]] == 8 * r + q


def test_backends_page_names_all_kernels_that_multiply_zeros() -> None:
    page = (DOCS / "backends.md").read_text()
    assert [k.name for k in KERNELS if k.multiplies_zeros and f"`{k.name}`" not in page] == []


def test_command_line_page_lists_the_exit_codes() -> None:
    page = (DOCS / "command-line.md").read_text()
    listed = {name: int(code) for code, name in re.findall(r"^\| (\d+) \| `(\w+)` \|", page, re.MULTILINE)}
    direct = errors.SpformatError.__subclasses__()
    others = [c for base in direct for c in base.__subclasses__() if c.exit_code != base.exit_code]
    assert listed == {c.__name__: c.exit_code for c in (*direct, *others)}


def test_command_line_page_lists_every_verb_and_variable() -> None:
    page = (DOCS / "command-line.md").read_text()
    sources = "".join(p.read_text() for folder in ("spformat", "cli") for p in (ROOT / folder).rglob("*.py"))
    verbs = {p.stem for p in (ROOT / "cli").glob("*.py") if "\nEPILOG = " in p.read_text()}
    assert set(re.findall(r"^spformat (\w+)", page, re.MULTILINE)) == verbs
    assert set(re.findall(r"`(SPFORMAT_\w+)`", page)) == set(re.findall(r'"(SPFORMAT_[A-Z_]+[A-Z])"', sources))


def test_every_option_is_on_some_page_and_every_option_of_a_page_exists() -> None:
    """Of the pages for users: a flag that `--help` alone knows is not noticed, one that only a page knows is refused."""
    verbs = get_command(main.app).commands  # type: ignore[attr-defined]
    known = {flag for verb in verbs.values() for p in verb.params for flag in p.opts if flag.startswith("--")}
    pages = [ROOT / "README.md", *DOCS.glob("*.md"), *(DOCS / "formats").glob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    assert sorted(f for f in known if not re.search(rf"(?<![\w-]){f}(?![\w-])", text)) == []
    typed = re.findall(r"^spformat (?:[^\n#]|\\\n)*", text, re.MULTILINE)
    used = {flag for line in typed for flag in re.findall(r"(?<!\S)--[a-z][a-z-]+", line)}
    assert used - known == set()


def page_text(name: str) -> str:
    return (DOCS / "formats" / f"{name}.md").read_text()


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "performance.md"], ids=lambda p: p.name)
def test_page_is_short(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", sorted((DOCS / "results").glob("20*.md")), ids=lambda p: p.stem)
def test_result_says_where_it_comes_from(page: Path) -> None:
    """The first table of a page names the run, and the index lists the page under its date."""
    origin = dict(re.findall(r"^\| (\w+) \| (.+) \|$", page.read_text().split("\n\n")[1], re.MULTILINE))
    assert list(origin) == ["date", "device", "versions", "commit", "command"]
    assert page.name.startswith(origin["date"][:10])
    index = (DOCS / "results" / "index.md").read_text()
    assert re.search(rf"^\| {origin['date'][:10]} \| .*\({re.escape(page.name)}\)", index, re.MULTILINE), "no row"
