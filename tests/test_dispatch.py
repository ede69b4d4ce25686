"""Decisions as tables of Problems, none of which needs a GPU; what plans may share and keep."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import re
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import spformat as sf
from spformat import backends
from spformat.arrays.library import span
from spformat.dispatch import cost, select
from spformat.dispatch.api import run
from spformat.products import rates
from spformat.products.plan import MemoryOf, Plan
from spformat.products.problem import Problem, result_dtype


def problem(fmt: str, *, n: int = 512, sm: int | None = 90, dtype: str = "bfloat16", **changes: Any) -> Problem:
    cls = sf.by_name(fmt)
    given = changes.pop("params", {"n": 2, "m": 4, "vector_length": 32} if fmt == "vector-nm" else {})
    fields: dict[str, Any] = {
        "format": fmt, "params": tuple(cls.resolve_params({"max_width": 8} if fmt == "ell-buckets" else given).items()),
        "M": 4096, "K": 4096, "n": n, "nnz": 1_600_000,
        "a_dtype": dtype, "b_dtype": dtype, "out_dtype": dtype, "device": "cuda" if sm else "cpu", "sm": sm,
    }  # fmt: skip
    return Problem.product(**(fields | changes))


@pytest.mark.parametrize("fmt", [f.name for f in sf.FORMATS])
@pytest.mark.parametrize("sm", [80, 86, 90, 100])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_format_has_a_kernel_on_every_supported_gpu(fmt: str, sm: int, dtype: str) -> None:
    if dtype not in sf.by_name(fmt).value_dtypes:
        pytest.skip(f"{fmt} does not hold {dtype}")
    for n in (1, 16, 512, 4096):
        for layout in ("row", "col"):
            e = sf.explain(problem(fmt, sm=sm, dtype=dtype, n=n, b_layout=layout))
            assert e.chosen is not None, str(e)
            own = ("cuda.", "vendor.") if fmt in ("csr", "dense") else ("cuda.",)
            own = ("composed.same_arrays",) if fmt in ("coo", "csc") else own  # by the kernels of CSR
            assert e.chosen.startswith((*own, "composed.copied_operands"))
            assert any(a and a.kernel.startswith(own) for a in e.answers)


def test_an_older_gpu_is_refused_with_its_name() -> None:
    e = sf.explain(problem("bsr", sm=75))
    assert e.chosen is None
    assert "sm_75" in str(e)


@pytest.mark.parametrize("fmt", [f.name for f in sf.FORMATS])
@pytest.mark.parametrize("sides", [("strided", "row"), ("row", "strided"), ("col", "strided")])
def test_no_kernel_on_a_device_takes_operands_without_unit_stride(fmt: str, sides: tuple[str, str]) -> None:
    for dtype in set(sf.by_name(fmt).value_dtypes) & {"bfloat16", "float16", "float32", "float64"}:
        for n in (8, 512):
            e = sf.explain(problem(fmt, dtype=dtype, n=n, b_layout=sides[0], out_layout=sides[1]))
            assert e.chosen is None, str(e)
            assert all("stride" in str(a) or "row- or column-major" in str(a) for a in e.answers
                       if a.kernel.startswith(("cuda.", "vendor.")))  # fmt: skip


@pytest.mark.parametrize("fmt", ["dense", "csr", "two-four"])
def test_libraries_take_bfloat16_from_sm_80_on(fmt: str) -> None:
    answers = {a.kernel: a for a in sf.explain(problem(fmt, sm=75)).answers}
    assert all("needs sm_80" in str(a) for name, a in answers.items() if name.startswith("vendor."))
    if fmt != "two-four":
        assert str(sf.explain(problem(fmt, sm=75, dtype="float16")).chosen).startswith("vendor.")


def test_the_trace_lists_every_kernel_with_reasons() -> None:
    x = np.eye(8, dtype=np.float32)
    e = sf.explain(sf.convert(x, "csr"), x)
    names = [a.kernel for a in e.answers]
    assert "cpu.spmm_csr" in names
    assert "reference.spmm" in names
    assert any(n.startswith("cuda.") for n in names)
    rejected = [a for a in e.answers if not a]
    assert rejected
    assert all(a.reasons for a in rejected)
    text = str(e)
    assert "use .to('cuda')" in text or "move them with .to('cuda')" in text
    assert text.index("cpu.spmm_csr: accepted") < text.index("reference.spmm: accepted")


@pytest.mark.parametrize("name", [3, 0, True, b"cpu", ["cpu"], ("cpu",), {}])
def test_what_is_no_name_of_a_backend(name: Any) -> None:
    a, x = sf.convert(np.eye(8, dtype=np.float32), "csr"), np.eye(8, 4, dtype=np.float32)

    def within_a_block() -> None:
        with sf.use_backend(name):
            sf.spmm(a, x)

    for call in (
        lambda: sf.spmm(a, x, backend=name),
        lambda: sf.linear(x.T, a, backend=name),
        lambda: sf.plan(a, backend=name),
        lambda: sf.explain(a, backend=name),
        lambda: sf.recommend(a, backend=name),
        lambda: run("spmm", a, x, backend=name),
        within_a_block,
    ):
        with pytest.raises(sf.errors.UsageError, match="backend: expected the name of a backend or kernel") as refused:
            call()
        assert repr(name) in str(refused.value)


def test_a_named_backend_never_falls_back() -> None:
    x = np.eye(4, dtype=np.float32)
    a = sf.convert(x, "csr")
    with pytest.raises((sf.errors.DeviceUnavailable, sf.errors.NoKernelError)) as e:
        sf.spmm(a, x, backend="cuda")
    assert e.value.exit_code == 69
    with pytest.raises(sf.errors.UsageError, match="unknown backend 'cudaa'"):
        sf.spmm(a, x, backend="cudaa")


def test_a_kernel_can_be_named() -> None:
    x = np.eye(4, dtype=np.float32)
    a = sf.convert(x, "csr")
    assert sf.plan(a, n=4, backend="reference.spmm").kernel == "reference.spmm"
    np.testing.assert_array_equal(sf.spmm(a, 2 * x, backend="cpu.spmm_csr"), 2 * x)
    p = problem("vector-nm", dtype="float32", n=4096)
    assert sf.explain(p).chosen == "cuda.spmm_vector_nm_tma_sm90a"  # three TF32 products
    named = sf.explain(p, backend="cuda.spmm_vector_nm")  # float32 products on the CUDA cores
    assert [answer.kernel for answer in named.answers if answer] == ["cuda.spmm_vector_nm"] == [named.chosen]
    with sf.use_backend("reference.spmm"):
        assert sf.plan(a, n=4).kernel == "reference.spmm"
    with pytest.raises(sf.errors.NoKernelError, match=r"cpu\.spmm_bsr: does not take format csr"):
        sf.spmm(a, x, backend="cpu.spmm_bsr")
    with pytest.raises(sf.errors.UsageError, match=r"unknown kernel .cpu\.spmm.*cpu\.spmm_csr"):
        sf.spmm(a, x, backend="cpu.spmm")


def test_a_cupy_that_cannot_start_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy creates its folder of compiled kernels when it is imported; products on the host do not import it."""
    (tmp_path / "cupy.py").write_text("raise PermissionError(13, 'Permission denied: /nowhere')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    cuda = backends.get("cuda")
    missing = sys.modules[type(cuda).__module__]._missing  # type: ignore[attr-defined]
    missing.cache_clear()
    try:
        x = np.eye(3, dtype=np.float32)
        a = sf.convert(x, "csr")
        np.testing.assert_array_equal(sf.spmm(a, x), x)
        (why,) = cuda.missing()
        assert "CuPy cannot start" in why
        assert "Permission denied: /nowhere" in why
        assert why in str(sf.explain(a))
    finally:
        missing.cache_clear()


def test_selection_order(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.eye(4, dtype=np.float32)
    a = sf.convert(x, "csr")

    def runs_on(kernel: str) -> bool:
        return sf.plan(a, n=4).kernel == sf.explain(a).chosen == sf.explain(a, x).chosen == kernel

    assert runs_on("cpu.spmm_csr")
    monkeypatch.setenv("SPFORMAT_BACKEND", "reference")
    assert runs_on("reference.spmm")
    assert sf.explain(problem("csr")).chosen.startswith("cuda.")  # of another machine
    with sf.use_backend("cpu"):
        assert runs_on("cpu.spmm_csr")
        assert sf.explain(a, backend="reference").chosen == "reference.spmm"
        assert sf.plan(a, n=4, backend="reference").kernel == "reference.spmm"


def test_plans_live_and_die_with_their_matrix() -> None:
    x = np.eye(6, dtype=np.float32)
    a = sf.convert(x, "bitmask")
    sf.spmm(a, x)
    before = len(a._plans)
    sf.spmm(a, x)
    assert len(a._plans) == before
    there = weakref.ref(a)
    p = sf.plan(a, n=6)
    del a
    gc.collect()
    assert there() is None
    np.testing.assert_array_equal(p(x), x)


def test_plans_of_ever_new_operands_are_not_all_kept() -> None:
    a = sf.convert(np.eye(4, dtype=np.float32), "csr")
    made = sf.spmm(a, np.ones((4, 2), np.float32))
    a._plans.update({("filled", i): None for i in range(4096)})
    kept = len(a._plans)
    for pitch in range(3, 9):
        assert (sf.spmm(a, np.ones((4, pitch), np.float32)[:, :2]) == made).all()
    assert len(a._plans) <= kept + 1  # one Problem has all these pitches


def test_unvalidated_matrices_are_validated_before_a_kernel_sees_them() -> None:
    x = np.eye(6, dtype=np.float32)
    a = sf.convert(x, "csr")
    bad = a.with_arrays(indices=np.full(6, 99, np.int32))
    for call in (lambda: sf.spmm(bad, x), lambda: sf.plan(bad, n=6), lambda: bad.to_dense(), lambda: bad.to_scipy()):
        with pytest.raises(
            sf.errors.IndexBoundsError, match=r"csr: indices\[0\]: expected an index in \[0, 6\), got 99"
        ):
            call()


@pytest.mark.parametrize(
    ("a", "b", "out"),
    [("float32", "float32", "float32"), ("bfloat16", "bfloat16", "bfloat16"), ("float16", "bfloat16", "float32"),
     ("bfloat16", "float32", "float32"), ("float64", "float16", "float64"), ("int8", "int8", "int32"),
     ("int8", "float16", "float16"), ("float8_e4m3fn", "float8_e4m3fn", "float32"),
     ("float8_e5m2", "bfloat16", "bfloat16")],
)  # fmt: skip
def test_result_types(a: str, b: str, out: str) -> None:
    assert result_dtype(a, b) == out
    assert result_dtype(b, a) == out


def test_operands_that_do_not_fit() -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    a = sf.convert(x, "csr")
    with pytest.raises(ValueError, match=r"B: expected 4 rows"):
        sf.spmm(a, np.ones((3, 2), np.float32))
    with pytest.raises(ValueError, match=r"out: expected shape \(3, 2\)"):
        sf.spmm(a, np.ones((4, 2), np.float32), out=np.ones((3, 3), np.float32))
    with pytest.raises(ValueError, match="overlaps"):
        both = np.ones((4, 4), np.float32)
        sf.spmm(sf.convert(np.eye(4, dtype=np.float32), "csr"), both, out=both)
    np.testing.assert_array_equal(sf.spmm(a, np.ones(4, np.float32)), x.sum(axis=1))
    np.testing.assert_array_equal(sf.spmm(x, np.ones((4, 2), np.float32)), x @ np.ones((4, 2), np.float32))


def test_out_must_not_touch_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The overlap is checked before every run, unless the plan checks it itself and names the arrays that it reads."""
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    a = sf.convert(x, "bsr", blocksize=(8, 8))
    made = sf.plan(a, n=8)
    for out in (a.data[0], a.data[0, :, ::-1], a.data.reshape(-1)[4:52].reshape(8, 6)):
        with pytest.raises(ValueError, match="out overlaps the arrays of A"):
            made.run(x[:, : out.shape[1]], out)
    room = np.zeros(128, np.float32)
    room[32:96] = x.reshape(-1)
    inside = sf.plan(sf.BSR(shape=(8, 8), blocksize=(8, 8), indptr=a.indptr, indices=a.indices,
                            data=room[32:96].reshape(1, 8, 8)), n=8)  # fmt: skip
    for out in (room[:40].reshape(8, 5), room[88:].reshape(8, 5)):
        with pytest.raises(ValueError, match="out overlaps the arrays of A"):
            inside.run(x[:, :5], out)
    for out in (room[:32].reshape(8, 4), room[96:].reshape(8, 4)):  # beside it
        np.testing.assert_array_equal(inside.run(x[:, :4], out), x @ x[:, :4])
    kernel = next(k for k in backends.get("cpu").kernels() if k.name == made.kernel)
    reads = MemoryOf(a)
    monkeypatch.setattr(type(kernel), "plan", lambda self, a, p: Plan(self.name, p, print, reads=reads))
    looks_itself = sf.plan(sf.BSR.from_csr(a.to_csr(), blocksize=(8, 8)), n=8)
    assert looks_itself.run is print
    assert looks_itself.reads is reads


@pytest.mark.parametrize("looks_itself", [False, True])
def test_memory_that_a_plan_calls_the_matrix_is_not_given_to_others(
    looks_itself: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a kernel does not keep an array, another array at its address must not be refused as ``out``."""
    a = sf.convert(np.eye(8, dtype=np.float32), "bsr", blocksize=(8, 8))
    kernel = next(k for k in backends.get("cpu").kernels() if k.name == "cpu.spmm_bsr")

    def plan(self: Any, a: Any, p: Problem) -> Plan:
        reads = MemoryOf(a.alias()) if looks_itself else None
        return Plan(self.name, p, print, reads=reads)

    monkeypatch.setattr(type(kernel), "plan", plan)
    made = sf.plan(a, n=8, backend="cpu")
    arrays = [weakref.ref(v) for v in a.arrays().values()]
    matrix = weakref.ref(a)
    del a
    gc.collect()
    assert matrix() is None
    assert [held() is not None for held in arrays] == [True] * 3
    del made
    gc.collect()
    assert [held() for held in arrays] == [None] * 3


def test_where_an_array_on_a_device_lies() -> None:
    for shape, strides, wanted in (
        ((3, 5), (20, 4), (1000, 1060)), ((3, 5), (40, 4), (1000, 1100)), ((3,), (-4,), (992, 1004)),
        ((3, 5), (4, -12), (952, 1012)),
    ):  # fmt: skip
        x = SimpleNamespace(data=SimpleNamespace(ptr=1000), itemsize=4, shape=shape, strides=strides)
        assert span(x) == wanted


def test_what_kernels_ask_more_than_once_is_answered_once_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product with a stored transpose is asked for by two methods of its kernel; the rates by every kernel."""
    p = Problem.product("csr", (), 64, 64, 8, 100, "float32", "float32", "float32", operation="spmm_transposed")
    counts: dict[str, list[str]] = {"_ask": [], "_current_tables": []}
    for module, name in ((select, "_ask"), (rates, "_current_tables")):
        real = getattr(module, name)
        spy = lambda q, *rest, real=real, name=name: counts[name].append(q.operation) or real(q, *rest)  # noqa: E731
        monkeypatch.setattr(module, name, spy)
    for calls in (1, 2):
        trace = sf.explain(p)
        assert "composed.transposed_copy: accepted" in str(trace)
        assert counts["_ask"] == ["spmm_transposed", "spmm"] * calls
        assert counts["_current_tables"] == ["spmm_transposed"] * calls


def test_a_problem_of_another_process_is_the_same_key() -> None:
    """Texts have other hashes there. That of a problem is kept with it, and must not go along."""
    p = problem("csr")
    hash(p)
    there = "import pickle, sys; p = pickle.load(sys.stdin.buffer); print(p in {p.changed(n=p.n)})"
    ran = subprocess.run([sys.executable, "-c", there], input=pickle.dumps(p), capture_output=True, check=True)
    assert ran.stdout == b"True\n"
    assert vars(copy.copy(p)).keys() == {f.name for f in dataclasses.fields(p)}


def test_plan_is_a_value() -> None:
    x = np.eye(5, dtype=np.float32)
    p = sf.plan(sf.convert(x, "bsr", blocksize=(2, 2)), n=5)
    assert isinstance(p, Plan)
    assert "cpu.spmm_bsr" in repr(p)
    for n in (1, 3, 100):
        B = np.random.default_rng(n).standard_normal((5, n)).astype(np.float32)
        out = np.empty((5, n), np.float32)
        assert p(B, out=out) is out
        np.testing.assert_array_equal(out, B)


def test_a_product_on_the_host_imports_no_kernels_of_gpus() -> None:
    code = (
        "import sys, numpy as np, spformat as sf\n"
        "a = sf.convert(np.eye(8, dtype=np.float32), 'csr')\n"
        "assert (a @ np.ones((8, 3), np.float32) == 1).all()\n"
        "assert 'spformat.backends.cuda' not in sys.modules\n"
        "assert 'cuda.' in str(sf.explain(a))\n"
    )
    r = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert r.returncode == 0, r.stderr


HYPOTHETICAL: dict[str, Any] = {
    "format": "bsr", "params": (("blocksize", (32, 32)),), "M": 64, "K": 64, "n": 16, "nnz": 2048, "a_dtype": "float32",
    "b_dtype": "float32", "out_dtype": "float32", "device": "cuda", "sm": 90,
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"format": "bsx"}, "unknown format 'bsx'; did you mean 'bsr'?"),
        ({"format": "vector-nm", "params": ()}, "vector-nm: parameter n is required: an int in 1 .. 256"),
        ({"format": "ell-buckets", "params": ()}, "ell-buckets: expected all params of a matrix, got no max_width"),
        ({"params": (("blocksize", (0, 4)),)}, "bsr: blocksize: expected two ints in 1 .. 1024, got (0, 4)"),
        (
            {"params": {"blocksize": (4, 4)}},
            "params: expected pairs such as (('blocksize', (32, 32)),), got {'blocksize'",
        ),
        ({"params": (("blocksize", 4, 4),)}, "params: expected pairs such as"),
        ({"a_dtype": "floaty"}, "dtype floaty is not a value type; use one of float64"),
        ({"b_dtype": "int32"}, "dtype int32 is not a value type"),
        ({"out_dtype": "complex64"}, "dtype complex64 is not a value type"),
        ({"M": -1}, "expected sizes in 0 .. 2^48-1, got shape (-1, 64)"),
        ({"n": 1.5}, "expected sizes in 0 .. 2^48-1, got shape (64, 1.5)"),
        ({"nnz": "3"}, "expected a number of stored values, got '3'"),
        ({"device": "tpu"}, "expected device 'cpu' and no sm, or 'cuda' and an sm such as 90, got 'tpu' and 90"),
        ({"sm": "90"}, "got 'cuda' and '90'"),
    ],
    ids=str,
)
def test_a_hypothetical_problem_is_checked(wrong: dict[str, Any], text: str) -> None:
    """KeyError, ZeroDivisionError and TypeError came from the kernels that were asked."""
    p = Problem.product(**HYPOTHETICAL | wrong)
    for ask in (sf.explain, lambda p: cost.estimate(p, 16)):
        if "n" not in wrong or ask is sf.explain:  # estimate is given its own n
            with pytest.raises((sf.errors.UsageError, sf.errors.ArrayError), match=re.escape(text)):
                ask(p)


def test_a_hypothetical_problem_has_the_usual_params_and_names_of_types() -> None:
    p = Problem.product(**HYPOTHETICAL)
    short = {
        "params": (),
        "a_dtype": np.float32,
        "b_dtype": "fp32",
        "out_dtype": np.dtype("float32"),
        "M": np.int64(64),
    }
    assert sf.explain(Problem.product(**HYPOTHETICAL | short)).problem == p == sf.explain(p).problem
    assert sf.explain(p.changed(out_dtype="int32")).chosen is None
