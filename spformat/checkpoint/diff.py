"""Compare the values of two checkpoints. -0.0 equals +0.0; every other bit pattern equals only itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays.dtypes import VALUE_TYPES, bits, nonzero_mask
from ..arrays.segments import distinct
from ..errors import UsageError, printable
from ..formats.base import Format
from ..formats.csr import CSR
from ..formats.dense import Dense
from ..formats.stack import Stack
from ..limits import product
from ..storage.descriptor import Record
from ..storage.files import Path, is_file, safe_name, sha256_of
from ..storage.stheader import METADATA
from ..storage.tensorfile import TensorFile
from .manifest import MANIFEST, read_manifest
from .source import Source, open_source


@dataclass(frozen=True)
class Difference:
    """One tensor that differs, and how."""

    tensor: str
    what: str
    count: int = 0
    index: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{printable(self.tensor)}: {self.what}"


def diff_checkpoints(a: Path | Source, b: Path | Source) -> Iterator[tuple[str, Difference | None]]:
    """(tensor, its difference or None) for every tensor of either checkpoint. Two tensors are in memory at a time.

    First come tensors that only one of them has, then the others, shard by shard, so that each shard is opened once for
    all of them that another shard shares with it.
    """
    first, second = _opened(a), _opened(b)
    if (first.matrix or second.matrix) and len(first.records) == len(second.records) == 1:
        # A file with one matrix has no name for it, so the only tensor of the other one is meant.
        for (name, f), (other, g) in zip(first.opened(first.records), second.opened(second.records), strict=True):
            yield name, _difference(name, f.read(name), g.read(other))
        return
    for name in sorted(first.records.keys() ^ second.records.keys()):
        yield name, Difference(name, f"only in {first.path if name in first.records else second.path}")
    common = first.records.keys() & second.records.keys()
    names = sorted(common, key=lambda name: (first.records[name][0], second.records[name][0], name))
    for (name, f), (_, g) in zip(first.opened(names), second.opened(names), strict=True):
        records = first.records[name][1], second.records[name][1]
        if any(record.only_bytes for record in records):
            yield name, _difference_of_bytes(f, g, *records)
        else:
            yield name, _difference(name, f.read(name), g.read(name))


def diff_metadata(a: Path | Source, b: Path | Source) -> list[Difference]:
    """The keys of ``__metadata__`` whose texts differ, over all shards of each checkpoint.

    A "format" that only one of the two states is no difference: loaders demand it of a dense checkpoint, so
    a conversion to dense adds it.
    """
    one, other = _opened(a).metadata, _opened(b).metadata
    ignored = {"format"} - (one.keys() & other.keys())
    keys = sorted((one.keys() | other.keys()) - ignored)
    return [
        Difference(METADATA, f"'{printable(key, 40)}': {_texts(one.get(key))} against {_texts(other.get(key))}")
        for key in keys
        if one.get(key) != other.get(key)
    ]


def _opened(x: Path | Source) -> Source:
    return x if isinstance(x, Source) else open_source(x)


def _texts(every: tuple[str, ...] | None) -> str:
    return ", ".join(f"'{printable(text, 60)}'" for text in every[:3]) if every else "nothing"


def diff_provenance(a: Path, b: Path) -> Iterator[tuple[str, Difference | None]]:
    """(file, its difference or None) for every input file that the manifest of one folder names.

    The file is looked up in the other folder, and its sha256 is compared with the one in the manifest; one that is not
    there differs. If both folders have a manifest, the one that names fewer missing and different files counts as the
    output, B if they are equal. UsageError if neither has one.
    """
    pairs = [(p, q) for p, q in ((b, a), (a, b)) if os.path.isfile(os.path.join(p, MANIFEST))]
    if not pairs:
        raise UsageError(f"--provenance: neither {printable(a)} nor {printable(b)} has a {MANIFEST}")
    _, _, rows = min((_inputs(p, q) for p, q in pairs), key=lambda inputs: inputs[:2])
    yield from rows


def _inputs(packed: Path, source: Path) -> tuple[int, int, list[tuple[str, Difference | None]]]:
    """(files missing, files missing or different, ``diff_provenance``), where ``packed`` is the output."""
    manifest, rows, missing = os.path.join(packed, MANIFEST), [], 0
    entries = read_manifest(manifest)["files"].values()
    for entry in entries:
        name, what = entry["source"], ""
        if len(entries) == 1 and not os.path.isdir(source):
            path = os.fspath(source)  # a file by itself may have been renamed, and may have any name
        else:
            fix = "it should be the name of an input file, as convert writes it: convert the input again"
            folder = source if os.path.isdir(source) else os.path.dirname(source)
            path = os.path.join(folder, safe_name(name, ".safetensors", manifest, fix))
        if not is_file(path):
            what = f"{printable(manifest)} names this file of its input, and {printable(source)} does not hold it"
            missing += 1
        elif (actual := sha256_of(path)) != entry["source_sha256"]:
            what = f"sha256: the manifest says {entry['source_sha256']}, the file has {actual}"
        rows.append((name, Difference(name, what) if what else None))
    return missing, sum(d is not None for _, d in rows), rows


def _difference(name: str, x: Any, y: Any) -> Difference | None:
    """The difference of two tensors, or None. Two sparse ones are compared by their nonzeros, because a dense graph may
    not fit into memory."""
    if x.ndim == y.ndim == 3 and x.shape == y.shape and any(isinstance(a, Stack) for a in (x, y)):
        return _of_stack(name, x, y)
    sparse = all(isinstance(a, Format) and not isinstance(a, Dense) for a in (x, y))
    if sparse and x.shape == y.shape and x.dtype == y.dtype and product(*x.shape) < 2**63:
        return _compare_nonzeros(name, x.to_csr().without_zeros(), y.to_csr().without_zeros())
    return _compare(name, *(a.to_dense() if isinstance(a, Format) else a for a in (x, y)))


def _difference_of_bytes(f: TensorFile, g: TensorFile, x: Record, y: Record) -> Difference | None:
    """As ``_difference``, of two tensors of which numpy lacks the type of one: their bytes are compared."""
    if (x.dtype, x.shape) != (y.dtype, y.shape):
        return Difference(x.name, f"{x.dtype}{list(x.shape)} against {y.dtype}{list(y.shape)}")
    size, count, first = 0, 0, (0, 0, 0)
    for one, other in zip(f.raw(x.name), g.raw(y.name), strict=True):
        unequal = one != other
        if not count and unequal.any():
            at = int(unequal.argmax())
            first = size + at, int(one[at]), int(other[at])
        count, size = count + int(unequal.sum()), size + one.size
    if not count:
        return None
    text = f"{count} of {size} bytes differ, first byte {first[0]}: {first[1]} against {first[2]}"
    return Difference(x.name, text, count, first[:1])


def _of_stack(name: str, x: Any, y: Any) -> Difference | None:
    """The difference of two stacks, or of a stack and an array [E, M, K], matrix by matrix."""
    pairs = enumerate(zip(x, y, strict=True))
    found = [(e, d) for e, pair in pairs if (d := _difference(name, *pair)) is not None]
    if not found:
        return None
    (e, first), count = found[0], sum(d.count for _, d in found)
    if not first.index:  # another dtype
        return first
    text = f"{count} of {product(*x.shape)} elements differ, first in matrix {e}: {first.what}"
    return Difference(name, text, count, (e, *first.index))


def _compare_nonzeros(name: str, x: CSR, y: CSR) -> Difference | None:
    """As ``_compare``, for two CSR of equal shape and dtype, with sorted columns and without stored zeros."""
    K = x.shape[1]
    places = [a.rows().astype(np.int64) * K + a.indices for a in (x, y)]  # int64: M*K overflows int32
    every = distinct(np.concatenate(places))
    values = [np.zeros(every.size, x.dtype), np.zeros(every.size, x.dtype)]
    for value, place, a in zip(values, places, (x, y), strict=True):
        value[np.searchsorted(every, place)] = a.data
    unequal = bits(values[0]) != bits(values[1])
    if not unequal.any():
        return None
    first = int(unequal.argmax())
    at = divmod(int(every[first]), K)
    return _differing(name, int(unequal.sum()), product(*x.shape), at, values[0][first], values[1][first])


def _compare(name: str, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> Difference | None:
    if x.shape != y.shape or x.dtype != y.dtype:
        return Difference(name, f"{x.dtype}{list(x.shape)} against {y.dtype}{list(y.shape)}")
    if x.dtype.name in VALUE_TYPES:
        unequal = (bits(x) != bits(y)) & (nonzero_mask(x) | nonzero_mask(y))
    else:
        unequal = x != y
        if unequal.any():  # a NaN is unequal to itself
            unequal = unequal & _other_bytes(x, y)
    count = int(unequal.sum())
    if not count:
        return None
    at = tuple(int(i) for i in np.unravel_index(int(unequal.reshape(-1).argmax()), x.shape))
    return _differing(name, count, x.size, at, x[at], y[at])


def _other_bytes(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """bool array: whether elements of one type have other bytes."""
    rows = (np.ascontiguousarray(a).reshape(-1).view(np.uint8).reshape(-1, a.itemsize) for a in (x, y))
    return np.asarray(np.not_equal(*rows).any(axis=1)).reshape(x.shape)


def _differing(name: str, count: int, size: int, at: tuple[int, ...], one: Any, other: Any) -> Difference:
    values = [str(one), str(other)]
    if values[0] == values[1]:  # NaN of different bits
        values = [
            f"{text} (0x{np.asarray(x).tobytes()[::-1].hex()})" for text, x in zip(values, (one, other), strict=True)
        ]
    text = f"{count} of {size} elements differ, first at {list(at)}: {' against '.join(values)}"
    return Difference(name, text, count, at)
