"""spmm(), linear(), plan(), explain(): take operands to a plan, never convert, never copy between host and device."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays.dtypes import VALUE_TYPES, dtype_name, value_type
from ..arrays.library import current_device, is_cupy, namespace
from ..arrays.torch_tensors import (
    TorchStream,
    array_to_torch,
    check_operands,
    is_torch,
    mergeable,
    refuse_gradient,
    torch_empty,
)
from ..backends.host import numpy_dtype
from ..errors import ArrayError, UsageError
from ..formats.base import Format
from ..formats.foreign import as_array, as_format, unmasked
from ..products.problem import COL, OVERWRITES, ROW, STRIDED, Plan, Problem, result_dtype, scalar, tile_class
from .select import Explanation, ask, without_epilogue, choose, named

log = logging.getLogger("spformat")

_chosen: contextvars.ContextVar[str | None] = contextvars.ContextVar("spformat_backend", default=None)


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Inside the block every call without ``backend=`` uses this backend or kernel, and never falls back."""
    named(name)
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


def spmm(A: Any, B: Any, out: Any = None, backend: str | None = None, *, alpha: float = 1.0, beta: float = 0.0,
         bias: Any = None) -> Any:  # fmt: skip
    """C[M,N] = alpha * A[M,K] @ B[K,N] + beta * C + bias with sparse A; C is in B's library, on B's device.

    A: any spformat object (a scipy, torch or dense matrix is taken as its format first).
    B: numpy, CuPy or torch array [K, N], row- or column-major, with a leading dimension if you like; or [K].
    out: array [M, N] to write, all of it; its dtype may be wider than B's. Default: a new row-major array of
    ``problem.result_dtype``. 16-bit inputs are summed in float32.
    backend: a name ("cpu", "reference", "cuda", "vendor", a plug-in's), or that of one kernel as ``explain`` prints it
    ("cuda.spmm_vector_nm"). A named backend or kernel never falls back.
    alpha, beta: numbers; beta other than 0 needs ``out``, which is not read otherwise.
    bias: [M], a value for each row of A, in the dtype of C; consecutive in memory.

    alpha, beta and bias are applied by the kernel itself where its plan says so, before C is rounded; else by one more
    pass over C. For ``y = x W^T`` and rows of x, see ``linear``.

    ``A @ B`` is the same, without options. The plan is cached with A. Raises NoKernelError with every kernel's reasons,
    DeviceUnavailable when the named backend cannot run here, UsageError for a torch tensor that requires a gradient,
    ValueError and TypeError for operands that do not fit.
    """
    if not isinstance(A, Format):
        refuse_gradient("A", A)
        A = as_format(A)
    if not isinstance(B, np.ndarray) and not is_cupy(B):
        return _foreign(A, B, out, backend, alpha=alpha, beta=beta, bias=bias)
    if B.ndim == 1:
        column = None if out is None else out[:, None]
        return spmm(A, B[:, None], column, backend, alpha=alpha, beta=beta, bias=bias)[:, 0]
    if bias is None and alpha == 1 and beta == 0:
        return _plan_for(A, B, out, backend).run(B, out)
    if bias is not None:
        _require_like("bias", bias, "B", B)
    return _plan_for(A, B, out, backend, True).run(B, out, scalar("alpha", alpha), scalar("beta", beta), bias)


Format.__matmul__ = spmm


