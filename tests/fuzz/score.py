"""Mutation score of the parsers and validators: each change of their code should make some test fail (T24).

Small edits (a comparison, a constant, an operator, a negation, a dropped statement, argument or result) are made one at
a time to the functions below. A forked child compiles the changed function, puts it in the place of the old one in
every module that holds it, and runs the fast tests, cheapest first: what the checks say word for word, good files, then
pytest on ``TESTS``. Nothing is written or imported again, so no cache can hand back the old code. Two controls come
first: with every function compiled anew but unchanged all tests pass, and with the body of each one replaced by an
error of no test's choosing they fail. mutmut and cosmic-ray change whole files and start pytest for each mutant: hours
for these files, converters included. ``python -m fuzz score``.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fuzz import headers, mutants, refusals
from spformat.formats import FORMATS
from spformat.storage.container import load, save

HERE = Path(__file__).parent.parent
TESTS = [
    "test_headers.py",
    "test_descriptors.py",
    "test_parsers.py",
    "test_declarations.py",
    "test_scans.py",
    "test_invariants.py",
    "test_two_four_words.py",
    "test_stfile.py",
    "test_container.py",
]
SLOW = (
    "truncations substitutions official t27 many_threads gpu network bounded many_entries other_memory_layouts "
    "over_the_limit_is_not"
)
CHECKS = r".*\.(check_memory|check_canonical|dims|layout_problems|param_problems|_bad_nibble)|check_inside|check_blocks"
TARGETS = {
    "spformat.limits": r"product|check|check_bytes|using",
    "spformat.storage.stheader": r"length|parse|strict_json|sniff|_.*",
    "spformat.storage.descriptor": r"read|undescribed|sealed|_.*",
    "spformat.storage.stfile": r"Reader\..*",
    "spformat.arrays.scans": r".*",
    "spformat.formats.base": r"Format\.(layout_problems|_dtypes_of|__post_init__|validate|ensure_valid|with_arrays)",
    "spformat.formats.declare": r"ParamDeclaration\..*|plain_int|parse_shape|parse_table",
    "spformat.formats.array_checks": r"array_problems|_dtypes_of",
} | {
    f"spformat.formats.{name}": CHECKS
    for name in "dense csr csc coo bsr dbsr bitmask sr_bcrs ell_buckets vector_nm two_four".split()
}  # fmt: skip
COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.Pow: ast.Mult,
}  # fmt: skip
Edit = tuple[str, Callable[[], None]]


def edits(function: ast.AST) -> Iterator[Edit]:
    """(what changes, a function that changes it) for each mutant; docstrings and annotations stay."""
    for node in ast.walk(function):
        for change in _edits_of(node):
            yield f"line {getattr(node, 'lineno', 0)}: {change[0]}", change[1]


def _edits_of(node: ast.AST) -> Iterator[Edit]:
    def put(field: str, value: Any) -> Callable[[], None]:
        return lambda: setattr(node, field, value)

    match node:
        case ast.Compare(ops=[op, *more]):
            yield f"{ast.unparse(node)}: other comparison", put("ops", [COMPARED[type(op)](), *more])
            if more:
                yield f"{ast.unparse(node)}: other second comparison", put("ops", [op, COMPARED[type(more[0])]()])
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in OPERATORS:
            yield f"{ast.unparse(node)}: other operator", put("op", OPERATORS[type(op)]())
        case ast.BoolOp(op=op):
            yield f"{ast.unparse(node)}: and for or", put("op", ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            yield f"{ast.unparse(node)}: dropped", _become(node, operand)
        case ast.Constant(value=bool() as value):
            yield f"{value}: flipped", put("value", not value)
        case ast.Constant(value=int() as value):
            yield f"{value}: one more", put("value", value + 1)
        case ast.Constant(value=str() as value) if value and not getattr(node, "is_doc", False):
            yield f"{value!r:.40}: other text", put("value", value + "XX")
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield f"if {ast.unparse(test)}: negated", put("test", ast.UnaryOp(ast.Not(), test))
        case ast.Expr(value=ast.Call()) | ast.Raise():
            yield f"{ast.unparse(node)[:60]}: dropped", _become(node, ast.Pass())
        case ast.Return(value=value) if not (
            value is None or (isinstance(value, ast.Constant) and value.value is None)
        ):
            yield f"return {ast.unparse(value)[:60]}: None", put("value", ast.Constant(None))
        case ast.Call(keywords=[_, *_] as keywords):
            for i, keyword in enumerate(keywords):
                if keyword.arg:
                    yield (
                        f"{ast.unparse(node)[:60]}: without {keyword.arg}",
                        put("keywords", keywords[:i] + keywords[i + 1 :]),
                    )


def _become(node: ast.AST, other: ast.AST) -> Callable[[], None]:
    """Turns ``node`` into ``other`` where it stands."""

    def change() -> None:
        place = {k: getattr(node, k) for k in ("lineno", "col_offset", "end_lineno", "end_col_offset")}
        node.__class__ = type(other)
        node.__dict__.clear()
        node.__dict__.update(other.__dict__ | place)

    return change


def functions(module: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """(qualified name, definition) of the functions of a module that are measured, without annotations."""
    tree = ast.parse(Path(str(importlib.import_module(module).__file__)).read_text())
    for top in tree.body:
        inner = top.body if isinstance(top, ast.ClassDef) else [top]
        for f in inner:
            if not isinstance(f, ast.FunctionDef):
                continue
            name = f"{top.name}.{f.name}" if isinstance(top, ast.ClassDef) else f.name
            if not re.fullmatch(TARGETS[module], name) or name.endswith(("__repr__", "__enter__")):
                continue
            f.returns = None
            for a in (*f.args.args, *f.args.kwonlyargs):
                a.annotation = None
            for node in ast.walk(f):
                if isinstance(node, ast.AnnAssign):
                    node.annotation = ast.Name("int", ast.Load())
            if isinstance(f.body[0], ast.Expr) and isinstance(f.body[0].value, ast.Constant):
                f.body[0].value.is_doc = True  # type: ignore[attr-defined]
            yield name, f


def install(module: str, name: str, function: ast.FunctionDef) -> None:
    """Put a changed function where the old one is, also where it was imported by name, by tests too."""
    found = sys.modules[module]
    tree = ast.fix_missing_locations(ast.Module([function], []))
    scope: dict[str, Any] = {}
    exec(compile(tree, f"<{module}.{name}>", "exec", flags=annotations_flag()), found.__dict__, scope)
    owner, _, attribute = name.rpartition(".")
    made = scope[attribute]
    if owner:
        setattr(getattr(found, owner), attribute, made)
        return
    old = getattr(found, attribute)
    for other in list(sys.modules.values()):
        for key, value in list(getattr(other, "__dict__", {}).items()):
            if value is old:
                setattr(other, key, made)


def annotations_flag() -> int:
    """The compiler flag of ``from __future__ import annotations``."""
    import __future__

    return __future__.annotations.compiler_flag


class Suite:
    """The fast tests, in the order of their price."""

    def __init__(self, folder: Path) -> None:
        self.stored = json.loads(refusals.STORED.read_text())
        self.files = {f.name: refusals.Files(f.name, folder) for f in FORMATS}
        self.folder = folder
        self.good = folder / "good"

    def said(self, section: str) -> None:
        """What the checks say, word for word."""
        for number, seed, refusal in self.stored[section]:
            found = refusals.of_header(seed) if section == "header" else self.files[section].refusal(number, seed)
            assert json.loads(json.dumps(found)) == refusal

    def accepted(self) -> None:
        """Good headers and files."""
        assert {headers.check(data) for data in headers.seeds()[:-1]} == {"accepted"}
        for fmt in FORMATS:
            for f in mutants.bases(fmt):
                save(self.good, {"w": f}, overwrite=True)
                assert load(self.good)["w"] == f

    def rest(self) -> None:
        """The unit tests."""
        chosen = " and ".join(f"not {word}" for word in SLOW.split())
        flags = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", chosen, f"--rootdir={HERE.parent}"]
        code = pytest.main([*flags, f"--basetemp={self.folder}/tmp", *(str(HERE / t) for t in TESTS)])
        assert code == 0, code

    def stages(self, module: str) -> Iterator[tuple[str, Callable[[], None]]]:
        """(name, tests that raise AssertionError, or whatever a broken function raises) in the order they run."""
        last = module.rpartition(".")[2].replace("_", "-")
        first = [last] if last in self.stored else ["header"]
        for section in [*first, *(s for s in self.stored if s not in first)]:
            yield "words", lambda section=section: self.said(section)  # type: ignore[misc]
        yield "good files", self.accepted
        yield "unit tests", self.rest


ANSWERS = ("survived", "words", "good files", "unit tests")
"""What became of a mutant: which tests noticed it. Beside them "hung or died" and the runner's own failure."""
SECONDS, WALL, MEMORY = 60, 600, 8 << 30


