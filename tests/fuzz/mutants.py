"""Right checksums, wrong content: files edited by somebody who recomputes every sum (T4, T6).

Each mutant is a good file with one to three edits of array elements, lengths, orders, dtypes, shape, params or tables,
sealed again and written to a file that ``load`` reads. Refused is fine. What is accepted must touch nothing outside its
arrays (``fuzz.oracle``), decode to what the oracle reads, and be byte for byte what ``from_csr`` makes of it.
``python -m fuzz mutants --count N`` spreads N over all formats.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from cases import params_of
from hostile import matrix

from fuzz.oracle import touched
from fuzz.substitutions import MEMORY
from spformat.errors import FormatError, LimitError, StructureError
from spformat.formats import FORMATS
from spformat.formats.base import Format
from spformat.storage import descriptor, stfile, stheader, stwriter
from spformat.storage.container import load, save

SHAPES = ((6, 9), (13, 34), (1, 1), (0, 7), (3, 0))
Arrays = dict[str, np.ndarray[Any, Any]]


def mutate(rng: random.Random, tree: dict[str, Any], arrays: Arrays) -> None:
    """Edit one to three places of the tensor "w", in place."""
    w = tree["tensors"]["w"]
    for _ in range(rng.randrange(1, 4)):
        what = rng.randrange(8)
        if what < 5:
            name = rng.choice(sorted(arrays))
            arrays[name] = _array(rng, arrays[name].copy(), arrays)
        elif what == 5:
            w["shape"] = _number(rng, w["shape"])
        else:
            for group in ("params", "tables"):
                if w.get(group):
                    key = rng.choice(sorted(w[group]))
                    w[group][key] = _number(rng, w[group][key])


def _array(rng: random.Random, a: np.ndarray[Any, Any], arrays: Arrays) -> np.ndarray[Any, Any]:
    kind = rng.randrange(10)
    if kind < 6 and a.size:
        flat = a.reshape(-1).view(f"u{a.itemsize}")
        i = rng.randrange(flat.size)
        near = [int(flat[rng.randrange(flat.size)]), 0, 1, 2**31 - 1, 2 ** (8 * a.itemsize) - 1]
        near += [int(flat[i]) + 1, int(flat[i]) - 1, int(flat[i]) ^ 1 << rng.randrange(8 * a.itemsize)]
        flat[i] = rng.choice(near) % 2 ** (8 * a.itemsize)
    elif kind == 6:
        a = np.concatenate([a, a[-1:]]) if a.ndim else a
    elif kind == 7:
        a = a[:-1]
    elif kind == 8 and rng.random() < 0.3:
        dtypes = (np.int32, np.int64, np.uint32, np.uint8, np.float16, np.int16, np.bool_)
        a = a.astype(dtypes[rng.randrange(len(dtypes))]) if a.dtype.kind in "iu" else a
    elif a.size > 1:
        flat = a.reshape(-1)
        i, j = rng.randrange(flat.size), rng.randrange(flat.size)
        flat[[i, j]] = flat[[j, i]]
    return np.ascontiguousarray(a)


def _number(rng: random.Random, value: Any) -> Any:
    if isinstance(value, list):
        out = list(value)
        if out:
            at = rng.randrange(len(out))
            out[at] = _number(rng, out[at] if rng.random() < 0.7 else rng.choice(out))
        return out
    if type(value) is int:
        return rng.choice([value + 1, max(0, value - 1), 2 * value, 0, 1, 2**31, 2**48 - 1])
    return rng.choice([value, "logical", "fragment", "cutlass-sm80", "ldmatrix"]) if isinstance(value, str) else value


class Base:
    """A good file, parsed once; its mutants are edited copies of it."""

    def __init__(self, f: Format, path: Path) -> None:
        self.path = path
        save(path, {"w": f}, overwrite=True)
        with stfile.Reader(path) as reader:
            self.text = reader.header.metadata[descriptor.KEY]
            self.arrays: Arrays = {name: reader.read(name) for name in reader.entries}
        self.fd = os.open(path, os.O_RDWR)

    def write(self, rng: random.Random) -> None:
        """The next mutant, into the file."""
        tree, arrays = json.loads(self.text), dict(self.arrays)
        mutate(rng, tree, arrays)
        raw = {name: a.tobytes() for name, a in arrays.items()}
        sums = tree["tensors"]["w"]["crc32"]
        for name, data in raw.items():
            sums[name.removeprefix("w.")] = f"{zlib.crc32(data):08x}"
        entries = stheader.layout((k, stwriter.code_of(a.dtype), a.shape, len(raw[k])) for k, a in arrays.items())
        header = stheader.encode(entries, descriptor.sealed(tree, entries, {}))
        whole = len(header).to_bytes(8, "little") + header + b"".join(raw[e.name] for e in entries)
        os.pwrite(self.fd, whole, 0)
        os.ftruncate(self.fd, len(whole))


def bases(fmt: type[Format]) -> list[Format]:
    """Good objects of several shapes and params."""
    found = []
    for params in params_of(fmt.name):
        for shape in SHAPES:
            try:
                found.append(fmt.from_dense(matrix(shape), **params))
            except StructureError:
                continue
    return [f for f in found if f.nbytes < 1 << 15]


def check(f: Format) -> None:
    """AssertionError unless an accepted object touches only its own arrays and is canonical."""
    places = touched(f)
    try:
        csr = f.to_csr().validate()
        rows = csr.rows().tolist()
        held = sorted(zip(rows, csr.indices.tolist(), strict=True))
        if f.keeps_stored_zeros:
            held = [p for p in held if p in set(places)]
        assert held == sorted(places), (f, held, places)
        assert f.name == "dense" or type(f).from_csr(csr, **f.params()) == f, f
    except LimitError:  # a legal object whose conversion is too large
        pass


def hunt(fmt: type[Format], path: Path, seeds: range) -> Counter[str]:
    """Try one mutant a seed; verdicts by class of error, "accepted" among them."""
    verdicts = Counter[str]()
    objects = bases(fmt)
    per_base = -(-len(seeds) // len(objects))
    for i, f in enumerate(objects):
        base = Base(f, path)
        try:
            for seed in seeds[i * per_base : (i + 1) * per_base]:
                base.write(random.Random(seed))
                try:
                    found: Any = load(path)["w"]
                except (FormatError, LimitError) as e:
                    verdicts[type(e).__name__] += 1
                    continue
                verdicts["accepted"] += 1
                try:
                    check(found)
                except Exception as e:
                    raise AssertionError(f"{fmt.name}: base {i}, seed {seed}: {e!r}") from e
        finally:
            os.close(base.fd)
    return verdicts


def main(arguments: list[str]) -> int:
    """The command; a file that is accepted wrongly ends it with a traceback."""
    parser = argparse.ArgumentParser("fuzz mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    each, total = -(-given.count // len(FORMATS)), Counter[str]()
    with tempfile.TemporaryDirectory(dir=MEMORY if os.path.isdir(MEMORY) else None) as folder:
        for fmt in FORMATS:
            start = time.time()
            verdicts = hunt(fmt, Path(folder, "x"), range(given.seed, given.seed + each))
            total += verdicts
            print(f"mutants: {fmt.name}: {each} in {time.time() - start:.0f} s: {dict(verdicts)}", flush=True)
    print(f"mutants: {total.total()}, {total['accepted']} accepted, none out of range: {dict(total)}")
    return 0
