"""What an addition costs: a format, an edge, an operation and a kernel, all of each in this file."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import laws
import numpy as np
import pytest
import stand_in_cupy
from cases import CASES, params_of
from catalogue import command

import spformat as sf
from spformat import backends
from spformat.arrays import scans
from spformat.arrays.dtypes import bits, nonzero_mask
from spformat.arrays.library import Array, index_dtype, namespace
from spformat.dispatch import api, select
from spformat.errors import NoKernelError, OrderError, PatternError, UsageError
from spformat.formats import composed, edges, registered, unregister
from spformat.formats.base import INDEX, VALUE, Format, array
from spformat.formats.composed import Composed
from spformat.formats.declare import part
from spformat.formats.edges import CHECK, DENSE, Edge
from spformat.preprocess.structure import analyse
from spformat.products import operations
from spformat.products.kernel import Kernel, reasons, spmm_of
from spformat.products.operation import Items, Operation
from spformat.products.plan import Plan
from spformat.products.problem import Operand, Problem


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class COO(Format):
    """Coordinates: row, column and value of every nonzero, in row-major order."""

    name = "coo"

    rows: Array = array(INDEX, "nnz", bound="M-1", doc="row, not falling")
    cols: Array = array(INDEX, "nnz", bound="K-1", doc="column, strictly increasing in a row")
    data: Array = array(VALUE, "nnz", doc="value")

    def dims(self) -> dict[str, int]:
        return {"M-1": self.shape[0] - 1, "K-1": self.shape[1] - 1}

    @classmethod
    def array_specs(
        cls, shape: tuple[int, int], dtype: np.dtype[Any], nnz: int, params: dict[str, Any]
    ) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        rows, cols = (index_dtype(n - 1) for n in shape)
        return {"rows": (rows, (nnz,)), "cols": (cols, (nnz,)), "data": (dtype, (nnz,))}

    def check_memory(self) -> None:
        scans.within(self, "rows", self.shape[0])
        scans.within(self, "cols", self.shape[1])

    def check_canonical(self) -> None:
        key = self.rows * np.int64(self.shape[1]) + self.cols
        scans.require_none(self, key[1:] <= key[:-1], "cols", "row-major order, no place twice", OrderError, 1)
        scans.require_none(self, ~nonzero_mask(self.data), "data", "no stored zero", PatternError)

    @classmethod
    def _from_csr(cls, a: sf.CSR, **params: Any) -> Self:
        a = a.without_zeros()
        rows = a.rows().astype(index_dtype(a.shape[0] - 1))
        return cls.trusted(shape=a.shape, rows=rows, cols=a.indices, data=a.data)

    def _to_csr(self) -> sf.CSR:
        return sf.CSR.from_coordinates(self.shape, self.rows, self.cols, self.data)


# ------------------------------------------------------------------ an edge of the host: one loop, one line


@functools.cache
def loop() -> Any:
    """The compiled loop; numba is imported when the first large array comes."""
    import numba

    @numba.njit(nogil=True)
    def items(x: Any, zero_mask: Any, rows: Any, cols: Any, data: Any) -> int:
        at = 0
        for i in range(x.shape[0]):
            for j in range(x.shape[1]):
                if x[i, j] & zero_mask:
                    if at < rows.size:
                        rows[at], cols[at], data[at] = i, j, x[i, j]
                    at += 1
        return at

    return items


def coo_from_dense(x: Array, params: dict[str, Any]) -> COO:
    """Array [M, K] -> COO."""
    raw, (M, K) = bits(x), x.shape
    mask = raw.dtype.type(sf.formats.base.value_type(x.dtype).zero_mask)
    nothing = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, raw.dtype)
    nnz = loop()(raw, mask, *nothing)
    rows, cols = np.empty(nnz, index_dtype(M - 1)), np.empty(nnz, index_dtype(K - 1))
    data = np.empty(nnz, raw.dtype)
    loop()(raw, mask, rows, cols, data)
    return COO.trusted(shape=(M, K), rows=rows, cols=cols, data=data.view(x.dtype))


HOST = Edge(DENSE, "coo", "cpu", coo_from_dense, lambda x, elements: elements >= 64)


# ------------------------------------------------------------------ an edge of a device: one kernel, one line


SCATTER = r"""
extern "C" __global__ void scatter(const int* rows, const int* cols, const float* data, int nnz, long long K,
                                   float* out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < nnz) out[rows[i] * K + cols[i]] = data[i];
}
"""


def coo_to_dense_cuda(a: COO, params: dict[str, Any]) -> Array | None:
    """COO -> array [M, K]; float32 with 32-bit indices, the general code takes the rest."""
    import cupy

    if a.dtype != np.float32 or a.rows.dtype != np.int32 or a.cols.dtype != np.int32:
        return None
    out = a.empty_dense()
    if a.data.size:
        kernel = cupy.RawKernel(SCATTER, "scatter")
        nnz = a.data.size
        kernel((-(-nnz // 256),), (256,), (a.rows, a.cols, a.data, np.int32(nnz), np.int64(a.shape[1]), out))
    return out


DEVICE = Edge("coo", DENSE, "cuda", coo_to_dense_cuda)


@pytest.fixture
def coo(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[COO]]:
    """The format and its edges, registered for one test."""
    sf.register(COO)
    edges.register(HOST, DEVICE)
    yield COO
    edges.unregister(HOST, DEVICE)
    unregister("coo")


def test_a_format_is_listed_while_it_is_registered() -> None:
    """The lists are remembered; so are the formats that the reference and a stored transpose take."""

    def names() -> list[set[str]]:
        reference = next(k for k in backends.get("reference").kernels() if k.name == "reference.spmm")
        copy = next(k for k in backends.get("composed").kernels() if k.name == "composed.transposed_copy")
        return [{f.name for f in registered()}, {f for _, f in reference.takes}, {f for _, f in copy.takes}]

    before = names()
    sf.register(COO)
    try:
        assert names() == [known | {"coo"} for known in before]
    finally:
        unregister("coo")
    assert names() == before


def test_a_composed_format_is_listed_while_it_is_registered() -> None:
    @dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
    class Stack(Composed):
        name = "stack"
        parts: tuple[Format, ...] = part(many=True)

    listed, others = composed(), registered()
    sf.register(Stack)
    try:
        assert composed() == (*listed, Stack)
        assert registered() == others
    finally:
        unregister("stack")
    assert composed() == listed


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
def test_the_laws_hold_for_the_format(coo: type[COO], case: str, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("numba")
    x = CASES[case](dtype)
    a = laws.check_roundtrip(coo, {}, x)
    assert a is not None
    laws.check_edge(coo, {}, x)
    laws.check_container(a, tmp_path)
    whole = laws.integers(x)
    laws.check_spmm(coo.from_dense(whole), whole, "reference", 3, np.random.default_rng(0))
    assert a.T.to_csr() == sf.CSR.from_dense(np.ascontiguousarray(a.to_dense().T))


def test_the_loop_runs_where_it_is_worth_it(coo: type[COO], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    seen: list[tuple[int, ...]] = []
    original = loop()
    monkeypatch.setitem(globals(), "loop", lambda: lambda x, *rest: seen.append(x.shape) or original(x, *rest))
    sf.convert(np.eye(4, dtype=np.float32), "coo")
    assert seen == []
    a = sf.convert(np.eye(8, dtype=np.float32), "coo")
    assert seen == [(8, 8), (8, 8)]
    assert a.rows.tolist() == list(range(8))  # type: ignore[attr-defined]


def test_the_edge_of_the_device_runs_for_arrays_there(coo: type[COO], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: the kernel is a stand-in that writes what it is asked to, the rest is as on a device."""
    cupy: Any = stand_in_cupy.module()
    launched: list[tuple[Any, ...]] = []

    def kernel(grid: Any, block: Any, arguments: tuple[Any, ...]) -> None:
        rows, cols, data, nnz, K, out = arguments
        launched.append((grid, block, int(nnz), int(K)))
        out[rows, cols] = data

    cupy.RawKernel = lambda source, name: kernel
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    x = np.array([[0, 1, 0], [2, 0, 3]], np.float32)
    a = sf.convert(x, "coo")
    np.testing.assert_array_equal(a.to_dense(), x)
    assert launched == []
    np.testing.assert_array_equal(a.to("cuda").to_dense(), x)
    assert launched == [((1,), (256,), 3, 3)]
    half = sf.convert(x.astype(np.float16), "coo").to("cuda")
    assert coo_to_dense_cuda(half, {}) is None  # type: ignore[arg-type] # the general code takes it
    assert len(launched) == 1


