"""Tensors of torch: arrays that share their memory, in both directions; on a device, torch's stream and allocator."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import UsageError
from .dtypes import SAFETENSORS, VALUE_TYPES
from .library import Array, import_cupy, is_cupy

_UNKNOWN_TO_NUMPY = {d.name: d for d in SAFETENSORS.values() if d.name.startswith(("bfloat", "float8"))}
"""dtypes of ml_dtypes by their names, which torch has, too."""
_DTYPES_OF_ML_DTYPES = frozenset(_UNKNOWN_TO_NUMPY.values())


def import_torch() -> Any:
    """The module torch; UsageError, with the command that installs it, if it is missing."""
    try:
        import torch
    except ImportError as e:
        raise UsageError("torch is not installed: pip install 'spformat[torch]'") from e
    return torch


def is_torch(x: Any) -> bool:
    """True for a torch tensor. torch is not imported here: if nobody has imported it, no tensor can exist."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def untraced(function: Any) -> Any:
    """``function``, which torch.compile calls and does not look into: it would take our arrays for its tensors.

    The call ends a graph, and another begins after it. With ``fullgraph=True`` torch raises an error instead.
    """
    outside = _untraced.get(function)
    if outside is None:
        torch = import_torch()
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.graph_break(msg=_BETWEEN)  # an error of ours, where torch refuses to make ``outside``
        outside = _untraced[function] = torch.compiler.disable(function)
        outside._torchdynamo_disable_msg = _BETWEEN
    return outside


_BETWEEN = (
    "products of spformat run between the graphs of torch.compile; only a layer, spformat.torch.SparseLinear, is a "
    "part of one"
)


_untraced: dict[Any, Any] = {}
"""Function -> the same function outside of torch's graphs. A plain dictionary, because torch.compile reads it."""


def compiling() -> bool:
    """Whether torch.compile now looks into the calling code."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_dynamo_compiling())


def refuse_recorded(name: str) -> None:
    """UsageError while torch.jit.trace, torch.export or make_fx records: what ``name`` returns would be a constant."""
    torch, fx = sys.modules["torch"], sys.modules.get("torch.fx.experimental.proxy_tensor")
    jit = torch._C._get_tracing_state() is not None
    if jit or (fx is not None and fx.get_proxy_mode() is not None):
        recorder = "torch.jit.trace" if jit else "torch.export or make_fx"
        raise UsageError(
            f"{recorder} would record the result of this product as a constant, the "
            f"same for every input: use spformat.torch.{name}, or a layer, spformat.torch.SparseLinear, which are "
            "recorded as operators"
        )


def array_to_torch(x: Array) -> Any:
    """A torch tensor that shares the memory of a numpy or CuPy array (read-only arrays are copied)."""
    torch = import_torch()
    shared = _shared(torch, x)
    # The strides of an array without elements may be 0, and torch.export saves no such tensor.
    return shared if x.size else shared.new_empty(shared.shape)


def _shared(torch: Any, x: Array) -> Any:
    if x.dtype in _DTYPES_OF_ML_DTYPES:
        # Neither numpy nor its DLPack knows these types, so the bits are passed as integers and viewed afterwards.
        kind = getattr(torch, x.dtype.name, None)
        if kind is None:
            raise UsageError(f"torch {torch.__version__} has no dtype {x.dtype.name}: install a newer one")
        return _shared(torch, x.view(f"uint{8 * x.dtype.itemsize}")).view(kind)
    if is_cupy(x):
        return torch.from_dlpack(x)
    return torch.from_numpy(x if x.flags.writeable else x.copy())


def torch_to_array(t: Any) -> Array:
    """A numpy or CuPy array that shares the memory of a torch tensor and has its strides.

    On a device, CuPy's current stream waits for the work that torch has queued on its own current stream.
    """
    import torch

    if not isinstance(t, torch.Tensor):
        raise TypeError(f"expected a torch tensor, got {type(t).__module__}.{type(t).__name__}")
    if t.is_cuda:
        cuda, device = _cupy().cuda, t.get_device()
        with cuda.Device(device):
            _after(_stream_of_torch(device), cuda.get_current_stream())
            return _device_array(t, functools.partial(_array_at, owner=t))
    t = t.detach()
    name = str(t.dtype).removeprefix("torch.")
    if name in _UNKNOWN_TO_NUMPY and t.layout == torch.strided and not t.is_neg():
        raw = torch_to_array(t.view(torch.uint16 if t.element_size() == 2 else torch.uint8))
        return raw.view(_UNKNOWN_TO_NUMPY[name])
    try:
        array: Array = t.numpy()
    except (RuntimeError, TypeError) as e:
        raise _not_shared(t, e) from e
    return array


class TorchStream:
    """``with TorchStream(t) as array:`` In the block, ``array(tensor)`` is an array that shares a tensor's memory.

    If ``t`` is on a device, torch's current stream is also CuPy's current stream inside the block. So kernels of the
    block run after everything that torch has queued before, and before everything that torch queues later; torch's
    allocator and graphs see them. They also run after the work on CuPy's own stream, such as a conversion.

    Arrays of tensors on a device are cached by address, because a call may take only a few microseconds. They do not
    own their memory.
    """

    __slots__ = ("_device", "_entered")

    def __init__(self, t: Any) -> None:
        self._device = t.get_device() if t.is_cuda else None
        self._entered: list[Any] = []

    def __enter__(self) -> Callable[[Any], Array]:
        if self._device is None:
            return torch_to_array
        cuda = _cupy().cuda
        try:
            if cuda.runtime.getDevice() != self._device:
                self._enter(cuda.Device(self._device))
            stream = _stream_of_torch(self._device)
            _after(cuda.get_current_stream(), stream)
            self._enter(stream)
        except BaseException:
            self.__exit__()
            raise
        return _lent

    def _enter(self, what: Any) -> None:
        what.__enter__()
        self._entered.append(what)

    def __exit__(self, *_: object) -> None:
        while self._entered:
            self._entered.pop().__exit__(None, None, None)


def torch_empty(t: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """Memory of torch's allocator where ``t`` is."""
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device=t.device)


