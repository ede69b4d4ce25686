"""Every byte of a small file of each format replaced by each of its 255 other values; the file cut anywhere (T3).

CRC32 of each array and SHA-256 of the header leave no byte uncovered: nothing may be accepted, and what refuses must be
an error of ours. ``python -m fuzz substitutions`` runs all of them, ``--share 0.01`` a random hundredth.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from hostile import make

from spformat.errors import FormatError, LimitError
from spformat.formats import FORMATS, by_name
from spformat.formats.base import Format
from spformat.storage.container import load, save

SHAPE = (3, 5)
MEMORY = "/dev/shm"


def sweep(fmt: type[Format], path: Path, share: float = 1.0, seed: int = 0) -> tuple[Counter[str], list[Any]]:
    """(answers counted by class, damaged files that were accepted: (kind, place, value)); leaks are raised."""
    tensors = {"w": make(fmt, SHAPE), "b": np.int8([1])}
    save(path, tensors, overwrite=True)
    good = path.read_bytes()
    rng, verdicts, accepted = random.Random(seed), Counter[str](), []

    def verdict(what: Any) -> None:
        try:
            load(path)
        except (FormatError, LimitError) as e:
            verdicts[type(e).__name__] += 1
        else:
            accepted.append(what)

    fd = os.open(path, os.O_RDWR)
    try:
        for i in range(len(good)):
            for value in range(256):
                if value != good[i] and (share == 1 or rng.random() < share):
                    os.pwrite(fd, bytes([value]), i)
                    verdict(("byte", i, value))
            os.pwrite(fd, good[i : i + 1], i)
        assert load(path)["w"] == tensors["w"]  # nothing was left changed
        for n in reversed(range(len(good))):
            os.ftruncate(fd, n)
            verdict(("cut", n, None))
    finally:
        os.close(fd)
    for i in range(len(good) + 1):
        for kind, data in (("inserted", good[:i] + b" " + good[i:]), ("deleted", good[:i] + good[i + 1 :])):
            if data != good and (share == 1 or rng.random() < 20 * share):
                path.write_bytes(data)
                verdict((kind, i, None))
    return verdicts, accepted


def main(arguments: list[str]) -> int:
    """The command; 1 if a damaged file was accepted."""
    parser = argparse.ArgumentParser("fuzz substitutions", description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the substitutions, drawn at random")
    names = [f.name for f in FORMATS]
    parser.add_argument("--only", choices=names, nargs="+", default=names, help="formats")
    given = parser.parse_args(arguments)
    total = failures = 0
    with tempfile.TemporaryDirectory(dir=MEMORY if os.path.isdir(MEMORY) else None) as folder:
        for fmt in map(by_name, given.only):
            start = time.time()
            verdicts, accepted = sweep(fmt, Path(folder, "x"), given.share)
            total, failures = total + verdicts.total() + len(accepted), failures + len(accepted)
            print(
                f"substitutions: {fmt.name}: {verdicts.total()} refused, {len(accepted)} accepted {accepted[:3]} "
                f"in {time.time() - start:.0f} s: {dict(verdicts)}", flush=True,
            )  # fmt: skip
    print(f"substitutions: {total} damaged files, {failures} accepted")
    return int(failures > 0)
