"""The declaration of a format's fields: params, tables, arrays, parts; and how text becomes them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from ..errors import ArrayError, UsageError

if TYPE_CHECKING:
    from .csr import CSR

VALUE, INDEX, POS = "VALUE", "INDEX", "POS"
MAX_DIMENSION = 2**48 - 1
MOST_INTS = 64
"""Numbers that a parameter of kind "ints" may have."""
REQUIRED, AUTO, OMITTED = object(), object(), object()
"""Param defaults: must be given; follows from the matrix (``Format.auto_params``); is left out of params and files."""


@dataclass(frozen=True)
class ArrayDeclaration:
    """One array of a format: its kind, symbolic dimensions and, for INDEX, the largest number it may hold."""

    name: str
    kind: str
    dims: tuple[str, ...]
    bound: str | None
    doc: str


@dataclass(frozen=True)
class PartDeclaration:
    """One part of a composed format, or a tuple of parts."""

    name: str
    many: bool
    doc: str


@dataclass(frozen=True)
class RowChunks:
    """How the arrays of a matrix follow from those of its row chunks.

    A row chunk has ``rows`` rows, or a multiple of it; the last may have fewer. Each array of the matrix is the arrays
    of the row chunks end to end along the first axis. A pointer continues counting from row chunk to row chunk.
    """

    rows: int
    pointers: tuple[str, ...] = ()
    """Arrays [n+1] that start at 0 and count entries of the array whose first dimension is their bound."""
    second_axis: tuple[str, ...] = ()
    """Arrays whose rows lie along their second axis. A file cannot be written in such row chunks."""

    def axis(self, name: str) -> int:
        """The axis of an array along which the rows of the matrix lie."""
        return 1 if name in self.second_axis else 0


@dataclass(frozen=True)
class ParamDeclaration:
    """One parameter: what ``from_csr`` takes, how text becomes it, and its range."""

    name: str
    kind: str
    low: int
    high: int
    choices: tuple[str, ...]
    default: Any
    doc: str
    since: int = 1
    """The first version of the format that has it. Files in which it is given have at least this version."""

    def range_text(self) -> str:
        """The legal values in words."""
        if self.kind == "choice":
            return "one of " + ", ".join(self.choices)
        unit = {"pair": "two ints", "ints": f"1 to {MOST_INTS} ints, ascending,"}.get(self.kind, "an int")
        return f"{unit} in {self.low} .. {self.high}"

    def parse(self, value: Any) -> Any:
        """The value in its stored type; text ("64x64", "32") is read; UsageError outside the range."""
        if isinstance(value, Iterator):  # it can be read once, and a parameter is read by checks, too
            got = f"a {type(value).__name__}, which can be read only once; use a tuple"
            raise UsageError(f"{self.name}: expected {self.range_text()}, got {got}", value=value)
        try:
            if self.kind == "choice":
                if value in self.choices:
                    return str(value)
            elif self.kind == "pair":
                items = value.lower().split("x") if isinstance(value, str) else value
                if isinstance(items, (int, np.integer)) or (isinstance(value, str) and len(items) == 1):
                    items = (value, value)  # 16 stands for 16x16
                pair = tuple(plain_int(v) for v in items)
                if len(pair) == 2 and all(self.low <= v <= self.high for v in pair):
                    return pair
            elif self.kind == "ints":
                many = value.lower().split("x") if isinstance(value, str) else value
                ints = tuple(plain_int(v) for v in ((many,) if isinstance(many, (int, np.integer)) else many))
                ascending = all(a < b for a, b in itertools.pairwise(ints))
                if 1 <= len(ints) <= MOST_INTS and ascending and self.low <= ints[0] and ints[-1] <= self.high:
                    return ints
            elif self.low <= (number := plain_int(value)) <= self.high:
                return number
        except (TypeError, ValueError):
            pass
        raise UsageError(f"{self.name}: expected {self.range_text()}, got {value!r:.80}", value=value)


def plain_int(value: Any) -> int:
    """A host int from an int or digits; TypeError or ValueError for bools, floats and the rest."""
    if type(value) is int:
        return value
    if isinstance(value, str):
        return int(value)
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(value)
    return int(value)


def array(kind: str, *dims: str, bound: str | None = None, doc: str = "") -> Any:
    """Declare an array: VALUE, INDEX (with ``bound``), POS (uint8) or a numpy dtype name, and its dimensions."""
    return dataclasses.field(metadata={"array": (kind, dims, bound, doc)})


def param(
    kind: str, low: int = 0, high: int = 0, *, choices: tuple[str, ...] = (), default: Any = REQUIRED, doc: str = "",
    since: int = 1,
) -> Any:  # fmt: skip
    """Declare a parameter: kind "int", "pair", "ints" or "choice", its range and its default.

    A parameter that is added to a format later has the default OMITTED and says ``since`` which version of the format
    there is such a parameter: files without it stay as they are, and files with it have that version.
    """
    metadata = {"param": (kind, low, high, choices, default, doc, since)}
    return (
        dataclasses.field(default=None, metadata=metadata)
        if default is OMITTED
        else dataclasses.field(metadata=metadata)
    )


def table(length: str, doc: str = "") -> Any:
    """Declare a table: a tuple of host ints that follows from the content and that a launch needs."""
    return dataclasses.field(metadata={"table": (length, doc)})


def part(*, many: bool = False, doc: str = "") -> Any:
    """Declare a part: a matrix of any format; many: a tuple of them. For classes derived from ``composed.Composed``."""
    return dataclasses.field(metadata={"part": (many, doc)})


@functools.cache
def part_declarations(cls: Any) -> tuple[PartDeclaration, ...]:
    """The parts of a format class, in the order they are written."""
    return tuple(PartDeclaration(f.name, *f.metadata["part"]) for f in dataclasses.fields(cls) if "part" in f.metadata)


@functools.cache
def declarations(
    cls: Any,
) -> tuple[tuple[ArrayDeclaration, ...], tuple[ParamDeclaration, ...], tuple[tuple[str, str], ...]]:
    """(arrays, params, tables) of a format class, in the order they are written."""
    arrays, params, tables = [], [], []
    for f in dataclasses.fields(cls):
        if "array" in f.metadata:
            arrays.append(ArrayDeclaration(f.name, *f.metadata["array"]))
        elif "param" in f.metadata:
            params.append(ParamDeclaration(f.name, *f.metadata["param"]))
        elif "table" in f.metadata:
            tables.append((f.name, f.metadata["table"][0]))
    return tuple(arrays), tuple(params), tuple(tables)


def arrays_counted_by(cls: Any, pointer: str) -> tuple[str, ...]:
    """The arrays of a format class whose entries a pointer counts."""
    arrays = declarations(cls)[0]
    label = next(d.bound for d in arrays if d.name == pointer)
    return tuple(d.name for d in arrays if d.dims[0] == label)


@functools.cache
def value_field_of(cls: Any) -> str:
    """``Declared.value_field`` of a format class."""
    return next((d.name for d in declarations(cls)[0] if d.kind == VALUE), "")


def parse_shape(name: str, shape: Any, rank: int = 2) -> tuple[int, int]:
    """(M, K) as ints in 0 .. 2^48-1; as many sizes as the format has dimensions (``Format.rank``)."""
    try:
        given = tuple(shape)  # digits in a text are ints in parameters only
        sizes = () if any(isinstance(n, str) for n in given) else tuple(map(plain_int, given))
    except (TypeError, ValueError):
        sizes = ()
    if len(sizes) != rank or min(sizes) < 0 or max(sizes) > MAX_DIMENSION:
        wanted = "two ints (M, K)" if rank == 2 else f"{rank} ints"
        raise UsageError(f"{name}: shape: expected {wanted} in 0 .. 2^48-1, got {shape!r:.80}", value=shape)
    return sizes  # type: ignore[return-value]


def parse_rows(name: str, first: Any, last: Any) -> tuple[int, int]:
    """The numbers of the first row and of the one after the last, as ints; UsageError for anything else."""
    try:
        return plain_int(first), plain_int(last)
    except (TypeError, ValueError):
        raise UsageError(f"{name}: rows: expected two ints first, last, got {first!r:.40} .. {last!r:.40}") from None


def parse_table(name: str, key: str, values: Any) -> tuple[int, ...]:
    """A table as a tuple of ints >= 0."""
    try:
        parsed = tuple(plain_int(v) for v in values)
    except (TypeError, ValueError):
        parsed = (-1,)
    if any(v < 0 for v in parsed):
        raise ArrayError(f"{name}: {key}: expected ints >= 0, got {values!r:.80}", array=f"tables.{key}")
    return parsed


def _is_plain(value: Any) -> bool:
    """Whether equal values of this kind are the same parameter: 1, True and 1.0 are equal, and not all are legal."""
    kind = type(value)
    return kind is int or kind is str or (kind is tuple and all(type(v) is int for v in value))


@functools.lru_cache(maxsize=1024)
def _resolved(cls: type[Declared], given: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """``resolve_params`` without a matrix. A conversion resolves the same parameters several times."""
    return cls._resolve_params(dict(given), None)


@functools.cache
def _asks_the_matrix(cls: type[Declared]) -> bool:
    """Whether params of this class may follow from a matrix."""
    return cls.auto_params.__func__ is not Declared.auto_params.__func__  # type: ignore[attr-defined]


class Declared:
    """The class methods that follow from the declaration of a format's fields. ``Format`` derives from this class."""

    __slots__ = ()
    name: ClassVar[str]
    version: ClassVar[int] = 1

    @classmethod
    def declared_arrays(cls) -> tuple[ArrayDeclaration, ...]:
        return declarations(cast(Any, cls))[0]

    @classmethod
    def declared_params(cls) -> tuple[ParamDeclaration, ...]:
        return declarations(cast(Any, cls))[1]

    @classmethod
    def declared_tables(cls) -> tuple[tuple[str, str], ...]:
        """(name, label of its length) of each table."""
        return declarations(cast(Any, cls))[2]

    @classmethod
    def value_field(cls) -> str:
        """The name of the VALUE array; empty for a composed format that has none of its own."""
        return value_field_of(cast(Any, cls))

    @classmethod
    def declared_parts(cls) -> tuple[PartDeclaration, ...]:
        """The parts of a composed format; none for other formats."""
        return part_declarations(cast(Any, cls))

    @classmethod
    def param_problems(cls, params: dict[str, Any]) -> list[str]:
        """Broken relations between params (each alone is already in range), as ``name: expected .., got ..``."""
        return []

    @classmethod
    def auto_params(cls, a: CSR, params: dict[str, Any]) -> dict[str, Any]:
        """Values of AUTO params, computed from the matrix."""
        return {}

    @classmethod
    def resolve_params(cls, given: dict[str, Any], a: CSR | None = None) -> dict[str, Any]:
        """All params in their stored types, defaults filled in; UsageError names parameter, value and range.

        AUTO params that are not given follow from the matrix ``a``; without it they are left out.
        """
        if (a is None or not _asks_the_matrix(cast(Any, cls))) and all(map(_is_plain, given.values())):
            return dict(_resolved(cast(Any, cls), tuple(given.items())))
        return cls._resolve_params(given, a)

    @classmethod
    def _resolve_params(cls, given: dict[str, Any], a: CSR | None) -> dict[str, Any]:
        known = {d.name: d for d in cls.declared_params()}
        unknown = [k for k in given if k not in known]
        if unknown:
            takes = ", ".join(known) or "no parameters"
            raise UsageError(f"{cls.name}: unknown parameter {unknown[0]!r:.80}; it takes {takes}")
        params: dict[str, Any] = {}
        for d in known.values():
            value = given.get(d.name, d.default)
            left_out = value is None and (d.default is AUTO or d.default is OMITTED)
            if value is AUTO or value is OMITTED or left_out:
                continue
            if value is REQUIRED:
                raise UsageError(f"{cls.name}: parameter {d.name} is required: {d.range_text()}")
            try:
                params[d.name] = d.parse(value)
            except UsageError as e:
                raise UsageError(f"{cls.name}: {e.message}", value=value) from None
        if a is not None:
            params = cls.auto_params(a, params) | params
        problems = cls.param_problems(params)
        if problems:
            raise UsageError(f"{cls.name}: " + "; ".join(problems))
        params = cls.normal_params(params)
        return {name: params[name] for name in known if name in params}

    @classmethod
    def normal_params(cls, params: dict[str, Any]) -> dict[str, Any]:
        """Legal params in the one form in which they are stored, where several say the same."""
        return params

    @classmethod
    def changed_params(cls, params: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """The params of a matrix with some of them replaced, and without those that the new ones decide."""
        return params | given

    @classmethod
    def has_all_params(cls, params: dict[str, Any]) -> bool:
        """Whether ``params`` lack none but those that may be left out."""
        return all(d.name in params or d.default is OMITTED for d in cls.declared_params())

    @classmethod
    def version_of(cls, params: dict[str, Any]) -> int:
        """The version of the format that a file states for a matrix with these params."""
        return max([cls.version, *(d.since for d in cls.declared_params() if d.name in params)])

    @classmethod
    def versions(cls) -> tuple[int, ...]:
        """The versions of the format that this release reads, ascending."""
        return tuple(sorted({cls.version, *(d.since for d in cls.declared_params() if d.since > cls.version)}))

    @classmethod
    def array_specs(
        cls, shape: tuple[int, int], dtype: np.dtype[Any], nnz: int, params: dict[str, Any]
    ) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]] | None:
        """dtype and shape of every array of a matrix with ``nnz`` nonzeros, from which a file is laid out.

        None if shape and nnz do not decide them (blocks, vectors); then only the conversion does.
        """
        return None

    @classmethod
    def row_chunks(cls, params: dict[str, Any]) -> RowChunks | None:
        """How a matrix can be converted in row chunks whose arrays are written one after the other.

        None if that is not possible; then only the whole matrix can be converted. params: all of them, resolved.
        """
        return None

    @classmethod
    def row_layout(cls, params: dict[str, Any]) -> RowChunks | None:
        """Where ``vstack`` and ``row_range`` cut the arrays of a matrix in memory: as ``row_chunks``, unless a format
        has rows along a second axis. None if rows cannot be cut."""
        return cls.row_chunks(params)
