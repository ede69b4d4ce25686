"""``linear`` and ``spmm`` of torch tensors with a matrix: differentiable, traceable, on host and device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from ..arrays.torch_tensors import untraced
from ..errors import UsageError
from ..formats.base import Format
from ..formats.transposed import Transposed
from .description import Description
from .weights import Weight, keep, require_dense


def linear(x: torch.Tensor, W: Format | Transposed, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x W^T + bias, as ``torch.nn.functional.linear``, with a sparse W [M, K] or the transpose ``A.T`` of one.

    x: [.., K]; bias: [M] in the dtype of y, which is ``problem.result_dtype``. Gradients flow to x and bias.
    """
    y: torch.Tensor = _linear(x, W, bias)
    return y


@untraced
def _linear(x: torch.Tensor, W: Format | Transposed, bias: torch.Tensor | None) -> torch.Tensor:
    tensors, text, transposed = _operands("W", W, "x", x)
    if bias is not None:
        require_dense("bias", bias)
    return torch.ops.spformat.linear(x, tensors, bias, text, transposed)


def spmm(A: Format | Transposed, B: torch.Tensor) -> torch.Tensor:
    """C = A @ B for a sparse A [M, K], or the transpose of one, and B [K, N] or [K]; gradients flow to B."""
    C: torch.Tensor = _spmm(A, B)
    return C


@untraced
def _spmm(A: Format | Transposed, B: torch.Tensor) -> torch.Tensor:
    tensors, text, transposed = _operands("A", A, "B", B)
    return torch.ops.spformat.spmm(tensors, B, text, transposed)


def _operands(name: str, A: Format | Transposed, dense: str, x: torch.Tensor) -> tuple[list[torch.Tensor], str, bool]:
    """(tensors, text, transposed): how operators take a matrix. The tensors are kept with the matrix.

    name, dense: the arguments A and x as the caller's function has them. UsageError for an A that is no matrix and
    a sparse x, TypeError for an x that is no tensor.
    """
    matrix = A.matrix if isinstance(A, Transposed) else A
    if not isinstance(matrix, Format):
        fix = f"use spformat.convert({name}, format)"
        raise UsageError(f"{name}: expected a matrix of spformat, got {type(A).__name__}: {fix}")
    require_dense(dense, x, "; spformat.linear and spformat.spmm take arrays")
    tensors, text = matrix.kernel_arrays("torch", lambda: _tensors_of(matrix))
    return tensors, text, isinstance(A, Transposed)


def _tensors_of(matrix: Format) -> tuple[list[torch.Tensor], str]:
    description = Description.of(matrix.ensure_valid())
    with torch.inference_mode(False), _unrecorded():
        tensors = description.tensors(matrix)
        same = description.matrix(tensors).alias()
        keep(Weight(description.text, tensors, same), tensors[description.values])
    return tensors, description.text


@contextmanager
def _unrecorded() -> Iterator[None]:
    """Inside the block tensors are real ones, also under a mode that fakes or records, and in transformations of
    torch.func: they are kept with their matrix."""
    tracing = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)
    try:
        with _disable_current_modes(), temporarily_clear_interpreter_stack():
            yield
    finally:
        torch._C._set_tracing_state(tracing)
