"""Which array library an array belongs to, where it lies, and the index types. Only this module tells numpy from
CuPy."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np

from ..errors import (
    ArrayError,
    DeviceError,
    DeviceFault,
    DeviceMemoryError,
    DeviceUnavailable,
    SpformatError,
    UsageError,
)

PAD = -1
"""The index of a padded slot in every index array."""

Array = Any
"""numpy.ndarray or cupy.ndarray."""

F = TypeVar("F", bound=Callable[..., Any])

INT32_MAX = 2**31 - 1

_NO_DEVICE = {35, 100, 101}
"""CUDA status: driver older than the runtime, no device, no such device."""
_OUT_OF_MEMORY = 2
_STICKY = {214, 700, 701, 702, 709, 710, *range(714, 721)}
"""CUDA status codes after which every further CUDA call of the process fails: ECC error, illegal address, timeout,
..."""


def ceil_div(a: int, b: int) -> int:
    """ceil(a / b) for a >= 0, b > 0."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The smallest multiple of b that is >= a."""
    return b * ceil_div(a, b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is >= n >= 1."""
    return 1 << (n - 1).bit_length()


def index_dtype(bound: int) -> np.dtype[Any]:
    """int32 when every number up to ``bound`` fits, else int64."""
    return _INT32 if bound <= INT32_MAX else _INT64


_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)


def is_cupy(x: Any) -> bool:
    """True for a CuPy array. CuPy is not imported here: if nobody has imported it, no such array can exist."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def is_array(x: Any) -> bool:
    """True for an array of numpy or CuPy."""
    return isinstance(x, np.ndarray) or is_cupy(x)


BOUNDARY = 16
"""Bytes of the widest load of a GPU. Arrays of a matrix on a device start at a multiple of it."""


def on_boundary(x: Any) -> Any:
    """``x``; or a copy, if it is on a device and does not start on a boundary (a slice, memory of another library)."""
    if not is_cupy(x) or not x.size or x.data.ptr % BOUNDARY == 0:
        return x
    with current_device(x):  # CuPy puts a copy on its current device
        return x.copy()


def namespace(x: Array) -> Any:
    """numpy or cupy, the library ``x`` belongs to."""
    if isinstance(x, np.ndarray):
        return np
    if is_cupy(x):
        return sys.modules["cupy"]
    raise ArrayError(f"expected a numpy or CuPy array, got {type(x).__module__}.{type(x).__name__}")


def unmasked(x: Array) -> Array:
    """``x``; UsageError for numpy's masked arrays, whose mask would be lost."""
    if type(x) is not np.ndarray and not is_cupy(x) and isinstance(x, np.ma.MaskedArray):  # numpy.ma imports in 10 ms
        raise UsageError("a masked array: its mask would be lost; use x.filled(0), or x.data for all values")
    return x


def array_of(x: Any) -> Array:
    """A nested list, or an object with ``__array__``, as a numpy array; UsageError for lists of different lengths."""
    try:
        return np.asarray(x)
    except ValueError as e:
        if not isinstance(x, (list, tuple)):
            raise
        expected = "a matrix [M, K] as a list of rows, each a list of K numbers"
        raise UsageError(f"array: expected {expected}, got lists that are no array ({e!s:.120})") from None


def device_of(x: Array) -> str:
    """ "cpu" or "cuda:<id>"."""
    return f"cuda:{x.device.id}" if is_cupy(x) else "cpu"


def span(x: Array) -> tuple[int, int]:
    """The first address of an array, and the address after its last byte."""
    if isinstance(x, np.ndarray):
        return np.lib.array_utils.byte_bounds(x)
    start: int = x.data.ptr
    end = start + x.itemsize
    for extent, stride in zip(x.shape, x.strides, strict=True):
        if stride < 0:
            start += (extent - 1) * stride
        else:
            end += (extent - 1) * stride
    return start, end


def current_device(x: Array) -> AbstractContextManager[Any]:
    """Inside ``with current_device(x):`` CuPy creates arrays and runs kernels on the device of ``x``.

    Errors that CuPy raises inside the block are turned into errors of this package.
    """
    return _OnDevice(x.device) if is_cupy(x) else _ON_HOST


def on_own_device(function: F) -> F:
    """A decorator: ``function`` runs with ``current_device`` of its first argument, an array or a matrix."""

    @functools.wraps(function)
    def there(x: Any, *others: Any, **options: Any) -> Any:
        resident = getattr(x, "resident", None)  # of a matrix: one of its arrays
        with current_device(x if resident is None else resident()):
            return function(x, *others, **options)

    return there  # type: ignore[return-value]


def is_recorded(x: Array) -> bool:
    """Whether work on a CuPy array is recorded into a CUDA graph now: nothing can be read from the device."""
    if not is_cupy(x):
        return False
    cuda = import_cupy().cuda
    stream = cuda.get_current_stream().ptr
    return stream > 1 and bool(cuda.runtime.streamIsCapturing(stream))  # 0 and 1: default streams, never captured


_ON_HOST: AbstractContextManager[Any] = nullcontext()


class _OnDevice(AbstractContextManager[None]):
    """``current_device`` of a CuPy array. A class: a generator would cost a small conversion several times as much."""

    __slots__ = ("_device",)

    def __init__(self, device: Any) -> None:
        self._device = device

    def __enter__(self) -> None:
        if sys.modules["cupy"].cuda.runtime.getDevice() == self._device.id:
            self._device = None  # as it mostly is: nothing to change, and nothing to put back
        else:
            self._device.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._device is not None:
            self._device.__exit__(kind, error, trace)
        if isinstance(error, (RuntimeError, MemoryError)):  # all errors of CuPy are derived from these
            typed = device_error(error)
            if typed is not None:
                raise typed from error


def device_error(e: BaseException) -> SpformatError | None:
    """The error of this package for an error that CuPy raised; None for any other error.

    Errors of CuPy are recognised by the names of their classes, so that CuPy need not be imported. After an error for
    lack of memory the CUDA context can still be used; after an illegal address every later call would fail.
    """
    if isinstance(e, SpformatError) or not type(e).__module__.startswith(("cupy", "cupy_backends")):
        return None
    kind, status = type(e).__name__, getattr(e, "status", None)
    if kind == "OutOfMemoryError" or (kind.startswith("CUDA") and status == _OUT_OF_MEMORY):
        return DeviceMemoryError(f"not enough device memory: {e}; the CUDA context is usable")
    if not kind.startswith(("CUDARuntimeError", "CUDADriverError")):
        return None
    if status in _NO_DEVICE:
        return DeviceUnavailable(f"{e}; `spformat env` shows what is there")
    if status in _STICKY:
        return DeviceFault(f"{e}; CUDA context lost: the process must end, restart it")
    return DeviceError(f"{e}")


def library_error(text: str) -> SpformatError:
    """The error for a library call that failed with ``text`` as its reason.

    DeviceFault if an earlier fault has destroyed the CUDA context: a library then reports only that it failed.
    """
    from cupy.cuda import runtime

    try:
        runtime.deviceSynchronize()  # synchronize!
    except runtime.CUDARuntimeError as e:
        typed = device_error(e)
        if isinstance(typed, DeviceFault):
            typed.message = f"{text}: {typed.message}"
            return typed
    return DeviceError(text)


def parse_device(device: str) -> int | None:
    """None for "cpu", the id for "cuda" or "cuda:<id>"."""
    kind, _, number = str(device).partition(":")  # str(), so that a torch.device is accepted, too
    if kind == "cpu" and not number:
        return None
    if kind == "cuda" and (not number or number.isdecimal()):
        return int(number or 0)
    raise UsageError(f"device: expected 'cpu', 'cuda' or 'cuda:<id>', got {device!r}")


def parse_devices(devices: str) -> tuple[str, ...]:
    """One device, or several CUDA devices with commas between; UsageError for anything else, and for one said twice."""
    names = tuple(name.strip() for name in str(devices).split(","))
    numbers = [parse_device(name) for name in names]
    if len(names) > 1 and (None in numbers or len(set(numbers)) < len(numbers)):
        raise UsageError(f"device: expected different CUDA devices, as in 'cuda:0,cuda:1', got {devices!r}")
    return names


def to_device(x: Array, device: str) -> Array:
    """A copy of ``x`` on ``device``, or ``x`` itself if it is there. All copies between host and device are made here.

    Raises DeviceUnavailable, DeviceMemoryError, or ArrayError for a dtype the device library lacks (float8).
    """
    number = parse_device(device)
    if number is None:
        return x.get() if is_cupy(x) else x
    cupy = import_cupy()
    if is_cupy(x) and x.device.id == number:
        return x
    with device_errors(device, x.dtype, x.nbytes), cupy.cuda.Device(number):
        return cupy.asarray(x)


def has_dtype(device: str, dtype: str) -> bool:
    """Whether an array of the dtype (numpy or ml_dtypes name) can be on ``device``: CuPy has no eight-bit floats."""
    return parse_device(device) is None or not dtype.startswith("float8")


def default_stream(device: str) -> AbstractContextManager[Any]:
    """Inside the ``with`` block the device is the current one, and kernels run on its default stream, which other
    threads use, too."""
    number = parse_device(device)
    return _ON_HOST if number is None else _on_default_stream(number)


@contextmanager
def _on_default_stream(number: int) -> Iterator[None]:
    cuda = import_cupy().cuda
    with cuda.Device(number), cuda.Stream.null:  # CuPy has a current stream for each device
        yield


def room_on(device: str) -> int:
    """Bytes of a CUDA device that finished results may occupy: half of the free memory; conversions need the rest."""
    cupy = import_cupy()
    with device_errors(device, "any", 0), cupy.cuda.Device(parse_device(device)) as chosen:
        return int(chosen.mem_info[0]) // 2


@contextmanager
def device_errors(device: str, dtype: Any, nbytes: int) -> Iterator[None]:
    """Turn what CuPy raises while ``nbytes`` of ``dtype`` are placed on ``device`` into errors of this package."""
    cupy = import_cupy()
    try:
        yield
    except (cupy.cuda.memory.OutOfMemoryError, cupy.cuda.runtime.CUDARuntimeError) as e:
        typed = device_error(e)
        if typed is None:
            raise
        typed.message = f"{device}: {nbytes:,} bytes: {typed.message}"
        raise typed from e
    except ValueError as e:
        message = f"CuPy {cupy.__version__} cannot hold dtype {dtype} on a device; keep the tensor on the host"
        raise ArrayError(message, value=str(dtype)) from e


def import_cupy() -> Any:
    """The module cupy; DeviceUnavailable, with the command that installs it, if it is missing."""
    try:
        import cupy
    except ImportError as e:
        raise DeviceUnavailable("CuPy is not installed: pip install 'spformat[cuda13]' (or cuda12)") from e
    except OSError as e:  # CuPy creates its folder for compiled kernels when it is imported
        raise DeviceUnavailable(f"CuPy cannot start: {e}; CUPY_CACHE_DIR names a folder it may write to") from e
    _settle_cache()
    return cupy


@functools.cache
def _settle_cache() -> None:
    """Let CuPy compile in memory if its folder is not writable; otherwise CuPy would raise an OSError."""
    import tempfile

    folder = os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # the permissions do not show a read-only file system
    except OSError:
        compile_in_memory()


def compile_in_memory() -> None:
    """From now on CuPy does not use its folder of compiled kernels."""
    os.environ["CUPY_CACHE_IN_MEMORY"] = "1"


def unsigned(x: Array) -> Array:
    """An integer array viewed as unsigned of the same width; a negative number becomes larger than any bound."""
    return x.view(np.dtype(f"uint{8 * x.dtype.itemsize}"))
