"""Do two checkpoints hold the same values? -0.0 equals +0.0, every other bit pattern equals only itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..dtypes import VALUE_TYPES, bits, nonzero_mask
from ..errors import printable
from ..files import Path
from ..formats.base import Format
from .source import open_source


@dataclass(frozen=True)
class Difference:
    """One tensor that differs, and how."""

    tensor: str
    what: str
    count: int = 0
    index: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{printable(self.tensor)}: {self.what}"


def diff_checkpoints(a: Path, b: Path) -> Iterator[tuple[str, Difference | None]]:
    """(tensor, None or its difference) for every tensor of either; two tensors are in memory at a time."""
    first, second = open_source(a), open_source(b)
    for name in sorted(set(first.records) | set(second.records)):
        if name not in first.records or name not in second.records:
            yield name, Difference(name, f"only in {first.path if name in first.records else second.path}")
            continue
        yield name, _compare(name, *(_dense(s, name) for s in (first, second)))


def _dense(source: Any, name: str) -> np.ndarray[Any, Any]:
    with source.open(source.records[name][0]) as f:
        x = f.read(name)
        array: np.ndarray[Any, Any] = x.to_dense() if isinstance(x, Format) else x
        return array


def _compare(name: str, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> Difference | None:
    if x.shape != y.shape or x.dtype != y.dtype:
        return Difference(name, f"{x.dtype}{list(x.shape)} against {y.dtype}{list(y.shape)}")
    if x.dtype.name in VALUE_TYPES:
        unequal = (bits(x) != bits(y)) & (nonzero_mask(x) | nonzero_mask(y))
    else:
        unequal = x != y
    count = int(unequal.sum())
    if not count:
        return None
    at = tuple(int(i) for i in np.unravel_index(int(unequal.reshape(-1).argmax()), x.shape))
    text = f"{count} of {x.size} elements differ, first at {list(at)}: {x[at]} against {y[at]}"
    return Difference(name, text, count, at)
