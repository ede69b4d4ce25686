"""The safetensors header as a value: strict parsing, the layout of a new file, canonical bytes. No I/O.

A file is ``u64 length | JSON header | data``. The header maps each tensor name to dtype, shape and byte range in the
data, and ``__metadata__`` to strings. The ranges must cover the data without gap, overlap or rest. Some errors that
other readers tolerate are refused: duplicate keys, NUL in names, bool or float sizes, products that overflow.
Deviations that older writers really produced (leading spaces, extra fields) are accepted and listed in
``Header.oddities``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from .. import limits
from ..arrays.dtypes import SAFETENSORS
from ..errors import ContainerError, FormatError, UsageError, printable

METADATA = "__metadata__"
MAX_RANK = 8
MAX_DEPTH = 127
"""The deepest nesting that the reference implementation reads; it refuses a deeper value even in an unknown field."""
_ADDRESSABLE = 2**63 - 1
"""The most bytes of an array. numpy refuses a shape whose extents other than 0 multiply to more."""
MAX_HEADER = 100_000_000
"""The longest header, in bytes, that the reference implementation reads."""
PARSED = 32
"""Bytes of memory that one byte of JSON may need when it is parsed; ``[[],[],..`` needs most."""
_NOT_COUNTED = 64 << 10
"""Texts of up to this many bytes are parsed whatever the memory budget is."""
ALIGNMENT = 64
"""The data of a file that this package writes start on this boundary, so that every array is aligned to its items."""

# Code of a type that numpy lacks -> its width in bits. Tensors of such types are checked and copied, not interpreted.
_OPAQUE_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
_BITS = {code: 8 * dtype.itemsize for code, dtype in SAFETENSORS.items()} | _OPAQUE_BITS
_FIELDS = ("dtype", "shape", "data_offsets")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: ``nbytes`` bytes at ``begin`` of the data part."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header. ``entries`` are in the order of their data; ``raw`` is the JSON text with its padding."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    raw: bytes
    data_bytes: int
    oddities: tuple[str, ...] = ()
    """Violations of the specification that were tolerated; a file that this package wrote has none."""

    @property
    def data_start(self) -> int:
        """Offset of the data part in the file."""
        return 8 + len(self.raw)


_JSON = re.compile(rb"[{\[][\t\n\r -~]{7}")
"""How a JSON file begins, and no header length of a file of less than 2^61 bytes."""


def length(prefix: bytes, file_bytes: int) -> int:
    """The header length from the first 8 bytes of a file. It is checked before anything of that size is allocated."""
    if len(prefix) < 8:
        raise ContainerError(f"truncated: 8-byte length expected, the file has {len(prefix)} bytes")
    n = int.from_bytes(prefix[:8], "little")
    if n < 2:
        raise ContainerError(f"header length: expected at least 2, got {n}")
    if n > file_bytes - 8 or n > MAX_HEADER:
        most = min(file_bytes - 8, MAX_HEADER)
        text = f"header length: expected at most {most}, got {n}: not a safetensors file, or truncated"
        if _JSON.match(prefix):
            text = f"this is JSON: of a checkpoint, name the folder ({text})"
        raise ContainerError(text)
    limits.check("header_bytes", n, "header length")
    return n


def parse(raw: bytes, data_bytes: int) -> Header:
    """The header whose JSON is ``raw``, in a file with ``data_bytes`` bytes after it.

    Raises:
        ContainerError: the bytes break the format.
        LimitError: more tensors, or a longer name, than the limits allow.
    """
    # Counted before parsing, to save memory. A key with escapes is not counted here, but it is after parsing.
    limits.check("tensors", raw.count(b'"data_offsets"'), "number of tensors")
    oddities = []
    if not raw.startswith(b"{"):
        oddities.append("header does not start with '{'")
    tree = strict_json(raw, "header")
    limits.check("tensors", len(tree) - (METADATA in tree), "number of tensors")
    metadata = _metadata(tree.pop(METADATA, {}))
    entries = sorted((_entry(name, fields, oddities) for name, fields in tree.items()), key=_place)
    _check_coverage(entries, data_bytes)
    return Header({e.name: e for e in entries}, metadata, raw, data_bytes, tuple(oddities))


def strict_json(text: str | bytes, what: str, error: type[FormatError] = ContainerError) -> dict[str, Any]:
    """A JSON object as a dict; ``error`` for anything else, and for duplicate keys, NaN and numbers out of range.

    LimitError if parsing the text may need more memory than the budget allows.
    """
    if len(text) > _NOT_COUNTED:
        limits.check_bytes(PARSED * len(text), f"{what}, parsed")
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        tree = json.loads(
            decoded,
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_int=_integer,
            parse_float=_finite,
        )
    except UnicodeDecodeError as e:
        raise error(f"{what}: expected UTF-8, got byte 0x{e.object[e.start]:02x} at {e.start}") from e
    except RecursionError as e:
        raise error(f"{what}: JSON is nested too deeply") from e
    except ValueError as e:  # malformed, a duplicate key, or a number out of range
        raise error(f"{what}: not valid JSON: {printable(e)}") from e
    if not isinstance(tree, dict):
        raise error(f"{what}: expected a JSON object, got {_json_type(tree)}")
    return tree


def layout(arrays: Iterable[tuple[str, str, tuple[int, ...], int]]) -> tuple[Entry, ...]:
    """The entries of a new file for (name, dtype code, shape, bytes): by decreasing item size, then by name.

    As the data start on a 64-byte boundary, every array is aligned to its items in this order, without gaps.
    """
    entries, at = [], 0
    for name, dtype, shape, nbytes in sorted(arrays, key=lambda a: (-_BITS.get(a[1], 0), a[0])):
        entries.append(Entry(name, dtype, tuple(shape), at, at + nbytes))
        at += nbytes
    return tuple(entries)


def encode(entries: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
    """The canonical header bytes, without the length: metadata sorted, entries in the given order, no blanks except the
    padding."""
    tree: dict[str, Any] = {}
    if metadata:
        tree[METADATA] = dict(sorted(metadata.items()))
    for e in entries:
        tree[e.name] = dict(zip(_FIELDS, (e.dtype, e.shape, (e.begin, e.end)), strict=True))
    try:
        raw = compact_json(tree).encode("utf-8")
    except UnicodeEncodeError as e:
        raise UsageError("names and metadata: expected Unicode text, got a lone surrogate") from e
    return raw + b" " * (-(8 + len(raw)) % ALIGNMENT)


def own_metadata(metadata: Any) -> dict[str, str]:
    """What a caller wants in ``__metadata__``; UsageError unless it is a mapping, or pairs, with keys that are text.

    The values are checked when the header is written.
    """
    try:
        own = dict(metadata or {})
    except (TypeError, ValueError):
        got = f"{type(metadata).__name__} {metadata!r:.80}"
        raise UsageError(f"metadata: expected {{name: text}}, got {got}", value=metadata) from None
    for key in own:
        if not isinstance(key, str):
            raise UsageError(f"metadata: expected names that are text, got {key!r:.80}", value=key)
    return own


def compact_json(tree: Any, *, sort_keys: bool = False) -> str:
    """JSON without blanks and without escapes of characters outside ASCII."""
    return (_SORTED if sort_keys else _AS_GIVEN).encode(tree)


# ``json.dumps`` would build an encoder in every call, and opening a small file takes nine.
_AS_GIVEN, _SORTED = (
    json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=s) for s in (False, True)
)


def sniff(start: bytes) -> str:
    """A hint for an error message: what a file that is no safetensors file looks like; "" if unknown."""
    for magic, what in _MAGIC:
        if start.startswith(magic):
            return f"; it looks like {what}"
    return ""


TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
"""File name endings of PyTorch's own files, which are pickles, alone or in a zip archive."""


def is_torch_file(path: str, start: bytes) -> bool:
    """Whether a file that begins with ``start`` is one that ``torch.save`` wrote."""
    if start.startswith(b"PK\x03\x04"):
        return path.lower().endswith(TORCH_SUFFIXES)
    # The length of a header may begin with the same two bytes, but its other bytes are zeros.
    return start[:1] == b"\x80" and 2 <= start[1] <= 5 and any(start[2:8])


def torch_lines(path: str) -> str:
    """What to do with a file that ``torch.save`` wrote: lines of Python."""
    stem = next((path[: -len(s)] for s in TORCH_SUFFIXES if path.lower().endswith(s)), path)
    return (
        "a PyTorch file, which spformat never reads, because reading one can run code. This converts it:\n"
        "    import torch, safetensors.torch\n"
        f"    tensors = torch.load({path!r}, map_location='cpu', weights_only=True)\n"
        f"    safetensors.torch.save_file(tensors, {stem + '.safetensors'!r})"
    )


_MAGIC = (
    (b"version https://git-lfs", "a Git LFS pointer: run `git lfs pull`"),
    (
        b"PK\x03\x04",
        "a zip archive (PyTorch .pt, .npz): it is never unpickled; convert it to safetensors first, "
        "a matrix in .npz by `spformat convert a.npz a.safetensors --to csr`",
    ),
    (b"%%MatrixMarket", "a Matrix Market file: `spformat convert a.mtx a.safetensors --to csr` first"),
    (b"\x80", "a pickle (PyTorch .bin): it is never unpickled; convert it to safetensors first"),
    (b"\x1f\x8b", "a gzip archive: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive: unpack it first"),
    (b"GGUF", "a GGUF file, which is not read"),
    (b"\x93NUMPY", "a .npy file: load it with numpy"),
    (b"\x89HDF", "an HDF5 file, which is not read"),
    *((start, "a JSON file: of a checkpoint, name the folder") for start in (b'{\n  "', b'{\n "', b'{"metadata"')),
    (b"<", "an HTML or XML page: a failed download?"),
)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        seen: set[str] = set()
        key = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"duplicate key '{key}'")
    return tree


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"expected finite numbers, got {text}")


