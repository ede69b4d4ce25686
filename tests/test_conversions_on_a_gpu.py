"""A GPU converts to the bytes of the numpy code, and refuses with its words: random cases for every format.

``SPFORMAT_CONVERSION_CASES`` is the number of cases (240), ``SPFORMAT_CONVERSION_SEED`` the first seed (0). A message names
format and seed of a case; ``conversions.drawn`` draws it again. Without a GPU the same law holds for the compiled edges
of the host, and the law itself is tried on results with one bit changed.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import conversions
import numpy as np
import pytest
from conversions import Device, Host, difference, differences, drawn, pruning_differences

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.arrays.library import has_dtype
from spformat.backends.cuda.bsr import bsr_from_dense
from spformat.backends.cuda.ell_buckets import ell_buckets_from_csr
from spformat.backends.cuda.sr_bcrs import sr_bcrs_from_dense
from spformat.formats import registered
from spformat.formats.base import Format
from spformat.preprocess import masks

CASES = int(os.environ.get("SPFORMAT_CONVERSION_CASES", "240"))
SEED = int(os.environ.get("SPFORMAT_CONVERSION_SEED", "0"))
ON_DEVICE = tuple(t for t in VALUE_TYPES if has_dtype("cuda", t))
SHOWN = 5
"""Most differences that are listed; the search ends there."""
FORMATS = pytest.mark.parametrize("fmt", registered(), ids=lambda f: f.name)
SHARE = -(-CASES // (len(registered()) + 1))


def assert_none(found: Iterator[str]) -> None:
    """Fails with the first differences."""
    texts = [text for text, _ in zip(found, range(SHOWN), strict=False)]
    assert not texts, "\n".join(texts)


def of_format(fmt: type[Format], seeds: range, dtypes: tuple[str, ...], place: Host) -> Iterator[str]:
    """All differences of the cases of a format, each with its case."""
    for seed in seeds:
        case = drawn(fmt, seed, dtypes)
        yield from (f"{text}\n    of {case}" for text in differences(case, place))


@pytest.mark.gpu
@FORMATS
def test_a_device_converts_to_the_bytes_of_the_general_code(fmt: type[Format]) -> None:
    pytest.importorskip("cupy")
    assert_none(of_format(fmt, range(SEED, SEED + SHARE), ON_DEVICE, Device()))


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", [sf.BSR, sf.DBSR, sf.SRBCRS, sf.ELLBuckets], ids=lambda f: f.name)
def test_small_matrices_by_the_launches_of_large_ones(fmt: type[Format], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the last block of a kernel adds up what a launch of its own does for larger matrices."""
    pytest.importorskip("cupy")
    for module, name in ((bsr_from_dense, "FEW_WORDS"), (sr_bcrs_from_dense, "FEW_TILES"), (sr_bcrs_from_dense, "MOST_OWNERS"),
                         (ell_buckets_from_csr, "FEW")):  # fmt: skip
        monkeypatch.setattr(module, name, 0)
    kept = (bsr_from_dense._few, sr_bcrs_from_dense._marking, ell_buckets_from_csr._passes)
    for plans in kept:
        plans.cache_clear()
    try:
        assert_none(of_format(fmt, range(SEED, SEED + min(SHARE, 10)), ON_DEVICE, Device()))
    finally:
        for plans in kept:
            plans.cache_clear()


@pytest.mark.gpu
def test_a_device_prunes_to_the_bytes_of_the_general_code() -> None:
    pytest.importorskip("cupy")
    assert_none(text for s in range(SEED, SEED + SHARE) for text in pruning_differences(s, ON_DEVICE, Device()))


@FORMATS
def test_the_host_converts_to_the_bytes_of_the_general_code(fmt: type[Format]) -> None:
    assert_none(of_format(fmt, range(20), tuple(VALUE_TYPES), Host()))


def test_the_host_prunes_to_the_bytes_of_the_general_code() -> None:
    assert_none(text for s in range(20) for text in pruning_differences(s, tuple(VALUE_TYPES), Host()))


def test_cases_are_of_every_kind() -> None:
    """Of the first 100 cases of a format, some have each of the kinds that matter; and every width of values comes."""
    for fmt in registered():
        cases = [drawn(fmt, seed, tuple(VALUE_TYPES)) for seed in range(100)]
        near = [c for c in cases if c.x is not None]
        assert {c.layout for c in near} == {"C", "F", "strided", "shifted"}
        assert {c.a.dtype.itemsize for c in cases} == {1, 2, 4, 8}
        assert {c.widened for c in cases} == {False, fmt.name not in conversions.SHARING}
        assert any(0 in c.a.shape for c in cases)
        assert any(max(c.a.shape) > 20000 for c in near)
        with np.errstate(all="ignore"):  # signalling NaNs
            assert any(np.isnan(c.a.data.astype(np.float64)).any() for c in cases)
        assert any(c.a.stored_zeros for c in near) == fmt.keeps_stored_zeros
        assert any(c.x is None for c in cases) == (fmt.name in conversions.FAR)
        refused = [
            isinstance(conversions.outcome(lambda c=c, fmt=fmt: fmt.from_csr(c.a, **c.params)), Exception) for c in near
        ]
        assert sum(refused) < 60
        assert any(refused) or fmt.name not in ("two-four", "vector-nm")


