"""What the parsers say, word for word, and where exactly they begin to say it: headers, descriptors, declarations."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import drop, keep, make, put, rewrite

from spformat import descriptor, limits, stfile, stheader
from spformat.container import load, save, save_dense
from spformat.errors import (
    ArrayError,
    ContainerError,
    DescriptorError,
    InputError,
    IntegrityError,
    LimitError,
    SpformatError,
    UsageError,
)
from spformat.formats import BSR, CSR, TwoFour, by_name, declare
from spformat.formats.declare import ParamDeclaration, parse_shape, parse_table, plain_int


def said(e: BaseException) -> str:
    return f"{type(e).__name__}: {e}"


# --- header


def length(n: int, have: int) -> int:
    return stheader.length(n.to_bytes(8, "little"), have)


@pytest.mark.parametrize(
    ("n", "have", "message"),
    [
        (1, 10, "header length: expected at least 2, got 1"),
        (0, 8, "header length: expected at least 2, got 0"),
        (3, 10, "header length: expected at most 2, got 3: not a safetensors file, or truncated"),
        (2**64 - 1, 2**40,
         "header length: expected at most 100000000, got 18446744073709551615: not a safetensors file, or truncated"),
        (100_000_001, 2**40,
         "header length: expected at most 100000000, got 100000001: not a safetensors file, or truncated"),
    ],
)  # fmt: skip
def test_header_length(n: int, have: int, message: str) -> None:
    with pytest.raises(ContainerError) as caught:
        length(n, have)
    assert str(caught.value) == message


def test_header_length_at_its_bounds() -> None:
    assert length(2, 10) == 2
    assert length(16 << 20, 1 << 40) == 16 << 20
    with pytest.raises(
        LimitError, match=r"^header length: expected at most 16,777,216, got 16,777,217; raise it with --m"
    ):
        length((16 << 20) + 1, 1 << 40)
    with limits.using(header_bytes=1 << 30):
        assert length(100_000_000, 1 << 40) == 100_000_000
    assert stheader.length((2).to_bytes(8, "little") + b"{}", 10) == 2  # eight bytes, whatever follows
    with pytest.raises(ContainerError) as caught:
        stheader.length(bytes(7), 7)
    assert str(caught.value) == "truncated: 8-byte length expected, the file has 7 bytes"


def one(name: str = '"a"', dtype: str = '"F32"', shape: str = "[2]", offsets: str = "[0,8]", more: str = "") -> str:
    """The text of a header with one tensor."""
    return f'{{{name}:{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}{more}}}}}'


LONG = "9999999999999999999999999999999999999..."
BROKEN: dict[str, tuple[str | bytes, int, str]] = {
    "duplicate": ('{"a":1,"b":2,"b":3,"a":4}', 0, "header: not valid JSON: duplicate key 'b'"),
    "duplicate in metadata": ('{"__metadata__":{"k":"","k":""}}', 0, "header: not valid JSON: duplicate key 'k'"),
    "NaN": ('{"a":NaN}', 0, "header: not valid JSON: expected finite numbers, got NaN"),
    "infinity": ('{"a":-Infinity}', 0, "header: not valid JSON: expected finite numbers, got -Infinity"),
    "-0": (one(offsets="[-0,8]"), 8, "header: not valid JSON: expected integers without a sign on zero, got -0"),
    "large": (one(more=',"x":1e999'), 8, "header: not valid JSON: number out of range: 1e999"),
    "310 digits": (one(more=',"x":' + "9" * 310), 8, f"header: not valid JSON: number out of range: {LONG}"),
    "5,000 digits": (one(shape=f"[{'9' * 5000}]"), 8, f"header: not valid JSON: number out of range: {LONG}"),
    "deep": ("[" * 100_000, 0, "header: JSON is nested too deeply"),
    "no UTF-8": (b'{"\xff":1}', 0, "header: expected UTF-8, got byte 0xff at 2"),
    "cut": ('{"a"', 0, "header: not valid JSON: Expecting ':' delimiter: line 1 column 5 (char 4)"),
    "a list": ("[]", 0, "header: expected a JSON object, got a list"),
    "a float": ("1.5", 0, "header: expected a JSON object, got a float"),
    "an integer": ("1", 0, "header: expected a JSON object, got an integer"),
    "a string": ('"x"', 0, "header: expected a JSON object, got a string"),
    "a boolean": ("true", 0, "header: expected a JSON object, got a boolean"),
    "null": ("null", 0, "header: expected a JSON object, got null"),
    "metadata, a list": ('{"__metadata__":[]}', 0, "__metadata__: expected an object, got a list"),
    "metadata, a number": ('{"__metadata__":{"k":1}}', 0, "__metadata__['k']: expected a string, got an integer"),
    "metadata, a surrogate": (
        '{"__metadata__":{"k":"\\ud800"}}', 0,
        "__metadata__['k']: expected Unicode text, got a lone surrogate in '\\ud800'",
    ),
    "metadata, a surrogate key": (
        '{"__metadata__":{"\\ud800":""}}', 0,
        "__metadata__ key: expected Unicode text, got a lone surrogate in '\\ud800'",
    ),
    "no name": (one('""'), 8, "tensor '': tensor name: expected text without NUL, got ''"),
    "NUL": (one('"a\\u0000"'), 8, "tensor 'a\\x00': tensor name: expected text without NUL, got 'a\\x00'"),
    "a surrogate": (one('"\\ud800"'), 8, "tensor name: expected Unicode text, got a lone surrogate in '\\ud800'"),
    "an entry": ('{"a":[]}', 0, "tensor 'a': expected an object, got a list"),
    "no dtype": ('{"a":{"shape":[],"data_offsets":[0,4]}}', 4, "tensor 'a': expected a field 'dtype', got none"),
    "no shape": ('{"a":{"dtype":"F32","data_offsets":[0,4]}}', 4, "tensor 'a': expected a field 'shape', got none"),
    "no range": ('{"a":{"dtype":"F32","shape":[]}}', 4, "tensor 'a': expected a field 'data_offsets', got none"),
    "dtype": (one(dtype="1"), 8, "tensor 'a': dtype: expected a string, got an integer"),
    "shape, a number": (one(shape="2"), 8, "tensor 'a': shape: expected a list of integers, got an integer"),
    "shape, a float": (one(shape="[2.0]"), 8, "tensor 'a': shape: expected integers, got a float"),
    "shape, a boolean": (one(shape="[true]"), 8, "tensor 'a': shape: expected integers, got a boolean"),
    "shape, negative": (one(shape="[-1]"), 8, "tensor 'a': shape: expected 0 .. 2^48-1, got -1 (negative)"),
    "shape, 2^48": (
        one(shape=f"[{2**48}]"), 8,
        "tensor 'a': shape: expected 0 .. 2^48-1, got 281474976710656 (dimension > 2^48-1)",
    ),
    "shape, 2^48 - 1": (
        one(shape=f"[{2**48 - 1}]"), 8,
        "tensor 'a': data_offsets: expected 9007199254740960 bits for F32 [281474976710655], got 64",
    ),
    "shape, 60 digits": (
        one(shape=f"[{'9' * 60}]"), 8,
        f"tensor 'a': shape: expected 0 .. 2^48-1, got {LONG} (dimension > 2^48-1)",
    ),
    "9 dimensions": (one(shape="[1,1,1,1,1,1,1,1,2]"), 8, "tensor 'a': shape: expected at most 8 dimensions, got 9"),
    "no address": (
        one(shape=f"[{2**24},{2**24},{2**13},0]", offsets="[0,0]"), 0,
        "tensor 'a': shape: expected extents an address can hold, got [16777216, 16777216, 8192, 0]",
    ),
    "no address, dtype unknown": (
        one(dtype='"X"', shape=f"[{2**24},{2**24},{2**15},0]", offsets="[0,0]"), 0,
        "tensor 'a': shape: expected extents an address can hold, got [16777216, 16777216, 32768, 0]",
    ),
    "3 offsets": (one(offsets="[0,4,8]"), 8, "tensor 'a': data_offsets: expected [begin, end], got [0, 4, 8]"),
    "6 offsets": (one(offsets="[0,1,2,3,4,5]"), 8, "tensor 'a': data_offsets: expected [begin, end], got [0, 1, 2, 3]"),
    "offsets back": (one(offsets="[8,0]"), 8, "tensor 'a': data_offsets: expected [begin, end], got [8, 0]"),
    "range": (one(offsets="[0,7]"), 7, "tensor 'a': data_offsets: expected 64 bits for F32 [2], got 56"),
    "field, a surrogate": (
        one(more=',"x":"\\ud800"'), 8,
        "tensor 'a': field 'x': expected Unicode text, got a lone surrogate in '\\ud800'",
    ),
    "field, a surrogate key": (
        one(more=',"\\ud800":1'), 8,
        "tensor 'a': field name: expected Unicode text, got a lone surrogate in '\\ud800'",
    ),
    "field, a surrogate inside": (
        one(more=f',"{"y" * 50}":[{{"\\ud800":1}}]'), 8,
        f"tensor 'a': field '{'y' * 37}...': expected Unicode text, got a lone surrogate in '\\ud800'",
    ),
    "field, lists": (
        one(more=',"x":' + "[" * 126 + "]" * 126), 8,
        "tensor 'a': field 'x': expected at most 127 levels of nesting, got more",
    ),
    "field, objects": (
        one(more=',"x":' + '{"a":' * 126 + "1" + "}" * 126), 8,
        "tensor 'a': field 'x': expected at most 127 levels of nesting, got more",
    ),
    "gap at the start": (
        one(offsets="[4,12]"), 12, "tensor 'a': bytes not covered: gap of 4 between the start of the data and 'a'",
    ),
    "gap": (
        one()[:-1] + ',"b":{"dtype":"U8","shape":[1],"data_offsets":[11,12]}}', 12,
        "tensor 'b': bytes not covered: gap of 3 between 'a' and 'b'",
    ),
    "overlap": (
        one()[:-1] + ',"b":{"dtype":"U8","shape":[3],"data_offsets":[7,10]}}', 10,
        "tensor 'b': overlapping data: 'a' ends at 8, 'b' begins at 7",
    ),
    "missing data": (one(), 7, "truncated: the tensors need 8 bytes of data, the file has 7"),
    "too much data": (one(), 9, "bytes not covered: 1 after 'a'"),
    "data of nothing": ("{}", 1, "bytes not covered: 1 after the start of the data"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_header(case: str) -> None:
    raw, room, message = BROKEN[case]
    with pytest.raises(ContainerError) as caught:
        stheader.parse(raw.encode() if isinstance(raw, str) else raw, room)
    assert str(caught.value) == message
    assert caught.value.tensor == (message.split("'")[1].encode().decode("unicode_escape")
                                   if message.startswith("tensor '") else None)  # fmt: skip


SOUND = {
    "at the bounds": (one(shape="[1,1,1,1,1,1,2,1]"), 8),
    "a field nobody knows": (one(more=',"x":[1,{"y":[1.5,"z",null]}]'), 8),
    "125 levels": (one(more=',"x":' + "[" * 125 + "]" * 125), 8),
    "125 objects": (one(more=',"x":' + '{"a":' * 125 + "[1]".strip("[]") + "}" * 125), 8),
    "300 digits": (one(more=',"x":' + "9" * 300), 8),
    "309 digits": (one(more=',"x":1' + "0" * 308), 8),
    "just an address": (one(shape=f"[{2**24},{2**24},4095,0]", offsets="[0,0]"), 0),
    "an address to the byte": (one(dtype='"U8"', shape="[92737,649657,42799,3577,0]", offsets="[0,0]"), 0),  # 2^63 - 1
    "just an address, dtype unknown": (one(dtype='"X"', shape=f"[{2**24},{2**24},{2**15 - 1},0]", offsets="[0,0]"), 0),
    "a zero and a large extent": (one(shape=f"[0,{2**24}]", offsets="[0,0]"), 0),
    "a dtype nobody knows": (one(dtype='"X"', shape="[3]"), 8),
    "blanks": (" " + one() + "  ", 8),
}


@pytest.mark.parametrize("case", SOUND)
def test_a_sound_header(case: str) -> None:
    text, room = SOUND[case]
    found = stheader.parse(text.encode(), room)
    assert list(found.entries) == ["a"]
    assert (found.entries["a"].begin, found.entries["a"].nbytes, found.data_bytes) == (0, room, room)
    assert found.data_start == 8 + len(text)
    odd = {"blanks": ("header does not start with '{'",)}
    odd |= dict.fromkeys(SOUND, ("tensor 'a' has an unknown field 'x'",)) if '"x"' in text else {}
    assert found.oddities == odd.get(case, ())


def test_oddities_are_escaped_and_cut() -> None:
    found = stheader.parse(one('"\\u001b"', more=f',"{"y" * 50}":1').encode(), 8)
    assert found.oddities == (f"tensor '\\x1b' has an unknown field '{'y' * 37}...'",)


def test_tensors_lie_in_the_order_of_their_data() -> None:
    empty = '"{}":{{"dtype":"U8","shape":[0],"data_offsets":[{},{}]}}'
    text = ",".join((one('"b"', offsets="[0,8]")[1:-1], empty.format("z", 8, 8), empty.format("y", 0, 0)))
    assert list(stheader.parse(f"{{{text}}}".encode(), 8).entries) == ["y", "b", "z"]


@pytest.mark.parametrize(
    ("text", "limit", "message"),
    [
        (one(shape=f"[0,{2**24 + 1}]", offsets="[0,0]"), {},
         "dimension of the tensor 'a' without elements: expected at most 16,777,216, got 16,777,217; raise it with"
         " --max-empty-extent (in Python: spformat.limits.using(empty_extent=...))"),
        (one(f'"{"n" * 1025}"'), {},
         f"tensor name '{'n' * 37}...', bytes: expected at most 1,024, got 1,025; raise it with --max-name-bytes (in"
         " Python: spformat.limits.using(name_bytes=...))"),
        (one(f'"{"n" * 41}"'), {"name_bytes": 40},
         f"tensor name '{'n' * 37}...', bytes: expected at most 40, got 41; raise it with --max-name-bytes (in Python:"
         " spformat.limits.using(name_bytes=...))"),
        (one()[:-1] + ',"b":{}}', {"tensors": 1},  # before a look at the second entry
         "number of tensors: expected at most 1, got 2; raise it with --max-tensors (in Python:"
         " spformat.limits.using(tensors=...))"),
        ("[" + '"data_offsets",' * 2 + "1]", {"tensors": 1},  # before parsing
         "number of tensors: expected at most 1, got 2; raise it with --max-tensors (in Python:"
         " spformat.limits.using(tensors=...))"),
    ],
)  # fmt: skip
def test_limits_of_a_header(text: str, limit: dict[str, int], message: str) -> None:
    with limits.using(**limit), pytest.raises(LimitError) as caught:
        stheader.parse(text.encode(), 0)
    assert str(caught.value) == message


def test_at_its_limits_a_header_is_read() -> None:
    with limits.using(tensors=1, name_bytes=3):
        assert list(stheader.parse(one('"\u00e9x"').encode(), 8).entries) == ["\u00e9x"]


@pytest.mark.parametrize(
    ("start", "hint"),
    [
        (b"PK\x03\x04", "a zip archive (PyTorch .pt, .npz): it is never unpickled; convert it to safetensors first"),
        (b"GGUF\x03", "a GGUF file, which is not read"),
        (b"\x80\x02", "a pickle (PyTorch .bin): it is never unpickled; convert it to safetensors first"),
        (b"version https://git-lfs.github.com", "a Git LFS pointer: run `git lfs pull`"),
    ],
)
def test_what_a_file_looks_like(start: bytes, hint: str) -> None:
    assert stheader.sniff(start) == f"; it looks like {hint}"
    assert stheader.sniff(b"\x01" + start) == ""


# --- descriptor

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
                      f"dtype: expected one of float16, bfloat16, got {'x' * 37}...", {}, "w"),
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


# --- files


def broken(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(SpformatError) as caught:
        stfile.Reader(path)
    assert caught.value.path == str(path)
    return caught.value.message


def test_a_file_that_is_none(tmp_path: Path) -> None:
    assert broken(tmp_path / "a", b"abc") == "truncated: 8-byte length expected, the file has 3 bytes"
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    assert broken(tmp_path / "b", pointer).endswith(
        "not a safetensors file, or truncated; it looks like a Git LFS pointer: run `git lfs pull`"
    )
    assert broken(tmp_path / "c.incomplete", b"") == (
        "truncated: 8-byte length expected, the file has 0 bytes; the name says that a download is incomplete"
    )
    assert broken(tmp_path / "d.incomplete", b"GGUF" + bytes(9)).endswith(
        "; it looks like a GGUF file, which is not read"
    )
    assert broken(tmp_path / "e", (2).to_bytes(8, "little") + b"{}x") == (
        "bytes not covered: 1 after the start of the data"
    )
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    with limits.using(file_bytes=10):
        assert broken(tmp_path / "f", (2).to_bytes(8, "little") + b"{} ").startswith(
            "size of the file: expected at most 10, got 11; raise it with --max-file-bytes"
        )
    assert not before or set(os.listdir("/proc/self/fd")) == before  # the refused file is closed


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    tensors = {"t": np.arange(12, dtype=np.int16).reshape(4, 3), "s": np.float32(2)}
    save_dense(
        tmp_path / "p",
        tensors | {"f": np.array([0, 1, 1], bool), "e": np.zeros((0, 2), np.int8), "z": np.zeros(0, bool)},
    )
    return tmp_path / "p"


def test_rows_and_bytes_of_a_tensor(plain: Path) -> None:
    whole = np.arange(12, dtype=np.int16).reshape(4, 3)
    with stfile.Reader(plain) as reader:
        for rows in (slice(0, 4), slice(1, 3), slice(2, 2), slice(3, 1), slice(-1, None), slice(1, 99)):
            np.testing.assert_array_equal(reader.read("t", rows=rows), whole[rows])
        assert reader.read("e", rows=slice(0, 1)).shape == (0, 2)
        with pytest.raises(UsageError) as caught:
            reader.read("s", rows=slice(0, 1))
        assert said(caught.value) == "UsageError: tensor 's': rows: expected a tensor with rows, got a scalar"
        pieces = [p.tobytes() for p in reader.pieces("t", 10)]
        assert [len(p) for p in pieces] == [10, 10, 4]
        assert b"".join(pieces) == whole.tobytes() == reader.read_bytes("t").tobytes()
        room = bytearray(24)
        reader.read_into("t", 0, memoryview(room))
        assert room == whole.tobytes()
        reader.read_into("t", 20, memoryview(room)[:4])
        assert room[:4] == whole.tobytes()[20:]
        for at, n in ((-1, 4), (21, 4)):
            with pytest.raises(UsageError) as caught:
                reader.read_into("t", at, memoryview(room)[:n])
            text = f"{plain}: tensor 't': read_into: expected bytes 0..24, got {at}..{at + n}"
            assert str(caught.value) == text
        with pytest.raises(ContainerError) as refused:
            reader.entry("x")
        assert str(refused.value) == f"{plain}: tensor 'x': expected the tensor in the file, got none of that name"
    with pytest.raises(UsageError) as caught:
        reader.read("t")
    assert str(caught.value) == f"{plain}: the file is closed; read inside the `with` block"
    reader.close()


def test_sums_bools_and_dtypes(tmp_path: Path, plain: Path) -> None:
    with stfile.Reader(plain) as reader:
        with pytest.raises(IntegrityError) as caught:
            reader.read("t", crc32=1)
        e = caught.value
        assert (e.path, e.tensor, e.expected) == (str(plain), "t", "00000001")
        assert e.message == f"crc32 00000001 is stored, {e.value} computed: the file is damaged"
        reader.read("t", crc32=int(e.value, 16))
        start = reader.header.data_start + reader.entry("f").begin
    for element, value in ((2, 2), (1, 255)):
        data = bytearray(plain.read_bytes())
        data[start + element] = value
        plain.write_bytes(data)
        with stfile.Reader(plain) as reader, pytest.raises(ArrayError) as refused:
            reader.read("f")
        r = refused.value
        assert str(r) == f"{plain}: tensor 'f': BOOL: expected bytes 0 or 1, got {value} at element {element}"
        assert (r.index, r.value) == (element, value)
    raw = one(dtype='"F4"', shape="[16]").encode()
    (tmp_path / "f4").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(8))
    with stfile.Reader(tmp_path / "f4") as reader, pytest.raises(ArrayError) as refused:
        reader.read("a")
    assert str(refused.value).startswith(
        f"{tmp_path}/f4: tensor 'a': dtype 'F4' not supported; supported: F64, F32, F16"
    )


def test_a_file_that_changes_or_goes(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stfile.Reader(plain) as reader:
        os.utime(plain, ns=(0, 0))
        with pytest.raises(IntegrityError) as caught:
            reader.read("t")
        assert str(caught.value) == f"{plain}: the file was changed while it was being read"
        os.truncate(plain, reader.header.data_start)
        with pytest.raises(IntegrityError) as caught:
            reader.read("t")
        assert str(caught.value) == f"{plain}: tensor 't': short read: the file was truncated while open"

        def fails(*args: Any) -> int:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch, pytest.raises(InputError) as failed:
            patch.setattr(os, "preadv", fails)
            reader.read("t")
        assert str(failed.value) == f"{plain}: cannot read the file: Input/output error"
        with monkeypatch.context() as patch, pytest.raises(InputError) as failed:
            patch.setattr(os, "fstat", fails)
            reader.read("e")
        assert str(failed.value) == f"{plain}: cannot read the file: Input/output error"


# --- declarations


def test_params() -> None:
    pair = ParamDeclaration("p", "pair", 1, 4, (), None, "")
    number = ParamDeclaration("n", "int", 1, 4, (), None, "")
    choice = ParamDeclaration("c", "choice", 0, 0, ("a", "b"), None, "")
    assert [pair.parse(v) for v in ("1x4", "4X1", (1, 4), [np.int64(4), 1])] == [(1, 4), (4, 1), (1, 4), (4, 1)]
    assert [number.parse(v) for v in (1, 4, "1", np.int8(4))] == [1, 4, 1, 4]
    assert type(number.parse(np.int8(4))) is int
    assert [choice.parse(v) for v in ("a", "b")] == ["a", "b"]
    refused = {
        pair: ["0x1", "1x5", "1", "1x1x1", (1, True), (1, 2.0), 3, None, "ax1"],
        number: [0, 5, True, np.bool_(True), 2.0, "x", None, (1,)],
        choice: ["c", None, 1],
    }
    ranges = {pair: "two ints in 1 .. 4", number: "an int in 1 .. 4", choice: "one of a, b"}
    for declared, values in refused.items():
        assert declared.range_text() == ranges[declared]
        for value in values:
            with pytest.raises(UsageError) as caught:
                declared.parse(value)
            assert str(caught.value) == f"{declared.name}: expected {ranges[declared]}, got {value!r}"
            assert caught.value.value == value
    with pytest.raises(UsageError) as caught:
        number.parse("9" * 99)
    assert str(caught.value) == f"n: expected an int in 1 .. 4, got '{'9' * 79}"


def test_plain_ints() -> None:
    assert [plain_int(v) for v in (3, "3", np.uint8(3))] == [3, 3, 3]
    assert type(plain_int(np.uint8(3))) is int
    for value in (True, np.bool_(False), 3.0, None, b"3", [3]):
        with pytest.raises(TypeError):
            plain_int(value)


def test_shapes_and_tables() -> None:
    assert parse_shape("x", [np.int32(0), 2**48 - 1]) == (0, 2**48 - 1)
    for shape in ((1,), (1, 2, 3), (-1, 0), (0, -1), (2**48, 0), (0, 2**48), (1.0, 2), 5, None, "1x", (True, 1)):
        with pytest.raises(UsageError) as caught:
            parse_shape("x", shape)
        assert str(caught.value) == f"x: shape: expected two ints (M, K) in 0 .. 2^48-1, got {shape!r}"
        assert caught.value.value == shape
    assert parse_table("x", "t", [0, np.int32(2)]) == (0, 2)
    assert parse_table("x", "t", ()) == ()
    for values in ((0, -1), (1.0,), (True,), 5, None):
        with pytest.raises(ArrayError) as refused:
            parse_table("x", "t", values)
        assert str(refused.value) == f"x: t: expected ints >= 0, got {values!r}"
        assert refused.value.array == "tables.t"
    with pytest.raises(ArrayError) as refused:
        parse_table("x", "t", "y" * 99)
    assert str(refused.value) == f"x: t: expected ints >= 0, got '{'y' * 79}"
    with pytest.raises(UsageError, match=rf"got \('{'y' * 78}$"):
        parse_shape("x", ("y" * 99, 1))


I32, F32 = np.int32, np.float32
BUILT: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "a list": ({"indptr": [0, 1, 1]}, "indptr", "indptr: expected a numpy or CuPy array, got list"),
    "2-D": ({"indices": np.zeros((1, 1), I32)}, "indices", "indices: expected 1 dimensions [nnz], got shape (1, 1)"),
    "short pointer": ({"indptr": np.array([0, 1], I32)}, "indptr", "indptr: dimension M+1 = 3, got 2 (shape (2,))"),
    "other length": ({"indices": np.zeros(2, I32)}, "data", "data: dimension nnz = 2, got 1 (shape (1,))"),
    "strided": ({"data": np.zeros(2, F32)[::2]}, None, ""),
    "float index": ({"indices": np.zeros(1, F32)}, "indices", "indices: expected dtype int32, got float32"),
    "int64 index": ({"indices": np.zeros(1, np.int64)}, "indices", "indices: expected dtype int32, got int64"),
    "big-endian": ({"indices": np.zeros(1, ">i4")}, "indices", "indices: expected dtype int32, got >i4"),
    "bool": (
        {"data": np.zeros(1, bool)}, "data",
        "data: expected dtype float64 or float32 or float16 or bfloat16 or float8_e4m3fn or float8_e5m2 or int8, got"
        " bool",
    ),
    "several": (
        {"indptr": np.array([0, 1], I32), "indices": np.zeros(1, F32)}, "indptr",
        "indptr: dimension M+1 = 3, got 2 (shape (2,)); indices: expected dtype int32, got float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BUILT)
def test_arrays_that_do_not_fit(case: str) -> None:
    changed, array, message = BUILT[case]
    arrays: dict[str, Any] = {"indptr": np.array([0, 1, 1], I32), "indices": np.zeros(1, I32), "data": np.ones(1, F32)}
    if not message:
        assert CSR(shape=(2, 3), **arrays | changed).nnz == 1
        return
    with pytest.raises(ArrayError) as caught:
        CSR(shape=(2, 3), **arrays | changed)
    assert (str(caught.value), caught.value.array) == (f"csr: {message}", array)


def test_order_of_memory_and_positions() -> None:
    f = BSR.from_dense(np.ones((4, 4), F32), blocksize=(2, 2))
    with pytest.raises(ArrayError) as caught:
        BSR(shape=f.shape, blocksize=(2, 2), indptr=f.indptr, indices=f.indices, data=np.asfortranarray(f.data))
    assert (str(caught.value), caught.value.array) == ("bsr: data: expected C order; use ascontiguousarray", "data")
    g = make(by_name("vector-nm"))
    with pytest.raises(ArrayError, match=r"indices: expected dtype uint8, got int8"):
        g.with_arrays(indices=g.arrays()["indices"].astype(np.int8))
    t = make(TwoFour)
    with pytest.raises(ArrayError, match=r"meta: expected dtype uint16, got int16"):
        t.with_arrays(meta=t.arrays()["meta"].view(np.int16))
    e = make(by_name("ell-buckets"))
    with pytest.raises(ArrayError) as caught:
        type(e)(shape=e.shape, **e.params(), **e.arrays(), **e.tables() | {"rows_per_bucket": (1,)})
    assert "rows_per_bucket: expected" in str(caught.value)
    assert caught.value.array == "rows_per_bucket"


def test_the_validated_mark() -> None:
    f = make(CSR)
    assert f.is_validated
    assert f.ensure_valid() is f
    changed = f.with_arrays(data=f.values.copy())
    assert not changed.is_validated
    assert changed == f
    assert changed.validate() is changed
    assert changed.is_validated
    bad = f.with_arrays(indices=np.full_like(f.arrays()["indices"], 99))
    for act in (bad.ensure_valid, bad.validate):
        with pytest.raises(SpformatError):
            act()
        assert not bad.is_validated


class OnHost:
    """Lanes of a device that is the host: what ``read_to`` asks of them, in pieces of 5 bytes."""

    def fill(self, shape: tuple[int, ...], dtype: Any, fetch: Any, *, summed: bool = False) -> tuple[Any, int]:
        out = np.empty(shape, dtype)
        room = out.reshape(-1).view(np.uint8).data if out.size else memoryview(bytearray())
        for at in range(0, room.nbytes, 5):
            fetch(room[at : at + 5], at)
        return out, zlib.crc32(room) if summed else 0


def test_a_tensor_for_a_device(plain: Path) -> None:
    lanes: Any = OnHost()
    with stfile.Reader(plain) as reader:
        for name in "tfesz":
            found = reader.read_to(lanes, name, zlib.crc32(reader.read(name)))
            np.testing.assert_array_equal(found, reader.read(name))
            assert (found.dtype, found.shape) == (reader.read(name).dtype, reader.read(name).shape)
            np.testing.assert_array_equal(reader.read_to(lanes, name), found)
        with pytest.raises(IntegrityError, match=r"tensor 't': crc32 00000001 is stored"):
            reader.read_to(lanes, "t", 1)
        with (
            limits.using(memory=23),
            pytest.raises(LimitError, match=rf"^tensor 't' of {plain}: 24 bytes requested, 23 a"),
        ):
            reader.read_to(lanes, "t")
        with (
            limits.using(memory=23),
            pytest.raises(LimitError, match=rf"^tensor 't' of {plain}: 24 bytes requested, 23 a"),
        ):
            reader.read("t")
        start = reader.header.data_start + reader.entry("f").begin
    data = bytearray(plain.read_bytes())
    data[start + 1] = 2
    plain.write_bytes(data)
    with stfile.Reader(plain) as reader:
        with pytest.raises(ArrayError) as caught:
            reader.read_to(lanes, "f")
        assert str(caught.value) == f"{plain}: tensor 'f': BOOL: expected bytes 0 or 1, got others"
        os.utime(plain, ns=(0, 0))
        for act in (lambda: reader.read_to(lanes, "e"), lambda: reader.read_into("t", 0, memoryview(bytearray(1)))):
            with pytest.raises(IntegrityError, match="the file was changed while it was being read"):
                act()


def test_f17_reads_may_be_short(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stfile.Reader(plain) as reader:
        wanted = {name: reader.read(name) for name in reader.entries}
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, rooms, at: real(fd, [rooms[0][:5]], at))
    with stfile.Reader(plain) as reader:
        for name, a in wanted.items():
            np.testing.assert_array_equal(reader.read(name, zlib.crc32(a)), a)


def test_f34_a_file_may_be_the_first_one_a_process_opens(plain: Path) -> None:
    kept = os.dup(0)
    os.close(0)  # a caller that closed stdin: the next file is number 0
    try:
        with stfile.Reader(plain) as reader:
            assert reader.read("s") == 2
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(0)
    finally:
        os.dup2(kept, 0)
        os.close(kept)


def test_what_is_read_lies_on_a_cache_line(plain: Path) -> None:
    with stfile.Reader(plain) as reader:
        kept = [reader.read(name) for name in "ttffss"]
    assert [a.ctypes.data % 64 for a in kept] == [0] * 6


def test_fields_are_kept_in_their_own_types() -> None:
    f = make(BSR)
    fields: dict[str, Any] = {"shape": [np.int64(7), 7], "blocksize": "2x3"}
    g = BSR(**fields, **f.arrays())
    assert (g.shape, g.blocksize) == ((7, 7), (2, 3))
    assert all(type(n) is int for n in (*g.shape, *g.blocksize))
    e = make(by_name("ell-buckets"))
    again = type(e)(shape=e.shape, **e.params(), **e.arrays(), **{k: list(v) for k, v in e.tables().items()})
    assert again.tables() == e.tables()


def test_checks_are_on_unless_asked_otherwise(tmp_path: Path) -> None:
    for name, edit in (("a", keep(drop("crc32"))), ("b", put(x=1))):
        save(tmp_path / name, {"w": make(CSR)})
        rewrite(tmp_path / name, edit, sums=False)
        with stfile.Reader(tmp_path / name) as reader:
            with pytest.raises(DescriptorError, match=r"'crc32', got none|unknown key 'x'"):
                descriptor.read(reader.header)
            descriptor.read(reader.header, allow_unchecked=True, ignore_unknown=True)


# --- limits


def test_products_are_exact_and_of_sizes() -> None:
    assert limits.product() == 1
    assert limits.product(2**32, np.int64(2**32), 3) == 3 * 2**64
    assert limits.product(0, 2**63) == 0
    with pytest.raises(UsageError) as caught:
        limits.product(2, -1)
    assert str(caught.value) == "size: expected a number >= 0, got -1"
    with pytest.raises(TypeError):
        limits.product(2.0)  # type: ignore[arg-type]


def test_d12_the_budget_names_bytes_and_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(n: int, given: int = 0) -> str:
        with pytest.raises(LimitError) as caught:
            limits.check_bytes(n, "x", given)
        e = caught.value
        assert (e.value, e.hint) == (n, "--max-memory")
        assert f"{n:,} bytes requested, {e.limit:,} allowed" in str(e)
        assert e.exit_code == 78
        return str(e)

    monkeypatch.setattr(limits, "host_memory", lambda: 10 << 30)
    assert limits.check_bytes(4 << 30, "x") == 4 << 30
    assert refused((4 << 30) + 1) == (
        "x: 4,294,967,297 bytes requested, 4,294,967,296 allowed; raise the budget with --max-memory (in Python:"
        " spformat.limits.using(memory=...))"
    )
    assert limits.check_bytes(8 << 30, "x", 1 << 30) == 8 << 30
    assert "8,589,934,592 allowed" in refused((8 << 30) + 1, 1 << 30)
    assert "10,737,418,240 allowed" in refused((10 << 30) + 1, 9 << 30)
    with limits.using(memory=7):
        assert limits.check_bytes(7, "x", 1 << 30) == 7
        assert "7 allowed" in refused(8, 1 << 30)
        with limits.using(tensors=3) as inner:
            assert (inner.memory, inner.tensors, limits.current()) == (7, 3, inner)
        assert limits.current().tensors == 100_000
    assert limits.current().memory is None


def test_limits_by_name() -> None:
    with limits.using(tensors=3):
        limits.check("tensors", 3, "n")
        with pytest.raises(LimitError) as caught:
            limits.check("tensors", 1234, "n")
    e = caught.value
    assert (e.limit, e.value, e.hint) == (3, 1234, "--max-tensors")
    limits.check("memory", 1 << 60, "no limit is set")
    with pytest.raises(UsageError) as unknown, limits.using(tensor=3, x=1):
        pass
    assert str(unknown.value).startswith("limits: expected some of file_bytes, header_bytes, ")
    assert str(unknown.value).endswith(", link_roots, got tensor, x")
    with limits.using(limits.Limits(tensors=5), name_bytes=6) as both:
        assert (both.tensors, both.name_bytes, both.memory) == (5, 6, None)


def test_arrays_lie_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    f = make(BSR)
    monkeypatch.setattr(declare, "device_of", lambda a: f"cuda:{a.ndim}")
    with pytest.raises(ArrayError) as caught:
        f.with_arrays()
    assert str(caught.value) == "bsr: arrays on several devices: indptr cuda:1, indices cuda:1, data cuda:3"
    assert caught.value.array is None
