"""Matrices that a kernel's order of their contents replaces: what they give back, and that nothing is kept twice."""

from __future__ import annotations

import copy
import gc
import importlib.util
import pickle
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.formats.base import Format
from spformat.preprocess import masks
from spformat.products.kernel import Accepted
from spformat.products.plan import MemoryOf

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "at_rest.py"
spec = importlib.util.spec_from_file_location("at_rest", BENCHMARK)
assert spec
assert spec.loader
at_rest = importlib.util.module_from_spec(spec)
spec.loader.exec_module(at_rest)


class Reversed:
    """A kernel order of a matrix: one array of bytes, the arrays behind one another and backwards."""

    def __init__(self, a: Format) -> None:
        self.layout = a.array_layout()
        self.bytes = np.concatenate([x.view(np.uint8).reshape(-1) for x in a.arrays().values()])[::-1].copy()
        self.times = 0

    def arrays(self) -> tuple[Any, ...]:
        return (self.bytes,)

    def restore(self) -> dict[str, Any]:
        self.times += 1
        every, at, out = self.bytes[::-1].copy(), 0, {}
        for name, (dtype, shape) in self.layout.items():
            size = int(np.prod(shape)) * dtype.itemsize
            out[name] = every[at : at + size].view(dtype).reshape(shape).copy()
            at += size
        return out


def matrix(name: str = "two-four", first: int = 0) -> Format:
    x = np.zeros((40, 72), np.float16)
    x[:, first::4] = np.arange(1, 1 + 40 * 18).reshape(40, 18)
    params = {"blocksize": (8, 8)} if name == "bsr" else {}
    return sf.convert(x, name, **params)


def reverse(a: Format) -> Reversed:
    return a.kernel_order("reversed", lambda: Reversed(a))


@pytest.mark.parametrize("name", ["two-four", "csr", "ell-buckets", "bitmask", "bsr"])
def test_everything_that_can_be_asked_is_as_before(name: str) -> None:
    a, b = matrix(name), matrix(name)
    dense, values = b.to_dense(), sf.convert(b, "csr").data
    order = reverse(a)
    assert a.in_kernel_order
    assert not b.in_kernel_order
    assert (repr(a), a.nbytes, a.dtype, a.device, a.stored, a.shape) == (
        repr(b), b.nbytes, b.dtype, b.device, b.stored, b.shape,
    )  # fmt: skip
    assert a.array_layout() == b.array_layout()
    assert a.spans() == ((order.bytes.ctypes.data, order.bytes.ctypes.data + order.bytes.size),)
    assert order.times == 0  # nothing so far needs an array
    assert a == b
    assert b == a
    assert (a.to_dense() == dense).all()
    assert a.to_csr() == b.to_csr()
    assert a.validate() is a
    assert a.copy() == b
    assert pickle.loads(pickle.dumps(a)) == b
    assert copy.deepcopy(a) == b
    assert a.nnz == b.nnz
    assert a.refill(values * 2) == b.refill(values * 2)
    assert (a * 2) == (b * 2)
    assert a.to("cpu") is a
    for key, x in b.arrays().items():
        assert getattr(a, key).tobytes() == x.tobytes()
        assert getattr(a, key) is not getattr(a, key)
    assert sf.convert(a, "dense") == sf.convert(b, "dense")


def test_files_are_the_same(tmp_path: Any) -> None:
    a, b = matrix(), matrix()
    reverse(a)
    sf.save(tmp_path / "a.safetensors", {"w": a})
    sf.save(tmp_path / "b.safetensors", {"w": b})
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_metadata_in_another_order() -> None:
    a, b = matrix(), matrix()
    reverse(a)
    assert a.with_meta_order("fragment") == b.with_meta_order("fragment")
    assert not a.with_meta_order("fragment").in_kernel_order


def test_arrays_are_freed_with_those_of_aliases_before_and_after() -> None:
    a = matrix()
    arrays = [weakref.ref(x) for x in a.arrays().values()]
    before, seen = a.alias(), MemoryOf(a.alias())
    assert len(seen()) == 2
    order = reverse(before)  # what a plan does, which has an alias
    after = before.alias()
    assert [x() for x in arrays] == [None, None]
    assert after.in_kernel_order
    assert len(seen()) == 1
    assert after == a == before == matrix()
    assert a.kernel_order("reversed", lambda: pytest.fail("built twice")) is order
    assert after.is_validated