def outcome(suite: Suite, module: str, changes: Callable[[], None]) -> str:
    """One of ``ANSWERS``, or "hung or died", for the tests with some changes, in a process of its own."""
    pid = os.fork()
    if pid == 0:
        code = 99  # the runner failed, not a test
        with contextlib.suppress(BaseException):
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))  # an endless loop is noticed
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            signal.alarm(WALL)
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, 1)
            os.dup2(sink, 2)
            changes()
            for name, tests in suite.stages(module):
                code = ANSWERS.index(name)
                tests()
            code = 0
        os._exit(code)
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    shutil.rmtree(suite.folder / "tmp", ignore_errors=True)
    if ended == 99:
        raise RuntimeError(f"score: a mutant of {module} could not be put in place")
    return "hung or died" if ended < 0 else ANSWERS[ended]


def controls(suite: Suite, only: str) -> None:
    """RuntimeError unless the unchanged functions pass, compiled anew, and each one is missed when it is gone."""
    chosen = [(m, name, f) for m in TARGETS if re.search(only, m) for name, f in functions(m)]

    def unchanged() -> None:
        for m, name, f in chosen:
            install(m, name, f)

    if (found := outcome(suite, "unchanged", unchanged)) != "survived":
        raise RuntimeError(f"score: the tests fail without a mutant: {found}")
    for m, name, f in chosen:
        gone = copy.deepcopy(f)
        gone.body = ast.parse("raise KeyboardInterrupt('score')").body
        if outcome(suite, m, lambda m=m, name=name, gone=gone: install(m, name, gone)) == "survived":  # type: ignore[misc]
            print(f"  not tested at all: {m}.{name}", flush=True)


