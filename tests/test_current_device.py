"""A matrix on another GPU than the current one: its arrays are computed with on their own GPU. Needs no GPU."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import strict_cupy

import spformat as sf
from spformat.formats import CSR, edges
from spformat.preprocess import masks, order
from spformat.storage import stwriter

VIEWS = frozenset("shape dtype ndim size strides flags itemsize nbytes T view reshape get".split())
"""What CuPy does with an array without a kernel."""


class _Elsewhere(strict_cupy.Array):
    """An array on the second GPU: a kernel on it while the first is current is an error, as without peer access."""

    current = 0
    __cuda_array_interface__: Any = None  # CuPy's arrays have one

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        _used(ufunc.__name__)
        return _there(super().__array_ufunc__(ufunc, method, *inputs, **options))

    def __getitem__(self, at: Any) -> Any:
        return _there(super().__getitem__(at))

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if not callable(value) or isinstance(value, np.dtype):
            return _there(value)

        def called(*args: Any, **options: Any) -> Any:
            if name not in VIEWS:
                _used(name)
            return _there(value(*args, **options))

        return called

    @property
    def device(self) -> Any:
        return _Device(1)


class _Device(strict_cupy.Device):
    def __enter__(self) -> _Device:
        self.before, _Elsewhere.current = _Elsewhere.current, self.id
        return self

    def __exit__(self, *_: object) -> None:
        _Elsewhere.current = self.before


def _used(name: str) -> None:
    if _Elsewhere.current != 1:
        raise ValueError(f"Array device must be same as the current device: {name}, array device = 1 while current = 0")


def _there(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(_there, x))
    return _Elsewhere(x.host) if type(x) is strict_cupy.Array else x


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two GPUs, the first of them current."""
    cupy = strict_cupy.module()
    for name in strict_cupy.FUNCTIONS | {"asarray", "ascontiguousarray"}:
        plain = getattr(cupy, name)

        def function(*args: Any, plain: Any = plain, name: str = name, **options: Any) -> Any:
            _used(name)
            return _there(plain(*args, **options))

        monkeypatch.setattr(cupy, name, function)
    monkeypatch.setattr(cupy, "ndarray", strict_cupy.Array)
    cuda = cupy.cuda
    monkeypatch.setattr(cuda, "Device", _Device)
    monkeypatch.setattr(cuda.runtime, "getDevice", lambda: _Elsewhere.current)
    monkeypatch.setattr(cuda, "get_current_stream", lambda: SimpleNamespace(ptr=0), raising=False)
    monkeypatch.setattr(strict_cupy.Memory, "device_id", 1)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(edges, "_waiting", {"cpu": [], "cuda": []})  # no kernel runs here
    monkeypatch.setattr(edges, "_table", {})
    return cupy


X = np.array([[1, 0, 2, 0], [0, 0, 0, 0], [3, 4, 0, 0], [0, 5, 0, 6]], np.float32)

QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "row_length": lambda a: a.row_length(),
    "nnz": lambda a: a.nnz,
    "density": lambda a: a.density,
    "stored_zeros": lambda a: a.stored_zeros,
    "to_dense": lambda a: a.to_dense().get().tolist(),
    "times two": lambda a: (a * 2).to_dense().get().tolist(),
    "negative": lambda a: (-a).to_dense().get().tolist(),
    "astype": lambda a: a.astype("float16").to_dense().get().tolist(),
    "stack": lambda a: sf.stack([a, a]).to_dense().get().tolist(),
    "in_order": lambda a: a.to_csr().in_order().to_dense().get().tolist(),
    "without_zeros": lambda a: a.to_csr().without_zeros().to_dense().get().tolist(),
    "rows": lambda a: a.to_csr().rows().get().tolist(),
}


