"""The exact error of every check: ``refusals.json``, which the tests compare with the errors raised today.

``python -m fuzz refusals`` collects up to three inputs for each kind of refusal (class, array and wording without the
numbers) among mutants of headers and of files of each format, and writes down class, fields and message of each. A
change of wording is then a visible change of that file; a check that stops working, points at another place or counts
otherwise is a failing test.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuzz import headers, mutants
from spformat.errors import FormatError, LimitError, SpformatError
from spformat.formats import by_name, registered
from spformat.storage import descriptor, stheader
from spformat.storage.container import load

STORED = Path(__file__).with_name("refusals.json")
EACH = 3
_VARYING = r"'[^']*'|[\d.]+|\[[^]]*\]|got .*|with 'no such key.*|JSON: .*|is claimed.*"
Refusal = dict[str, Any]


def described(e: SpformatError) -> Refusal:
    """Class, message and fields of an error, without the path."""
    return {k: v for k, v in e.to_json().items() if k not in ("path", "message", "exit_code")} | {"text": e.message}


def of_header(seed: int) -> Refusal | None:
    """What header and descriptor parser say to the input of a seed; None if they take it."""
    rng = random.Random(seed)
    data = rng.choice(headers.seeds())
    for _ in range(rng.choice((1, 1, 2))):
        data = headers.mutant(data, rng)
    prefix, raw, room = headers.taken_apart(data)
    try:
        n = stheader.length(prefix, 8 + len(raw) + room)
        header = stheader.parse((raw + bytes(room))[:n], len(raw) + room - n)
        if descriptor.KEY in header.metadata:
            descriptor.read(header, **headers.options(data))
    except (FormatError, LimitError) as e:
        return described(e)
    return None


class Files:
    """Mutants of the files of one format, by the number of the base and the seed."""

    def __init__(self, name: str, folder: Path) -> None:
        self.path = folder / name
        self.bases = [mutants.Base(f, folder / f"{name}-{i}") for i, f in enumerate(mutants.bases(by_name(name)))]

    def refusal(self, number: int, seed: int) -> Refusal | None:
        """What ``load`` says to a mutant; None if it is accepted."""
        base = self.bases[number]
        base.write(random.Random(seed))
        try:
            load(base.path)
        except (FormatError, LimitError) as e:
            return described(e)
        return None


def kind(refusal: Refusal) -> str:
    """Class, array and wording, without what differs from case to case."""
    return f"{refusal['code']} {refusal.get('array')} " + re.sub(_VARYING, "#", refusal["text"])


def collected(tries: int) -> Iterator[tuple[str, list[Any]]]:
    """("header" or the name of a format, cases [number, seed, refusal])."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("header", *(f.name for f in registered())):
            seen, cases = Counter[str](), []
            files = None if name == "header" else Files(name, Path(folder))
            for seed in range(tries):
                number = seed % len(files.bases) if files else 0
                found = files.refusal(number, seed) if files else of_header(seed)
                if found is not None and seen[kind(found)] < EACH:
                    seen[kind(found)] += 1
                    cases.append([number, seed, found])
            yield name, cases


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser("fuzz refusals", description=__doc__)
    parser.add_argument("--tries", type=int, default=6000, help="mutants looked at in each place")
    given = parser.parse_args(arguments)
    tree = dict(collected(given.tries))
    lines = [f'"{name}": [\n' + ",\n".join(json.dumps(c) for c in cases) + "\n]" for name, cases in tree.items()]
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"refusals: {', '.join(f'{name} {len(cases)}' for name, cases in tree.items())}, in {STORED}")
    return 0