def linear(x: Any, W: Any, bias: Any = None, *, alpha: float = 1.0, beta: float = 0.0, out: Any = None,
           backend: str | None = None) -> Any:  # fmt: skip
    """y = alpha * x @ W^T + beta * y + bias, as torch.nn.functional.linear, with sparse W [M, K].

    x: numpy, CuPy or torch array [.., K]; y: [.., M], row-major, in x's library and ``problem.result_dtype``.
    bias: [M] in the dtype of y. out: y to write, all of it; of other than two dimensions only in C order.
    alpha, beta, backend: as in ``spmm``.

    Nothing is transposed: rows of x are columns of the B of ``spmm``, rows of y columns of its C, and the kernels take
    both layouts. Raises what ``spmm`` raises; ValueError for an x whose last dimension is not K.
    """
    if not isinstance(W, Format):
        refuse_gradient("W", W)
        W = as_format(W)
    if not isinstance(x, np.ndarray) and not is_cupy(x):
        return _foreign(W, x, out, backend, linear, alpha=alpha, beta=beta, bias=bias)
    M, K = W.shape
    if x.ndim == 0 or x.shape[-1] != K:
        raise ValueError(f"x: expected shape [.., {K}], the columns of W {W.shape} last, got {x.shape}")
    shape = (*x.shape[:-1], M)
    if out is None:
        if beta != 0:
            raise ValueError(f"beta = {beta} adds to y: expected out, got none")
        with current_device(x):
            out = namespace(x).empty(shape, numpy_dtype(result_dtype(dtype_name(W.dtype), _operand_type("x", x))))
    else:
        _require_like("out", out, "x", x)
        if out.shape != shape:
            raise ValueError(f"out: expected shape {shape}, got {out.shape}")
    if x.ndim == 2:
        spmm(W, x.T, out.T, backend, alpha=alpha, beta=beta, bias=bias)
        return out
    if not out.flags.c_contiguous:
        raise ValueError(f"out: expected C order for {out.ndim} dimensions, got strides {out.strides}")
    rows = math.prod(x.shape[:-1])
    linear(x.reshape(rows, K), W, bias, alpha=alpha, beta=beta, out=out.reshape(rows, M), backend=backend)
    return out


def plan(A: Any, n: int | None = None, *, B: Any = None, out: Any = None, backend: str | None = None,
         b_dtype: Any = None, b_layout: str = ROW, out_dtype: Any = None, out_layout: str = ROW,
         epilogue: bool = False, unsafe: bool = False) -> Plan:  # fmt: skip
    """A plan for products with A: ``p = plan(A, n=4096)``, then ``p(B)`` or ``p(B, out=C)`` many times.

    n: the N to choose tiles for (any N may be run). Give B (and out) instead to copy their dtype and layout;
    else B is row-major in A's dtype. unsafe=True skips validation of A: only for arrays you made yourself.
    epilogue: ``p(B, out=C, alpha=.., beta=.., bias=..)`` (see ``spmm``); ``p.tile`` says if that is a pass of its own.
    """
    A = as_format(A)
    if B is not None:
        problem = describe(A, as_array(B), None if out is None else as_array(out), epilogue)
    else:
        name = value_type(b_dtype or A.dtype).name
        result = _dtype_name(out_dtype) if out_dtype is not None else result_dtype(A.dtype.name, name)
        problem = _problem(A, tile_class(n or 512), name, result, b_layout, out_layout, epilogue)
    return _make_plan(A, problem, _asked_for(backend), unsafe)


def explain(
    A: Any, B: Any = None, *, n: int | None = None, backend: str | None = None, installed: bool = False
) -> Explanation:
    """Which kernel would run ``spmm(A, B)``, and why each other one would not.

    A may be a bare ``Problem`` (for a GPU you do not have: device "cuda", sm 90): what is missing here then
    does not count, unless ``installed``, nor do ``use_backend`` and SPFORMAT_BACKEND.
    """
    if isinstance(A, Problem):
        return ask(A, backend, installed=installed)
    A = as_format(A)
    if B is None:
        name = A.dtype.name
        return ask(_problem(A, tile_class(n or 512), name, result_dtype(name, name), ROW, ROW), _asked_for(backend))
    B = as_array(B)
    return ask(describe(A, B[:, None] if B.ndim == 1 else B, None), _asked_for(backend))


# ------------------------------------------------------------------ from operands to a plan


def _asked_for(backend: str | None) -> str | None:
    """The backend or kernel that a call names, or the block or the environment that it is in."""
    return backend or _chosen.get() or os.environ.get("SPFORMAT_BACKEND")


