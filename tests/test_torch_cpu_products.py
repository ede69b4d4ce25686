"""Products in bfloat16 by torch's dense product, of panels of A: ``cpu.expand_then_torch``."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is missing: pip install torch")

import ml_dtypes
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import spformat as sf
from spformat.backends.cpu import expand_torch
from spformat.backends.cpu.bfloat16_scan import holds_unusual
from spformat.preprocess import masks

if missing := expand_torch._refusals():
    pytest.skip("; ".join(missing), allow_module_level=True)

NAME = "cpu.expand_then_torch"
SHAPE = (1027, 1100)
"""One row more than whole panels, and columns that are no multiple of a block."""
FORMATS = ("csr", "ell-buckets", "bsr:blocksize=16x16", "dbsr:blocksize=16x16",
           "vector-nm:n=2,m=4,vector_length=32", "two-four", "two-four:meta_order=cutlass-sm80", "bitmask")  # fmt: skip
LAYOUTS = ("C", "F", "every second element")


@pytest.fixture(autouse=True)
def several_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expand_torch, "PANEL", 1 << 20)


def bfloat16(x: Any) -> Any:
    return np.asarray(x).astype(ml_dtypes.bfloat16)


def matrix(spec: str, seed: int = 0) -> Any:
    """Small integers, so that sums are exact."""
    x = np.random.default_rng(seed).integers(-4, 5, SHAPE).astype(np.float32)
    mask = masks.magnitude_vector_nm(x, 2, 4, 32) if spec.startswith("vector") else masks.magnitude_nm(x, 2, 4)
    return sf.convert(bfloat16(masks.apply(x, mask)), spec)


def laid_out(x: Any, layout: str) -> Any:
    if layout == "every second element":
        wide = np.full((x.shape[0], 2 * x.shape[1]), 99, x.dtype)
        wide[:, ::2] = x
        return wide[:, ::2]
    return np.array(x, order=layout)  # type: ignore[call-overload]


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What torch multiplied: the other way gives the same results."""
    calls: list[Any] = []
    multiply = expand_torch._multiply
    monkeypatch.setattr(expand_torch, "_multiply", lambda *args: (calls.append(args), multiply(*args)))
    return calls


@pytest.mark.parametrize("layouts", [(b, c) for b in LAYOUTS for c in LAYOUTS], ids=" and ".join)
@pytest.mark.parametrize("spec", FORMATS)
def test_exact_sums(spec: str, layouts: tuple[str, str], multiplied: list[Any]) -> None:
    a, B = matrix(spec), np.random.default_rng(1).integers(-4, 5, (SHAPE[1], 37))
    b, out = laid_out(bfloat16(B), layouts[0]), laid_out(bfloat16(np.full((SHAPE[0], 37), np.nan)), layouts[1])
    plan = sf.plan(a, B=b, out=out, backend=NAME)
    for _ in range(2):
        assert plan(b, out=out) is out
    wanted = bfloat16(a.to_dense().astype(np.float64) @ B)
    np.testing.assert_array_equal(out.astype(np.float64), wanted.astype(np.float64))
    ((parts, *_), _) = multiplied
    assert (len(parts) > 1) == (type(a).row_chunks(a.params()) is not None)
    if layouts[1] == "every second element":
        assert (out.base[:, 1::2] == 99).all()


def test_random_values_stay_in_the_bound(multiplied: list[Any]) -> None:
    rng = np.random.default_rng(2)
    w, B = bfloat16(rng.standard_normal(SHAPE)), bfloat16(rng.standard_normal((SHAPE[1], 300)))
    a = sf.convert(masks.apply(w, masks.magnitude(w, 0.5)), "bitmask")
    C = sf.spmm(a, B, backend=NAME).astype(np.float64)
    A, b = a.to_dense().astype(np.float64), B.astype(np.float64)
    bound = 2.0**-8 * np.abs(A @ b) + 2 * SHAPE[1] * 2.0**-24 * (np.abs(A) @ np.abs(b))
    assert (np.abs(C - A @ b) <= bound).all()
    assert multiplied