def _integer(text: str) -> int:
    if text == "-0":  # other readers do not accept it as an integer
        raise ValueError("expected integers without a sign on zero, got -0")
    if len(text) > 300:
        _finite(text)
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"number out of range: {printable(text, 40)}")
    return value


def _json_type(value: Any) -> str:
    names = {bool: "a boolean", int: "an integer", float: "a float", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "null")


def _text(value: Any, what: str, tensor: str | None = None) -> str:
    if type(value) is not str:
        raise ContainerError(f"{what}: expected a string, got {_json_type(value)}", tensor=tensor)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as e:
        message = f"{what}: expected Unicode text, got a lone surrogate in '{printable(value)}'"
        raise ContainerError(message, tensor=tensor) from e
    return value


def _metadata(tree: Any) -> dict[str, str]:
    if type(tree) is not dict:
        raise ContainerError(f"{METADATA}: expected an object, got {_json_type(tree)}")
    return {_text(k, f"{METADATA} key"): _text(v, f"{METADATA}['{printable(k)}']") for k, v in tree.items()}


def check_length(name: str) -> None:
    """LimitError for the name of an entry that is longer than the limits in force allow."""
    limits.check("name_bytes", len(name.encode("utf-8")), f"tensor name '{printable(name, 40)}', bytes")