def main(arguments: list[str]) -> int:
    """The command; 1 if fewer than nine in ten mutants are noticed."""
    parser = argparse.ArgumentParser("fuzz score", description=__doc__)
    parser.add_argument("--only", default="", help="modules whose name this regular expression finds")
    parser.add_argument("--every", type=int, default=1, help="each n-th mutant")
    parser.add_argument("--again", type=Path, help="only the mutants that survived in this output of an earlier run")
    given = parser.parse_args(arguments)
    again = {line for line in given.again.read_text().splitlines() if "survived: " in line} if given.again else None
    total = Counter[str]()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        suite, number = Suite(Path(folder)), 0
        for _, tests in suite.stages("unchanged"):
            tests()
        shutil.rmtree(suite.folder / "tmp")
        controls(suite, given.only)
        for module in [m for m in TARGETS if re.search(given.only, m)]:
            start, seen = time.time(), Counter[str]()
            for name, function in functions(module):
                for i in range(sum(1 for _ in edits(function))):
                    number += 1
                    changed = copy.deepcopy(function)
                    what, change = list(edits(changed))[i]
                    line = f"  survived: {module}.{name}: {what}".replace("\n", " ")
                    if number % given.every or (again is not None and line not in again):
                        continue
                    change()
                    found = outcome(suite, module, lambda: install(module, name, changed))  # noqa: B023
                    seen[found] += 1
                    if found == "survived":
                        print(line, flush=True)
            total += seen
            print(f"score: {module}: {share(seen)}, {dict(seen)}, {time.time() - start:.0f} s", flush=True)
    print(f"score: {share(total)}: {dict(total)}")
    return int(total["survived"] > 0.1 * total.total())


def share(seen: Counter[str]) -> str:
    """How many were noticed, in words."""
    noticed = seen.total() - seen["survived"]
    return f"{noticed} of {seen.total()} mutants noticed ({noticed / max(1, seen.total()):.1%})"
