"""Mutated inputs for every reader that is no safetensors parser: none may end as a bug, with exit code 70 (T5, T6).

npz, mtx, smtx; config.json, manifest, journal and index of a checkpoint; entries of compressed-tensors. A mutant is a
good input with some bytes changed, repeated or removed, or with parts of its JSON replaced. The answer must be a value,
or an error of this package that is no InternalError.
``python -m fuzz readers --count N`` spreads N over all readers.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import os
import random
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.io
import scipy.sparse as sp

from fuzz.substitutions import MEMORY
from spformat import limits
from spformat.checkpoint import convert_checkpoint, journals, open_source
from spformat.checkpoint.conversion import Conversion
from spformat.checkpoint.layouts import config_for, dense_index
from spformat.checkpoint.manifest import journal_bytes, json_bytes
from spformat.checkpoint.packed import config_when_dense
from spformat.checkpoint.parts import Part
from spformat.checkpoint.recipe import Recipe
from spformat.checkpoint.tensor_plans import plan_tensors
from spformat.errors import InternalError, SpformatError
from spformat.formats.csr import CSR
from spformat.interop import compressed_tensors
from spformat.interop.matrices import read_matrix
from spformat.storage.container import save_dense

BUDGET = 32 << 20
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, "", "x", "keep", "nope", "../x", "\0",
    "\ud800", "é", [], [1], [[]], {}, {"metadata": 5}, {"x": None}, ["x"], "bsr:blocksize=0x0", "model.safetensors",
)  # fmt: skip
TOKENS = (
    b"0", b"-1", b"1e400", b"nan", b"inf", b"true", b"null", b'"', b"{}", b"[", b"]" * 9, b"[" * 2000, b"\0", b"\n",
    b"\xff", b"\xef\xbb\xbf", b"9" * 30, b"9" * 5000, b"2147483648", b"18446744073709551616", b" ", b",", b"%", b"()",
    b"'<U1'", b"'|O'", b"'<c16'", b"(True,)", b"\\ud800", b"-" * 9000 + b"1", b"pattern", b"symmetric", b"array", b"hermitian",
)  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """Good inputs, and what reads a mutant of one of them, in a folder."""

    seeds: Callable[[Path], list[Any]]
    """Bytes; JSON trees; or arrays by name."""
    read: Callable[[Path, Any], Any]


# ----------------------------------------------------------------------------------------------------------- mutants


def mutant(rng: random.Random, seed: Any) -> Any:
    """A changed copy of a seed: bytes, a JSON tree or arrays by name."""
    if isinstance(seed, bytes):
        return _bytes(rng, seed)
    if all(isinstance(v, np.ndarray) for v in seed.values()):
        return _arrays(rng, seed)
    tree = copy.deepcopy(seed)
    for _ in range(rng.randrange(1, 4)):
        tree = _tree(rng, tree)
    if rng.random() < 0.3:
        return _bytes(rng, json.dumps(tree).encode())
    return tree


def _bytes(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        at, kind = rng.randrange(len(out) + 1), rng.randrange(6)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = rng.randrange(256)
        elif kind == 2:
            out[at:at] = rng.choice(TOKENS)
        elif kind == 3:
            del out[at : at + rng.choice((1, 2, 8, 64))]
        elif kind == 4:
            begin = rng.randrange(len(out) + 1)
            out[at:at] = out[begin : begin + rng.choice((1, 4, 32))]
        else:
            token = rng.choice(TOKENS)
            out[at : at + len(token)] = token
    return bytes(out[:100_000])


def _tree(rng: random.Random, tree: Any) -> Any:
    if isinstance(tree, (dict, list)) and tree and rng.random() < 0.8:
        keys = list(tree) if isinstance(tree, dict) else range(len(tree))
        key = rng.choice(list(keys))
        kind = rng.randrange(8)
        if kind == 0:
            del tree[key]
        elif kind == 1 and isinstance(tree, dict):
            tree[rng.choice(("", "x", "weight_map", "metadata", "index", "quantization_config", str(key) + "x"))] = (
                tree[key]
            )
        elif kind == 2:
            tree[key] = copy.deepcopy(rng.choice(ODD))
        else:
            tree[key] = _tree(rng, tree[key])
        return tree
    return copy.deepcopy(rng.choice(ODD))


def _arrays(rng: random.Random, seed: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    out = dict(seed)
    for _ in range(rng.randrange(1, 4)):
        name = rng.choice(list(out))
        a, kind = out[name].copy(), rng.randrange(6)
        if kind < 2 and a.size:
            flat = a.reshape(-1).view(f"u{a.itemsize}")
            flat[rng.randrange(flat.size)] = rng.choice(
                (0, 1, 255, 2 ** (8 * a.itemsize) - 1, 2 ** (8 * a.itemsize - 1))
            )
        elif kind == 2:
            dtypes = (np.int8, np.uint8, np.int32, np.int64, np.uint64, np.float16, np.float32, np.float64, np.bool_)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                a = a.astype(rng.choice(dtypes))
        elif kind == 3:
            a = a.reshape(-1)
        elif kind == 4:
            a = a[: rng.randrange(a.shape[0] + 1)] if a.ndim else a
        else:
            a = np.array(rng.choice(((0, 0), (1, 2**40), (2**40, 0), (4,), (4, 8, 1), (-1, 8), (3, 5))))
        out[name] = a
        if rng.random() < 0.1 and len(out) > 1:
            del out[rng.choice(list(out))]
    return out


# ----------------------------------------------------------------------------------------------------------- readers


def _a() -> sp.csr_array:
    return sp.csr_array(np.array([[0, 1.5, 0, -2], [0, 0, 0, 0], [3, 0, 4, 5]]))


def _npz(_: Path) -> list[Any]:
    seeds = []
    for layout in ("csr", "csc", "coo", "bsr"):
        for packed in (True, False):
            buffer = io.BytesIO()
            sp.save_npz(buffer, _a().asformat(layout), compressed=packed)
            seeds.append(buffer.getvalue())
    return seeds


def _mtx(_: Path) -> list[Any]:
    seeds = []
    square = np.array([[1, 2], [2, 0]])
    for value, options in (
        (_a(), {}), (_a(), {"field": "pattern"}), (_a().toarray(), {}), (sp.csr_array(square), {"symmetry": "symmetric"}),
        (square, {"symmetry": "symmetric"}), (sp.csr_array(square), {"field": "integer"}),
    ):  # fmt: skip
        buffer = io.BytesIO()
        scipy.io.mmwrite(buffer, value, **options)
        seeds.append(buffer.getvalue())
    return seeds


def _matrix(suffix: str) -> Callable[[Path, Any], Any]:
    def read(folder: Path, data: bytes) -> Any:
        path = folder / f"a{suffix}"
        path.write_bytes(data)
        return read_matrix(path)

    return read


_DENSE = np.array([[0, 1, 0, 2, 0, 0, 3, 0], [0, 0, 0, 0, 4, 0, 0, 0]], np.int8)


def _group() -> dict[str, np.ndarray[Any, Any]]:
    csr = CSR.from_dense(_DENSE)
    bits = np.packbits(_DENSE != 0, axis=1, bitorder="little")
    offsets = csr.indptr[:-1].astype(np.int64)
    return {"compressed": csr.data, "bitmask": bits, "row_offsets": offsets, "shape": np.array([2, 8])}


def _text(folder: Path, name: str, mutated: Any) -> None:
    data = mutated if isinstance(mutated, bytes) else json.dumps(mutated).encode()
    (folder / name).write_bytes(data)


def _configs(folder: Path) -> list[Any]:
    save_dense(folder / "model.safetensors", {f"w.{k}": x for k, x in _group().items()}, overwrite=True)
    weights = {"num_bits": 8, "type": "float"}
    groups = {"config_groups": {"g": {"weights": weights, "targets": ["Linear"]}}, "sparsity_config": {"format": "x"}}
    return [{"quantization_config": groups, "model_type": "x"}, {"compression_config": groups, "x": [1, 2]}]


def _config(folder: Path, mutated: Any) -> Any:
    _text(folder, "config.json", mutated)
    source = open_source(folder)
    data = (folder / "config.json").read_bytes()
    config_when_dense(data)
    source.config()
    return config_for(data, "transformers")


def _target(folder: Path, name: str) -> Path:
    """A folder beside ``folder``: no conversion writes into its input."""
    return folder.with_name(f"{folder.name}-{name}")


def _packed(folder: Path) -> list[Any]:
    save_dense(folder / "model-00001-of-00002.safetensors", {"a": _DENSE.astype(np.float32)})
    save_dense(folder / "model-00002-of-00002.safetensors", {"b": _DENSE.astype(np.float16)})
    convert_checkpoint(folder, _target(folder, "out"), "csr")
    tree = json.loads((_target(folder, "out") / "spformat.json").read_text())
    return [tree, tree | {"index": {"metadata": {"total_size": 9}, "more": [1, {"x": "y"}]}}]


def _manifest(folder: Path, mutated: Any) -> Any:
    _text(_target(folder, "out"), "spformat.json", mutated)
    source = open_source(_target(folder, "out"))
    return dense_index(source.index, [("a", "x.safetensors", 1)])


def _finished(folder: Path) -> list[Any]:
    _packed(folder)
    (_target(folder, "out") / "spformat.json").unlink()
    trees = []
    for i in (1, 2):
        convert_checkpoint(folder, _target(folder, "parts"), "csr", part=f"{i}/2")
        trees.append(json.loads((_target(folder, "parts") / f"spformat.partial-{i}-of-2.json").read_text()))
    return [tree for tree in trees if tree.pop("sha256")]


def _journal(folder: Path, mutated: Any) -> Any:
    name = journals.journal_name(Part(1, 2))
    sealed = isinstance(mutated, dict) and "\\ud" not in json.dumps(mutated)
    (_target(folder, "parts") / name).write_bytes(
        journal_bytes(mutated) if sealed else mutated if isinstance(mutated, bytes) else json.dumps(mutated).encode()
    )
    source = open_source(folder)
    c = Conversion(
        source, plan_tensors(source, Recipe(to="csr")), Recipe(to="csr"), os.fspath(_target(folder, "parts"))
    )
    known = journals.entries_of(c, [name]) or {}
    for file_plan in c.parts(2)[0]:
        journals.finished(c, file_plan, known.get(file_plan.name))
    journals.parts_of(c, [name])
    return journals.parts_in(os.fspath(_target(folder, "parts")))


def _sharded(folder: Path) -> list[Any]:
    for i, name in enumerate("ab", 1):
        save_dense(folder / f"model-{i:05}-of-00002.safetensors", {name: _DENSE.astype(np.float32)}, overwrite=True)
    weights = {name: f"model-{i:05}-of-00002.safetensors" for i, name in enumerate("ab", 1)}
    return [{"metadata": {"total_size": 128}, "weight_map": weights, "more": {"x": [1, "y", None]}}]


def _index(folder: Path, mutated: Any) -> Any:
    _text(folder, "model.safetensors.index.json", mutated)
    source = open_source(folder)
    listed = [(name, source.records[name][0], 1) for name in source.records]
    _text(folder, "model.safetensors.index.json", json_bytes(dense_index(source.index, listed)))
    return open_source(folder)  # what we write of it, we read


def _groups(_: Path) -> list[Any]:
    two = {"compressed": np.ones((2, 4), np.float16), "bitmask": np.full((2, 1), 0x33, np.uint8)}
    return [_group(), two | {"shape": np.array([[2], [8]])}]


def _compressed(folder: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    save_dense(folder / "model.safetensors", {f"w.{k}": x for k, x in arrays.items()}, overwrite=True)
    source = open_source(folder)
    for name in source.records:
        with source.open(source.records[name][0]) as f:
            f.read(name)
    layout = compressed_tensors.BITMASK if "row_offsets" in arrays else compressed_tensors.TWO_FOUR
    if {"compressed", "bitmask", "shape"} <= arrays.keys():
        return compressed_tensors.decode(layout, arrays)
    return None


READERS = {
    "npz": Reader(_npz, _matrix(".npz")),
    "mtx": Reader(_mtx, _matrix(".mtx")),
    "smtx": Reader(lambda _: [b"3, 4, 4\n0 2 2 4 \n0 3 0 2 \n", b"1, 1, 0\n0 0\n\n"], _matrix(".smtx")),
    "config": Reader(_configs, _config),
    "manifest": Reader(_packed, _manifest),
    "journal": Reader(_finished, _journal),
    "index": Reader(_sharded, _index),
    "compressed-tensors": Reader(_groups, _compressed),
}


def campaign(name: str, count: int, room: Path, seed: int = 0) -> Counter[str]:
    """What ``count`` mutants became, by kind of answer. AssertionError for one that ends as a bug."""
    rng, seen, reader = random.Random(f"{name} {seed}"), Counter[str](), READERS[name]
    folder = room / name
    folder.mkdir()
    seeds = reader.seeds(folder)
    with limits.using(memory=BUDGET, tensors=1000), warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(count):
            mutated = mutant(rng, rng.choice(seeds))
            try:
                reader.read(folder, mutated)
                seen["read"] += 1
            except SpformatError as e:
                assert not isinstance(e, InternalError), (name, seed, i, mutated)
                seen[type(e).__name__] += 1
            except BaseException as e:
                raise AssertionError(f"{name}, seed {seed}, mutant {i}: {type(e).__name__}: {mutated!r:.3000}") from e
    return seen


def main(arguments: list[str]) -> int:
    """The command; a leak ends with a traceback that shows the input."""
    parser = argparse.ArgumentParser("fuzz readers", description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--reader", choices=list(READERS))
    given = parser.parse_args(arguments)
    names = [given.reader] if given.reader else list(READERS)
    for name in names:
        start = time.time()
        with tempfile.TemporaryDirectory(dir=MEMORY if os.path.isdir(MEMORY) else None) as folder:
            seen = campaign(name, -(-given.count // len(names)), Path(folder), given.seed)
        print(f"readers: {name}: seed {given.seed}, {time.time() - start:.0f} s: {dict(seen)}", flush=True)
    return 0
