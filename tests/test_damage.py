"""Damaged files: no truncation, no substitution, insertion or deletion of a byte is accepted."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
from hostile import make

from spformat.errors import SpformatError
from spformat.formats import FORMATS
from spformat.formats.base import Format
from spformat.formats.csr import CSR
from spformat.storage.container import load, save


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_truncations_and_byte_substitutions(tmp_path: Path, fmt: type[Format]) -> None:
    path = tmp_path / "x"
    save(path, {"w": make(fmt, (3, 5)), "b": np.int8([1])})
    good = path.read_bytes()
    for n in reversed(range(len(good))):
        os.truncate(path, n)
        with pytest.raises(SpformatError):
            load(path)
    path.write_bytes(good)
    accepted = []
    with open(path, "r+b", buffering=0) as f:
        for i in range(len(good)):
            for flip in (0x01, 0x20, 0xFF):
                f.seek(i)
                f.write(bytes([good[i] ^ flip]))
                try:
                    load(path)
                except SpformatError:
                    continue
                accepted.append((i, flip))
            f.seek(i)
            f.write(good[i : i + 1])
    assert accepted == []
    assert load(path)["w"] == make(fmt, (3, 5))


@pytest.mark.slow
def test_substitutions_insertions_and_deletions(tmp_path: Path) -> None:
    rng = random.Random(3)  # 24 values a byte; all 255 were run once and rejected
    path = tmp_path / "x"
    save(path, {"w": make(CSR, (3, 5))})
    good = path.read_bytes()
    accepted = []
    for i in range(len(good)):
        mutants = [good[:i] + bytes([v]) + good[i + 1 :] for v in rng.sample(range(256), 24)]
        mutants += [good[:i] + good[i + 1 :], good[:i] + b" " + good[i:], good[:i] + b"\0" + good[i:]]
        for mutant in mutants:
            if mutant == good:
                continue
            path.write_bytes(mutant)
            try:
                load(path)
            except SpformatError:
                continue
            accepted.append((i, mutant))
    assert accepted == []
