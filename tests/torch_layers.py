"""Sparse layers of small integers, whose products are exact, for the tests of spformat.torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import spformat as sf
from spformat.torch import SparseLinear

ROWS, DEPTH = 96, 128
PARAMS: dict[str, dict[str, Any]] = {
    "two-four": {},
    "vector-nm": {"n": 2, "m": 4, "vector_length": 32},
    "bsr": {"blocksize": (16, 16)},
    "dbsr": {"blocksize": (16, 16)},
    "csr": {},
    "bitmask": {},
    "ell-buckets": {},
    "sr-bcrs": {},
}


def weights(dtype: str = "float16", seed: int = 3) -> np.ndarray[Any, Any]:
    """[ROWS, DEPTH] integers that every format holds: two of four columns, the same ones in every 32 rows."""
    rng = np.random.default_rng(seed)
    keep = rng.permuted(np.tile([1, 1, 0, 0], (ROWS // 32, DEPTH // 4, 1)), axis=2).reshape(ROWS // 32, DEPTH)
    values = rng.integers(1, 4, (ROWS, DEPTH)) * rng.choice([-1, 1], (ROWS, DEPTH))
    return np.asarray(values * keep.repeat(32, 0)).astype(sf.arrays.dtypes.VALUE_TYPES[dtype].numpy)


def matrix(fmt: str = "two-four", dtype: str = "float16", seed: int = 3) -> sf.Format:
    return sf.convert(weights(dtype, seed), fmt, **PARAMS[fmt])


def a_sum() -> sf.Format:
    """A matrix of two parts."""
    w = weights()
    left = w * (np.arange(DEPTH) < 64)
    return sf.Sum.from_parts([sf.convert(left, "two-four"), sf.convert(w - left, "csr")])


def bias(dtype: str = "float16") -> torch.Tensor:
    return torch.arange(ROWS).remainder(7).sub(3).to(getattr(torch, dtype))


def layer(fmt: str = "two-four", dtype: str = "float16", with_bias: bool = True, seed: int = 3) -> SparseLinear:
    return SparseLinear(matrix(fmt, dtype, seed), bias(dtype) if with_bias else None).requires_grad_(False)


def tokens(*leading: int, dtype: str = "float16", seed: int = 5) -> torch.Tensor:
    values = np.random.default_rng(seed).integers(-3, 4, (*leading, DEPTH))
    return torch.from_numpy(values).to(getattr(torch, dtype))


def dense(x: torch.Tensor, w: np.ndarray[Any, Any], b: torch.Tensor | None = None) -> torch.Tensor:
    """The product with a dense weight, in float64, in the dtype of x."""
    W = torch.from_numpy(w.astype(np.float64)).to(x.device)
    return torch.nn.functional.linear(x.double(), W, None if b is None else b.double()).to(x.dtype)
