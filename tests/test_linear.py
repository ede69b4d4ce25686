"""linear(x, W, bias) and spmm with alpha, beta and bias: against float64, on every backend, without a transpose."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from test_kernels import problem

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda import KERNELS
from spformat.backends.cuda.csr.spmm_csr import SpmmCSR
from spformat.backends.cuda.runtime import epilogue
from spformat.backends.cuda.two_four.spmm_two_four import SpmmTwoFour
from spformat.dispatch import api as dispatch
from spformat.dispatch import select
from spformat.preprocess import masks
from spformat.products.kernel import Kernel, spmm_of
from spformat.products.operations import SPMM
from spformat.products.plan import Plan
from spformat.products.problem import COL

FORMATS = ("dense", "csr", "bsr:blocksize=4x4", "vector-nm:n=2,m=4,vector_length=1", "two-four", "bitmask")
M, K, N = 21, 36, 9


def weights(dtype: str, shape: tuple[int, int] = (M, K)) -> np.ndarray[Any, Any]:
    w = np.random.default_rng(1).integers(-4, 5, shape).astype(VALUE_TYPES[dtype].numpy)
    return np.asarray(masks.apply(w, masks.magnitude_nm(w, 2, 4)))


def integers(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray[Any, Any]:
    """Small enough for every sum, times any multiple of an eighth, to be exact in bfloat16 before it is rounded."""
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(VALUE_TYPES[dtype].numpy)


def expected(w: Any, x: Any, alpha: float, beta: float, old: Any, bias: Any) -> Any:
    total = alpha * (x.astype(np.float64) @ w.astype(np.float64).T)
    total = total + (beta * old.astype(np.float64) if beta else 0)
    return (total if bias is None else total + bias.astype(np.float64)).astype(
        bias.dtype if bias is not None else x.dtype
    )


@pytest.fixture
def layouts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(layout of B, layout of C) of every plan."""
    seen: list[tuple[str, str]] = []
    make = dispatch._plan_of

    def watched(A: Any, problem: Any, *rest: Any, **more: Any) -> Plan:
        seen.append((problem.b_layout, problem.out_layout))
        return make(A, problem, *rest, **more)

    monkeypatch.setattr(dispatch, "_plan_of", watched)
    return seen


@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=pytest.mark.backend("cpu"))])
@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_linear(text: str, dtype: str, backend: str, layouts: list[tuple[str, str]]) -> None:
    w, x = weights(dtype), integers((N, K), dtype, 2)
    W, bias, old = sf.convert(w, text), integers((M,), dtype, 3), integers((N, M), dtype, 4)
    y = sf.linear(x, W, backend=backend)
    assert y.flags.c_contiguous
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, expected(w, x, 1, 0, old, None))
    np.testing.assert_array_equal(sf.linear(x, W, bias, backend=backend), expected(w, x, 1, 0, old, bias))
    out = old.copy()
    assert sf.linear(x, W, bias, alpha=0.5, beta=-2, out=out, backend=backend) is out
    np.testing.assert_array_equal(out, expected(w, x, 0.5, -2, old, bias))
    assert layouts == [(COL, COL)] * 2  # x and y as they are; the product alone, then with an epilogue


def test_rows_of_many_dimensions_and_of_one() -> None:
    w, x = weights("float16"), integers((2, 3, K), "float16", 5)
    W, bias = sf.convert(w, "two-four"), integers((M,), "float16", 6)
    y = sf.linear(x, W, bias)
    assert y.shape == (2, 3, M)
    np.testing.assert_array_equal(y.reshape(6, M), expected(w, x.reshape(6, K), 1, 0, None, bias))
    np.testing.assert_array_equal(sf.linear(x[1, 2], W, bias), y[1, 2])
    assert sf.linear(x[:0], W, bias).shape == (0, 3, M)
    out = np.ones((2, 3, M), np.float16)
    sf.linear(x, W, beta=1, out=out)
    np.testing.assert_array_equal(out, expected(w, x, 1, 0, None, None) + 1)


def test_a_pitch_is_kept(layouts: list[tuple[str, str]]) -> None:
    w, wide = weights("float32"), integers((N, K + 5), "float32", 7)
    x, room = wide[:, :K], np.full((N, M + 3), 7, np.float32)
    sf.linear(x, sf.convert(w, "csr"), out=room[:, :M])
    np.testing.assert_array_equal(room[:, :M], x @ w.T)
    assert (room[:, M:] == 7).all()
    assert layouts == [(COL, COL)]


def test_spmm_with_an_epilogue() -> None:
    w, B = weights("float64"), integers((K, N), "float64", 8)
    A, bias, C = sf.convert(w, "csr"), integers((M,), "float64", 9), integers((M, N), "float64", 10)
    wanted = 0.1 * (w @ B) + 0.3 * C + bias[:, None]
    for backend in (None, "reference"):
        out = C.copy()
        np.testing.assert_allclose(sf.spmm(A, B, out, backend, alpha=0.1, beta=0.3, bias=bias), wanted, rtol=1e-14)
    np.testing.assert_array_equal(sf.spmm(A, B[:, 0], bias=bias), w @ B[:, 0] + bias)
    p = sf.plan(A, n=N, epilogue=True)
    np.testing.assert_array_equal(p(B, bias=bias), w @ B + bias[:, None])
    np.testing.assert_array_equal(p(B), w @ B)


