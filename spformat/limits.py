"""Checked size products, the limits that bound hostile input, and the one memory budget.

A file may declare any size. Sizes are therefore multiplied as Python ints, which cannot wrap, compared
with the bytes that are really there, and passed through ``check_bytes`` before anything is allocated.

Limits live in a context variable: ``with using(memory=2**40): ...`` changes them for this thread (or
task) only. There is no process-wide switch that another thread could flip in between; hand
``current()`` to worker threads and enter ``using(...)`` there.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from operator import index
from typing import Any

from .errors import LimitError, UsageError

MAX_DIM = 2**48 - 1
"""Largest extent of one dimension that is taken seriously; far above any address space in use."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a legitimate file is expected to stay under. Each field has a command-line flag."""

    file_bytes: int = 2**44
    """Apparent size of one file; a hole in a sparse file costs its maker nothing."""
    header_bytes: int = 16 * 2**20
    tensors: int = 100_000
    name_bytes: int = 1024
    descriptor_bytes: int = 2**20
    """Description of one tensor. The tables of the largest legal ell-buckets have 43,008 numbers."""
    empty_extent: int = 2**24
    """Largest dimension of an array without elements: no bytes of the file stand behind it."""
    memory: int | None = None
    """Bytes one allocation may take; None: 4 GiB or 8 times the input, whichever is larger."""
    allow_unchecked: bool = False
    """Read files of ours whose checksums were left out (``--allow-unchecked``); wrong ones never pass."""
    ignore_unknown: bool = False
    """Read descriptors with keys this release does not know (``--ignore-unknown``)."""
    sort: bool = False
    """Put indices that a file holds out of order in order (``convert --sort``) instead of refusing the file."""
    link_roots: tuple[str, ...] = ()
    """Folders that symlinks among the files of a checkpoint may lead into (``--follow-symlinks``)."""


_FIELDS = Limits.__dataclass_fields__.keys()
_NUMBERS = {name for name, f in Limits.__dataclass_fields__.items() if str(f.type).startswith("int")}
_FLOOR = 4 * 2**30
_LEAST = 2**20
"""Bytes that every process has. To ask the system for its limits takes as long as a launch on a device."""
_RATIO = 8
_DEFAULT = Limits()
_current: ContextVar[Limits] = ContextVar("spformat_limits", default=_DEFAULT)


def current() -> Limits:
    """The limits in force here."""
    return _current.get()


@contextmanager
def using(limits: Limits | None = None, **changes: Any) -> Iterator[Limits]:
    """Limits for a ``with`` block: those given, or the current ones with ``changes``."""
    unknown = changes.keys() - _FIELDS
    if unknown:
        raise UsageError(f"limits: expected some of {', '.join(_FIELDS)}, got {', '.join(sorted(unknown))}")
    for name in _NUMBERS & changes.keys():
        value = changes[name]
        try:
            bad = isinstance(value, bool) or (value is not None and index(value) < 0)
        except TypeError:
            bad = True
        if bad:
            raise UsageError(f"limits: {name}: expected a number >= 0 or None, got {value!r:.80}", value=value)
    chosen = replace(limits or current(), **changes)
    token = _current.set(chosen)
    try:
        yield chosen
    finally:
        _current.reset(token)


def product(*factors: int) -> int:
    """Product of sizes as a Python int; ``np.prod`` of (2**32, 2**32) would be 0."""
    result = 1
    for factor in factors:
        size = index(factor)
        if size < 0:
            raise UsageError(f"size: expected a number >= 0, got {size}")
        result *= size
    return result


def check(name: str, value: int, what: str) -> None:
    """LimitError if ``value`` exceeds the limit ``name``; the message names the flag that raises it."""
    allowed: int | None = getattr(current(), name)
    if allowed is not None and value > allowed:
        flag = "--max-" + name.replace("_", "-")
        raise LimitError(
            f"{what}: expected at most {allowed:,}, got {value:,}; raise it with {flag} "
            f"(in Python: spformat.limits.using({name}=...))",
            limit=allowed,
            value=value,
            hint=flag,
        )


def check_bytes(n: int, what: str, given: int = 0) -> int:
    """``n``, if allocating ``n`` bytes for ``what`` is within the memory budget; else LimitError.

    Args:
        n: bytes about to be allocated, as an exact Python int.
        what: named in the message, for instance "dense copy of (1048576, 1048576)".
        given: bytes of the real input it is made from (array or file), which widen the default budget.
    """
    allowed = _budget(given)
    if n > allowed:
        raise LimitError(
            f"{what}: {n:,} bytes requested, {allowed:,} allowed; raise the budget with --max-memory "
            f"(in Python: spformat.limits.using(memory=...))",
            limit=allowed,
            value=n,
            hint="--max-memory",
        )
    return n


def always_allowed(n: int) -> bool:
    """Whether ``check_bytes`` accepts ``n`` bytes for every input. It is for callers to whom the other arguments of
    ``check_bytes`` cost more than the check."""
    return (n <= _LEAST and current().memory is None) or n <= _budget(0)


def _budget(given: int) -> int:
    allowed = current().memory
    return min(max(_FLOOR, _RATIO * given), host_memory()) if allowed is None else allowed


def host_memory() -> int:
    """Bytes this process may ever have: physical memory, its control group, its address-space limit."""
    bounds = [_machine_memory()]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        bounds.append(soft)
    return min(bounds)


@cache
def _machine_memory() -> int:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as f:
            group = f.read().strip()
    except OSError:
        return physical
    return min(physical, int(group)) if group.isdigit() else physical
