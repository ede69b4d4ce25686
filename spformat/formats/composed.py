"""Composed formats: matrices whose parts are matrices. Files, copies to devices, checks and ``repr`` follow from the
parts.

A class derives from ``Composed``, declares its parts and implements how they combine: ``layout_problems`` in O(1),
``check_canonical`` over the contents, ``_to_csr``. A part is a matrix of any registered format. It may be composed,
too, down to ``MAX_DEPTH`` levels.

    a: Format = part(doc="..")                           named as the field: "a"
    parts: tuple[Format, ...] = part(many=True, doc="..")    named by their place: "0", "1", ..
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ..arrays.library import Array, device_of, to_device
from ..errors import FormatError, UsageError
from .base import Format
from .hooks import Counts

MAX_DEPTH = 4
"""The most levels of parts inside parts, in memory and in files."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Composed(Format):
    """Base of the formats that declare parts."""

    def __post_init__(self) -> None:
        for d in self.declared_parts():
            given = getattr(self, d.name)
            if d.many:
                given = tuple(given) if isinstance(given, (tuple, list)) else (given,)
                object.__setattr__(self, d.name, given)
            for p in given if d.many else (given,):
                if not isinstance(p, Format):
                    raise UsageError(f"{self.name}: {d.name}: expected spformat matrices, got {type(p).__name__}; "
                                     "use convert(x, ..) first")  # fmt: skip
        if self.depth > MAX_DEPTH:
            raise UsageError(f"{self.name}: expected at most {MAX_DEPTH} levels of parts, got {self.depth}")
        Format.__post_init__(self)  # super() is lost when slots=True remakes the class

    @property
    def depth(self) -> int:
        """Levels of parts: 1 where no part has parts."""
        return 1 + max((p.depth for p in self.parts_by_name().values() if isinstance(p, Composed)), default=0)

    # ---------------------------------------------------------------- reading

    def parts_by_name(self) -> dict[str, Format]:
        parts: dict[str, Format] = {}
        for d in self.declared_parts():
            given = getattr(self, d.name)
            parts |= {str(i): p for i, p in enumerate(given)} if d.many else {d.name: given}
        return parts

    @classmethod
    def fields_of_parts(cls, parts: dict[str, Format]) -> dict[str, Any]:
        single = [d.name for d in cls.declared_parts() if not d.many]
        rest = {name: p for name, p in parts.items() if name not in single}
        many = next((d.name for d in cls.declared_parts() if d.many), None)
        wanted = {*single, *(str(i) for i in range(len(rest) if many else 0))}
        if wanted != parts.keys():
            expected, got = ", ".join(sorted(wanted)), ", ".join(sorted(parts)) or "none"
            raise UsageError(f"{cls.name}: parts: expected {expected:.80}, got {got:.80}")
        fields: dict[str, Any] = {name: parts[name] for name in single}
        return fields | ({many: tuple(rest[str(i)] for i in range(len(rest)))} if many else {})

    @classmethod
    def candidates(cls, counts: Counts) -> tuple[dict[str, Any], ...]:
        """None: counts of a matrix do not tell how it would be divided."""
        return ()

    @classmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        """None: a composed format is tested with parts, not with parameters."""
        return ()

    def unequal_parts(self, shape: tuple[int, int]) -> list[tuple[str, str]]:
        """What ``layout_problems`` says of parts without this shape, or without the dtype and device of part 0."""
        problems, parts = [], self.parts_by_name()
        first = next(iter(parts.values()))
        for name, p in parts.items():
            if p.shape != shape:
                problems.append(("parts", f"part {name}: expected shape {shape}, got {p.shape}"))
            if p.dtype != first.dtype:
                problems.append(("parts", f"part {name}: expected dtype {first.dtype} as part 0, got {p.dtype}"))
            if p.device != first.device:
                problems.append(("parts", f"part {name}: expected device {first.device} as part 0, got {p.device}"))
        return problems

    @property
    def values(self) -> Array:
        """Its own VALUE array, or that of its first part; all parts have one dtype and one device."""
        own = self.value_field()
        values: Array = getattr(self, own) if own else self._first_part().values
        return values

    @property
    def dtype(self) -> np.dtype[Any]:
        """dtype of the values."""
        dtype: np.dtype[Any] = self.values.dtype if self.value_field() else self._first_part().dtype
        return dtype

    @property
    def device(self) -> str:
        """ "cpu" or "cuda:<id>"."""
        return device_of(self.values) if self.value_field() else self._first_part().device

    def _first_part(self) -> Format:
        return next(iter(self.parts_by_name().values()))

    @property
    def stored(self) -> int:
        """Value slots of all parts, padding included: O(1)."""
        return sum(p.stored for p in self.parts_by_name().values())

    @property
    def nnz(self) -> int:
        """Stored items of all parts, as each part counts them."""
        return sum(p.nnz for p in self.parts_by_name().values())

    def count_nonzeros(self) -> int:
        return sum(p.count_nonzeros() for p in self.parts_by_name().values())

    @property
    def stored_zeros(self) -> int:
        """The number of zeros that the parts store explicitly."""
        return sum(p.stored_zeros for p in self.parts_by_name().values())

    def __repr__(self) -> str:
        own = [f"{k}={v!r}" for k, v in self.params().items()]
        own += [f"{k}={a.dtype}[{', '.join(map(str, a.shape))}]" for k, a in self.arrays().items()]
        parts = [f"{d.name}={getattr(self, d.name)!r}" for d in self.declared_parts()]
        where = f"device={self.device}, nbytes={self.nbytes}"
        return f"{type(self).__name__}({', '.join([f'shape={self.shape}', *own, *parts, where])})"

    def __eq__(self, other: object) -> bool:
        """Same class, shape, params, tables and arrays, and equal parts under the same names."""
        same = Format.__eq__(self, other)
        if same is not True or not isinstance(other, Composed):
            return same
        return self.parts_by_name() == other.parts_by_name()

    __hash__ = None

    # ---------------------------------------------------------------- moving and checking

    def with_parts(self, parts: dict[str, Format]) -> Self:
        """The same object with other parts under the same names. The validated mark is dropped."""
        return type(self)(**(self.fields() | self.fields_of_parts(parts)))

    def to(self, device: str) -> Self:
        """A copy on "cpu", "cuda" or "cuda:<id>", or the object itself if all of it is there. The validated mark
        stays."""
        before = self.parts_by_name() | self.arrays()
        arrays = {name: to_device(a, device) for name, a in self.arrays().items()}
        parts = {name: p.to(device) for name, p in self.parts_by_name().items()}
        if all((parts | arrays)[name] is x for name, x in before.items()):
            return self
        out = type(self)(**(self.fields() | arrays | self.fields_of_parts(parts)))
        object.__setattr__(out, "_marked", self.is_validated)
        return out

    def scan_contents(self) -> None:
        """Validate part by part, then scan how they combine.

        Raises what the format of a part raises, the name of the part before it, and what the combination raises.
        """
        for name, p in self.parts_by_name().items():
            try:
                p.validate()
            except FormatError as e:
                raise _of_part(e, self.name, name) from None
        Format.scan_contents(self)  # super() is lost when slots=True remakes the class

    def in_order(self) -> Self:
        """Valid, with the indices of every part sorted where its format can hold them in any order."""
        parts = {}
        for name, p in self.parts_by_name().items():
            try:
                parts[name] = p.in_order()
            except FormatError as e:
                raise _of_part(e, self.name, name) from None
        return self.with_parts(parts).validate()


def _of_part(e: FormatError, name: str, part: str) -> FormatError:
    """``e`` with the name of the part that it is about."""
    e.message = f"{name}: part {part}: {e.message}"
    if e.fields.get("array"):
        e.fields["array"] = f"{part}.{e.fields['array']}"
    return e
