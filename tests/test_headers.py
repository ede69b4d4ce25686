"""The exact errors of the header parser, and the exact values at which they begin."""

from __future__ import annotations

import pytest

from spformat import limits
from spformat.errors import ContainerError, LimitError
from spformat.storage import stheader


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
        (
            b"PK\x03\x04",
            "a zip archive (PyTorch .pt, .npz): it is never unpickled; convert it to safetensors first, a matrix in "
            ".npz by `spformat convert a.npz a.safetensors --to csr`",
        ),
        (b"GGUF\x03", "a GGUF file, which is not read"),
        (b'{\n  "metadata": {', "a JSON file: of a checkpoint, name the folder"),
        (b'{"metadata":{', "a JSON file: of a checkpoint, name the folder"),
        (b"\x80\x02", "a pickle (PyTorch .bin): it is never unpickled; convert it to safetensors first"),
        (b"version https://git-lfs.github.com", "a Git LFS pointer: run `git lfs pull`"),
    ],
)
def test_what_a_file_looks_like(start: bytes, hint: str) -> None:
    assert stheader.sniff(start) == f"; it looks like {hint}"
    assert stheader.sniff(b"\x01" + start) == ""
