"""Tensors that differ only in the number of their layer, as one line of a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

_LAYER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,8})(?![^.])")
"""A part of a dotted name that is a number: the 17 of "layers.17.q_proj.weight"."""
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_RUNS = 3
"""Runs of numbers that a label lists; of more, the first two and the last."""


@dataclass(frozen=True)
class Group(Generic[T]):
    """Tensors on one line: what their names have in common, and their rows."""

    names: tuple[str, ...]
    rows: tuple[T, ...]

    @property
    def label(self) -> str:
        """ "layers.0-31.q_proj x 32" for several names; a single name as it is."""
        if len(self.names) == 1:
            return self.names[0]
        numbers = zip(*(map(int, _LAYER.findall(name)) for name in self.names), strict=True)
        ranges = iter([_ranges(of_layer) for of_layer in numbers])
        return _LAYER.sub(lambda _: next(ranges), self.names[0]) + f" x {len(self.names)}"


def grouped(rows: Iterable[T], name: Callable[[T], str], fate: Callable[[T], Hashable]) -> list[Group[T]]:
    """Rows in groups of equal ``fate`` whose names differ only in numbers of layers; in order of their first rows."""
    groups: dict[Hashable, list[T]] = {}
    for row in rows:
        groups.setdefault((_LAYER.sub("*", name(row)), fate(row)), []).append(row)
    return [Group(tuple(map(name, members)), tuple(members)) for members in groups.values()]


def one_each(rows: Iterable[T], name: Callable[[T], str]) -> list[Group[T]]:
    """Each row in a group of its own."""
    return [Group((name(row),), (row,)) for row in rows]


def counted(groups: Sequence[Group[T]]) -> str:
    """ "291 tensors", and how many lines they have if fewer."""
    n = sum(len(group.rows) for group in groups)
    tensors, lines = (f"{count} {what}{'s'[: count != 1]}" for count, what in ((n, "tensor"), (len(groups), "line")))
    return tensors + (f" on {lines} (--long: one each)" if len(groups) < n else "")


def without_numbers(text: str) -> str:
    """``text`` with a # for each number: what texts of one group have in common."""
    return _NUMBER.sub("#", text)


def together(texts: Sequence[str]) -> str:
    """One text for several: numbers in which they differ become a range, "49.8-50.2 %"."""
    different = list(dict.fromkeys(texts))
    if len({without_numbers(text) for text in different}) != 1:
        return "; ".join(different)
    numbers = zip(*(_NUMBER.findall(text) for text in different), strict=True)
    ranges = iter([_from_to(at) for at in numbers])
    return _NUMBER.sub(lambda _: next(ranges), different[0])


def each_of(lists: Sequence[Sequence[str]]) -> str:
    """The texts of several tensors, each once. What only some of the tensors have is followed by their number."""
    of_kind: dict[str, list[str]] = {}
    for texts in lists:
        for text in texts:
            of_kind.setdefault(without_numbers(text), []).append(text)
    parts = []
    for texts in of_kind.values():
        some = f" ({len(texts)} of {len(lists)})" if len(texts) < len(lists) else ""
        parts.append(together(texts) + some)
    return "; ".join(parts)


def _from_to(numbers: Iterable[str]) -> str:
    ordered = sorted(numbers, key=float)
    return ordered[0] if ordered[0] == ordered[-1] else f"{ordered[0]}-{ordered[-1]}"


def _ranges(numbers: Iterable[int]) -> str:
    """ "0-31", "0-3,7" or, with more than three runs, "0,2,..,30"."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ",".join(texts if len(texts) <= _RUNS else [*texts[:2], "..", texts[-1]])
