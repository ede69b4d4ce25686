"""spmm(), linear(), plan(), explain(): find the plan for operands. Nothing is converted or copied between devices."""

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

from ..arrays.dtypes import dtype_name, value_type
from ..arrays.library import current_device, is_cupy, namespace
from ..arrays.torch_tensors import (
    TorchStream,
    array_to_torch,
    check_operands,
    compiling,
    count_change,
    is_torch,
    mergeable,
    refuse_gradient,
    refuse_recorded,
    torch_empty,
    untraced,
)
from ..backends.host import numpy_dtype
from ..errors import ArrayError, UsageError
from ..formats.base import Format
from ..formats.foreign import as_array, as_format, refuse_sparse
from ..formats.transposed import Transposed
from ..products import operations
from ..products.operations.spmm import operand_type, require_like
from ..products.plan import Plan
from ..products.problem import (
    ROW,
    WORKSPACE,
    Operand,
    Problem,
    columns,
    cuda_device_of,
    most_workspace,
    result_dtype,
    scalar,
)
from . import composed  # noqa: F401 - its backend registers itself
from .plans import plan_with
from .select import Explanation, ask, checked, choose, named

log = logging.getLogger("spformat")

_default_backend: contextvars.ContextVar[str | None] = contextvars.ContextVar("spformat_backend", default=None)
default_backend = _default_backend.get
"""The backend or kernel that the enclosing ``use_backend`` block names, or None."""


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Inside the block every call without ``backend=`` uses this backend or kernel, and never falls back."""
    named(name)
    token = _default_backend.set(name)
    try:
        yield
    finally:
        _default_backend.reset(token)


def spmm(A: Any, B: Any, out: Any = None, backend: str | None = None, *, alpha: float = 1.0, beta: float = 0.0,
         bias: Any = None) -> Any:  # fmt: skip
    """C[M,N] = alpha * A[M,K] @ B[K,N] + beta * C + bias with sparse A; C is in B's library, on B's device.

    A: any spformat object (a scipy, torch or dense matrix is first wrapped in its format), or the transpose of one:
    ``spmm(A.T, B)`` is the product with A^T. A is stored a second time only if no kernel can do without that.
    B: numpy, CuPy or torch array [K, N], row- or column-major, with a leading dimension if you like; or [K].
    out: array [M, N] to write, all of it; its dtype may be wider than B's. Default: a new row-major array of
    ``problem.result_dtype``. 16-bit inputs are summed in float32.
    backend: a name ("cpu", "reference", "cuda", "vendor", a plug-in's), or that of one kernel as ``explain`` prints it
    ("cuda.spmm_vector_nm"). A named backend or kernel never falls back.
    alpha, beta: numbers; beta other than 0 needs ``out``, which is not read otherwise.
    bias: [M], a value for each row of C, in the dtype of C; consecutive in memory.

    alpha, beta and bias are applied by the kernel itself where its plan says so, before C is rounded; else by one more
    pass over C. For ``y = x W^T`` and rows of x, see ``linear``.

    ``A @ B`` is the same, without options. The plan is cached with A. Raises NoKernelError with every kernel's reasons,
    DeviceUnavailable when the named backend cannot run here, UsageError for a torch tensor that requires a gradient,
    ValueError and TypeError for operands that do not fit.
    """
    if isinstance(B, np.ndarray) and compiling():
        return untraced(spmm)(A, B, out, backend, alpha=alpha, beta=beta, bias=bias)
    if isinstance(A, Format):
        plain = bias is None and type(alpha) is float and alpha == 1 and type(beta) is float and beta == 0
        if plain and (isinstance(B, np.ndarray) or is_cupy(B)) and B.ndim == 2:
            return _plan_for("spmm", A, B, out, backend).run(B, out)
        operation = "spmm"
    elif isinstance(A, Transposed):
        A, operation = A.matrix, "spmm_transposed"
    else:
        refuse_gradient("A", A)
        A, operation = as_format(A), "spmm"
    return _product(operation, A, B, out, backend, alpha, beta, bias)


def _product(operation: str, A: Format, B: Any, out: Any, backend: str | None, alpha: float, beta: float,
             bias: Any) -> Any:  # fmt: skip
    if not isinstance(B, np.ndarray) and not is_cupy(B):
        return _foreign(operation, A, B, out, backend, alpha=alpha, beta=beta, bias=bias)
    if B.ndim == 1:
        column = None
        if out is not None:
            require_like("out", out, "B", B)
            length = A.matrix_shape[1 if operation == "spmm_transposed" else 0]
            if out.shape != (length,):
                raise ValueError(f"out: expected shape ({length},) for a B of one dimension, got {out.shape}")
            column = out[:, None]
        result = _product(operation, A, B[:, None], column, backend, alpha, beta, bias)
        return result[:, 0] if out is None else out
    alpha, beta = scalar("alpha", alpha), scalar("beta", beta)
    if bias is None and alpha == 1 and beta == 0:
        return _plan_for(operation, A, B, out, backend).run(B, out)
    if bias is not None:
        require_like("bias", bias, "B", B)
    plan = _plan_for(operation, A, B, out, backend, True)
    return plan.run(B, out, alpha, beta, bias)


Format.__matmul__ = spmm
Transposed.__matmul__ = spmm


def _from_the_left(A: Any, x: Any) -> Any:
    """x @ A for dense x [.., M]: ``linear`` with the transpose, which is not stored."""
    return linear(x, A.T)


Format.__rmatmul__ = _from_the_left
Transposed.__rmatmul__ = _from_the_left


def linear(x: Any, W: Any, bias: Any = None, *, alpha: float = 1.0, beta: float = 0.0, out: Any = None,
           backend: str | None = None) -> Any:  # fmt: skip
    """y = alpha * x @ W^T + beta * y + bias, as torch.nn.functional.linear, with sparse W [M, K].

    x: numpy, CuPy or torch array [.., K]; y: [.., M], row-major, in x's library and ``problem.result_dtype``.
    bias: [M] in the dtype of y. out: y to write, all of it; of other than two dimensions only in C order.
    alpha, beta, backend: as in ``spmm``.

    Nothing is transposed: rows of x are columns of the B of ``spmm``, rows of y columns of its C, and the kernels take
    both layouts. Raises what ``spmm`` raises; ValueError for an x whose last dimension is not K.
    """
    if isinstance(x, np.ndarray) and compiling():
        return untraced(linear)(x, W, bias, alpha=alpha, beta=beta, out=out, backend=backend)
    operation = "spmm"
    if isinstance(W, Transposed):
        W, operation = W.matrix, "spmm_transposed"
    elif not isinstance(W, Format):
        refuse_gradient("W", W)
        W = as_format(W)
    return _linear(operation, x, W, bias, alpha, beta, out, backend)


def _linear(operation: str, x: Any, W: Format, bias: Any, alpha: float, beta: float, out: Any,
            backend: str | None) -> Any:  # fmt: skip
    if not isinstance(x, np.ndarray) and not is_cupy(x):
        return _foreign(operation, W, x, out, backend, True, alpha=alpha, beta=beta, bias=bias)
    M, K = W.matrix_shape if operation == "spmm" else W.matrix_shape[::-1]
    if x.ndim == 0 or x.shape[-1] != K:
        raise ValueError(f"x: expected shape [.., {K}], the columns of W {(M, K)} last, got {x.shape}")
    shape = (*x.shape[:-1], M)
    if out is None:
        if scalar("beta", beta) != 0:
            raise ValueError(f"beta = {beta} adds to y: expected out, got none")
        with current_device(x):
            out = namespace(x).empty(shape, numpy_dtype(result_dtype(dtype_name(W.dtype), operand_type("x", x))))
    else:
        require_like("out", out, "x", x)
        if out.shape != shape:
            raise ValueError(f"out: expected shape {shape}, got {out.shape}")
    if x.ndim == 2:
        _product(operation, W, x.T, out.T, backend, alpha, beta, bias)
        return out
    if not out.flags.c_contiguous:
        raise ValueError(f"out: expected C order for {out.ndim} dimensions, got strides {out.strides}")
    rows = math.prod(x.shape[:-1])
    _linear(operation, x.reshape(rows, K), W, bias, alpha, beta, out.reshape(rows, M), backend)
    return out


def plan(A: Any, n: int | None = None, *, B: Any = None, out: Any = None, backend: str | None = None,
         b_dtype: Any = None, b_layout: str | None = None, out_dtype: Any = None, out_layout: str | None = None,
         epilogue: bool = False, workspace: int = WORKSPACE, unsafe: bool = False) -> Plan:  # fmt: skip
    """A plan for products with A (or A.T): ``p = plan(A, n=4096)``, then ``p(B)`` or ``p(B, out=C)`` many times.

    n: the number of columns to choose a kernel for; any number may be run, and the plan fits its launch to it. Give B
    (and out) instead to copy their dtype and layout, in place of b_dtype and b_layout (and out_dtype and out_layout);
    else B is row-major in A's dtype.
    epilogue: ``p(B, out=C, alpha=.., beta=.., bias=..)`` (see ``spmm``); ``p.tile`` says if that is a pass of its own.
    workspace: most bytes for copies beside A, B and C: a dense copy of A or panels of it, a stored transpose, float32
    sums of a sum of matrices. 0 refuses kernels that need any. It does not limit what a kernel needs to run at all
    (tables of indices, values in its own order, tiles, partial sums); ``Plan.workspace`` counts what is kept of that.
    unsafe=True skips validation of A: only for arrays whose contents you have checked. backend: as in ``spmm``, whose
    errors this raises, too.
    """
    operation, A = ("spmm_transposed", A.matrix) if isinstance(A, Transposed) else ("spmm", as_format(A))
    of_out = {k: x for k, x in (("out_dtype", out_dtype), ("out_layout", out_layout)) if x is not None}
    if B is not None:
        of_b = {k: x for k, x in (("b_dtype", b_dtype), ("b_layout", b_layout)) if x is not None}
        beside = [*((name, "B") for name in of_b), *((name, "out") for name in of_out if out is not None)]
        for name, array in beside:
            raise UsageError(f"plan: {array} has a dtype and a layout: expected no {name} beside it; leave one out")
        refuse_sparse("B", B)
        array, result = as_array(B), None if out is None else as_array(out)
        problem = operations.operation(operation).problem(A, array, result, epilogue, most_workspace(workspace))
        if of_out:
            problem = problem.changed(
                **of_out | ({"out_dtype": _dtype_name(out_dtype)} if out_dtype is not None else {})
            )
    elif out is not None:
        raise UsageError("plan: out: expected B beside it; give B=.., or out_dtype= and out_layout= instead of out")
    else:
        problem = problem_of(
            A, 512 if n is None else n, operation, value_type(b_dtype or A.dtype).name, out_dtype, b_layout or ROW,
            out_layout or ROW, epilogue, workspace,
        )  # fmt: skip
    return _plan_of(A, problem, backend_name(backend), unsafe)


def explain(
    A: Any, B: Any = None, *, n: int | None = None, backend: str | None = None, installed: bool = False
) -> Explanation:
    """Which kernel would run ``spmm(A, B)``, how long each expects to take, and why the others would not.

    A: a matrix, its transpose (``A.T``), or a bare ``Problem`` (for a GPU you do not have: device "cuda", sm 90). For a
    ``Problem``, what is missing here does not count unless ``installed``, nor do ``use_backend`` and SPFORMAT_BACKEND.
    n: columns of B where B is not given, 512 by default. backend: ask only this backend or kernel.

    A product that no kernel takes is no error here. UsageError for an unknown backend and what is no matrix, ValueError
    for a B that does not fit.
    """
    if isinstance(A, Problem):
        return ask(checked(A), backend, installed=installed)
    operation, A = ("spmm_transposed", A.matrix) if isinstance(A, Transposed) else ("spmm", as_format(A))
    if B is None:
        return ask(problem_of(A, 512 if n is None else n, operation), backend_name(backend))
    refuse_sparse("B", B)
    B = as_array(B)
    problem = operations.operation(operation).problem(A, B[:, None] if B.ndim == 1 else B)
    return ask(problem, backend_name(backend))


def run(operation: str, A: Any, *dense: Any, out: Any = None, backend: str | None = None) -> Any:
    """An operation by its name: ``run("spmm", A, B)``. A and the arrays as in ``spmm``; numpy and CuPy arrays only."""
    matrix = as_format(A)
    problem = operations.operation(operation).problem(matrix, *dense, out=out)
    return _plan_of(matrix, problem, backend_name(backend), False).run(*dense, out)


# ------------------------------------------------------------------ from operands to a plan


def backend_name(backend: str | None = None) -> str | None:
    """The backend or kernel that a call names, else that of the ``use_backend`` block, else SPFORMAT_BACKEND.

    UsageError for anything but text and None.
    """
    if backend is not None and not isinstance(backend, str):
        named(backend)  # raises: it may be nothing that a dict takes, or false
    return backend or default_backend() or os.environ.get("SPFORMAT_BACKEND")


def _plan_for(operation: str, A: Format, B: Any, out: Any, backend: str | None, epilogue: bool = False) -> Plan:
    """The cached plan of this call. Its key is cheap to build, while a Problem is not."""
    name = backend_name(backend)
    try:
        shape, strides = B.shape, B.strides
        if out is None:
            key: Any = (shape[1], B.dtype, strides, B.__class__, name)
        else:
            key = (shape[1], B.dtype, strides, B.__class__, name, out.dtype, out.strides, out.__class__)
    except (AttributeError, IndexError):  # B or out is not an array of two dimensions
        operations.operation(operation).problem(A, B, out, epilogue)  # raises an error that says which
        raise
    if epilogue or operation != "spmm":
        key = (*key, operation, epilogue)
    cached: Plan | None = A._plans.get(key)
    if cached is not None:
        return cached
    problem = operations.operation(operation).problem(A, B, out, epilogue)
    plan = _plan_of(A, problem, name, False)
    if len(A._plans) < PLANS:  # calls with always new shapes must not let the cache grow without bound
        A._plans[key] = plan
    return plan


PLANS = 4096
"""Most entries in the cache of plans of a matrix."""


def _plan_of(A: Format, problem: Problem, name: str | None, unsafe: bool) -> Plan:
    """A plan of the fastest kernel, shared by problems that differ only in their number of columns."""
    kernel = choose(problem, name)
    key = kernel.name, problem.changed(n=0) if len(problem.operands) == 2 else problem
    shared: Plan | None = A._plans.get(key)
    if shared is None:
        if not unsafe:
            A.ensure_valid()
        shared = plan_with(kernel, A if A.is_validated else A.alias(), problem)
        log.info("%s %s: %s %s", problem.operation, problem.operands, shared.kernel, shared.tile)
        if not unsafe and len(A._plans) < PLANS:
            A._plans[key] = shared
    return shared if shared.problem == problem else replace(shared, problem=problem)


def problem_of(
    A: Format, n: int, operation: str = "spmm", b_dtype: str = "", out_dtype: Any = None, b_layout: str = ROW,
    out_layout: str = ROW, epilogue: bool = False, workspace: int = WORKSPACE,
) -> Problem:  # fmt: skip
    """The problem of a product of A with a B of n columns that does not exist yet. Default: B in A's dtype."""
    a, (M, K) = Operand.of(A), A.matrix_shape
    b = b_dtype or a.dtype
    result = result_dtype(a.dtype, b) if out_dtype is None else _dtype_name(out_dtype)
    sm, device_id, board = (None, 0, "") if a.device == "cpu" else cuda_device_of(A)
    if epilogue and result in ("int32", "int64"):
        raise TypeError(f"alpha, beta and bias need a C of floating-point values, got {result}; give out in float32")
    return Problem.product(
        a.format, a.params, M, K, columns(n), a.stored, a.dtype, b, result, b_layout, out_layout,
        a.device, sm, device_id, epilogue, operation=operation, workspace=workspace, parts=a.parts,
        row_length=A.row_length(), board=board,
    )  # fmt: skip


def _dtype_name(dtype: Any) -> str:
    """The name of a dtype for C: a value type, by any of its names, or integers. ArrayError for anything else."""
    try:
        return value_type(dtype).name
    except ArrayError as e:
        with contextlib.suppress(TypeError, ValueError, SyntaxError):  # numpy parses text of many forms
            name: str = np.dtype(dtype).name
            if name in ("int32", "int64"):
                return name
        raise ArrayError(f"out_dtype: {e.message}, or int32 or int64 for products of int8", array="out") from None


def _foreign(
    operation: str, A: Format, B: Any, out: Any, backend: str | None, transposed_operands: bool = False, **epilogue: Any
) -> Any:
    """``spmm`` (or ``linear``, whose operands are transposed) of a nested list or a torch tensor; no sparse matrix.

    Torch tensors are not copied. On a device the work is queued on torch's current stream, and torch allocates the
    result.
    """
    if is_torch(B):
        return untraced(_of_torch)(operation, A, B, out, backend, transposed_operands, epilogue)
    refuse_sparse("x" if transposed_operands else "B", B)
    if transposed_operands:
        return _linear(operation, as_array(B), A, out=out, backend=backend, **epilogue)
    return _product(operation, A, as_array(B), out, backend, **epilogue)


def _of_torch(
    operation: str,
    A: Format,
    B: Any,
    out: Any,
    backend: str | None,
    transposed_operands: bool,
    epilogue: dict[str, Any],
) -> Any:
    """``_foreign`` of a torch tensor."""

    def call(B: Any, out: Any) -> Any:
        if transposed_operands:
            return _linear(operation, B, A, out=out, backend=backend, **epilogue)
        return _product(operation, A, B, out, backend, **epilogue)

    refuse_recorded("linear" if transposed_operands else "spmm")
    name, matrix = ("x", "W") if transposed_operands else ("B", "A")
    refuse_sparse(name, B)
    check_operands(**{name: B, "bias": epilogue["bias"], "out": out})
    for factor in ("alpha", "beta"):
        refuse_gradient(factor, epilogue[factor])
    if B.is_cuda == (A.device == "cpu"):
        fix = f"{matrix}.to('cuda')" if B.is_cuda else f"{name}.cuda(), or {matrix}.to('cpu')"
        where = f"{matrix} is on {A.device}, {name} on {B.device}"
        raise UsageError(f"{where}; nothing is copied between them unasked: use {fix}")
    rows = A.shape[1] if operation == "spmm_transposed" else A.shape[0]
    with TorchStream(B) as array:
        if epilogue["bias"] is not None:
            epilogue["bias"] = array(epilogue["bias"])
        x = array(mergeable(B) if B.is_cuda and B.ndim > 2 else B)
        if out is None and B.is_cuda and epilogue["beta"] == 0:
            shape = (*x.shape[:-1], rows) if transposed_operands else (rows, *x.shape[1:])
            out = torch_empty(B, shape, result_dtype(dtype_name(A.dtype), operand_type(name, x)))
        if out is None:
            return array_to_torch(call(x, None))
        call(x, array(out))
        count_change(out)
        return out
