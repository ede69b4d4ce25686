"""Compiled loops kept on disk by numba, with a cache that mends itself: a file that cannot be read is no file.

numba compiles anew when the file of a function changes; loops here also call what stands in files beside theirs.
"""

from __future__ import annotations

import importlib
import pickle
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core import caching

F = TypeVar("F", bound=Callable[..., Any])
FunctionCache: Any = caching.FunctionCache  # numba has type hints for little

_UNREADABLE = (
    pickle.UnpicklingError, EOFError, OSError, ValueError, TypeError, LookupError, AttributeError, ImportError,
    ArithmeticError, MemoryError, RuntimeError, struct.error,
)  # fmt: skip
"""What unpickling damaged bytes raises, and what LLVM raises for a damaged object."""


def _sources() -> tuple[tuple[str, int, int], ...]:
    """(name, time of the last change, size) of every file that loops are made of; none where they lie in an archive."""
    files = sorted(p for p in Path(__file__).parent.glob("*.py") if p.stem.endswith("_loops") or p.stem == "simd")
    return tuple((p.name, p.stat().st_mtime_ns, p.stat().st_size) for p in files)


_SOURCES = _sources()


class _Cache(FunctionCache):  # type: ignore[misc]
    """numba reads its files without looking at them: a crash or a full disk would end every later run."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except _UNREADABLE:
            with suppress(OSError):  # a folder one may only read: compile, and keep nothing
                self.flush()
            return None

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), _SOURCES)

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(*_UNREADABLE):  # the code is compiled; not keeping it costs time only
            super().save_overload(sig, data)


def _without_scipy_linalg() -> None:
    """Import what numba will want at its first call, without its look for BLAS: that imports scipy.linalg, a third of
    the time of the first call. scipy is there, so the answer is yes; whoever multiplies in numba is asked again."""
    linalg: Any = importlib.import_module("numba.np.linalg")
    ensure_blas = linalg.ensure_blas
    linalg.ensure_blas = lambda: None
    try:
        importlib.import_module("numba.np.arraymath")
    finally:
        linalg.ensure_blas = ensure_blas


_without_scipy_linalg()


def compiled(f: F) -> F:
    """numba without the GIL, cached on disk where there is a place to write."""
    dispatcher: Any = numba.njit(nogil=True, error_model="numpy")(f)
    with suppress(RuntimeError):  # "cannot cache function: no locator available"
        dispatcher._cache = _Cache(f)
    return cast(F, dispatcher)
