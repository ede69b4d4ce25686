"""The target "fastest": each tensor gets the first format that ``recommend`` names for it.

As text it says for what: "fastest:n=16+2048,device=H200,objective=time,b_layout=row", where any part may be left out. A
recipe holds this text, and a manifest the format that it led to.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from ..arrays.dtypes import VALUE_TYPES
from ..arrays.library import Array, round_up
from ..dispatch.recommend import COLUMNS, OBJECTIVES, Recommendations, recommend
from ..errors import StructureError, UsageError
from ..limits import product
from ..preprocess.coordinates import STRIP, of_row_chunks, structure_of
from ..preprocess.structure import Structure
from ..products.problem import COL, ROW
from ..products.roofline import DEVICES, Device, device_named
from ..storage.descriptor import Record

FASTEST = "fastest"
CHUNK_BYTES = 64 << 20
"""A plain tensor with more bytes is counted in chunks of rows of about so many bytes."""


@dataclass(frozen=True)
class Fastest:
    """What the fastest format of a tensor is chosen for."""

    n: tuple[int, ...] = COLUMNS
    """Columns of B; the sum of the expected times counts."""
    device: str = "H200"
    objective: str = "time"
    b_layout: str = ROW

    def __post_init__(self) -> None:
        try:
            device_named(self.device)
        except UsageError:
            names = ", ".join((*DEVICES, "cpu"))
            raise UsageError(
                f"{FASTEST}: device: expected one of {names}, or an architecture like sm_89, got {self.device!r:.80}; "
                "--gpu also takes other boards by their names",
                value=self.device,
            ) from None
        for key, known in (("objective", OBJECTIVES), ("b_layout", (ROW, COL))):
            if (got := getattr(self, key)) not in known:
                raise UsageError(f"{FASTEST}: {key}: expected one of {', '.join(known)}, got {got!r:.80}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """What "fastest:n=16+2048,device=H200" says; UsageError for what it cannot mean."""
        params: dict[str, Any] = {}
        for item in filter(None, text.partition(":")[2].split(",")):
            key, _, value = item.partition("=")
            if key not in cls.__dataclass_fields__ or key in params or not value:
                known = ", ".join(cls.__dataclass_fields__)
                raise UsageError(
                    f"target {text!r:.200}: expected each of {known} once, as name=value; got {item!r:.80}"
                )
            params[key] = numbers(value, "+") if key == "n" else value
        return cls(**params)

    def __str__(self) -> str:
        n = "+".join(map(str, self.n))
        return f"{FASTEST}:n={n},device={self.device},objective={self.objective},b_layout={self.b_layout}"

    def recommend(self, x: Any, device: str | Device = "") -> Recommendations:
        """The recommendations for a matrix or its Structure. device: instead of its own.

        By the counts alone, as they are in a plan: sums, which need the matrix itself, are not among them.
        """
        return recommend(
            structure_of(x), self.n, device=device or self.device, objective=self.objective, b_layout=self.b_layout
        )


def numbers(text: str, separator: str = ",") -> tuple[int, ...]:
    """The numbers of columns in "16,2048"; UsageError for anything else."""
    parts = [part.strip() for part in text.split(separator)]
    if not all(part.isascii() and part.isdecimal() and 0 < int(part) < 1 << 31 for part in parts):
        raise UsageError(f"n: expected numbers of columns like {separator.join(('16', '2048'))}, got {text!r:.80}")
    return tuple(dict.fromkeys(map(int, parts)))


def is_fastest(target: str) -> bool:
    """Whether a target is chosen by expected time."""
    return target.partition(":")[0] == FASTEST


def resolved(target: str, x: Any) -> str:
    """The format text that a "fastest" target means for a matrix, or for its Structure.

    StructureError where no kernel takes a product with any format of it.
    """
    best = next((r.format for r in Fastest.parse(target).recommend(x) if r.total_us is not None), None)
    if best is None:
        raise no_kernel(target, structure_of(x).dtype)
    return best


def no_kernel(target: str, dtype: str) -> StructureError:
    """The error about a matrix that no kernel multiplies, in any format."""
    return StructureError(f"{target}: no kernel takes products with values of dtype {dtype}")


def resolved_for_all(target: str, structures: Iterable[Structure]) -> str | None:
    """The format text that a "fastest" target means for several matrices together, the matrices of a stack.

    It is recommended for each of them, and has the least sum. None where ``resolved`` raises.
    """
    wanted = Fastest.parse(target)
    sums: dict[str, float] = {}
    for i, s in enumerate(structures):
        values = {r.format: r.value(wanted.objective) for r in wanted.recommend(s) if r.total_us is not None}
        sums = {text: sums.get(text, 0.0) + v for text, v in values.items() if i == 0 or text in sums}
    return min(sums, key=sums.__getitem__, default=None)


def matrix_in(f: Any, r: Record) -> Any:
    """A matrix in an open file, for ``recommend``; of a plain and large one, which is read in chunks of rows, the
    structure.

    f: a shard, or the ``StackedFile`` of one for a matrix of a stack. Raises what reading raises.
    """
    kind = VALUE_TYPES[r.dtype].numpy
    plain = len(r.arrays) == 1 and next(iter(r.arrays.values()))[1] == r.shape
    if hasattr(f, "read_rows") and plain and product(*r.shape, kind.itemsize) > CHUNK_BYTES:
        return of_row_chunks(_row_chunks(f, r, kind))
    return f.read(r.name) if r.format else f.array(r.name)


def _row_chunks(f: Any, r: Record, kind: np.dtype[Any]) -> Iterator[Array]:
    """The rows of a plain matrix, a chunk at a time, in the same memory. The checksum, if there is one, is compared."""
    name, shape = r.name, r.shape
    rows = round_up(max(1, CHUNK_BYTES // (shape[1] * kind.itemsize)), STRIP)
    buffer, computed = np.empty((min(rows, shape[0]), shape[1]), kind), 0
    array = next(iter(r.arrays))
    checked = r.crc32.get(array) is not None
    for begin in range(0, shape[0], rows):
        chunk = buffer[: min(rows, shape[0] - begin)]
        f.read_rows(name, begin, chunk)
        computed = zlib.crc32(chunk.reshape(-1).view(np.uint8).data, computed) if checked else 0
        yield chunk
    if checked:
        f.check_sum(name, array, computed)


def with_options(target: str, n: str, device: str) -> str:
    """A "fastest" target with the columns and the device that it does not state itself; other targets as they are."""
    if not is_fastest(target):
        return target
    stated = Fastest.parse(target)
    said = {item.partition("=")[0] for item in target.partition(":")[2].split(",")}
    if n and "n" not in said:
        stated = replace(stated, n=numbers(n))
    if device and "device" not in said:
        stated = replace(stated, device=device)
    return str(stated)