def test_arrays_that_others_keep_are_kept_beside_the_order() -> None:
    a = sf.Sum(parts=(matrix(), matrix("csr", 1)))
    a.keep_arrays()
    part = a.parts[0]
    order, data = reverse(part.alias()), part.data
    assert not part.in_kernel_order
    assert part.data is data
    assert part.kernel_order("reversed", lambda: pytest.fail("built twice")) is order


def test_another_order_is_kept_beside_the_first() -> None:
    a = matrix()
    first = reverse(a)
    second = a.kernel_order("second", lambda: Reversed(a))
    assert (second.bytes == first.bytes).all()
    assert a.spans() == ((first.bytes.ctypes.data, first.bytes.ctypes.data + first.bytes.size),)


def test_no_circle_keeps_a_matrix() -> None:
    a = matrix()
    order = weakref.ref(reverse(a))
    gone, alias = weakref.ref(a), a.alias()
    gc.disable()
    try:
        del a
        assert gone() is None
        assert order() is not None
        del alias
        assert order() is None
    finally:
        gc.enable()


def test_threads_that_read_while_arrays_are_dropped() -> None:
    for _ in range(50):
        a, wanted, wrong = matrix(), matrix(), []
        start = threading.Barrier(4)

        def read(a: Format = a, wanted: Format = wanted, wrong: list[Any] = wrong, start: Any = start) -> None:
            start.wait()
            for _ in range(20):
                if a.alias() != wanted or a.values.shape != wanted.values.shape or a.nbytes != wanted.nbytes:
                    wrong.append(a)

        threads = [threading.Thread(target=read) for _ in range(3)]
        for t in threads:
            t.start()
        start.wait()
        reverse(a)
        for t in threads:
            t.join()
        assert not wrong
        slots = [x for x in ("data", "meta") if _filled(a.alias(), x)]
        assert slots == []


def _filled(a: Format, name: str) -> bool:
    try:
        object.__getattribute__(a, name)
    except AttributeError:
        return False
    return True


def test_a_part_in_kernel_order() -> None:
    parts = [matrix(), matrix("csr", 1)]
    a, b = sf.Sum(parts=tuple(parts)), sf.Sum(parts=(matrix(), matrix("csr", 1)))
    order = reverse(parts[0])
    assert (a.nbytes, a.dtype, a.device, a.stored, repr(a)) == (b.nbytes, b.dtype, b.device, b.stored, repr(b))
    assert order.times == 0
    assert a == b
    assert (a.to_dense() == b.to_dense()).all()
    assert (a.T.materialize().to_dense() == b.to_dense().T).all()


def test_attributes_that_do_not_exist() -> None:
    a = matrix()
    reverse(a)
    with pytest.raises(AttributeError, match="'TwoFour' object has no attribute 'dta'"):
        a.dta  # noqa: B018
    with pytest.raises(AttributeError):
        object.__new__(sf.TwoFour).data  # noqa: B018


# ------------------------------------------------------------------ 2:4, on a device


TWO_FOUR_KERNELS = (
    "spmm_two_four", "spmm_two_four_tokens", "spmm_two_four_sm90", "spmm_two_four_sm90a", "spmm_two_four_shares_sm90a",
    "expand_then_dense",
)  # fmt: skip