@pytest.mark.parametrize(
    ("where", "value"), [("A", 1e-39), ("A", np.inf), *(("B", x) for x in (1e-39, -1e-40, np.inf, -np.inf, np.nan))]
)
def test_numbers_that_the_processor_would_change(where: str, value: float, multiplied: list[Any]) -> None:
    """Infinities of A would be right, but are so rare that they are treated like subnormal numbers."""
    a, B = matrix("csr"), bfloat16(np.ones((SHAPE[1], 33)))
    if where == "A":
        data = a.data.copy()
        data[-1] = value
        a = a.refill(data)
    else:
        B[a.indices[0]] = value
    with np.errstate(all="ignore"):
        wanted = sf.spmm(a, B, backend="cpu.expand_then_dense")
        got = sf.spmm(a, B, backend=NAME)
    np.testing.assert_array_equal(got.astype(np.float64), wanted.astype(np.float64))
    assert not multiplied


@pytest.mark.parametrize("place", [0, 4095, 4096, 9999])
def test_unusual_numbers_are_found_anywhere(place: int) -> None:
    codes = np.full(10000, 0x0080, np.uint16)  # the least normal number
    codes[::3], codes[1::3] = 0x8000, 0xFF7F  # -0, and the largest number, negative
    assert not holds_unusual(codes)
    for code in (0x0001, 0x807F, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF):
        codes[place] = code
        assert holds_unusual(codes)


def test_torch_that_would_not_compute_is_not_asked(multiplied: list[Any]) -> None:
    """Under a mode torch records what is called, or puts it on another device."""
    a, B = matrix("two-four"), bfloat16(np.ones((SHAPE[1], 33)))
    plan = sf.plan(a, B=B, backend=NAME)
    wanted = plan(B)
    assert len(multiplied) == 1
    for mode in (FakeTensorMode(), torch.device("meta")):
        with mode:
            assert (plan(B) == wanted).all()
    assert len(multiplied) == 1


def test_a_forked_process_does_without(multiplied: list[Any]) -> None:
    a, B = matrix("two-four"), bfloat16(np.ones((SHAPE[1], 33)))
    plan = sf.plan(a, B=B, backend=NAME)
    wanted = plan(B)
    child = os.fork()
    if not child:
        os._exit(not ((plan(B) == wanted).all() and len(multiplied) == 1))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_little_work_goes_another_way(multiplied: list[Any]) -> None:
    """Torch has loops of its own for small products. A plan takes any number of columns."""
    a = matrix("two-four")
    plan = sf.plan(a, n=64, backend=NAME)
    for n in (0, 1, 3):
        B = bfloat16(np.ones((SHAPE[1], n)))
        np.testing.assert_array_equal(plan(B), sf.spmm(a, B, backend="reference"))
    assert not multiplied


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(sf.errors.NoKernelError, match="must be bfloat16, got float16"):
        sf.plan(sf.convert(np.eye(1024, dtype=np.float16), "csr"), n=64, backend=NAME)
    with pytest.raises(sf.errors.NoKernelError, match="M \\* K must be at least 524288, got 262144"):
        sf.plan(sf.convert(bfloat16(np.eye(512)), "csr"), n=64, backend=NAME)
    with pytest.raises(sf.errors.NoKernelError, match="K \\* N must exceed 4096, got 3300"):
        sf.plan(matrix("csr"), n=3, backend=NAME)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    with pytest.raises(sf.errors.NoKernelError, match="does not use oneDNN"):
        sf.plan(matrix("csr"), n=64, backend=NAME)


def test_a_layer_of_torch_takes_it_for_many_tokens(multiplied: list[Any]) -> None:
    import spformat.torch as st

    linear = torch.nn.Linear(1536, 1024, dtype=torch.bfloat16)
    layer = st.SparseLinear.from_linear(linear, "two-four", prune=True)
    x = torch.randn(512, 1536, dtype=torch.bfloat16)
    with torch.no_grad():
        y = layer(x)
        wanted = torch.nn.functional.linear(x.double(), layer.weight.double(), linear.bias.double())
    assert multiplied
    assert torch.allclose(y.double(), wanted, rtol=2**-7, atol=2**-7)