def test_c_is_rounded_once() -> None:
    """float16 cannot represent 2048 + 1, but 2048 + 1 + 1: the sum is not rounded before the bias is added."""
    w = np.zeros((1, 4), np.float16)
    w[0, :2] = 2048, 1
    one = np.ones(1, np.float16)
    for backend in (None, "reference"):
        assert sf.linear(np.ones((1, 4), np.float16), sf.convert(w, "two-four"), one, backend=backend) == 2050


def test_beta_0_does_not_read_c() -> None:
    w, x = weights("float32"), integers((N, K), "float32", 11)
    out = np.full((N, M), np.nan, np.float32)
    for backend in (None, "reference"):
        sf.linear(x, sf.convert(w, "csr"), alpha=2, out=out, backend=backend)
        np.testing.assert_array_equal(out, 2 * (x @ w.T))


def test_refusals() -> None:
    w, x = weights("float16"), integers((N, K), "float16", 12)
    W, bias = sf.convert(w, "csr"), np.ones(M, np.float16)
    for backend in (None, "reference"):
        with pytest.raises(ValueError, match=r"bias: expected shape \(21,\)"):
            sf.linear(x, W, bias[:-1], backend=backend)
        with pytest.raises(TypeError, match="bias: this plan takes float16"):
            sf.linear(x, W, bias.astype(np.float32), backend=backend)
        with pytest.raises(ValueError, match="expected out"):
            sf.spmm(W, x.T, beta=1, backend=backend)
    with pytest.raises(TypeError, match=r"bias: expected numpy\.ndarray"):
        sf.linear(x, W, bias.tolist())
    with pytest.raises(ValueError, match="expected out"):
        sf.linear(x, W, beta=1)
    with pytest.raises(ValueError, match=r"x: expected shape \[\.\., 36\]"):
        sf.linear(x.T, W)
    with pytest.raises(ValueError, match=r"out: expected shape \(9, 21\)"):
        sf.linear(x, W, out=np.zeros((M, N), np.float16))
    with pytest.raises(ValueError, match="C order"):
        sf.linear(x[None], W, out=np.zeros((M, N, 1), np.float16).T)
    with pytest.raises(sf.errors.UsageError, match="epilogue=True"):
        sf.plan(W, n=N)(x.T, bias=bias)
    eight = sf.convert(np.eye(4, dtype=np.int8), "csr")
    with pytest.raises(TypeError, match="int32"):
        sf.linear(np.ones((2, 4), np.int8), eight, alpha=2)


def test_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'spformat[torch]'")
    w, x = weights("bfloat16"), integers((2, N, K), "bfloat16", 13)
    tensor = lambda a: torch.from_numpy(a.astype(np.float32)).bfloat16()  # noqa: E731
    bias = integers((M,), "bfloat16", 14)
    y = sf.linear(tensor(x), sf.convert(w, "two-four"), tensor(bias))
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, torch.nn.functional.linear(tensor(x), tensor(w), tensor(bias)))
    out = torch.zeros(2, N, M, dtype=torch.bfloat16)
    assert sf.linear(tensor(x), sf.convert(w, "two-four"), out=out) is out
    assert torch.equal(out, tensor(x) @ tensor(w).T)


def test_kernels_without_an_epilogue_are_asked_for_float32() -> None:
    """Then C is rounded by the pass that follows; a kernel that cannot write float32 writes the type of C."""

    class Plain(Kernel):
        name, takes = "cpu.plain", spmm_of("csr")

        def __init__(self, *narrow: str) -> None:
            self.narrow = narrow

        def unsupported(self, p: Any) -> list[str]:
            assert not p.epilogue
            return ["too wide"] * (bool(self.narrow) and p.out_dtype not in self.narrow)

    A, B = sf.convert(weights("float16"), "csr"), integers((K, N), "float16", 1)
    problem = SPMM.problem(A, B, None, True)
    assert problem.epilogue
    assert select.without_epilogue(Plain(), problem).out_dtype == "float32"
    assert select.without_epilogue(Plain("float16"), problem).out_dtype == "float16"
    assert select.without_epilogue(SpmmTwoFour(), problem) is problem


# ------------------------------------------------------------------ on a GPU