def test_one_changed_bit_is_a_difference() -> None:
    x = np.array([[1, 0], [-0.0, np.nan]], np.float32)
    a = sf.CSR.from_dense(x)
    for one, other, text in (
        (x, x.copy(), ""),
        (x, np.where(x == 0, np.float32(0), x), "array[(1, 0)]: expected 0x80000000, got 0x0; 1 of 4 differ"),
        (x, x.astype(np.float16), "expected float32(2, 2), got float16(2, 2)"),
        (x, x.T.copy(), "differ"),
        (a, sf.CSR.from_dense(x.copy()), ""),
        (a, a.with_arrays(data=-a.data), "data[(0,)]: expected 0x3f800000, got 0xbf800000"),
        (a, sf.convert(x, "bitmask"), "expected (<class"),
        (a, sf.errors.StructureError("no"), "got ('StructureError', 'no'"),
        (sf.errors.StructureError("no"), sf.errors.UsageError("no"), "got ('UsageError', 'no'"),
        (sf.errors.StructureError("no", count=1), sf.errors.StructureError("no", count=2), "'count': 2"),
        (sf.errors.StructureError("no", count=1), sf.errors.StructureError("no", count=1), ""),
    ):
        found = difference(one, other)
        assert (text in found) if text else (found == ""), found


def test_a_planted_difference_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The case, the conversion and the place are named."""
    edge = sf.formats.edges.Edge("csr", "bitmask", "cpu", lambda a, params: planted(a))

    def planted(a: Any) -> Any:
        b = sf.Bitmask._from_csr(a)
        bits = b.data.copy()
        if bits.size > 5:
            bits.view(f"u{bits.itemsize}")[5] ^= 1
        return b.with_arrays(data=bits)

    monkeypatch.setattr(sf.formats.edges, "_table", dict(sf.formats.edges._table))
    sf.formats.edges.register(edge)
    with pytest.raises(
        AssertionError, match=r"csr -> bitmask: data\[\(5,\)\]: expected 0x[0-9a-f]+, got .* 1 of (.|\n)*seed="
    ):
        assert_none(of_format(sf.Bitmask, range(20), ("float32",), Host()))
    real = masks.keep_nm
    with pytest.raises(AssertionError, match=r"magnitude_nm .*array\[.*pruning, seed"):
        assert_none(planted_masks(monkeypatch, real))


def planted_masks(monkeypatch: pytest.MonkeyPatch, real: Any) -> Iterator[str]:
    """Every second mask of n:m keeps one value more: that of the place, which comes after that of the host."""
    calls = iter(range(10**6))

    def keep(keys: Any, n: int, m: int) -> Any:
        mask = real(keys, n, m)
        if mask.size and next(calls) % 2:
            mask[-1, -1] ^= True
        return mask

    monkeypatch.setattr(masks, "keep_nm", keep)
    for seed in range(20):
        yield from pruning_differences(seed, ("float32",), Host())


BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "converters_gpu.py"


def test_the_benchmark_of_converters_has_a_row_for_every_case() -> None:
    """With numpy in the place of CuPy."""
    spec = importlib.util.spec_from_file_location("converters_gpu", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    clock = module.Clock(lambda: None, 1, 0.0)
    dense = list(module.dense_part(np, clock, (64, 256), None))
    ours = {(r.target, r.share, r.direction) for r in dense if r.who == "spformat"}
    assert ours == {(target, share, way) for target, _, share in module.CASES for way in ("to", "back")}
    sparse = list(module.csr_part(np, clock, None, nonzeros=50_000))
    assert len(sparse) == 2 * len(module.CASES) - 1  # a CSR is transposed, and so are BSR
    assert all(r.us > 0 and r.gb_per_s > 0 for r in dense + sparse)
    pruned = list(module.prune_part(np, clock, (64, 256), None))
    rows = [(t, w) for t, _ in module.PRUNED for w in ("spformat", "by mask")]
    assert [(r.target, r.who) for r in pruned] == [*rows, ("counts of inspect", "spformat")]
    small = list(module.small_part(np, clock, ["csr"]))
    assert {r.direction for r in small} == {"to", "back"}
    assert "MISSED" in module.text_of(dense[0]._replace(aim=1e9))
    with pytest.raises(SystemExit, match="came back different"):
        x = module.weights(np, (64, 64), "2:4", 0.5)
        module.check("csr", x, np.roll(x, 1, axis=1))


def test_the_benchmark_of_converters_says_that_there_is_no_device() -> None:
    code = f"import runpy, sys; sys.modules['cupy'] = None; runpy.run_path({str(BENCHMARK)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("cuda: CuPy is not installed: pip install 'spformat[cuda13]'")