def two_four(dtype: str, order: str, shape: tuple[int, int] = (72, 152)) -> tuple[sf.TwoFour, np.ndarray[Any, Any]]:
    """A 2:4 matrix and the same as a dense array of whole numbers."""
    rng = np.random.default_rng(5)
    x = rng.integers(1, 4, shape) * rng.choice([-1, 1], shape)
    x = masks.apply(x.astype(np.float32), masks.magnitude_nm(x.astype(np.float32), 2, 4))
    return sf.TwoFour.from_dense(x.astype(VALUE_TYPES[dtype].numpy), meta_order=order), x


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", TWO_FOUR_KERNELS)
@pytest.mark.parametrize(("dtype", "order"), [("float16", "ldmatrix"), ("bfloat16", "cutlass-sm80")])
def test_every_kernel_of_two_four_frees_the_arrays(kernel: str, dtype: str, order: str) -> None:
    import cupy

    host, x = two_four(dtype, order)
    a = host.to("cuda")
    before, arrays = a.alias(), [weakref.ref(v) for v in a.arrays().values()]
    b = np.random.default_rng(1).integers(-3, 4, (x.shape[1], 24)).astype(np.float32)
    if f"cuda.{kernel}" not in str(sf.explain(a, cupy.asarray(b.astype(host.dtype)))).partition("refused")[0]:
        pytest.skip(f"{kernel} does not run here")
    for lines in "CF":
        c = sf.spmm(a, cupy.asarray(b.astype(host.dtype), order=lines), backend=f"cuda.{kernel}")
        assert (c.get().astype(np.float32) == x @ b).all()
    assert [v() for v in arrays] == [None, None]
    assert a.in_kernel_order
    assert a.to("cpu") == before.to("cpu") == host
    assert a.with_meta_order("logical").to("cpu") == host.with_meta_order("logical")
    assert (a.to_dense().get() == host.to_dense()).all()
    assert a.to_csr().to("cpu") == host.to_csr()
    a.validate()


@pytest.mark.gpu
def test_a_sum_frees_the_arrays_of_its_two_four_part() -> None:
    import cupy

    host, x = two_four("float16", "fragment")
    rest = np.where((x == 0) & (np.random.default_rng(2).random(x.shape) < 0.05), 1, 0).astype(np.float16)
    a = sf.Sum(parts=(host, sf.convert(rest, "csr"))).to("cuda")
    part = a.parts[0]
    b = np.random.default_rng(1).integers(-3, 4, (x.shape[1], 24)).astype(np.float16)
    wanted = (x + rest) @ b.astype(np.float32)
    for backend in ("cuda.spmm_sum", "cuda.expand_then_dense", None):
        assert (sf.spmm(a, cupy.asarray(b), backend=backend).get() == wanted).all()
        assert part.in_kernel_order
    assert a.to("cpu").parts[0] == host


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_other_values_than_those_of_16_bits_stay_arrays(dtype: str) -> None:
    import cupy

    host, x = two_four(dtype, "ldmatrix")
    a = host.to("cuda")
    b = cupy.ones((x.shape[1], 8), dtype)
    for answer in sf.explain(a, b).answers:
        if isinstance(answer, Accepted) and answer.kernel.startswith("cuda."):
            sf.spmm(a, b, backend=answer.kernel)
    assert not a.in_kernel_order


@pytest.mark.gpu
def test_an_output_may_lie_where_dropped_arrays_were_and_not_over_the_order() -> None:
    import cupy

    a, x = two_four("float16", "ldmatrix")
    a = a.to("cuda")
    kept = a.data  # the memory stays, so that C can be put there
    b = cupy.ones((x.shape[1], 8), "float16")
    sf.spmm(a, b, backend="cuda.spmm_two_four")
    assert a.in_kernel_order
    at = kept.reshape(-1)[: x.shape[0] * 8].reshape(x.shape[0], 8)
    assert (sf.spmm(a, b, out=at, backend="cuda.spmm_two_four").get() == x.sum(axis=1, keepdims=True)).all()
    words = a.resident().reshape(-1).view("float16")
    with pytest.raises(ValueError, match="overlaps the arrays of A"):
        sf.spmm(a, b, out=words[: x.shape[0] * 8].reshape(x.shape[0], 8), backend="cuda.spmm_two_four")


# ------------------------------------------------------------------ bytes at rest


SLACK = 64 << 10
"""Bytes that do not grow with the matrix: records that kernels load ahead, counters, rounding of allocations."""
BEYOND = {"vector-nm": 1.25}
"""Formats that keep more than 1.1 times their bytes, and at most how many times (docs/decisions/0042-bytes-at-rest.md)."""


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "params", "zeros"), at_rest.CASES, ids=str)
def test_bytes_at_rest(name: str, params: dict[str, Any], zeros: float) -> None:
    """After products with every number of columns a matrix has at most 1.1 times the bytes of its format."""
    import cupy

    if not hasattr(cupy, "get_default_memory_pool"):
        pytest.skip("the emulated device has no memory pool")
    row = at_rest.measured(name, params, zeros, 1024, "float16", every=False)
    assert row["at rest"] * row["bytes"] <= BEYOND.get(name, 1.1) * row["bytes"] + SLACK