FAST = [k for k in KERNELS if k.formats & {"two-four", "csr", "bitmask"}]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kernel", FAST, ids=lambda k: k.name)
@pytest.mark.parametrize("shape", [(64, 128, 24), (200, 96, 72), (33, 72, 5)], ids=str)
def test_on_a_gpu(kernel: Any, dtype: str, shape: tuple[int, int, int]) -> None:
    """Rows of x, with a pitch and without, through this kernel: fused, or in a pass of its own."""
    import cupy

    rows, depth, tokens = shape
    w, x = weights(dtype, (rows, depth)), integers((tokens, depth), dtype, 2)
    name = min(kernel.formats)
    W = sf.convert(w, name).to("cuda")
    bias, old = integers((rows,), dtype, 3), integers((tokens, rows), dtype, 4)

    def device(a: np.ndarray[Any, Any], pitch: int = 0) -> Any:
        room = cupy.zeros((*a.shape[:-1], a.shape[-1] + pitch), "u2")
        room[..., : a.shape[-1]] = cupy.asarray(a.view(np.uint16))
        return room.view(a.dtype)[..., : a.shape[-1]]

    tried, refused = 0, set[str]()
    for pitch in (0, 3):
        X, out = device(x, pitch), device(old, pitch)
        problem = SPMM.problem(W, X.T, out.T, True)
        if reasons := kernel.unsupported(select.without_epilogue(kernel, problem)):
            refused.update(reasons)
            continue
        for alpha, beta, b in ((1, 0, bias), (0.5, -2, bias), (2, 1, None)):
            out[...] = device(old)
            sf.linear(X, W, None if b is None else device(b), alpha=alpha, beta=beta, out=out, backend=kernel.name)
            got = out.copy().view("u2").get().view(x.dtype)
            np.testing.assert_array_equal(got, expected(w, x, alpha, beta, old, b))
            tried += 1
    if not tried:
        pytest.skip("; ".join(sorted(refused)))


@pytest.mark.gpu
@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("layout", ["row", "col"])
def test_a_bias_of_a_vector_in_a_pass_of_its_own_on_a_gpu(layout: str, gap: int) -> None:
    """One column, contiguous and not; C is NaN before."""
    import cupy

    w, x, bias = weights("float16", (65, 96)), integers((1, 96), "float16", 2), integers((65,), "float16", 3)
    W, B = sf.convert(w, "csr").to("cuda"), cupy.asarray(np.ascontiguousarray(x.T))
    room = cupy.full((65, 1 + gap) if layout == "row" else (1, 65 + gap), np.nan, "f2")
    C = room[:, :1] if layout == "row" else room.T[:65]
    sm = int(cupy.cuda.Device().compute_capability)
    inner = SpmmCSR().plan(W, problem(W, 1, "float16", (layout, layout), sm))
    plan = epilogue.with_epilogue(inner, dataclasses.replace(inner.problem, epilogue=True))
    plan(B, out=C, bias=cupy.asarray(bias))
    np.testing.assert_array_equal(C.get(), expected(w, x, 1, 0, None, bias).T)
    assert bool(cupy.isnan(room).sum() == room.size - 65)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["row", "col"])
def test_a_bias_in_a_pass_of_its_own_on_a_gpu(layout: str) -> None:
    """Again and again, in a captured graph, on other streams, after a plug-in's plan; C is NaN before."""
    import cupy

    w, x, bias = weights("float16", (65, 96)), integers((100, 96), "float16", 2), integers((65,), "float16", 3)
    W, B, b = sf.convert(w, "csr").to("cuda"), cupy.asarray(np.ascontiguousarray(x.T)), cupy.asarray(bias)
    other = sf.convert(2 * w, "csr").to("cuda")
    want = expected(w, x, 1, 0, None, bias).T
    twice = expected(2 * w, x, 1, 0, None, bias).T
    C = cupy.empty((65, 100), "f2", order="C" if layout == "row" else "F")
    plan = sf.plan(W, B=B, out=C, epilogue=True)
    assert "pass of its own" in plan.tile
    second = sf.plan(other, B=B, out=C, epilogue=True)
    plain = sf.plan(W, B=B, out=C)  # asked for float32, C would be rounded once; integers are exact
    foreign = epilogue.with_epilogue(dataclasses.replace(plain, prepare=None), plan.problem)
    side = cupy.cuda.Stream(non_blocking=True)
    for stream in (cupy.cuda.Stream.null, side):
        with stream:
            for _ in range(4):
                for made, wanted in ((plan, want), (second, twice), (foreign, want)):
                    C.fill(float("nan"))
                    assert made(B, out=C, bias=b) is C
                    np.testing.assert_array_equal(C.get(), wanted)
    with side:
        side.begin_capture()
        plan(B, out=C, bias=b)
        graph = side.end_capture()
        for _ in range(2):
            C.fill(float("nan"))
            graph.launch()
            np.testing.assert_array_equal(C.get(), want)
            second(B, out=C, bias=b)
            np.testing.assert_array_equal(C.get(), twice)


@pytest.mark.gpu
def test_c_is_rounded_once_on_a_gpu() -> None:
    import cupy

    w = np.zeros((32, 64), np.float16)
    w[:, :2] = 2048, 1
    W, one, x = sf.convert(w, "two-four").to("cuda"), cupy.ones(32, "f2"), cupy.ones((8, 64), "f2")
    for kernel in FAST:
        if "two-four" in kernel.formats and not kernel.unsupported(
            select.without_epilogue(kernel, SPMM.problem(W, x.T, None, True))
        ):
            assert (sf.linear(x, W, one, backend=kernel.name) == 2050).all()
    with pytest.raises(ValueError, match="bias"):
        sf.linear(x, W, one[:5])