@pytest.mark.parametrize("target", ["csr", "bsr:blocksize=2x2", "ell-buckets", "dense", "coo", "two-four"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_matrix_answers_while_another_gpu_is_current(pair: Any, target: str, question: str) -> None:
    ask, there = QUESTIONS[question], sf.convert(X, target).to("cuda:1")
    assert there.device == "cuda:1"
    answer = ask(there)
    assert _Elsewhere.current == 0
    with _Device(1):
        assert ask(sf.convert(X, target).to("cuda:1")) == answer


def test_a_mask_is_applied_while_another_gpu_is_current(pair: Any) -> None:
    with _Device(1):
        w, mask = pair.asarray(X), pair.asarray(X > 2)
    assert masks.apply(w, mask).get().tolist() == np.where(X > 2, X, 0).tolist()


def test_a_transposed_array_is_converted_while_another_gpu_is_current(pair: Any) -> None:
    with _Device(1):
        w = pair.asarray(X).T
    assert sf.convert(w, "csr").to_dense().get().tolist() == X.T.tolist()


def test_a_transposed_array_is_saved_while_another_gpu_is_current(
    pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drain(whole: Any, write: Callable[[memoryview, int], None]) -> int:
        raw = whole.get().tobytes()
        write(memoryview(raw), 0)
        return zlib.crc32(raw)

    monkeypatch.setattr(stwriter, "DeviceCopy", lambda number: SimpleNamespace(drain=drain, close=lambda: None))
    with _Device(1):
        w = pair.asarray(X).T
    sf.save_dense(tmp_path / "w.safetensors", {"w": w})
    assert sf.open(tmp_path / "w.safetensors")["w"].to_dense().tolist() == X.T.tolist()


def test_coordinates_make_a_csr_while_another_gpu_is_current(pair: Any) -> None:
    with _Device(1):
        rows, cols, data = (pair.asarray(x) for x in (np.array([2, 0]), np.array([1, 3]), X[2, :2]))
    a = CSR.from_coordinates((3, 4), rows, cols, data)
    assert a.to_dense().get().tolist() == [[0, 0, 0, 4], [0] * 4, [0, 3, 0, 0]]


def test_rows_are_ordered_while_another_gpu_is_current(pair: Any) -> None:
    a = sf.convert(X, "csr").to("cuda:1")
    longest_first = order.by_length(a)
    assert longest_first.get().tolist() == [0, 2, 3, 1]
    assert order.permute_rows(a, longest_first).to_dense().get().tolist() == X[[0, 2, 3, 1]].tolist()


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_values_are_rounded_while_another_gpu_is_current(pair: Any, dtype: str) -> None:
    with _Device(1):
        w = pair.asarray(X)
    assert sf.convert(w, "csr", dtype=dtype).dtype == dtype


@pytest.mark.parametrize("layout", ["csr", "csc", "coo", "bsr"])
def test_a_sparse_matrix_of_cupyx_is_read_while_another_gpu_is_current(pair: Any, layout: str) -> None:
    """A stand-in for one, with unordered items and wide indices."""
    arrays: dict[str, Any] = {"data": np.array([2, 1, 4, 3], np.float32)}
    if layout == "coo":
        arrays |= {"row": np.array([0, 0, 2, 2]), "col": np.array([2, 0, 1, 0])}
    else:
        arrays |= {"indptr": np.array([0, 2, 2, 4, 4]), "indices": np.array([2, 0, 1, 0])}
    if layout == "bsr":
        arrays["data"] = arrays["data"].reshape(4, 1, 1)
    with _Device(1):
        there = {k: pair.asarray(x) for k, x in arrays.items()}
    given = SimpleNamespace(format=layout, shape=(4, 4), dtype=np.dtype(np.float32), tocsr=None, **there)
    wanted = [[1, 0, 2, 0], [0] * 4, [3, 4, 0, 0], [0] * 4]
    got = sf.from_scipy(given).to_dense().get()
    assert (got.T if layout == "csc" else got).tolist() == wanted


def test_arrays_in_several_places_are_named(pair: Any) -> None:
    """They were a TypeError of CuPy, or named by their shapes, which were the same."""
    with _Device(1):
        w = pair.asarray(X)
    a = sf.convert(X, "csr").to("cuda:1")
    with pytest.raises(sf.errors.UsageError, match="error: expected all arrays on one device, got cuda:1, cpu; move"):
        masks.error(w, X)
    with pytest.raises(sf.errors.UsageError, match="error: expected all arrays on one device, got cpu, cpu, cuda:1"):
        masks.error(X, X, w)
    with pytest.raises(
        sf.errors.UsageError, match="keep: expected an array on cuda:1, where the matrix is, got one on"
    ):
        a.only(np.ones(a.nnz, bool))
    with pytest.raises(sf.errors.UsageError, match="rows: expected an array on cuda:1, where data is, got one on cpu"):
        CSR.from_coordinates((4, 4), np.array([1]), np.array([1]), a.data[:1])
