"""Do two checkpoints hold the same values? -0.0 equals +0.0, every other bit pattern equals only itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..dtypes import VALUE_TYPES, bits, nonzero_mask
from ..errors import UsageError, printable
from ..files import Path, safe_name, sha256_of
from ..formats.base import Format
from .manifest import MANIFEST, read_manifest
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


def diff_provenance(a: Path, b: Path) -> Iterator[tuple[str, Difference | None]]:
    """(file, None or its difference) for every input file that the manifest of one names, looked up in the other.

    The sha256 of the file is compared with the one in the manifest. UsageError when neither folder has a manifest.
    """
    one, other = (p for p in (a, b) if os.path.isfile(os.path.join(p, MANIFEST))), {os.fspath(a), os.fspath(b)}
    packed = next(one, None)
    if packed is None:
        raise UsageError(f"--provenance: neither {printable(a)} nor {printable(b)} has a {MANIFEST}")
    source = (other - {os.fspath(packed)} or other).pop()
    folder = source if os.path.isdir(source) else os.path.dirname(os.path.abspath(source))
    for entry in read_manifest(os.path.join(packed, MANIFEST))["files"].values():
        name, expected = safe_name(entry["source"], ".safetensors"), entry["source_sha256"]
        found = sha256_of(os.path.join(folder, name))
        same = found == expected
        yield name, None if same else Difference(name, f"sha256: the manifest says {expected}, the file has {found}")


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