def _plan_for(A: Format, B: Any, out: Any, backend: str | None, epilogue: bool = False) -> Plan:
    """The cached plan of this call: the key is cheap to build, a Problem is not."""
    name = _asked_for(backend)
    try:
        shape, strides = B.shape, B.strides
        if out is None:
            key: Any = (shape[1], B.dtype, strides, B.__class__, name)
        else:
            key = (shape[1], B.dtype, strides, B.__class__, name, out.dtype, out.strides, out.__class__)
    except (AttributeError, IndexError):  # no matrix, or no array
        describe(A, B, out, epilogue)  # says which
        raise
    if epilogue:
        key = (*key, "epilogue")
    found = A._derived.get(key)
    if found is not None:
        cached: Plan = found
        return cached
    problem = describe(A, B, out, epilogue)
    made = A._derived.get((problem, name))
    if made is None:
        made = A._derived[(problem, name)] = _make_plan(A, problem, name, unsafe=False)
    if len(A._derived) < 4096:  # a caller with ever new shapes must not grow the cache without end
        A._derived[key] = made
    plan: Plan = made
    return plan


def _make_plan(A: Format, problem: Problem, name: str | None, unsafe: bool) -> Plan:
    kernel = choose(problem, name)
    if not unsafe:
        A.ensure_valid()
    asked = without_epilogue(kernel, problem)
    with current_device(A.values):
        made = kernel.plan(A if A.is_validated else _trusted(A), asked)
        if asked is not problem:
            made = _with_epilogue(made, problem)
    log.info("%s %dx%d (%s), N class %d: %s %s", problem.format, problem.M, problem.K, problem.a_dtype, problem.n,
             made.kernel, made.tile)  # fmt: skip
    # The arrays too: memory that A alone held could be handed out again, and be taken for A's when it comes as an out.
    held = [(*_span(a), a) for a in A.arrays().values() if a.size]
    if made.reads is None:
        return replace(made, run=_guarded(made.run, held))
    made.reads.extend(held)
    return made


def _trusted(A: Format) -> Format:
    """A with the validated mark, unseen: the caller of ``plan(unsafe=True)`` answers for the contents."""
    return type(A).trusted(shape=A.shape, **A.params(), **A.tables(), **A.arrays())


def _guarded(run: Any, held: list[tuple[int, int, Any]]) -> Any:
    """``run``, with an ``out`` refused that would overwrite the matrix while it is read."""

    def guarded(B: Any, out: Any, *epilogue: Any) -> Any:
        if out is not None and out.size:
            lo, hi = _span(out)
            if any(lo < end and start < hi for start, end, _ in held):
                raise ValueError(OVERWRITES)
        return run(B, out, *epilogue)

    return guarded


def _span(x: Any) -> tuple[int, int]:
    """First address of an array and the one behind its last."""
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


def _with_epilogue(made: Plan, problem: Problem) -> Plan:
    if problem.device == "cpu":
        from ..backends.host import with_epilogue
    else:
        from ..backends.cuda.runtime.epilogue import with_epilogue
    return with_epilogue(made, problem)


def describe(A: Format, B: Any, out: Any, epilogue: bool = False) -> Problem:
    """The Problem of one call; ValueError, TypeError or UsageError for operands that cannot be multiplied."""
    if B.ndim != 2:
        raise ValueError(f"B: expected a matrix [K, N], got shape {B.shape}")
    if B.shape[0] != A.shape[1]:
        raise ValueError(f"B: expected {A.shape[1]} rows, the columns of A {A.shape}, got shape {B.shape}")
    on_device = A.device != "cpu"
    if on_device != is_cupy(B):
        where = f"A is on {A.device}, B on {'cuda:' + str(B.device.id) if is_cupy(B) else 'cpu'}"
        fix = "A.to('cuda')" if not on_device else "A.to('cpu'), or cupy.asarray(B)"
        raise UsageError(f"spmm: {where}; nothing is copied between them unasked: use {fix}")
    b_dtype = _operand_type("B", B)
    b_layout = _layout(B)
    if out is None:
        return _problem(
            A, tile_class(B.shape[1]), b_dtype, result_dtype(A.dtype.name, b_dtype), b_layout, ROW, epilogue
        )
    _require_like("out", out, "B", B)
    if out.shape != (A.shape[0], B.shape[1]):
        raise ValueError(f"out: expected shape {(A.shape[0], B.shape[1])}, got {out.shape}")
    return _problem(A, tile_class(B.shape[1]), b_dtype, _dtype_name(out.dtype), b_layout, _layout(out), epilogue)


