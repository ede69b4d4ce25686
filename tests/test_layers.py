"""Who may import whom: downward only, and each heavy library in its own place. Reads the sources, imports nothing."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("limits",),
    ("arrays",),
    ("formats",),
    ("storage",),
    ("preprocess", "interop"),
    ("products",),
    ("backends",),
    ("dispatch",),
    ("measure", "checkpoint"),
    ("opening",),
    ("torch",),
    ("hf",),
    ("spformat",),
    ("__main__",),
)
"""Modules and packages of spformat, lowest first. An import leads to a lower layer, or stays inside one package."""

LEVEL = {name: level for level, layer in enumerate(LAYERS) for name in layer}

HOMES = {
    "cupy": ("spformat/arrays/library.py", "spformat/backends/vendor.py", "spformat/backends/cuda/", "cli/env.py"),
    "numba": (
        "spformat/backends/cpu/",
        "spformat/formats/fast/",
    ),
    "torch": (
        "spformat/formats/foreign.py",
        "spformat/arrays/torch_tensors.py",
        "spformat/interop/torch_semi_structured.py",
        "spformat/measure/contenders.py",
        "spformat/torch/",
        "spformat/hf/",
    ),
    "nvmath": ("spformat/backends/vendor.py",),
    "cuda": ("spformat/backends/cuda/",),
    "scipy": ("spformat/formats/foreign.py", "spformat/interop/", "spformat/measure/calibration_fit.py"),
    "transformers": ("spformat/hf/",),
    "peft": ("spformat/hf/adapters.py", "spformat/hf/sparse_lora.py"),
    "distributed": ("spformat/checkpoint/executors.py",),
    "fsspec": ("spformat/checkpoint/transfers.py",),
    "huggingface_hub": ("spformat/checkpoint/hub.py",),
    "safetensors": ("spformat/checkpoint/official.py",),
    "typer": ("cli/",),
    "rich": ("cli/",),
}
"""Library -> the only places that may import it."""

ENVIRONMENT = (
    "spformat/arrays/library.py",  # where CuPy keeps what it compiles
    "spformat/dispatch/api.py",
    "spformat/backends/cuda/runtime/jit.py",
    "spformat/products/rates.py",
    "spformat/measure/tune.py",
    "cli/",
)
"""Who may read os.environ, and only when a call needs it."""

FORMAT_IMPORTS = {
    "bsr": {"blocks"},
    "coo": {"items"},
    "csc": {"items"},
    "csr": {"items"},
    "dbsr": {"blocks", "bsr"},
    "foreign": {"blocks", "bsr", "coo", "csc", "dense", "transposed"},
    "transposed": {"bsr", "csc", "dbsr", "dense"},
    "convert": {"dense", "foreign"},
    "stack": {"composed"},
    "sum": {"composed", "cover"},
    "decompose": {"convert", "sum"},
    "vector_nm": {"vector_nm_pack"},
    "two_four": {"meta_orders"},
}
"""What a file of formats/ may import beside array_methods, base, declare, edges, hooks and the hub (csr)."""


@dataclass(frozen=True)
class Import:
    """One import statement: module "spformat.formats.csr" at module level or inside a function."""

    file: str
    line: int
    module: str
    deferred: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.module}"


def files() -> list[Path]:
    return sorted([*(ROOT / "spformat").rglob("*.py"), *(ROOT / "cli").rglob("*.py")])


def is_module(dotted: str) -> bool:
    path = ROOT / dotted.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


def targets(node: ast.Import | ast.ImportFrom, package: list[str]) -> Iterator[str]:
    """Absolute names of the modules that a statement in ``package`` imports."""
    if isinstance(node, ast.Import):
        yield from (a.name for a in node.names)
        return
    base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
    module = ".".join(filter(None, (base, node.module)))
    for a in node.names:
        below = f"{module}.{a.name}"
        if is_module(below):
            yield below
        elif not a.name.startswith("__"):
            yield module


def named(node: ast.AST, package: str) -> Iterator[str]:
    """Names of modules of ours in a string: a constant that is one, or text after the name of the own package.

    ``f"{__package__}.{layout}_loops"`` names every module of the package that ends so.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        if re.fullmatch(r"(spformat|cli)(\.\w+)+", node.value) and is_module(node.value):
            yield node.value
    elif isinstance(node, ast.JoinedStr) and "__package__" in ast.unparse(node.values[0]):
        rest = [v.value if isinstance(v, ast.Constant) else "*" for v in node.values[1:]]
        pattern = "".join(map(str, rest)).removeprefix(".").replace(".", "/")
        yield from (f"{package}.{path.stem}" for path in (ROOT / package.replace(".", "/")).glob(f"{pattern}.py"))