@pytest.mark.gpu
def test_the_edge_on_a_gpu(coo: type[COO]) -> None:
    for name, make in CASES.items():
        a = coo.from_dense(make("float32"))
        back = a.to("cuda").to_dense()
        assert namespace(back).__name__ == "cupy"
        assert laws.same(back.get(), a.to_dense()), name


def test_the_device_check_may_be_an_edge_too(coo: type[COO], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    scan = Edge("coo", CHECK, "cpu", lambda a, params: asked.append(a) or True)
    a = sf.convert(np.eye(4, dtype=np.float32), "coo")
    edges.register(scan)
    try:
        a.with_arrays().validate()
    finally:
        edges.unregister(scan)
    assert len(asked) == 1


def test_it_is_converted_inspected_and_chosen_from_by_name(coo: type[COO], tmp_path: Path) -> None:
    x = np.zeros((40, 60), np.float32)
    x[::7, ::11] = 1
    s = analyse(x)
    assert "coo" in s.candidates()
    assert s.sizes()["coo"] == sf.convert(x, "coo").nbytes
    sf.save_dense(tmp_path / "w.safetensors", {"w": x})
    (row,) = json.loads(command("inspect", tmp_path / "w.safetensors", "--json").out)["tensors"]
    assert row["sizes"]["coo"] == 36 * 12
    assert command("convert", tmp_path / "w.safetensors", tmp_path / "out", "--to", "coo").code == 0
    (file,) = (tmp_path / "out").glob("*.safetensors")
    assert sf.load(file)["w"] == sf.convert(x, "coo")
    assert command("validate", tmp_path / "out").code == 0
    assert "coo" in command("formats").out
    one = np.zeros((1000, 1), np.float32)
    one[500] = 1
    assert analyse(one).smallest() == "coo"  # 12 bytes, where csr has a pointer of 4004


def test_it_may_be_a_part_of_a_sum(coo: type[COO], tmp_path: Path) -> None:
    x = np.eye(4, dtype=np.float32)
    a = sf.Sum.from_parts([sf.convert(x, "coo"), sf.convert(np.roll(x, 1, axis=1), "csr")])
    laws.check_container(a, tmp_path)
    np.testing.assert_array_equal(a.to_dense(), x + np.roll(x, 1, axis=1))


def test_nothing_of_it_is_left(tmp_path: Path) -> None:
    with pytest.raises(sf.errors.UsageError, match="unknown format 'coo'"):
        sf.convert(np.eye(2, dtype=np.float32), "coo")


# ------------------------------------------------------------------ an operation: one definition, one line


def sddmm_problem(A: Format, X: Array, Y: Array, out: Array | None = None) -> Problem:
    """values of A times (X @ Y) at the places of A's nonzeros, row after row: [nnz]."""
    M, K = A.shape
    if X.ndim != 2 or Y.ndim != 2 or X.shape[0] != M or Y.shape != (X.shape[1], K):
        raise ValueError(f"X, Y: expected shapes ({M}, d) and (d, {K}), got {X.shape} and {Y.shape}")
    if out is not None and out.shape != (A.nnz,):
        raise ValueError(f"out: expected shape ({A.nnz},), got {out.shape}")
    dtype = "float32" if out is None else out.dtype.name
    result = Operand("dense", (A.nnz,), dtype, stored=A.nnz)
    return Problem("sddmm", (Operand.of(A), Operand.of(X), Operand.of(Y)), result)


def sddmm_reference(a: Items, X: Array, Y: Array) -> Array:
    """One dot product for each item."""
    return a.values * np.einsum("id,di->i", X[a.rows], Y[:, a.cols])


SDDMM = Operation("sddmm", sddmm_problem, sddmm_reference)


@pytest.fixture
def sddmm() -> Iterator[Operation]:
    yield operations.register(SDDMM)
    operations.unregister("sddmm")


def sampled(dtype: str = "float32") -> tuple[Array, Array, Array, Array]:
    """A matrix, two dense operands of whole numbers, and what the operation gives."""
    x = laws.integers(CASES["vectors"](dtype))
    rng = np.random.default_rng(4)
    X, Y = (rng.integers(-3, 4, shape).astype(dtype) for shape in ((x.shape[0], 5), (5, x.shape[1])))
    whole = x.astype(np.float64) * (X.astype(np.float64) @ Y.astype(np.float64))
    return x, X, Y, whole[nonzero_mask(x)]


def halves(x: Array) -> list[Format]:
    """The upper and the lower half of a matrix, in two formats."""
    top = x * (np.arange(x.shape[0]) < x.shape[0] // 2)[:, None].astype(x.dtype)
    return [sf.convert(top, "csr"), sf.convert(x - top, "bitmask")]


def test_an_operation_runs_for_every_format(sddmm: Operation) -> None:
    x, X, Y, expected = sampled("float16")
    ran = set()
    for fmt, params in [(f, p) for f in (*sf.FORMATS, sf.Sum) for p in ([{}] if f is sf.Sum else params_of(f.name))]:
        try:
            a = sf.Sum.from_parts(halves(x)) if fmt is sf.Sum else fmt.from_dense(x, **params)
        except sf.errors.StructureError:
            continue
        ran.add(fmt.name)
        np.testing.assert_array_equal(api.run("sddmm", a, X, Y), expected.astype(np.float32), err_msg=fmt.name)
        out = np.full(expected.size, np.nan, np.float64)
        assert api.run("sddmm", a, X, Y, out=out) is out
        np.testing.assert_array_equal(out, expected)
    assert ran == {f.name for f in (*sf.FORMATS, sf.Sum)}


def test_an_operation_is_explained_and_refused(sddmm: Operation) -> None:
    x, X, Y, expected = sampled()
    a = sf.convert(x, "csr")
    answer = select.ask(sddmm.problem(a, X, Y))
    assert answer.chosen == "reference.sddmm"
    assert answer.expected_us is not None
    assert str(answer).startswith("sddmm of A 43x62 (float32, csr, cpu) and B 43x5 (float32, row) and 5x62")
    with pytest.raises(NoKernelError, match=r"reference.sddmm: out.dtype must be one of"):
        api.run("sddmm", a, X, Y, out=np.empty(expected.size, np.int32))
    with pytest.raises(ValueError, match=r"X, Y: expected shapes \(43, d\) and \(d, 62\), got"):
        api.run("sddmm", a, Y, X)
    with pytest.raises(ValueError, match="out overlaps the arrays of A"):
        api.run("sddmm", a, X, Y, out=a.data)
    with pytest.raises(UsageError, match="an operation called 'sddmm' is already registered"):
        operations.register(Operation("sddmm", sddmm_problem, sddmm_reference))


def test_an_operation_takes_a_new_format_too(sddmm: Operation, coo: type[COO]) -> None:
    x, X, Y, expected = sampled()
    np.testing.assert_array_equal(api.run("sddmm", coo.from_dense(x), X, Y), expected)


# ------------------------------------------------------------------ a kernel: one class, one line


class SpmmCSRByRows(Kernel):
    """C = A @ B for CSR in float32: the rows of B that a row of A names, scaled and added up by numpy."""

    name = "mine.spmm_csr_by_rows"
    takes = spmm_of("csr")

    def unsupported(self, p: Problem) -> list[str]:
        return reasons(
            (p.device != "cpu", f"operands are on {p.device}; move them with .to('cpu')"),
            ({p.a_dtype, p.b_dtype, p.out_dtype} != {"float32"}, "A, B and C must be float32"),
            (p.n > 64, f"N must be at most 64, got {p.n}"),
        )

    def expected_us(self, p: Problem) -> float:
        return 0.01 + 1e-6 * p.nnz * p.n

    def _plan(self, a: Any, p: Problem) -> Plan:
        rows, cols, data, shape = a.rows(), a.indices, a.data, (p.rows,)

        def run(B: Array, out: Array | None) -> Array:
            C = np.empty((*shape, B.shape[1]), np.float32) if out is None else out
            C[...] = 0
            np.add.at(C, rows, data[:, None] * B[cols])
            return C

        return Plan(self.name, p, run, "row by row")


class Mine:
    """A backend of one kernel."""

    name = "mine"

    def missing(self) -> list[str]:
        return []

    def kernels(self) -> tuple[Kernel, ...]:
        return (SpmmCSRByRows(),)


@pytest.fixture
def mine() -> Iterator[Mine]:
    yield backends.register(Mine())  # type: ignore[misc]
    backends.unregister("mine")


def test_a_kernel_is_chosen_because_it_expects_the_least(mine: Mine, monkeypatch: pytest.MonkeyPatch) -> None:
    x = laws.integers(CASES["prime"]("float32"))
    a, B = sf.convert(x, "csr"), np.ones((x.shape[1], 3), np.float32)
    trace = sf.explain(a, B)
    assert trace.chosen == SpmmCSRByRows.name
    accepted = [answer for answer in trace.answers if answer]
    assert [k.expected_us for k in accepted] == sorted(k.expected_us for k in accepted)
    assert "mine.spmm_csr_by_rows: accepted, expects 0.0 us" in str(trace)
    assert sf.plan(a, 3).kernel == SpmmCSRByRows.name
    laws.check_spmm(a, x, "mine", 3, np.random.default_rng(0))
    wanted = 0.5 * (x @ B) + np.arange(x.shape[0], dtype=np.float32)[:, None]  # the epilogue is added to any kernel
    np.testing.assert_array_equal(sf.spmm(a, B, alpha=0.5, bias=np.arange(x.shape[0], dtype=np.float32)), wanted)
    monkeypatch.setattr(SpmmCSRByRows, "expected_us", lambda self, p: 1e9)
    slow = sf.explain(sf.convert(x, "csr"), B)
    assert slow.chosen is not None
    assert not slow.chosen.startswith("mine.")


def test_a_kernel_refuses_with_every_reason(mine: Mine) -> None:
    x = laws.integers(CASES["prime"]("float16"))
    a, B = sf.convert(x, "csr"), np.ones((x.shape[1], 65), np.float16)
    trace = sf.explain(a, B)
    assert "mine.spmm_csr_by_rows: A, B and C must be float32; N must be at most 64, got 65" in str(trace)
    np.testing.assert_array_equal(sf.spmm(a, B), x.astype(np.float32) @ B.astype(np.float32))
    with pytest.raises(NoKernelError, match="N must be at most 64, got 65"):
        sf.spmm(a, B, backend="mine")
    with pytest.raises(NoKernelError, match="does not take operation spmm_transposed"):
        sf.spmm(a.T, np.ones((x.shape[0], 2), np.float16), backend="mine.spmm_csr_by_rows")


def test_a_kernel_never_gets_a_matrix_that_was_not_validated(mine: Mine) -> None:
    good = sf.convert(np.eye(4, dtype=np.float32), "csr")
    bad = sf.CSR(shape=(4, 4), indptr=good.indptr, indices=np.array([0, 1, 9, 3], np.int32), data=good.data)
    kernel, problem = SpmmCSRByRows(), sf.plan(good, 2).problem
    with pytest.raises(UsageError, match=r"mine\.spmm_csr_by_rows: expected a validated matrix"):
        kernel.plan(bad, problem)
    for call in (lambda: sf.plan(bad, 2), lambda: sf.spmm(bad, np.ones((4, 2), np.float32), backend="mine")):
        with pytest.raises(sf.errors.IndexBoundsError, match="indices"):
            call()


def test_nothing_of_the_kernel_and_the_operation_is_left() -> None:
    assert "mine" not in backends.names()
    assert {o.name for o in operations.registered()} == {"spmm", "spmm_transposed"}
    with pytest.raises(UsageError, match="no backend called 'mine'"):
        backends.unregister("mine")
    with pytest.raises(UsageError, match="unknown operation 'sddmm'"):
        api.run("sddmm", np.eye(2, dtype=np.float32), np.eye(2), np.eye(2))