def _entry(name: str, fields: Any, oddities: list[str]) -> Entry:
    _text(name, "tensor name")
    if "\0" in name:  # an empty name is legal, and the official writer takes it
        raise ContainerError(f"tensor name: expected text without NUL, got '{printable(name)}'", tensor=name)
    check_length(name)
    if type(fields) is not dict:
        raise ContainerError(f"expected an object, got {_json_type(fields)}", tensor=name)
    for key in _FIELDS:
        if key not in fields:
            raise ContainerError(f"expected a field '{key}', got none", tensor=name)
    for key in fields.keys() - set(_FIELDS):
        check_plain(fields[_text(key, "field name", name)], f"field '{printable(key, 40)}'", name)
        oddities.append(f"tensor '{printable(name)}' has an unknown field '{printable(key, 40)}'")
    dtype = _text(fields["dtype"], "dtype", name)
    shape = _sizes(fields["shape"], "shape", name)
    if len(shape) > MAX_RANK:
        raise ContainerError(f"shape: expected at most {MAX_RANK} dimensions, got {len(shape)}", tensor=name)
    if 0 in shape:
        limits.check("empty_extent", max(shape), f"dimension of the tensor '{printable(name)}' without elements")
        if limits.product(*filter(None, shape)) * _BITS.get(dtype, 8) > 8 * _ADDRESSABLE:
            raise ContainerError(f"shape: expected extents an address can hold, got {list(shape)}", tensor=name)
    offsets = _sizes(fields["data_offsets"], "data_offsets", name)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ContainerError(f"data_offsets: expected [begin, end], got {list(offsets[:4])}", tensor=name)
    entry = Entry(name, dtype, shape, *offsets)
    if dtype in _BITS:
        bits = limits.product(*shape) * _BITS[dtype]
        if bits != 8 * entry.nbytes:
            raise ContainerError(
                f"data_offsets: expected {bits} bits for {dtype} {list(shape)}, got {8 * entry.nbytes}", tensor=name
            )
    return entry


