"""The description of the tensors in a file: JSON in ``__metadata__["spformat"]``, written and read by one schema.

    {"container": 1, "sha256": "<64 hex>", "plain": {"bias": "<8 hex>"}, "tensors": {"w": {
        "format": "bsr", "version": 1, "shape": [M, K], "dtype": "bfloat16", "params": {"blocksize": [16, 16]},
        "tables": {..}, "crc32": {"indptr": "<8 hex>", "indices": .., "data": ..}}}}

Array x of tensor w is the entry ``w.x`` of the file. A plain array is the entry of its own name. Every entry belongs to
exactly one tensor. ``crc32`` covers the bytes of an array; ``sha256`` covers the canonical header, checksums included,
with its own digits set to zero. Reading is strict: unknown or missing keys, other types, and headers that differ from
the canonical bytes are refused. No particular format is mentioned here.

A composed format has parts: ``"parts": {"0": {..}, "1": {..}}``. Part p of tensor w is described in the same way as a
tensor with the name ``w.p``: its array x is the entry ``w.p.x``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import limits
from ..arrays.dtypes import SAFETENSORS, VALUE_TYPES, dtype_name
from ..errors import (
    ArrayError,
    ContainerError,
    DescriptorError,
    IntegrityError,
    LimitError,
    UsageError,
    VersionError,
    printable,
)
from ..formats import by_name
from ..formats.base import VALUE, Format
from ..formats.composed import MAX_DEPTH
from ..formats.declare import OMITTED
from . import stheader
from .stheader import Entry, Header

KEY = "spformat"
CONTAINER = 1
_TENSOR_KEYS = {"format", "version", "shape", "dtype", "params", "crc32"}
_CRC = re.compile(r"[0-9a-f]{8}")
_SHA = re.compile(r"[0-9a-f]{64}")
_NO_SHA = "0" * 64


@dataclass(frozen=True, slots=True)
class Record:
    """Everything about one tensor except its data. ``format`` is None for a plain array."""

    name: str
    format: type[Format] | None
    shape: tuple[int, ...]
    dtype: str
    """The numpy (ml_dtypes) name of the value type; for a plain array of a type that numpy lacks, the safetensors
    code."""
    arrays: dict[str, tuple[str, tuple[int, ...]]]
    """Path -> (safetensors dtype code, shape) of each array: "data", or "0.data" for an array of part "0". The single
    path of a plain array is ""."""
    params: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, tuple[int, ...]] = field(default_factory=dict)
    crc32: dict[str, int | None] = field(default_factory=dict, compare=False)
    """The CRC32 of each array that is stored in the file; None, or absent, if there is none."""
    parts: dict[str, Record] = field(default_factory=dict)
    """Name -> record of that part of a composed format. Paths in it are relative to the part."""

    @property
    def own_arrays(self) -> tuple[str, ...]:
        """The arrays of the tensor itself, without those of its parts."""
        return tuple(path for path in self.arrays if "." not in path)

    @property
    def only_bytes(self) -> bool:
        """Whether numpy lacks the type of a plain array (F4, F6, ..), so that nothing but its bytes can be read."""
        return self.format is None and any(code not in SAFETENSORS for code, _ in self.arrays.values())

    @property
    def stored(self) -> int:
        """Value slots, padding included."""
        if self.format is None:
            return limits.product(*self.shape)
        own = [limits.product(*self.arrays[d.name][1]) for d in self.format.declared_arrays() if d.kind == VALUE]
        return sum(own) + sum(p.stored for p in self.parts.values())

    def entry(self, array: str) -> str:
        """The name an array has in the file."""
        return f"{self.name}.{array}" if array else self.name


def parts_by_name(records: Iterable[Record]) -> dict[str, Record]:
    """ "w.0" -> the record of part "0" of the tensor "w", for all parts of some tensors and the parts of these."""
    out: dict[str, Record] = {}
    for r in records:
        for p in r.parts.values():
            out |= {p.name: p} | (parts_by_name([p]) if p.parts else {})
    return out


def pack(records: Iterable[Record], sums: Mapping[str, int]) -> dict[str, Any]:
    """The descriptor of a new file, from {entry name: CRC32}, with zeros in place of ``sha256``."""
    tensors: dict[str, Any] = {}
    plain: dict[str, str] = {}
    for r in records:
        if r.format is None:
            plain[r.name] = f"{sums[r.name]:08x}"
            continue
        tensors[r.name] = _described(r, r.format, sums)
        _check_size(r.name, tensors[r.name])
    tree: dict[str, Any] = {"container": CONTAINER, "sha256": _NO_SHA, "tensors": tensors}
    return tree | {"plain": plain} if plain else tree


def _described(r: Record, cls: type[Format], sums: Mapping[str, int]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "format": cls.name,
        "version": cls.version_of(r.params),
        "shape": list(r.shape),
        "dtype": r.dtype,
        "params": {key: _plain(value) for key, value in r.params.items()},
        "crc32": {array: f"{sums[r.entry(array)]:08x}" for array in r.own_arrays},
    }
    if r.tables:
        described["tables"] = {key: list(value) for key, value in r.tables.items()}
    if r.parts:
        described["parts"] = {name: _described(p, p.format, sums) for name, p in r.parts.items() if p.format}
    return described


def sealed(tree: dict[str, Any], entries: Iterable[Entry], metadata: Mapping[str, str]) -> dict[str, str]:
    """``__metadata__`` with the descriptor. Its ``sha256`` is computed over the header with zeros in place of
    itself."""
    digest = hashlib.sha256(stheader.encode(entries, _with(metadata, tree | {"sha256": _NO_SHA}))).hexdigest()
    return _with(metadata, tree | {"sha256": digest})


def read(header: Header, *, allow_unchecked: bool = False, ignore_unknown: bool = False) -> dict[str, Record]:
    """Name -> record of every tensor of a file with a descriptor.

    Args:
        header: a parsed header whose metadata has ``KEY``.
        allow_unchecked: accept missing checksums (never wrong ones).
        ignore_unknown: accept keys this release does not know.

    Raises:
        DescriptorError: the schema is broken, or entries and descriptor do not match one to one.
        VersionError: a container or format version this release does not read.
        IntegrityError: the header is not canonical, or does not have the SHA-256 that is stored.
        ArrayError: an array has another value dtype than the descriptor states.
    """
    if header.oddities:
        raise ContainerError(f"header: {header.oddities[0]}; a file with a descriptor follows the specification")
    tree = stheader.strict_json(header.metadata[KEY], "descriptor", DescriptorError)
    _check_version("container", tree.get("container"), CONTAINER)
    _check_seal(header, tree, allow_unchecked)
    _check_keys("descriptor", tree, {"container", "sha256", "tensors"} - ({"sha256"} if allow_unchecked else set()),
                {"plain", "sha256"}, ignore_unknown)  # fmt: skip
    records: dict[str, Record] = {}
    for name, described in _object("descriptor: tensors", tree["tensors"]).items():
        try:
            records[name] = _read_tensor(name, described, header, allow_unchecked, ignore_unknown)
        except (DescriptorError, VersionError, ArrayError, LimitError) as e:
            e.at(tensor=name)
            raise
    for name, text in _object("descriptor: plain", tree.get("plain", {})).items():
        if name in records:
            raise DescriptorError("two tensors of this name", tensor=name)
        try:
            records[name] = _plain_record(_claimed(header, name, name), _checksum(text, "", allow_unchecked))
        except DescriptorError as e:
            e.at(tensor=name)
            raise
    _check_claims(header, records)
    return records


def undescribed(header: Header) -> dict[str, Record]:
    """Name -> record of every tensor of a file without descriptor, in the order of its data. All are plain arrays."""
    return {name: _plain_record(entry, None) for name, entry in header.entries.items()}


def _read_tensor(
    name: str, tree: Any, header: Header, allow_unchecked: bool, ignore_unknown: bool, depth: int = 0
) -> Record:
    if depth > MAX_DEPTH:
        raise DescriptorError(f"parts: expected at most {MAX_DEPTH} levels of parts, got more")
    described = _object("descriptor", tree)
    _check_size(name, described)
    if "format" not in described:
        raise DescriptorError("expected a key 'format', got none")
    cls = _format(described["format"])
    version = described.get("version")
    _check_version(f"{cls.name}", version, *cls.versions())
    declared = {d.name: d for d in cls.declared_arrays()}
    tables = [key for key, _ in cls.declared_tables()]
    optional = {"crc32"} if allow_unchecked else set()
    sometimes = {"tables": tables, "parts": cls.declared_parts()}
    required = (_TENSOR_KEYS | {key for key, declared_ones in sometimes.items() if declared_ones}) - optional
    _check_keys("descriptor", described, required, optional, ignore_unknown)
    shape = _ints("shape", described["shape"])
    if len(shape) != cls.rank:
        wanted = "[M, K]" if cls.rank == 2 else f"{cls.rank} dimensions"
        raise DescriptorError(f"shape: expected {wanted}, got {len(shape)} dimensions")
    dtype = described["dtype"]
    if type(dtype) is not str or dtype not in cls.value_dtypes:
        takes = ", ".join(cls.value_dtypes)
        raise DescriptorError(f"dtype: expected one of {takes}, got {printable(dtype, 40)}")
    params = _params(cls, described["params"], ignore_unknown)
    if cls.version_of(params) != version:
        text = f"version: expected {cls.version_of(params)} for these params, got {version}"
        raise DescriptorError(text, value=version)
    table_values = _object("tables", described.get("tables", {}))
    _check_keys("tables", table_values, set(tables), set(), ignore_unknown)
    sums = _object("crc32", described.get("crc32", {}))
    _check_keys("crc32", sums, set() if allow_unchecked else set(declared), set(declared), ignore_unknown)
    arrays: dict[str, tuple[str, tuple[int, ...]]] = {}
    for array, d in declared.items():
        entry = _claimed(header, f"{name}.{array}", array)
        arrays[array] = (entry.dtype, entry.shape)
        if d.kind == VALUE and entry.dtype != VALUE_TYPES[dtype].safetensors:
            expected = VALUE_TYPES[dtype].safetensors
            got = printable(entry.dtype, 40)
            raise ArrayError(f"{array}: expected {expected} for dtype {dtype}, got {got}", array=array)
    crc32 = {array: _checksum(sums.get(array), array, allow_unchecked) for array in declared}
    parts: dict[str, Record] = {}
    for part, below in _named_parts(cls, described.get("parts", {})).items():
        try:
            p = _read_tensor(f"{name}.{part}", below, header, allow_unchecked, ignore_unknown, depth + 1)
        except (DescriptorError, VersionError, ArrayError, LimitError) as e:
            e.message = f"part {part}: {e.message}"
            raise
        parts[part] = p
        arrays |= {f"{part}.{path}": spec for path, spec in p.arrays.items()}
        crc32 |= {f"{part}.{path}": crc for path, crc in p.crc32.items()}
    table_ints = {key: _ints(f"tables.{key}", table_values[key]) for key in tables}
    return Record(name, cls, shape, dtype, arrays, params, table_ints, crc32, parts)


def _named_parts(cls: type[Format], tree: Any) -> dict[str, Any]:
    """Name -> description of each part, in the order of the format. DescriptorError for missing or unknown names."""
    described = _object("parts", tree)
    single = [d.name for d in cls.declared_parts() if not d.many]
    many = len(described) - len(single) if any(d.many for d in cls.declared_parts()) else 0
    names = [*single, *(str(i) for i in range(many))]
    _check_keys("parts", described, set(names), set(), ignore_unknown=False)
    return {name: described[name] for name in names}


def _plain_record(e: Entry, crc32: int | None) -> Record:
    known = SAFETENSORS.get(e.dtype)
    dtype = e.dtype if known is None else dtype_name(known)
    return Record(e.name, None, e.shape, dtype, {"": (e.dtype, e.shape)}, crc32={"": crc32})


def _check_seal(header: Header, tree: dict[str, Any], allow_unchecked: bool) -> None:
    stored = tree.get("sha256")
    if stored is None and allow_unchecked:
        return
    if type(stored) is not str or not _SHA.fullmatch(stored):
        got = "none" if stored is None else printable(stored, 80)
        raise DescriptorError(f"sha256: expected 64 lower-case hex digits, got {got}{_UNCHECKED}", value=stored)
    others = {key: value for key, value in header.metadata.items() if key != KEY}
    entries = list(stheader.layout((e.name, e.dtype, e.shape, e.nbytes) for e in header.entries.values()))
    try:
        canonical = sealed(tree, entries, others)
    except UsageError as e:  # the writer raises this for text that UTF-8 cannot encode
        raise DescriptorError("descriptor: expected Unicode text, got a lone surrogate") from e
    if canonical != header.metadata or stheader.encode(entries, canonical) != header.raw:
        raise IntegrityError("header: its bytes do not match its sha256, or are not canonical: the file was changed")


def _check_version(what: str, stated: Any, *supported: int) -> None:
    if type(stated) is not int or stated not in supported:
        got = "none" if stated is None else f"{printable(stated, 40)!r}"
        newer = "; a newer spformat wrote it" if type(stated) is int and stated > supported[-1] else ""
        expected = " or ".join(map(str, supported))
        raise VersionError(
            f"{what} version: expected {expected}, got {got}{newer}", value=stated, expected=supported[-1]
        )


def _check_size(name: str, described: dict[str, Any]) -> None:
    size = len(stheader.compact_json(described))
    limits.check("descriptor_bytes", size, f"descriptor of tensor '{printable(name, 40)}', bytes")


def _check_keys(what: str, tree: dict[str, Any], required: set[str], optional: set[str], ignore_unknown: bool) -> None:
    missing = sorted(required - tree.keys())
    if missing:
        hint = _UNCHECKED if "crc32" in (missing[0], what) else ""
        raise DescriptorError(f"{what}: expected a key '{missing[0]}', got none{hint}", expected=missing[0])
    unknown = sorted(tree.keys() - required - optional)
    if unknown and not ignore_unknown:
        key = printable(unknown[0], 40)
        raise DescriptorError(
            f"{what}: unknown key '{key}'; a newer file? (--ignore-unknown reads it)", value=unknown[0]
        )


_UNCHECKED = " (--allow-unchecked reads files without checksums)"


def _check_claims(header: Header, records: dict[str, Record]) -> None:
    claimed: dict[str, str] = {}
    for r in records.values():
        for array in r.arrays:
            other = claimed.setdefault(r.entry(array), r.name)
            if other != r.name:
                both = f"entry '{printable(r.entry(array))}' is claimed by tensor '{printable(other)}' too"
                raise DescriptorError(both, tensor=r.name)
    for name in header.entries:
        if name not in claimed:
            raise DescriptorError(f"entry '{printable(name)}' of the file is claimed by no tensor", array=name)


def _claimed(header: Header, entry: str, array: str) -> Entry:
    claimed = header.entries.get(entry)
    if claimed is None:
        raise DescriptorError(f"expected the entry '{printable(entry)}' in the file, got none", array=array)
    return claimed


def _format(name: Any) -> type[Format]:
    if type(name) is not str:
        raise DescriptorError(f"format: expected a format id, got {printable(name, 40)!r}")
    try:
        return by_name(name)
    except UsageError as e:
        raise DescriptorError(f"format: {e.message}", value=name) from e


def _params(cls: type[Format], tree: Any, ignore_unknown: bool) -> dict[str, Any]:
    given = _object("params", tree)
    names = {d.name for d in cls.declared_params()}
    optional = {d.name for d in cls.declared_params() if d.default is OMITTED}
    _check_keys("params", given, names - optional, optional, ignore_unknown)
    given = {key: value for key, value in given.items() if key in names}
    try:
        params = cls.resolve_params(given)
    except UsageError as e:
        raise DescriptorError(f"params: {e.message}", value=e.value) from e
    for key in given:
        # A call may leave an AUTO param to the matrix; a file must state its value, so null is refused. So is a value
        # that is written in another way, "32" or 32.0 for 32.
        value = params.get(key)
        if value is None or stheader.compact_json(_plain(value)) != stheader.compact_json(given[key]):
            absent = "a value" if given[key] is None else "no such key, as the others say it"
            expected = absent if value is None else repr(_plain(value))
            raise DescriptorError(f"params: {key}: expected {expected}, got {given[key]!r:.80}", value=given[key])
    return params


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _object(what: str, tree: Any) -> dict[str, Any]:
    if type(tree) is not dict:
        raise DescriptorError(f"{what}: expected an object, got {printable(tree, 40)!r}")
    return tree


def _ints(what: str, values: Any) -> tuple[int, ...]:
    if type(values) is not list or not all(type(v) is int and 0 <= v <= limits.MAX_DIM for v in values):
        raise DescriptorError(f"{what}: expected a list of ints in 0 .. 2^48-1, got {printable(values, 80)}")
    return tuple(values)


def _checksum(text: Any, array: str, allow_unchecked: bool) -> int | None:
    if text is None and allow_unchecked:
        return None
    if type(text) is not str or not _CRC.fullmatch(text):
        got = "none" if text is None else printable(text, 40)
        raise DescriptorError(f"crc32: expected 8 lower-case hex digits, got {got}", array=array, value=text)
    return int(text, 16)


def _with(metadata: Mapping[str, str], tree: dict[str, Any]) -> dict[str, str]:
    return dict(sorted({**metadata, KEY: stheader.compact_json(tree, sort_keys=True)}.items()))