@functools.cache
def imports() -> tuple[Import, ...]:
    """Every import that runs, and every string that names a module; imports under TYPE_CHECKING do not run."""
    found = []
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        package = list(path.relative_to(ROOT).parent.parts)
        deferred: set[ast.AST] = set()
        tree = ast.parse(path.read_text())
        skipped: set[ast.AST] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                deferred.update(ast.walk(node))
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                skipped.update(ast.walk(node))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom) and node not in skipped:
                found += [Import(name, node.lineno, t, node in deferred) for t in targets(node, package)]
            elif isinstance(node, ast.Constant | ast.JoinedStr) and node not in skipped:
                found += [Import(name, node.lineno, t, True) for t in named(node, ".".join(package))]
    return tuple(found)


def file_of(module: str) -> str:
    """The file of a module or package of ours; "" for any other."""
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.relative_to(ROOT).as_posix() if file.exists() else ""


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """The sets of two or more names that reach each other."""
    reach: dict[str, set[str]] = {}
    for name in arrows:
        seen, todo = set[str](), [name]
        while todo:
            new = arrows.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        reach[name] = seen
    round_trips = {frozenset(b for b in reach[a] if a in reach.get(b, ())) for a in arrows}
    return sorted(sorted(c) for c in round_trips if c)


def place(dotted: str) -> str:
    """The part of spformat a module belongs to: "formats" for "spformat.formats.csr"."""
    parts = dotted.removesuffix(".py").replace("/", ".").removesuffix(".__init__").split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def inside(file: str, homes: tuple[str, ...]) -> bool:
    return any(file == home or (home.endswith("/") and file.startswith(home)) for home in homes)


def test_every_module_has_a_layer() -> None:
    assert {place(p.relative_to(ROOT).as_posix()) for p in files() if "cli" not in p.parts} == set(LEVEL)


def test_imports_lead_downward() -> None:
    wrong = []
    for i in imports():
        if i.file.startswith("spformat/") and i.module.split(".")[0] == "spformat":
            here, there = place(i.file), place(i.module)
            if here != there and LEVEL[there] >= LEVEL[here]:
                wrong.append(str(i))
    assert wrong == []


def test_the_picture_shows_the_imports() -> None:
    """In the picture of docs/index.md a folder imports only folders above it, and each folder has one line."""
    section = (ROOT / "docs" / "index.md").read_text().split("## How the code is laid out")[1]
    order = re.findall(r"^[ |]+(?:\+--> )?([a-z]+) ", section.split("```")[1], re.MULTILINE)
    known = (set(LEVEL) - {"errors", "limits", "opening", "spformat", "__main__"}) | {"cli"}
    assert sorted(order) == sorted(known)
    wrong = []
    for i in imports():
        here = "cli" if i.file.startswith("cli/") else place(i.file)
        there = place(i.module) if i.module.startswith("spformat.") else ""
        if here in order and there in order and here != there and order.index(there) > order.index(here):
            wrong.append(str(i))
    assert wrong == []


def test_no_files_import_in_a_circle() -> None:
    """Imports inside functions count, too: they only hide a circle."""
    arrows: dict[str, set[str]] = {}
    for i in imports():
        there = file_of(i.module)
        if there and there != i.file:
            arrows.setdefault(i.file, set()).add(there)
    assert circles(arrows) == []


def test_strings_that_name_modules_are_seen() -> None:
    """The loader of backends names modules of its own package, and of no other; loops are named by their ending."""
    by_name = [i for i in imports() if i.file == "spformat/backends/__init__.py" and i.module.startswith("spformat.")]
    assert {place(i.module) for i in by_name} == {"arrays", "backends", "errors", "formats", "products"}
    assert "spformat.backends.cuda" in {i.module for i in by_name}
    compiled = {i.module for i in imports() if i.file == "spformat/formats/fast/compiled.py"}
    assert {"spformat.formats.fast.row_loops", "spformat.formats.fast.numba_cache"} <= compiled
    upward = ast.parse("__import__('spformat.backends.cuda')").body[0]
    assert [t for n in ast.walk(upward) for t in named(n, "spformat.formats")] == ["spformat.backends.cuda"]
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"]]


