"""What needs more than one GPU, or a library that is an extra: skipped with what is missing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import CASES
from laws import integers

import spformat as sf
from spformat.arrays.library import device_of
from spformat.checkpoint import Recipe, convert_checkpoint, parts, shard, shard_input

pytestmark = pytest.mark.gpu

FITTING = ("csr", "ell-buckets", "bsr:blocksize=16x16", "dbsr:blocksize=16x16", "sr-bcrs", "bitmask", "two-four")


@pytest.fixture
def cp() -> Any:
    return pytest.importorskip("cupy")


@pytest.fixture
def pair(cp: Any) -> Any:
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    return cp


def halved(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """``x`` with two of every four columns cleared."""
    x = x.copy()
    x[:, 0::4] = x[:, 1::4] = 0
    return x


@pytest.mark.parametrize("target", FITTING)
def test_a_matrix_multiplies_where_it_is(target: str, pair: Any) -> None:
    """Conversion, validation, plan and product on the second GPU while the first is current, and side by side."""
    cp = pair
    x = halved(integers(CASES["blocks"]("bfloat16")))
    B = np.random.default_rng(1).integers(-2, 3, (x.shape[1], 24)).astype(x.dtype)
    wanted = x.astype(np.float64) @ B.astype(np.float64)
    for number in (1, 0):
        with cp.cuda.Device(number):
            there, b = cp.asarray(x), cp.asarray(B)
        with cp.cuda.Device(0):
            a = sf.convert(there, target)
            assert a.device == f"cuda:{number}"
            a.validate()
            C = sf.spmm(a, b)
            assert C.device.id == number
            assert (C.get().astype(np.float64) == wanted).all()
            assert sf.convert(a, "dense").data.device.id == number
            moved = sf.convert(x, target).to(f"cuda:{number}")
            assert (sf.spmm(moved, b).get().astype(np.float64) == wanted).all()


def test_operands_on_two_devices_are_refused(pair: Any) -> None:
    cp = pair
    a = sf.convert(integers(CASES["even"]("float16")), "csr").to("cuda:1")
    B = cp.ones((a.shape[1], 16), cp.float16)
    with pytest.raises(ValueError, match="B is on cuda:0, the matrix on cuda:1"):
        sf.spmm(a, B)


@pytest.mark.parametrize("more", [{"to": "bitmask"}, {"to": "two-four", "prune": "magnitude"}], ids=["kept", "pruned"])
def test_a_checkpoint_converted_on_two_devices_is_that_of_the_host(
    pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, str]
) -> None:
    monkeypatch.setattr(shard_input, "_WORTH_MOVING", 0)
    rng = np.random.default_rng(2)
    sf.save_dense(tmp_path / "in", {f"w{i}": rng.normal(size=(64, 96)).astype(np.float16) for i in range(8)})
    recipe, used, asked = Recipe(**more), set(), set()
    both, read, write = threading.Barrier(2), shard_input.read, parts.write_shard

    def watched(f: Any, plan: Any, device: str) -> Any:
        x = read(f, plan, device)
        assert device_of(x) == device
        used.add(device)
        return x

    def together(*arguments: Any) -> Any:
        device = arguments[-1]
        if device not in asked:
            asked.add(device)
            both.wait(timeout=120)  # passes only when both have begun
        return write(*arguments)

    with monkeypatch.context() as m:
        m.setattr(shard, "read", watched)
        m.setattr(shard_input, "read", watched)
        m.setattr(parts, "write_shard", together)
        convert_checkpoint(tmp_path / "in", tmp_path / "two", recipe, device="cuda:0,cuda:1")
    assert used == {"cuda:0", "cuda:1"}
    convert_checkpoint(tmp_path / "in", tmp_path / "host", recipe)
    names = sorted(p.name for p in (tmp_path / "host").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "two").iterdir())
    assert all((tmp_path / "two" / n).read_bytes() == (tmp_path / "host" / n).read_bytes() for n in names)


def test_cusparselt_is_exact(cp: Any) -> None:
    """The vendor's 2:4 product through nvmath, on shapes that it takes."""
    pytest.importorskip("nvmath", reason="nvmath-python is not installed: pip install 'spformat[cusparselt13]'")
    rng = np.random.default_rng(4)
    x = np.where(rng.random((256, 128, 4)).argsort(axis=2) < 2, rng.integers(-3, 4, (256, 128, 4)), 0)
    for dtype in ("float16", "bfloat16"):
        a = sf.convert(x.reshape(256, 512).astype(sf.arrays.dtypes.VALUE_TYPES[dtype].numpy), "two-four").to("cuda")
        for order in "CF":
            B = cp.asarray(rng.integers(-2, 3, (512, 64)).astype(a.dtype), order=order)
            plan = sf.plan(a, B=B, backend="vendor.cusparselt")
            wanted = a.to_dense().astype(np.float32) @ B.astype(np.float32)
            for _ in range(2):
                assert (plan(B).astype(np.float32) == wanted.astype(a.dtype).astype(np.float32)).all()
