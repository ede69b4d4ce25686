"""One good object of every format, and files edited by somebody who recomputes the checksums."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from spformat.arrays.dtypes import VALUE_TYPES
from spformat.formats.base import Format
from spformat.storage import descriptor, stfile, stheader, stwriter

PARAMS: dict[str, dict[str, Any]] = {
    "bsr": {"blocksize": (2, 3)},
    "dbsr": {"blocksize": (4, 4)},
    "ell-buckets": {"column_parts": 2, "max_width": 4},
    "sr-bcrs": {"vector_length": 2, "stride": 4},
    "vector-nm": {"n": 2, "m": 4, "vector_length": 1},
}
Edit = Callable[[dict[str, Any], dict[str, Any]], Any]


def matrix(shape: tuple[int, int], dtype: str = "float16", seed: int = 0) -> np.ndarray[Any, Any]:
    """Small integers, at most two nonzeros in every four columns, so that it fits every format."""
    rng = np.random.default_rng(seed)
    x = rng.integers(1, 8, shape) * (rng.random(shape) < 0.5)
    x[:, 2::4] = 0
    x[:, 3::4] = 0
    return x.astype(VALUE_TYPES[dtype].numpy)


def make(fmt: type[Format], shape: tuple[int, int] = (7, 7), dtype: str = "float16") -> Format:
    return fmt.from_dense(matrix(shape, dtype), **PARAMS.get(fmt.name, {}))


def rewrite(path: Path, edit: Edit, *, sums: bool = True, seal: bool = True) -> None:
    """A hostile edit of descriptor and arrays; checksums are recomputed unless an argument says otherwise.

    ``edit(tree, arrays)`` changes the descriptor and {entry: numpy array or (code, shape, bytes)} in place;
    a string it returns replaces the descriptor text.
    """
    with stfile.Reader(path) as reader:
        arrays: dict[str, Any] = {name: reader.read(name) for name in reader.entries}
        metadata = dict(reader.header.metadata)
    tree = json.loads(metadata.pop(descriptor.KEY))
    text = edit(tree, arrays)
    raw = {
        name: a if isinstance(a, tuple) else (stwriter.code_of(a.dtype), a.shape, a.tobytes())
        for name, a in arrays.items()
    }
    entries = stheader.layout((name, code, shape, len(data)) for name, (code, shape, data) in raw.items())
    if sums and isinstance(tree.get("tensors"), dict):
        for name, tensor in tree["tensors"].items():
            for array in tensor.get("crc32", {}) if isinstance(tensor, dict) else ():
                if f"{name}.{array}" in raw:
                    tensor["crc32"][array] = f"{zlib.crc32(raw[f'{name}.{array}'][2]):08x}"
    if isinstance(text, str):
        metadata[descriptor.KEY] = text
    elif seal:
        metadata = descriptor.sealed(tree, entries, metadata)
    else:
        metadata[descriptor.KEY] = stheader.compact_json(tree, sort_keys=True)
    header = stheader.encode(entries, metadata)
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"".join(raw[e.name][2] for e in entries))


def described(tree: dict[str, Any]) -> dict[str, Any]:
    """What the descriptor says of tensor "w"."""
    found: dict[str, Any] = tree["tensors"]["w"]
    return found


def put(**changes: Any) -> Edit:
    """Keys of the description of "w", exchanged or added."""
    return lambda tree, arrays: described(tree).update(changes)


def drop(key: str) -> Edit:
    """The description of "w" without a key."""
    return lambda tree, arrays: described(tree).pop(key)  # type: ignore[return-value]


def keep(edit: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Edit:
    """Run an edit for its effect; what it returns is not a new descriptor text."""

    def run(tree: dict[str, Any], arrays: dict[str, Any]) -> None:
        edit(tree, arrays)

    return run


def change(array: str, with_: Callable[[np.ndarray[Any, Any]], Any]) -> Edit:
    """An array of "w" as ``with_`` makes it."""

    def edit(tree: dict[str, Any], arrays: dict[str, Any]) -> None:
        arrays[f"w.{array}"] = with_(arrays[f"w.{array}"])

    return edit