def test_libraries_stay_in_their_places() -> None:
    wrong = [str(i) for i in imports() if not inside(i.file, HOMES.get(i.module.split(".")[0], (i.file,)))]
    assert wrong == []


def test_optional_libraries_are_imported_when_needed() -> None:
    """numba may be imported at the top of its loops, which a plan imports, and torch and transformers at the top of
    spformat.torch and spformat.hf, which only a user imports. So may peft at the top of the module of its adapter, which
    a function imports."""
    lazy = {"cupy", "torch", "transformers", "peft", "nvmath", "cuda", "scipy", "safetensors"}
    allowed = {("torch", "torch"), ("hf", "torch"), ("hf", "transformers")}
    early = [i for i in imports() if i.module.split(".")[0] in lazy and not i.deferred]
    early = [i for i in early if i.file != "spformat/hf/sparse_lora.py"]
    adapters = [i for i in imports() if i.module == "spformat.hf.sparse_lora"]
    assert [i.deferred for i in adapters] == [True]
    assert [str(i) for i in early if (place(i.file), i.module.split(".")[0]) not in allowed] == []


def test_import_of_spformat_is_light() -> None:
    code = "import sys, spformat; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy = {"scipy", "cupy", "numba", "torch", "typer", "rich", "pydantic", "safetensors", "nvmath", "cuda"}
    assert heavy & set(loaded.stdout.split()) == set()


def test_command_line_loads_spformat_only_when_a_verb_runs() -> None:
    wrong = [
        str(i) for i in imports() if i.file.startswith("cli/") and i.module.startswith("spformat") and not i.deferred
    ]
    assert wrong == []


def test_formats_know_only_the_hub() -> None:
    wrong = []
    for i in imports():
        name = Path(i.file).stem
        if Path(i.file).parent.name == "formats" and i.module.startswith("spformat.formats.") and name != "__init__":
            allowed = {
                "array_checks",
                "array_methods",
                "base",
                "checking",
                "declare",
                "dense_input",
                "edges",
                "fields",
                "hooks",
                "kernel_order",
                "refill",
                "row_length",
                "csr",
            } | FORMAT_IMPORTS.get(name, set())
            if i.module.split(".")[2] not in allowed:
                wrong.append(str(i))
    assert wrong == []


def test_backends_and_kernels_do_not_import_each_other() -> None:
    """But a variant may use the launcher it is a variant of, spmm_bsr_sm90a that of spmm_bsr, and the kernel for sums asks
    those of its parts what they expect."""
    wrong = []
    for i in imports():
        parts = i.module.split(".")
        if not i.file.startswith("spformat/backends/") or parts[:2] != ["spformat", "backends"] or len(parts) < 3:
            continue
        here = Path(i.file).relative_to("spformat/backends").parts[0]
        if here == "__init__.py":
            continue
        shared = {"base", "host", Path(here).stem} | ({"cuda"} if here == "vendor.py" else set())
        kernel = here == "cuda" and not i.file.endswith("__init__.py") and parts[-1].startswith("spmm_")
        kernel = kernel and not Path(i.file).stem.startswith((parts[-1], "spmm_sum"))
        if parts[2] not in shared or kernel:
            wrong.append(str(i))
    assert wrong == []


def test_environment_is_read_when_needed_and_nowhere_else() -> None:
    wrong = []
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        tree = ast.parse(path.read_text())
        in_functions = {n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
        for node in ast.walk(tree):
            reads = isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
            if reads and not (node in in_functions and inside(name, ENVIRONMENT)):
                wrong.append(f"{name}:{node.lineno}")
    assert wrong == []


@pytest.mark.parametrize("path", [p.relative_to(ROOT).as_posix() for p in files()])
def test_source_habits(path: str) -> None:
    text = (ROOT / path).read_text()
    tree = ast.parse(text)
    assert [n.lineno for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.names[0].name == "*"] == []
    caught = [ast.unparse(n.type) for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler) and n.type]
    # Where every error becomes an exit code, a line of a report, or a typed one. (CuPy, and the packages that fsspec and
    # huggingface_hub use for a network, have errors of their own and are not imported.)
    if path not in {"cli/main.py", "cli/env.py", "spformat/arrays/library.py", "spformat/checkpoint/transfers.py"}:
        assert "Exception" not in caught
        assert [n.lineno for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler) and n.type is None] == []
    assert re.search(r"\bTODO\b|\bFIXME\b|\bXXX\b", text) is None