def count_change(t: Any) -> None:
    """Let torch count a change of ``t`` that it has not seen, because the contents were written through an array.

    Autograd then refuses to use a tensor that it has kept for a gradient, as after every change in place.
    """
    import torch

    if not t.is_inference():  # torch counts none of these
        torch.autograd.graph.increment_version(t)


def mergeable(t: Any) -> Any:
    """``t``; or a copy, if its leading dimensions cannot be merged into one by strides alone.

    The copy lies in torch's memory. CuPy's pool might give the memory to other arrays before a graph that has captured
    it is replayed.
    """
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1]).view(t.shape)


def check_operands(**tensors: Any) -> None:
    """Check the arguments of a product; None stands for an argument that is not given.

    Raises TypeError for an argument that is no torch tensor, UsageError for a tensor on another device than the first,
    and for a tensor that requires a gradient, because the product would silently compute none.
    """
    import torch

    graded = torch.is_grad_enabled()
    first, at = next(iter(tensors.items()))
    for name, t in tensors.items():
        if t is None:
            continue
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}: expected a torch tensor, got {type(t).__module__}.{type(t).__name__}")
        if t.device != at.device:
            where = f"{name} is on {t.device}, {first} on {at.device}"
            raise UsageError(f"{where}; nothing is copied between them unasked: use {name}.to({first}.device)")
        if graded:
            _refuse_gradient(name, t)


def refuse_gradient(name: str, x: Any) -> None:
    """UsageError for a torch tensor that requires a gradient, because a product would silently compute none."""
    if is_torch(x) and sys.modules["torch"].is_grad_enabled():
        _refuse_gradient(name, x)


def _refuse_gradient(name: str, t: Any) -> None:
    if t.requires_grad:
        raise UsageError(
            f"{name}: this tensor requires a gradient, and products here have none: use `with torch.no_grad():`, "
            f"or give {name}.detach()"
        )


def _lent(t: Any) -> Array:
    return _device_array(t, _known) if t.is_cuda else torch_to_array(t)


def _device_array(t: Any, array_at: Callable[..., Array]) -> Array:
    if t.is_neg() or t.is_conj():  # its memory has other signs than the tensor
        fix = "use tensor.resolve_neg().resolve_conj()"
        raise _not_shared(t, TypeError(f"torch negates or conjugates it when it reads it; {fix}"))
    try:
        return array_at(t.data_ptr(), t.shape, t.stride(), t.dtype, t.get_device())
    except (RuntimeError, TypeError, NotImplementedError) as e:  # a sparse layout; a type of torch alone
        raise _not_shared(t, e) from e


def _array_at(ptr: int, shape: Any, stride: Any, dtype: Any, device: int, owner: Any = None) -> Array:
    """A CuPy array at an address. DLPack would accept only tensors on torch's current device, and no bfloat16."""
    cuda, name = _cupy().cuda, str(dtype).removeprefix("torch.")
    values = VALUE_TYPES[name].numpy if name in VALUE_TYPES else np.dtype(name)
    steps = tuple(values.itemsize * s for s in stride)
    nbytes = (
        values.itemsize + sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) if 0 not in shape else 0
    )
    memory = cuda.MemoryPointer(cuda.UnownedMemory(ptr, nbytes, owner, device), 0)
    return _cupy().ndarray(tuple(shape), values, memory, steps)


_known = functools.lru_cache(maxsize=512)(_array_at)
_cupy = functools.cache(import_cupy)


def _not_shared(t: Any, e: Exception) -> UsageError:
    what = f"{t.dtype}, {t.layout}, device {t.device}"
    if t.is_meta:
        return UsageError(f"torch tensor ({what}): it has no contents, so load or assign them first")
    known = str(t.layout) == "torch.strided" and str(t.dtype).removeprefix("torch.") in VALUE_TYPES
    without_memory = known and not t.is_neg() and not t.is_conj()  # a fake or a batched tensor
    hint = "; the operators of spformat.torch (linear, spmm, SparseLinear) take tensors without memory"
    return UsageError(
        f"torch tensor ({what}): its memory cannot be shared with {'CuPy' if t.is_cuda else 'numpy'}: {e}"
        + hint * without_memory
    )


class _Handle:
    """A stream by its address, for CuPy (CUDA stream protocol)."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr


@functools.lru_cache(maxsize=256)
def _stream(ptr: int) -> Any:
    return _cupy().cuda.Stream.from_external(_Handle(ptr))


def _stream_of_torch(device: int) -> Any:
    """torch's current stream of a device, as one of CuPy."""
    import torch

    return _stream(torch.cuda.current_stream(device).cuda_stream)


def _after(earlier: Any, later: Any) -> None:
    """Let one stream of CuPy wait for the work queued on another. A stream that is being captured does not wait,
    because a graph cannot wait for work outside of it."""
    if earlier.ptr != later.ptr and not later.is_capturing():
        later.wait_event(earlier.record())
