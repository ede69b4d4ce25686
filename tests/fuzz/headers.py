"""Arbitrary input for the header and descriptor parsers: they raise only our errors, and accept only what safetensors
accepts (T5, T7).

``python -m fuzz headers --runs N`` lets atheris (libFuzzer, guided by coverage of the two parsers) choose the input;
without atheris ``--blind`` mutates the same seeds at random.

An input is one byte of flags, two bytes of data length and a text. The text is a header as it stands in a file, or,
with the flag ``ASSEMBLED``, ``{"entries": .., "metadata": .., "descriptor": ..}``, which is laid out and sealed with
the right digest, as an attacker would: so the fuzzer gets past the digest to what lies behind it.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import random
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import hostile
import safetensors

from spformat.errors import FormatError, LimitError, SpformatError
from spformat.formats import FORMATS
from spformat.storage import descriptor, stheader, stwriter

ASSEMBLED, OWN_LENGTH, UNCHECKED, IGNORE_UNKNOWN = 1, 2, 4, 8

# Dtypes the official package knows. A foreign file with another one is read, and that tensor carried as bytes:
# the one case in which we accept what the official package refuses (docs/container.md, "Files of other tools").
THEIR_DTYPES = frozenset(
    "BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I16 U16 F16 BF16 "
    "I32 U32 F32 C64 F64 I64 U64".split()
)


class Wrong(AssertionError):
    """An answer that breaks a promise. Anything else that leaves ``check`` is a leaked exception."""


def check(data: bytes) -> str:
    """Feed one input; "accepted" or the class of the refusal. Raises Wrong, or what leaked."""
    if len(data) < 3:
        return "too short"
    prefix, raw, room = taken_apart(data)
    try:
        n = stheader.length(prefix, 8 + len(raw) + room)
        header = stheader.parse((raw + bytes(room))[:n], len(raw) + room - n)
    except (FormatError, LimitError) as e:
        return legible(e)
    differs(header, prefix + raw + bytes(room))
    if descriptor.KEY not in header.metadata:
        descriptor.undescribed(header)
        return "accepted"
    try:
        records = descriptor.read(header, **options(data))
    except (FormatError, LimitError) as e:
        return legible(e)
    claimed = [r.entry(array) for r in records.values() for array in r.arrays]
    if sorted(claimed) != sorted(header.entries):
        raise Wrong(f"entries {sorted(header.entries)} are claimed as {sorted(claimed)}")
    return "accepted"


def taken_apart(data: bytes) -> tuple[bytes, bytes, int]:
    """(length, header, bytes of data) of an input."""
    flags, room, text = data[0], int.from_bytes(data[1:3], "little"), data[3:]
    if flags & OWN_LENGTH:
        return text[:8], text[8:], room
    if flags & ASSEMBLED:
        with suppress(SpformatError):  # text that is not JSON is passed as it is
            return assembled(text)
    return len(text).to_bytes(8, "little"), text, room


def options(data: bytes) -> dict[str, bool]:
    """How the descriptor of an input is read."""
    return {"allow_unchecked": bool(data[0] & UNCHECKED), "ignore_unknown": bool(data[0] & IGNORE_UNKNOWN)}


def differs(header: stheader.Header, whole: bytes) -> None:
    """Wrong if the official package refuses a file whose header was accepted, for another reason than a new dtype."""
    try:
        safetensors.deserialize(whole)
    except safetensors.SafetensorError as e:
        if all(entry.dtype in THEIR_DTYPES for entry in header.entries.values()):
            raise Wrong(f"accepted what safetensors refuses: {e}: {header.raw!r}") from e


def legible(e: SpformatError) -> str:
    """The class of a refusal; Wrong if its text could break a terminal or a log, or is endless."""
    text = str(e)
    if not text.isprintable() or len(text) > 1500:
        raise Wrong(f"{type(e).__name__}: {text!r}")
    json.dumps(e.to_json())
    return type(e).__name__


def assembled(given: bytes) -> tuple[bytes, bytes, int]:
    """(length, header, bytes of data) of the file that ``given`` describes, its descriptor sealed."""
    tree = stheader.strict_json(given, "input")
    described = tree.get("entries")
    header: dict[str, Any] = {stheader.METADATA: tree.get("metadata", {})} if "metadata" in tree else {}
    at = 0
    for name, entry in described.items() if isinstance(described, dict) else ():
        header[name] = entry
        if isinstance(entry, list) and len(entry) == 3 and type(entry[2]) is int:  # dtype, shape, bytes
            header[name] = {"dtype": entry[0], "shape": entry[1], "data_offsets": [at, at + entry[2]]}
            at += max(0, entry[2])
    found = tree.get("descriptor")
    sealed = tree.get("metadata", {})
    if found is not None and isinstance(sealed, dict):
        text = found if isinstance(found, str) else json.dumps(found)
        header[stheader.METADATA] = {**sealed, descriptor.KEY: text}
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    if isinstance(found, dict) and at < 1 << 20:
        with suppress(SpformatError):  # a descriptor that cannot be sealed is passed as it is
            parsed = stheader.parse(raw, at)
            entries = list(stheader.layout((e.name, e.dtype, e.shape, e.nbytes) for e in parsed.entries.values()))
            raw = stheader.encode(entries, descriptor.sealed(found, entries, dict(parsed.metadata)))
    return len(raw).to_bytes(8, "little"), raw, min(at, 1 << 20)


# --- seeds and mutations


@functools.cache
def seeds() -> tuple[bytes, ...]:
    """Good inputs: a header of every format, sealed and as it stands, plain files, flags in all combinations."""
    found = []
    for fmt in FORMATS:
        f = hostile.make(fmt, (6, 9))
        entries = {f"w.{k}": [stwriter.code_of(a.dtype), list(a.shape), a.nbytes] for k, a in f.arrays().items()}
        entries["b"] = ["BOOL", [2], 2]
        tensor: dict[str, Any] = {
            "format": f.name, "version": f.version, "shape": list(f.shape), "dtype": f.dtype.name,
            "params": {k: list(v) if isinstance(v, tuple) else v for k, v in f.params().items()},
            "crc32": dict.fromkeys(f.arrays(), "0123abcd"),
        }  # fmt: skip
        if f.tables():
            tensor["tables"] = {k: list(v) for k, v in f.tables().items()}
        tree = {"container": 1, "sha256": "0" * 64, "tensors": {"w": tensor}, "plain": {"b": "89abcdef"}}
        whole = {"entries": entries, "metadata": {"k": "v"}, "descriptor": tree}
        text = json.dumps(whole, separators=(",", ":")).encode()
        found += [bytes([ASSEMBLED | flags, 0, 0]) + text for flags in (0, UNCHECKED, IGNORE_UNKNOWN)]
        prefix, raw, room = assembled(text)
        found += [bytes([0, room % 256, room >> 8]) + raw, bytes([OWN_LENGTH, room % 256, room >> 8]) + prefix + raw]
    tensors = {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], "x": [1, {"y": 1.5}]}}
    tensors["e"] = {"dtype": "F4", "shape": [0, 3], "data_offsets": [8, 8]}
    found.append(bytes([0, 8, 0]) + b" " + json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode() + b"  ")
    return *found, bytes([0, 0, 0]) + b"{}", bytes([OWN_LENGTH, 0, 0]) + bytes(8)


TOKENS = [
    *'0 1 8 -1 -0 2.0 1e999 true null NaN [] {} [[]] , : " { } [ ] \\u0000 \\ud800 \\u001b \\n'.split(),
    *"281474976710656 16777216 18446744073709551616 F32 F64 F4 X9 U8 BOOL BF16 int8 csr bsr vector-nm two-four".split(),
    *"__metadata__ spformat dtype shape data_offsets container sha256 tensors plain crc32 params tables".split(),
    *("format", "version", "blocksize", "meta_order", " ", "\u00e9", "\u202e", "\0", "[" * 130, "9" * 320),
]
VALUES: tuple[Any, ...] = (
    0, 1, -1, 2, 7, 2**24, 2**31, 2**47, 2**48, 2**63, 2**64, -(2**63), 10**300, 1.5, 1e308, True, None,
    "", "0" * 64, "0123abcd", "x" * 1100, "\ud800", "a\0b", "\x1b[31m", "F32", "csr", "float32", "32",
    [], {}, [0], [2, 3], [[1]], {"a": 1},
)  # fmt: skip


def mutant(data: bytes, rng: random.Random) -> bytes:
    """An edit of an input: of its JSON tree where it has one, of its bytes otherwise."""
    if rng.random() < 0.75:
        try:
            tree = json.loads(data[3:])
            for _ in range(rng.choice((1, 1, 2, 4))):
                edit(tree, rng)
            text = json.dumps(tree, separators=(",", ":"), ensure_ascii=rng.random() < 0.5)
            return data[:3] + text.encode("utf-8", "surrogatepass")
        except (ValueError, RecursionError):
            pass
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(out) + 1)
        if rng.random() < 0.7:
            out[at : at + rng.randrange(4)] = rng.choice(TOKENS).encode("utf-8", "surrogatepass")
        elif at < len(out):
            out[at] = rng.randrange(256)
    return bytes(out)


def edit(tree: Any, rng: random.Random) -> None:
    """Change one node of a JSON tree: walk down at random, then replace, drop, copy, rename or reorder."""
    while isinstance(tree, (dict, list)) and tree:
        keys: list[Any] = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        key = rng.choice(keys)
        inner = tree[key]
        if isinstance(inner, (dict, list)) and inner and rng.random() < 0.85:
            tree = inner
            continue
        kind = rng.randrange(7)
        if kind < 3:
            tree[key] = copy.deepcopy(rng.choice(VALUES))
        elif kind == 3 and type(inner) is int:
            tree[key] = inner + rng.choice((1, -1, inner, 64))
        elif kind == 4:
            del tree[key]
        elif isinstance(tree, dict):
            name = rng.choice([*TOKENS, *map(str, keys)])
            tree[name] = tree.pop(key) if kind == 5 else copy.deepcopy(inner)
        else:
            tree.insert(rng.randrange(len(tree) + 1), copy.deepcopy(inner))
        return


def blind(runs: int, seed: int) -> Counter[str]:
    """What became of ``runs`` random mutants of the seeds, each one to three edits away."""
    rng, start, verdicts = random.Random(seed), seeds(), Counter[str]()
    for _ in range(runs):
        data = rng.choice(start)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            data = mutant(data, rng)
        verdicts[check(data)] += 1
    return verdicts


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser("fuzz headers", description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--blind", action="store_true", help="random mutants: needs no atheris")
    parser.add_argument("--corpus", type=Path, help="folder that keeps what reached new code")
    given = parser.parse_args(arguments)
    if not given.blind:
        from fuzz import guided

        guided.run(given.runs, given.seed, given.corpus)  # ends the process
    start = time.time()
    verdicts = blind(given.runs, given.seed)
    print(f"headers: {given.runs} mutants in {time.time() - start:.0f} s, all answered:", dict(verdicts))
    return 0
