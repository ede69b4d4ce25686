"""``masks.prune``: the bytes of pruning and then converting, and on a device without a mask.

Random cases of all formats are in ``conversions.pruning_differences``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conversions import difference
from test_device_masks import any_bits, to_device

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.errors import StructureError, UsageError
from spformat.formats.base import Format
from spformat.preprocess import masks

SINGLE = ("csr", "bitmask", "ell-buckets", "sr-bcrs", "csc")
BLOCKS = ("bsr:blocksize=8x16", "dbsr:blocksize=16x8")
DTYPES = ("float64", "float32", "float16", "bfloat16", "int8")


def in_two_steps(x: np.ndarray[Any, Any], target: str, sparsity: float, **how: Any) -> Format:
    """``prune`` with a mask, on the host."""
    fmt, given = sf.formats.parse_spec(target)
    pattern = fmt.pattern(fmt.resolve_params(given))
    return sf.convert(masks.apply(x, masks.of_pattern(x, pattern, sparsity, **how)), target)


@pytest.fixture
def no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for a mask of a whole matrix fails."""
    for name in ("magnitude", "magnitude_blocks", "of_pattern", "apply"):
        monkeypatch.setattr(masks, name, None)


@pytest.mark.parametrize("target", [*SINGLE, *BLOCKS, "two-four", "vector-nm:n=1,m=4,vector_length=4", "dense"])
def test_a_host_matrix_is_pruned_and_converted(target: str) -> None:
    x = any_bits((48, 64), "float32", 3)
    x[~np.isfinite(x)] = 0
    for sparsity, norm in ((0.0, "l2"), (0.7, "l1"), (1.0, "l2")):
        wanted = in_two_steps(x, target, sparsity, norm=norm)
        assert difference(wanted, masks.prune(x, target, sparsity=sparsity, norm=norm)) == ""
        assert difference(wanted, masks.prune(sf.Dense.from_dense(x), target, sparsity=sparsity, norm=norm)) == ""
    fmt, given = sf.formats.parse_spec(target)
    assert difference(wanted, masks.prune(x, fmt, sparsity=sparsity, norm=norm, **given)) == ""


def test_what_is_refused() -> None:
    x = np.ones((4, 4), np.float32)
    with pytest.raises(UsageError, match=r"prune: expected sparsity=\.\..* to prune to csr"):
        masks.prune(x, "csr")
    with pytest.raises(UsageError, match="sparsity: expected a number"):
        masks.prune(x, "bsr:blocksize=2x2", sparsity=1.5)
    with pytest.raises(UsageError, match="norm"):
        masks.prune(x, "csr", sparsity=0.5, norm="max")
    with pytest.raises(UsageError, match="nonfinite"):
        masks.prune(x, "csr", sparsity=0.5, nonfinite="drop")
    with pytest.raises(UsageError, match="auto"):
        masks.prune(x, "auto", sparsity=0.5)
    with pytest.raises(StructureError, match="int32"):
        masks.prune(x.astype(np.int32), "csr", sparsity=0.5)
    x[1, 2] = np.nan
    with pytest.raises(StructureError, match="got 1 NaN or infinite, the first at row 1, column 2"):
        masks.prune(x, "csr", sparsity=0.5)


# ------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", [*SINGLE, *BLOCKS])
def test_a_device_writes_no_mask(target: str, dtype: str, request: pytest.FixtureRequest) -> None:
    """Few values, so that most of the smallest ones that stay are ties, and over many tiles."""
    shape = (301, 1003)
    x = np.random.default_rng(1).integers(-3, 4, shape).astype(VALUE_TYPES[dtype].numpy)
    norm = "l1" if dtype == "float64" else "l2"
    shares = (0.05, 0.5, 0.9, 0.999)
    wanted = [in_two_steps(x, target, s, norm=norm) for s in shares]
    request.getfixturevalue("no_masks")
    for apart in (0, 1):
        w = to_device(x, apart)
        for s, host in zip(shares, wanted, strict=True):
            assert difference(host, masks.prune(w, target, sparsity=s, norm=norm)) == "", (s, apart)


@pytest.mark.gpu
@pytest.mark.parametrize("target", ["csr", "bitmask", "bsr:blocksize=8x16"])
def test_a_device_counts_what_is_not_finite(target: str) -> None:
    x = any_bits((70, 90), "float16", 5)
    w = to_device(x)
    with pytest.raises(StructureError) as host:
        masks.prune(x, target, sparsity=0.5)
    with pytest.raises(StructureError) as device:
        masks.prune(w, target, sparsity=0.5)
    assert (str(host.value), host.value.fields) == (str(device.value), device.value.fields)
    kept = masks.prune(w, target, sparsity=0.5, nonfinite="keep")
    assert difference(in_two_steps(x, target, 0.5, nonfinite="keep"), kept) == ""


@pytest.mark.gpu
def test_a_device_keeps_blocks_whose_squares_vanish() -> None:
    """In float64 a block of small values may have a norm of 0 beside large ones. It is stored all the same."""
    x = np.full((64, 64), 1e-200)
    x[0, 0] = 1e200
    x[:, 32:] = 0
    wanted = in_two_steps(x, "bsr:blocksize=8x8", 0.5)
    assert wanted.nnz > 8 * 8
    assert difference(wanted, masks.prune(to_device(x), "bsr:blocksize=8x8", sparsity=0.5)) == ""