def check_plain(value: Any, what: str, tensor: str | None = None) -> None:
    """ContainerError unless a value that is not interpreted meets the rules that other readers have for any JSON:
    bounded depth, and text without lone surrogates."""
    waiting = [(value, 3)]  # the value is at depth 3: inside the header, an entry and a field
    while waiting:
        item, depth = waiting.pop()
        if type(item) is str:
            _text(item, what, tensor)
        elif type(item) in (list, dict):
            if depth > MAX_DEPTH:
                raise ContainerError(f"{what}: expected at most {MAX_DEPTH} levels of nesting, got more", tensor=tensor)
            if type(item) is dict:
                waiting += [(key, depth) for key in item]
            waiting += [(inner, depth + 1) for inner in (item.values() if type(item) is dict else item)]


def _sizes(value: Any, what: str, name: str) -> tuple[int, ...]:
    if type(value) is not list:
        raise ContainerError(f"{what}: expected a list of integers, got {_json_type(value)}", tensor=name)
    for size in value:
        if type(size) is not int:  # bool is a subclass of int
            raise ContainerError(f"{what}: expected integers, got {_json_type(size)}", tensor=name)
        if size < 0 or size > limits.MAX_DIM:
            bound = "dimension > 2^48-1" if size > 0 else "negative"
            raise ContainerError(f"{what}: expected 0 .. 2^48-1, got {printable(size, 40)} ({bound})", tensor=name)
    return tuple(value)


def _place(e: Entry) -> tuple[int, int]:
    return e.begin, e.end


def _check_coverage(entries: list[Entry], data_bytes: int) -> None:
    at, last = 0, None
    for e in entries:
        if e.begin != at:
            before, name = _quoted(last), _quoted(e)
            if e.begin > at:
                what = f"bytes not covered: gap of {e.begin - at} between {before} and {name}"
            else:
                what = f"overlapping data: {before} ends at {at}, {name} begins at {e.begin}"
            raise ContainerError(what, tensor=e.name)
        at, last = e.end, e
    if at > data_bytes:
        raise ContainerError(f"truncated: the tensors need {at} bytes of data, the file has {data_bytes}")
    if at < data_bytes:
        raise ContainerError(f"bytes not covered: {data_bytes - at} after {_quoted(last)}")


def _quoted(e: Entry | None) -> str:
    return "the start of the data" if e is None else f"'{printable(e.name)}'"
