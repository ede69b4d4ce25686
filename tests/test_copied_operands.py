"""Products with copies of B and C: when they are chosen, and that they are exact."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from test_kernels import Guarded, on_device

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.runtime import copy_lines
from spformat.backends.cuda.runtime.copy_lines import CopyLines, _room, copy_of
from spformat.backends.cuda.runtime.kernel import column_class
from spformat.dispatch.copied_operands import KERNEL, Layouts
from spformat.preprocess import masks
from spformat.products.ideal import alignment, b_alignment, library_alignment
from spformat.products.problem import Operand, Problem, alignment_of, itemsize, pitch_of
from spformat.products.tiles import forced

LAYOUTS = tuple(itertools.product(("row", "col"), repeat=2))
ODD = ("csr", "ell-buckets", "bsr:blocksize=16x16", "dbsr:blocksize=32x32", "sr-bcrs", "bitmask", "two-four",
       "vector-nm:n=8,m=32,vector_length=32", "dense")  # fmt: skip


def problem(n: int, b: str = "row", out: str = "row", fmt: str = "two-four", **more: Any) -> Problem:
    return Problem.product(
        fmt, (), 4096, 11008, n, 4096 * 5504, "bfloat16", "bfloat16", "bfloat16", b, out, "cuda", 90, **more
    )


# ------------------------------------------------------------------ alignment, without a GPU


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (np.zeros((4, 6), np.float16), 0),
        (np.zeros((6, 4), np.float16).T, 0),
        (np.zeros((4, 8), np.float16)[:, :6], 16),
        (np.zeros((4, 7), np.float16)[:, :6], 2),
        (np.zeros((6, 8), np.float16).T[:4], 16),
        (np.zeros((10, 4), np.float16).T[:, :6], 0),
        (np.zeros((4, 12), np.float32)[:, :6], 16),
        (np.zeros((4, 10), np.float32)[:, :6], 8),
        (np.zeros((1, 6), np.float32), 0),
        (np.zeros((4, 12), np.float32)[:, ::2], 0),  # neither row- nor column-major
    ],
)
def test_the_alignment_of_an_operand_follows_from_its_strides(x: Any, expected: int) -> None:
    assert alignment_of(x) == expected
    assert Operand.of(x).alignment == expected


def test_lines_without_gaps_are_as_long_as_the_shape_says() -> None:
    assert [b_alignment(problem(n)) for n in (336, 332, 334, 333)] == [16, 8, 4, 2]
    assert b_alignment(problem(333, b="col")) == 16
    assert alignment(problem(333, b="col")) == 2
    assert alignment(problem(333, b_alignment=16, out_alignment=8)) == 8
    assert alignment(problem(336, b_alignment=4)) == 4


def test_a_changed_problem_keeps_the_alignment_of_its_lines() -> None:
    p = problem(333, b_alignment=16, out_alignment=4)
    assert (p.changed(n=5).operands[1].alignment, p.changed(n=5).out.alignment) == (16, 4)
    turned = p.changed(b_layout="col")
    assert (turned.operands[1].alignment, turned.out.alignment) == (0, 4)


def test_tiles_are_chosen_for_an_odd_number_of_columns_unless_no_line_depends_on_it() -> None:
    aligned = problem(8, "col", "col", b_alignment=16, out_alignment=16)
    assert [column_class(n, aligned) for n in (1, 2, 4, 5, 8, 333)] == [1, 2, 4, 8, 8, 336]
    for p in (problem(8), problem(8, b_alignment=16, out_alignment=16), problem(8, "col", "col")):
        assert [column_class(n, p) for n in (1, 2, 4, 5, 8, 333)] == [1, 2, 4, 7, 8, 335]


def test_libraries_choose_kernels_by_the_length_of_lines_too() -> None:
    assert library_alignment(problem(333, b_alignment=16, out_alignment=16)) == 2
    assert library_alignment(problem(332, "col", "row", out_alignment=16)) == 8
    assert library_alignment(problem(336, b_alignment=4)) == 4
    assert library_alignment(problem(333, "col", "col")) == 16
    assert library_alignment(problem(1)) == 16


# ------------------------------------------------------------------ the choice, without a GPU


COPIES_B_ITSELF = "cuda.spmm_bitmask_expanding_sm90a"


@pytest.mark.parametrize(
    ("fmt", "n", "chosen"),
    [(fmt, n, KERNEL.name) for fmt in ("two-four", "dense") for n in (21, 333, 2657)]
    + [("bitmask", 21, COPIES_B_ITSELF), ("bitmask", 2657, KERNEL.name)],
)
def test_unaligned_rows_are_copied(fmt: str, n: int, chosen: str) -> None:
    trace = sf.explain(problem(n, fmt=fmt))
    assert trace.chosen == chosen
    aligned = sf.explain(problem(-(-n // 8) * 8, fmt=fmt))
    assert trace.expected_us is not None
    assert aligned.expected_us is not None
    assert trace.expected_us <= 1.5 * aligned.expected_us + 10


@pytest.mark.parametrize("fmt", ["csr", "sr-bcrs", "bitmask", "two-four", "dense"])
@pytest.mark.parametrize(("b", "out"), LAYOUTS)
@pytest.mark.parametrize(
    "pitch", [{}, {"b_alignment": 16}, {"out_alignment": 16}, {"b_alignment": 16, "out_alignment": 16}]
)
def test_odd_columns_cost_a_copy_and_no_slow_kernel_of_a_library(
    fmt: str, b: str, out: str, pitch: dict[str, int]
) -> None:
    """In every layout, also where lines that start on 16 bytes are no multiple of 16 bytes long."""
    params = {"csr": (), "sr-bcrs": (("vector_length", 8), ("stride", 16))}.get(fmt, ())
    stored = 4096 * 11008 if fmt == "dense" else 4096 * 5504
    aligned, odd = (problem(n, b, out, fmt, **pitch).changed(params=params, nnz=stored) for n in (1776, 1771))
    chosen = sf.explain(odd)
    assert chosen.expected_us is not None
    assert chosen.expected_us <= 1.35 * (sf.explain(aligned).expected_us or 0) + 10, chosen.chosen


@pytest.mark.parametrize("layout", ["row", "col"])
def test_aligned_operands_stay_where_they_are(layout: str) -> None:
    assert str(sf.explain(problem(336, layout, layout)).chosen).startswith("cuda.spmm_two_four_s")


def test_only_layouts_that_copy_something_are_tried() -> None:
    assert KERNEL.options(problem(336)) == []
    assert KERNEL.options(problem(336, "col", "col")) == [Layouts("row", "row", True, True)]
    assert KERNEL.options(problem(333)) == [
        Layouts("row", "row", True, True),
        Layouts("col", "col", True, True),
        Layouts("row", "row", True, False),
        Layouts("col", "row", True, False),
    ]
    assert KERNEL.options(problem(333, "col", "row")) == [
        Layouts("col", "row", False, True),
        Layouts("row", "row", True, True),
        Layouts("col", "col", False, True),
    ]
    assert KERNEL.options(problem(333, b_alignment=16, out_alignment=16)) == [Layouts("row", "row", True, True)]
    assert KERNEL.options(problem(333, b_alignment=16)) == [
        Layouts("row", "row", False, True),
        Layouts("col", "col", True, True),
        Layouts("row", "row", True, True),
    ]
    assert KERNEL.options(problem(1)) == []


def test_lines_of_c_that_start_anywhere_have_a_price() -> None:
    """Without one, a kernel that stores such a C many times as slowly would be chosen instead of a copy."""
    p = problem(333, fmt="bsr", b_alignment=16).changed(params=(("blocksize", (64, 64)),))
    prices = {a.kernel: a.expected_us for a in sf.explain(p).answers if a and a.kernel.startswith("cuda.spmm_bsr")}
    aligned = {a.kernel: a.expected_us for a in sf.explain(p.changed(out_alignment=16)).answers if a}
    assert {"cuda.spmm_bsr", "cuda.spmm_bsr_sm90a", "cuda.spmm_bsr_stream_sm90a"} <= prices.keys()
    assert all(us > aligned[name] for name, us in prices.items())


@pytest.mark.parametrize(("fmt", "name"), [("bitmask", "cuda.expand_then_dense"), ("dense", "vendor.cublas_gemm")])
@pytest.mark.parametrize(("b", "out"), [x for x in LAYOUTS if "row" in x])
def test_rows_of_an_odd_length_have_the_price_of_lines_that_start_anywhere(
    fmt: str, name: str, b: str, out: str
) -> None:
    """Without one, cuBLAS was chosen for 4096 x 11008 with 1771 columns, a col-major B and a C copied to aligned rows:
    1963 us instead of 273 on an H200."""
    odd, whole = (
        {
            a.kernel: a.expected_us
            for a in sf.explain(problem(n, b, out, fmt, b_alignment=16, out_alignment=16)).answers
            if a
        }
        for n in (1771, 1776)
    )
    assert odd[name] > 3 * whole[name]


def test_lines_of_copies_start_on_cache_lines_unless_they_are_short() -> None:
    assert [pitch_of(n, 2) for n in (0, 1, 8, 9, 32, 33, 64, 65, 333)] == [0, 8, 8, 16, 32, 64, 64, 128, 384]
    assert [pitch_of(n, 8) for n in (1, 2, 8, 9, 17)] == [8, 8, 8, 16, 32]
    assert all(pitch_of(n, size) >= -(-n // 8) * 8 for n in range(1, 99) for size in (1, 2, 4, 8)), (
        "room for whole eights"
    )


@pytest.mark.parametrize("n", [2, 31, 33, 333, 4097])
def test_the_workspace_is_enough_for_copies_in_every_layout(n: int) -> None:
    for fmt, dtype in (("two-four", "bfloat16"), ("csr", "float64")):
        p = problem(n, fmt=fmt).changed(M=77, K=45, a_dtype=dtype, b_dtype=dtype, out_dtype=dtype)
        for b, c in LAYOUTS:
            room = _room(p.inner, n, b, itemsize(dtype))[1] + _room(p.rows, n, c, itemsize(dtype))[1]
            assert room <= KERNEL.workspace_bytes(p), (fmt, b, c)


def test_copies_are_refused_where_no_workspace_is_allowed() -> None:
    trace = sf.explain(problem(333).changed(workspace=0))
    (answer,) = [a for a in trace.answers if a.kernel == KERNEL.name]
    assert not answer
    assert "workspace" in str(answer)


def test_the_product_between_the_copies_gets_the_workspace_that_they_leave() -> None:
    p = problem(333, fmt="bitmask")
    own = KERNEL.workspace_bytes(p)
    lines = 2 * 333 * (4096 + 11008)  # values of 2 bytes
    assert lines < own <= 2 * 1.1 * lines
    assert own & (own - 1) == 0
    layouts = Layouts("row", "row", True, True)
    assert KERNEL.problem(p.changed(workspace=own + 1000), layouts).workspace == 1000
    assert KERNEL.problem(p.changed(workspace=0), layouts).workspace == 0


def test_rows_that_are_both_copied_get_a_multiple_of_eight_columns() -> None:
    """With aligned rows but an odd number of columns cuBLAS was five times slower."""
    p = problem(333)
    assert KERNEL.problem(p, Layouts("row", "row", True, True)).n == 336
    assert KERNEL.problem(p, Layouts("row", "row", False, True)).n == 333
    assert KERNEL.problem(p, Layouts("col", "col", True, True)).n == 333


def test_operands_on_the_host_are_not_copied() -> None:
    p = Problem.product("csr", (), 40, 50, 33, 90, "float32", "float32", "float32")
    assert KERNEL.unsupported(p) == ["operands must be on a GPU"]


# ------------------------------------------------------------------ products on a GPU


@pytest.fixture(scope="module")
def cp() -> Any:
    return pytest.importorskip("cupy")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("spec", ODD)
def test_products_with_copies_are_exact(cp: Any, spec: str, dtype: str) -> None:
    if spec == "two-four" and dtype == "float32":
        pytest.skip("no kernel of a GPU takes float32 in two-four")
    rng = np.random.default_rng(9)
    x = rng.integers(-2, 3, (131, 260)).astype(VALUE_TYPES[dtype].numpy)
    if spec.startswith("vector-nm"):
        x = masks.prune_vector_nm(x, 8, 32, 32).to_dense()
    elif spec == "two-four":
        x = masks.prune_two_four(x).to_dense()
    elif spec != "dense":
        x = np.where(np.kron(rng.random((9, 17)) < 0.4, np.ones((16, 16), bool))[:131, :260], x, x.dtype.type(0))
    A = sf.convert(x, spec).to("cuda")
    for (b, c), (n, pad) in itertools.product(LAYOUTS, ((2, 3), (17, 0), (333, 3), (13, 3))):
        for a, matrix in ((A, x), (A.T, x.T)):
            wanted = matrix.astype(np.float64) @ (B := rng.integers(-2, 3, (matrix.shape[1], n))).astype(np.float64)
            B = on_device(cp, B.astype(x.dtype), b, pad)
            guarded = Guarded(cp, wanted.shape, x.dtype, c, pad)
            out = guarded.out
            p = sf.products.operations.operation("spmm" if a is A else "spmm_transposed").problem(A, B, out)
            for layouts in KERNEL.options(p):
                with forced(KERNEL.name, str(layouts)):
                    A._plans.clear()
                    if KERNEL.unsupported(p):
                        continue
                    sf.spmm(a, B, out=out, backend=KERNEL.name)
                assert (out.get() == wanted.astype(x.dtype)).all(), (b, c, n, pad, str(layouts))
                assert guarded.intact(), (b, c, n, pad, str(layouts))
                out.fill(float("nan"))


@pytest.mark.gpu
def test_one_plan_with_copies_runs_for_any_number_of_columns(cp: Any) -> None:
    rng = np.random.default_rng(10)
    x = masks.prune_two_four(rng.integers(-2, 3, (96, 128)).astype(np.float16))
    plan = sf.plan(x.to("cuda"), n=333, backend=KERNEL.name)
    assert plan.workspace >= KERNEL.workspace_bytes(plan.problem)
    for n in (333, 8, 1, 0, 2, 136, 4097):
        B = rng.integers(-2, 3, (128, n)).astype(np.float16)
        assert (plan(cp.asarray(B)).get() == x.to_dense().astype(np.float64) @ B).all(), n


@pytest.mark.gpu
def test_alpha_beta_and_bias_after_copies(cp: Any) -> None:
    rng = np.random.default_rng(11)
    x = masks.prune_two_four(rng.integers(-2, 3, (96, 128)).astype(np.float16))
    B, C, bias = (rng.integers(-2, 3, s).astype(np.float16) for s in ((128, 333), (96, 333), (96,)))
    out = cp.asarray(C)
    sf.spmm(x.to("cuda"), cp.asarray(B), out=out, backend=KERNEL.name, alpha=2, beta=-1, bias=cp.asarray(bias))
    assert (out.get() == 2 * (x.to_dense().astype(np.float64) @ B) - C + bias[:, None]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("most", [None, 2200], ids=["one group", "groups of lines"])
@pytest.mark.parametrize("many", [None, 0], ids=["one unit of a thread", "four units of a thread"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_lines_are_copied_from_anywhere_to_anywhere(
    cp: Any, size: int, many: int | None, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All starts within 16 bytes of both sides, lines longer and shorter than a unit, and nothing around them is touched."""
    monkeypatch.setattr(copy_lines, "MANY", copy_lines.MANY if many is None else many)
    monkeypatch.setattr(copy_lines, "MOST_UNITS", copy_lines.MOST_UNITS if most is None else most)
    values, rng = 16 // size, np.random.default_rng(size)
    p = problem(8).changed(sm=int(cp.cuda.Device().compute_capability))
    copy, stream = CopyLines(size, p), cp.cuda.get_current_stream().ptr
    dtype = np.dtype(f"u{size}")
    for lines, along, fill in ((1, 1, 1), (3, 5, 5), (2, 40, 40), (5, 37, 48), (2, 600, 601), (9, 2, 8)):
        for start, to_start in itertools.product(range(0, values, max(1, values // 8)), (0, 1 % values, values - 1)):
            ld, ld_to = along + start % 3, fill + to_start % 4
            words = rng.integers(1, 99, lines * ld).astype(dtype)
            # The last line ends with the allocation, and the first starts with it where start is 0.
            source = cp.empty(start + (lines - 1) * ld + along, dtype)
            source[start:] = cp.asarray(words[: source.size - start])
            target = cp.full(to_start + lines * ld_to + 7, 0xFF, dtype)
            copy.bind(
                stream, source.data.ptr + start * size, target.data.ptr + to_start * size, lines, along, ld, ld_to, fill
            )()
            wanted = np.full(target.size, 0xFF, dtype)
            for i in range(lines):
                at = to_start + i * ld_to
                wanted[at : at + fill] = 0
                wanted[at : at + along] = words[i * ld : i * ld + along]
            assert (target.get() == wanted).all(), (lines, along, fill, start, to_start)


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["row", "col"])
@pytest.mark.parametrize(("rows", "n"), [(5, 3), (70, 13), (3, 333), (1, 1)])
def test_copies_of_b_are_zero_behind_its_columns(source: str, rows: int, n: int) -> None:
    """What the memory held before may be infinite, and sums that are not finite are computed again, one by one."""
    cp = pytest.importorskip("cupy")
    x, pitch = np.random.default_rng(1).integers(0, 99, (rows, n)).astype(np.uint16), -(-n // 8) * 8
    there = cp.asarray(np.ascontiguousarray(x.T if source == "col" else x))
    to = cp.full((rows + 1, pitch), 0xFFFF, "uint16")
    p = problem(n, source).changed(sm=int(cp.cuda.Device().compute_capability))
    copy = copy_of(rows, 2, source, "row", p, fills=True)
    copy(cp.cuda.get_current_stream().ptr, there.data.ptr, to.data.ptr, n, rows if source == "col" else n, pitch)()
    got = to.get()
    assert (got[:rows, :n] == x).all()
    assert (got[:rows, n:] == 0).all()
    assert (got[rows] == 0xFFFF).all()
