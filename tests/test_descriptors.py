"""The exact errors of the descriptor parser, and the exact values at which they begin."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import drop, keep, make, put, rewrite

from spformat import limits
from spformat.errors import DescriptorError, LimitError, SpformatError
from spformat.formats import CSR, by_name
from spformat.storage import descriptor, stfile, stheader
from spformat.storage.container import load, save

Edit = Callable[[dict[str, Any], dict[str, Any]], Any]


def of_plain(**changes: Any) -> Edit:
    return lambda tree, arrays: tree["plain"].update(changes)


def param(**changes: Any) -> Edit:
    return lambda tree, arrays: tree["tensors"]["w"]["params"].update(changes)


def crc(**changes: Any) -> Edit:
    return lambda tree, arrays: tree["tensors"]["w"]["crc32"].update(changes)


UNCHECKED = " (--allow-unchecked reads files without checksums)"
HEX = "crc32: expected 8 lower-case hex digits, got"
SHA = "sha256: expected 64 lower-case hex digits, got"
# format, edit, class, message, fields beside path and tensor, tensor; the checksums are those of before
DESCRIBED: dict[str, tuple[str, Edit, str, str, dict[str, Any], str | None]] = {
    "two names": ("csr", of_plain(w="0" * 8), "DescriptorError", "two tensors of this name", {}, "w"),
    "two claims": ("csr", of_plain(**{"w.data": "0" * 8}), "DescriptorError",
                   "entry 'w.data' is claimed by tensor 'w' too", {}, "w.data"),
    "no claim": ("csr", keep(lambda t, a: t["plain"].pop("b")), "DescriptorError",
                 "entry 'b' of the file is claimed by no tensor", {"array": "b"}, None),
    "no entry": ("csr", of_plain(c="0" * 8), "DescriptorError", "expected the entry 'c' in the file, got none",
                 {"array": "c"}, "c"),
    "newer": ("csr", put(version=2), "VersionError", "csr version: expected 1, got '2'; a newer spformat wrote it",
              {"value": 2, "expected": 1}, "w"),
    "older": ("csr", put(version=0), "VersionError", "csr version: expected 1, got '0'", {"value": 0, "expected": 1},
              "w"),
    "no version": ("csr", put(version=None), "VersionError", "csr version: expected 1, got none", {"expected": 1}, "w"),
    "long version": ("csr", put(version="x" * 60), "VersionError",
                     f"csr version: expected 1, got '{'x' * 37}...'", {"value": "x" * 60, "expected": 1}, "w"),
    "newer container": ("csr", keep(lambda t, a: t.update(container=2)), "VersionError",
                        "container version: expected 1, got '2'; a newer spformat wrote it",
                        {"value": 2, "expected": 1}, None),
    "long seal": ("csr", keep(lambda t, a: t.update(sha256="x" * 100)), "DescriptorError",
                  f"{SHA} {'x' * 77}...{UNCHECKED}", {"value": "x" * 100}, None),
    "no seal": ("csr", keep(lambda t, a: t.pop("sha256")), "DescriptorError", f"{SHA} none{UNCHECKED}", {}, None),
    "another seal": ("csr", keep(lambda t, a: t.update(sha256="0" * 64)), "IntegrityError",
                     "header: its bytes do not match its sha256, or are not canonical: the file was changed", {}, None),
    "no sums": ("csr", keep(drop("crc32")), "DescriptorError",
                f"descriptor: expected a key 'crc32', got none{UNCHECKED}", {"expected": "crc32"}, "w"),
    "no sum": ("csr", keep(lambda t, a: t["tensors"]["w"]["crc32"].pop("data")), "DescriptorError",
               f"crc32: expected a key 'data', got none{UNCHECKED}", {"expected": "data"}, "w"),
    "null for a sum": ("csr", crc(data=None), "DescriptorError", f"{HEX} none", {"array": "data"}, "w"),
    "long sum": ("csr", crc(data="x" * 50), "DescriptorError", f"{HEX} {'x' * 37}...",
                 {"array": "data", "value": "x" * 50}, "w"),
    "upper case": ("csr", crc(data="ABCDEF01"), "DescriptorError", f"{HEX} ABCDEF01",
                   {"array": "data", "value": "ABCDEF01"}, "w"),
    "null for a plain sum": ("csr", of_plain(b=None), "DescriptorError", f"{HEX} none", {"array": ""}, "b"),
    "another sum": ("csr", crc(data="00000000"), "IntegrityError", "", {"array": "data", "expected": "00000000"}, "w"),
    "sum of nothing": ("csr", crc(x="0" * 8), "DescriptorError",
                       "crc32: unknown key 'x'; a newer file? (--ignore-unknown reads it)", {"value": "x"}, "w"),
    "unknown dtype": ("two-four", put(dtype="x" * 60), "DescriptorError",
                      f"dtype: expected one of float16, bfloat16, float32, float8_e4m3fn, float8_e5m2, int8, got {'x' * 37}...", {}, "w"),
    "another dtype": ("csr", put(dtype="bfloat16"), "ArrayError", "data: expected BF16 for dtype bfloat16, got F16",
                      {"array": "data"}, "w"),
    "text for a pair": ("bsr", param(blocksize="2x3"), "DescriptorError",
                        "params: blocksize: expected [2, 3], got '2x3'", {"value": "2x3"}, "w"),
    "text for a number": ("vector-nm", param(n="2"), "DescriptorError", "params: n: expected 2, got '2'",
                          {"value": "2"}, "w"),
    "a float": ("vector-nm", param(n=2.0), "DescriptorError",
                "params: vector-nm: n: expected an int in 1 .. 256, got 2.0", {"value": 2.0}, "w"),
    "a boolean": ("vector-nm", param(n=True), "DescriptorError",
                  "params: vector-nm: n: expected an int in 1 .. 256, got True", {"value": True}, "w"),
    "null": ("ell-buckets", param(max_width=None), "DescriptorError",
             "params: max_width: expected a value, got None", {}, "w"),
    "widths in version 1": ("ell-buckets", param(max_width=17, widths=[3, 17]), "DescriptorError",
                            "version: expected 2 for these params, got 1", {"value": 1}, "w"),
    "version 2 without": ("ell-buckets", put(version=2), "DescriptorError",
                          "version: expected 1 for these params, got 2", {"value": 2}, "w"),
    "widths said twice": ("ell-buckets", param(max_width=4, widths=[1, 2, 4]), "DescriptorError",
                          "params: widths: expected no such key, as the others say it, got [1, 2, 4]",
                          {"value": [1, 2, 4]}, "w"),
    "widths, null": ("ell-buckets", param(widths=None), "DescriptorError",
                     "params: widths: expected a value, got None", {}, "w"),
    "newer buckets": ("ell-buckets", put(version=3), "VersionError",
                      "ell-buckets version: expected 1 or 2, got '3'; a newer spformat wrote it",
                      {"value": 3, "expected": 2}, "w"),
    "a long text": ("bsr", param(blocksize="2x" + "0" * 99 + "3"), "DescriptorError",
                    f"params: blocksize: expected [2, 3], got '2x{'0' * 77}", {"value": "2x" + "0" * 99 + "3"}, "w"),
    "shape, text": ("csr", put(shape=["y" * 90]), "DescriptorError",
                    f"shape: expected a list of ints in 0 .. 2^48-1, got ['{'y' * 75}...", {}, "w"),
    "shape, 2^48": ("csr", put(shape=[2**48, 1]), "DescriptorError",
                    "shape: expected a list of ints in 0 .. 2^48-1, got [281474976710656, 1]", {}, "w"),
    "shape, -1": ("csr", put(shape=[-1, 1]), "DescriptorError",
                  "shape: expected a list of ints in 0 .. 2^48-1, got [-1, 1]", {}, "w"),
    "shape, 3-D": ("csr", put(shape=[2, 2, 2]), "DescriptorError", "shape: expected [M, K], got 3 dimensions", {}, "w"),
    "unknown key": ("csr", put(**{"z" * 60: 1}), "DescriptorError",
                    f"descriptor: unknown key '{'z' * 37}...'; a newer file? (--ignore-unknown reads it)",
                    {"value": "z" * 60}, "w"),
    "no tables": ("ell-buckets", keep(drop("tables")), "DescriptorError",
                  "descriptor: expected a key 'tables', got none", {"expected": "tables"}, "w"),
    "tables, a list": ("ell-buckets", put(tables=[]), "DescriptorError", "tables: expected an object, got '[]'", {},
                       "w"),
    "tables of none": ("csr", put(tables={}), "DescriptorError",
                       "descriptor: unknown key 'tables'; a newer file? (--ignore-unknown reads it)",
                       {"value": "tables"}, "w"),
    "no format": ("csr", keep(drop("format")), "DescriptorError", "expected a key 'format', got none", {}, "w"),
    "long format": ("csr", put(format=["f" * 60]), "DescriptorError",
                    f"format: expected a format id, got \"['{'f' * 35}...\"", {}, "w"),
}  # fmt: skip


@pytest.mark.parametrize("case", DESCRIBED)
def test_a_broken_descriptor(tmp_path: Path, case: str) -> None:
    name, edit, kind, message, fields, tensor = DESCRIBED[case]
    path = tmp_path / "x"
    save(path, {"w": make(by_name(name)), "b": np.int8([1])})
    rewrite(path, edit, sums=False, seal="seal" not in case)
    with pytest.raises(SpformatError) as caught:
        load(path)
    found = caught.value
    assert type(found).__name__ == kind
    assert message in ("", found.message)
    told = {k: v for k, v in found.fields.items() if k not in ("path", "tensor")}
    assert told == fields if message else told.items() >= fields.items()
    assert (found.path, found.tensor) == (str(path), tensor)


def test_a_description_of_just_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save(path, {"n" * 50: CSR.from_dense(np.eye(3, dtype=np.float16))})
    with stfile.Reader(path) as reader:
        size = len(stheader.compact_json(json.loads(reader.header.metadata[descriptor.KEY])["tensors"]["n" * 50]))
    with limits.using(descriptor_bytes=size):
        load(path)
    with limits.using(descriptor_bytes=size - 1), pytest.raises(LimitError) as caught:
        load(path)
    assert caught.value.message.startswith(
        f"descriptor of tensor '{'n' * 37}...', bytes: expected at most {size - 1}, got {size}; raise it with --max"
    )


@pytest.mark.parametrize(("sums", "seal"), [(False, True), (True, False), (False, False)])
def test_what_was_left_out_can_be_allowed(tmp_path: Path, sums: bool, seal: bool) -> None:
    path, f = tmp_path / "x", make(CSR)
    save(path, {"w": f, "b": np.int8([1])})

    def without(tree: dict[str, Any], arrays: dict[str, Any]) -> None:
        if not sums:
            del tree["tensors"]["w"]["crc32"]
            tree["plain"]["b"] = None
        if not seal:
            del tree["sha256"]

    rewrite(path, without, seal=seal)
    with pytest.raises(DescriptorError, match=r"--allow-unchecked|got none"):
        load(path)
    with limits.using(allow_unchecked=True):
        assert load(path)["w"] == f
        with stfile.Reader(path) as reader:
            found = descriptor.read(reader.header, allow_unchecked=True)
            stored = {array: found["w"].crc32[array] for array in f.arrays()} | {"": found["b"].crc32[""]}
            assert all((crc is not None) is sums for crc in stored.values())