def _operand_type(name: str, x: Any) -> str:
    """The value type of an operand; ArrayError names it and the cast."""
    try:
        return value_type(unmasked(x).dtype).name
    except ArrayError as e:
        raise ArrayError(f"{name}: {e.message}, as by {name}.astype('float32')", array=name) from None


def _require_like(name: str, x: Any, other_name: str, other: Any) -> None:
    """TypeError for an array of another library."""
    kind = type(other)
    if type(x) is not kind:
        raise TypeError(f"{name}: expected {kind.__module__}.{kind.__name__} like {other_name}, got {type(x).__name__}")


def _problem(A: Format, n: int, b_dtype: str, out_dtype: str, b_layout: str, out_layout: str, epilogue: bool = False,
             ) -> Problem:  # fmt: skip
    if epilogue and out_dtype in ("int32", "int64"):
        raise TypeError(f"alpha, beta and bias need a C of floating-point values, got {out_dtype}; give out in float32")
    sm, device_id = None, 0
    if A.device != "cpu":
        device_id = A.values.device.id
        sm = int(A.values.device.compute_capability)
    return Problem(
        format=A.name, params=tuple(A.params().items()), M=A.shape[0], K=A.shape[1], n=n, nnz=A.stored,
        a_dtype=A.dtype.name, b_dtype=b_dtype, out_dtype=out_dtype, b_layout=b_layout, out_layout=out_layout,
        device="cpu" if sm is None else "cuda", sm=sm, device_id=device_id, epilogue=epilogue,
    )  # fmt: skip


def _layout(x: Any) -> str:
    rows, cols = x.shape
    size = x.dtype.itemsize
    if cols <= 1 or x.strides[1] == size:
        return ROW if rows <= 1 or x.strides[0] >= cols * size else STRIDED
    if rows <= 1 or x.strides[0] == size:
        return COL if x.strides[1] >= rows * size else STRIDED
    return STRIDED


def _dtype_name(dtype: Any) -> str:
    return dtype if isinstance(dtype, str) and dtype in VALUE_TYPES else np.dtype(dtype).name


def _foreign(A: Format, B: Any, out: Any, backend: str | None, product: Any = None, **epilogue: Any) -> Any:
    """``spmm`` (or ``linear``) of a scipy matrix, a nested list or a torch tensor. Of torch the memory is shared; on a
    device the work goes to its current stream, and the result is from its allocator."""

    def call(B: Any, out: Any) -> Any:
        return product(B, A, out=out, backend=backend, **epilogue) if product else spmm(A, B, out, backend, **epilogue)

    if not is_torch(B):
        return call(as_array(B), out)
    name, matrix = ("x", "W") if product else ("B", "A")
    check_operands(**{name: B, "bias": epilogue["bias"], "out": out})
    if B.is_cuda == (A.device == "cpu"):
        fix = f"{matrix}.to('cuda')" if B.is_cuda else f"{name}.cuda(), or {matrix}.to('cpu')"
        where = f"{matrix} is on {A.device}, {name} on {B.device}"
        raise UsageError(f"{where}; nothing is copied between them unasked: use {fix}")
    with TorchStream(B) as array:
        if epilogue["bias"] is not None:
            epilogue["bias"] = array(epilogue["bias"])
        x = array(mergeable(B) if B.is_cuda and B.ndim > 2 else B)
        if out is None and B.is_cuda and epilogue["beta"] == 0:
            shape = (*x.shape[:-1], A.shape[0]) if product else (A.shape[0], *x.shape[1:])
            out = torch_empty(B, shape, result_dtype(dtype_name(A.dtype), _operand_type(name, x)))
        if out is None:
            return array_to_torch(call(x, None))
        call(x, array(out))
        return out
