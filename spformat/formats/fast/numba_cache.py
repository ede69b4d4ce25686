"""Loops that numba compiles and stores on disk, in a cache that repairs itself: an unreadable file counts as missing.

numba compiles a function again when its file has changed. Loops also call functions in other files of their folder and
in this one, so here a change of any file in these folders makes numba compile again.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import pickle
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core import caching, runtime

from ...arrays.interrupts import deferred_interrupts

F = TypeVar("F", bound=Callable[..., Any])
FunctionCache: Any = caching.FunctionCache  # numba has type hints for little
CacheFile: Any = caching.IndexDataCacheFile
RUNTIME: Any = cast(Any, runtime).rtsys

_UNREADABLE = (
    pickle.UnpicklingError, EOFError, OSError, ValueError, TypeError, LookupError, AttributeError, ImportError,
    ArithmeticError, MemoryError, RuntimeError, struct.error,
)  # fmt: skip
"""The errors that unpickling damaged bytes raises, and LLVM for a damaged object file."""


_HERE = Path(__file__).parent


@functools.cache
def _sources(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """(name, time of the last change, size) of every module in a folder; empty if they lie in an archive."""
    files = sorted(folder.glob("*.py"))
    return tuple((p.name, p.stat().st_mtime_ns, p.stat().st_size) for p in files)


class _File(CacheFile):  # type: ignore[misc]
    """The index of one function and its files with code, each of which says what it was compiled for.

    Two processes that compile at the same time may take the same name for two files, and the index of one then leads
    to the code of the other, for other types. Such a file counts as missing.
    """

    def save(self, key: Any, data: Any) -> None:
        super().save(key, (_text(key), data))

    def load(self, key: Any) -> Any:
        match super().load(key):
            case (text, data) if text == _text(key):
                return data
        return None


def _text(key: Any) -> str:
    return hashlib.sha256(repr(key).encode()).hexdigest()


class _Cache(FunctionCache):  # type: ignore[misc]
    """numba does not check the files that it reads: after a crash or a full disk every later run would fail."""

    def __init__(self, f: Any, variant: int | str | None) -> None:
        """variant: what decides the values that ``f`` encloses; None for a function without a closure."""
        super().__init__(f)
        self.variant, own = variant, cast(Any, self)._cache_file
        self._cache_file: Any = _File(self._cache_path, own._index_name.removesuffix(".nbi"), own._source_stamp)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        # Without numba's refresh of the target: that registers what compiling needs and running does not, and takes a
        # third of the time of the first product. numba refreshes the target by itself when it compiles.
        try:
            RUNTIME.initialize(target_context)
            with cast(Any, self)._guard_against_spurious_io_errors():
                code = self._load_overload(sig, target_context)
        except _UNREADABLE:
            with suppress(OSError):  # the folder may be read-only; then the code is compiled and not stored
                self.flush()
            code = None
        if code is None:
            _without_scipy_linalg()
        return code

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        own = Path(self._py_func.__code__.co_filename).parent
        if self.variant is None:
            key = super()._index_key(sig, codegen)
        else:  # numba would hash what the function encloses, and intrinsics have another hash in every process
            key = sig, codegen.magic_tuple(), self._py_func.__code__.co_code, self.variant
        return (*key, _sources(_HERE), _sources(own))

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(*_UNREADABLE):  # the code is compiled; if it is not stored, only time is lost
            super().save_overload(sig, data)


_in_llvm = False
"""Whether the main thread is inside of a function that ``_uninterrupted`` returned."""


def _uninterrupted(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which uses LLVM: an interrupt of the main thread is raised after its end.

    An exception in the middle of it could leave a lock of LLVM that no thread ever gets again, or be lost in a function
    that LLVM calls.
    """

    def whole(*arguments: Any) -> Any:
        global _in_llvm
        if threading.current_thread() is not threading.main_thread() or _in_llvm:
            return function(*arguments)
        _in_llvm = True
        try:
            with deferred_interrupts():
                return function(*arguments)
        finally:
            _in_llvm = False

    return whole


@functools.cache
def _without_scipy_linalg() -> None:
    """Import what numba needs when it compiles, without its search for BLAS.

    That search imports scipy.linalg, which takes as long as a compilation. scipy is installed, so it would succeed.
    Code that multiplies matrices in numba triggers the search later.
    """
    linalg: Any = importlib.import_module("numba.np.linalg")
    ensure_blas = linalg.ensure_blas
    linalg.ensure_blas = lambda: None
    try:
        importlib.import_module("numba.np.arraymath")
    finally:
        linalg.ensure_blas = ensure_blas


def compiled(f: F) -> F:
    """Compile with numba, without the GIL; the code is stored on disk if there is a writable folder.

    For a function that encloses nothing; others are ``compiled_for`` what decides the values that they enclose.
    """
    if f.__closure__ is not None:
        raise TypeError(f"{f.__qualname__} encloses {f.__code__.co_freevars}: use compiled_for")
    return _compiled(f, None)


def compiled_for(variant: int | str) -> Callable[[F], F]:
    """``compiled`` for a function inside another, which makes one for each ``variant``.

    variant: a number or a name that, with the source, decides the values that the function encloses. The code of each
    is stored.
    """
    return functools.partial(_compiled, variant=variant)


def _compiled(f: F, variant: int | str | None) -> F:
    dispatcher: Any = _uninterrupted(numba.njit(nogil=True, error_model="numpy"))(f)  # the first one starts LLVM
    dispatcher.compile = _uninterrupted(dispatcher.compile)
    with suppress(RuntimeError):  # "cannot cache function: no locator available"
        dispatcher._cache = _Cache(f, variant)
    return cast(F, dispatcher)
