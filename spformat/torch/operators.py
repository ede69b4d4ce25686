"""The operators ``spformat::linear`` and ``spformat::spmm``: what compilers, autograd and graphs of torch see.

    spformat::linear(Tensor x, Tensor[] weight, Tensor? bias, str matrix, bool transposed) -> Tensor    x @ A^T + bias
    spformat::spmm(Tensor[] weight, Tensor B, str matrix, bool transposed) -> Tensor                    A @ B
    spformat::dense(Tensor[] weight, str matrix) -> Tensor                                              A, dense

``weight`` and ``matrix`` are the tensors of A and the text of its ``Description``; ``transposed`` stands for A^T. The
operators are functional and out of place. Each product has a counterpart, ``.._backward``, which computes the gradient
of the dense operand and cannot be differentiated again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from ..arrays.torch_tensors import array_to_torch
from ..dispatch import api
from ..errors import UsageError
from ..products.problem import result_dtype
from .description import parse
from .weights import name_of, other_dtype, weight_of, with_lines

Tensors = Sequence[torch.Tensor]


class _Library(torch.library.Library):  # type: ignore[misc]
    """A library whose rules of autograd first refuse what they would lose."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> Any:
        """As of torch. What runs as "Autograd" gets the keys of the dispatcher first: ``with_keyset=True``."""
        if dispatch_key != "Autograd":
            return super().impl(op_name, fn, dispatch_key, **options)

        def guarded(keys: Any, *args: Any, **kwargs: Any) -> Any:
            _refuse_transformed(op_name, args)
            return fn(keys, *args, **kwargs)

        return super().impl(op_name, guarded, dispatch_key, **options)


LIBRARY = _Library("spformat", "DEF")
TAGS = (torch.Tag.pt2_compliant_tag,)
LIBRARY.define("linear(Tensor x, Tensor[] weight, Tensor? bias, str matrix, bool transposed) -> Tensor", tags=TAGS)
LIBRARY.define("linear_backward(Tensor grad, Tensor[] weight, str matrix, bool transposed) -> Tensor", tags=TAGS)
LIBRARY.define("spmm(Tensor[] weight, Tensor B, str matrix, bool transposed) -> Tensor", tags=TAGS)
LIBRARY.define("spmm_backward(Tensor[] weight, Tensor grad, str matrix, bool transposed) -> Tensor", tags=TAGS)
LIBRARY.define("dense(Tensor[] weight, str matrix) -> Tensor", tags=TAGS)

DEVICES = ("CPU", "CUDA")


# ------------------------------------------------------------------ kernels


def _linear(x: torch.Tensor, weight: Tensors, bias: torch.Tensor | None, matrix: str, transposed: bool) -> torch.Tensor:
    return weight_of(weight, matrix).linear(x, bias, transposed)


def _linear_backward(grad: torch.Tensor, weight: Tensors, matrix: str, transposed: bool) -> torch.Tensor:
    return weight_of(weight, matrix).linear(grad, None, not transposed)


def _spmm(weight: Tensors, B: torch.Tensor, matrix: str, transposed: bool) -> torch.Tensor:
    A = weight_of(weight, matrix).matrix
    with torch.no_grad():
        B = with_lines(B) if B.is_cuda else B
        C: torch.Tensor = api.spmm(A.T if transposed else A, B)
        return C.contiguous()


def _spmm_backward(weight: Tensors, grad: torch.Tensor, matrix: str, transposed: bool) -> torch.Tensor:
    return _spmm(weight, grad, matrix, not transposed)


def _dense(weight: Tensors, matrix: str) -> torch.Tensor:
    return array_to_torch(weight_of(weight, matrix).matrix.to_dense())


for _device in DEVICES:
    LIBRARY.impl("linear", _linear, _device)
    LIBRARY.impl("linear_backward", _linear_backward, _device)
    LIBRARY.impl("spmm", _spmm, _device)
    LIBRARY.impl("spmm_backward", _spmm_backward, _device)
    LIBRARY.impl("dense", _dense, _device)


# ------------------------------------------------------------------ shapes and types, for compilers and the meta device


def _extents(matrix: str, transposed: bool) -> tuple[int, int]:
    M, K = parse(matrix).shape
    return (K, M) if transposed else (M, K)


def _same_device(name: str, x: torch.Tensor, weight: Tensors, matrix: str, bias: torch.Tensor | None = None) -> None:
    """UsageError for operands on several devices; a weight on the meta device would give a result of noise."""
    for what, t in (("the matrix", weight[parse(matrix).values]), ("bias", bias)):
        if t is not None and t.device != x.device:
            raise UsageError(f"expected operands on one device, got {name} on {x.device}, {what} on {t.device}")


def _result(weight: Tensors, matrix: str, x: torch.Tensor) -> torch.dtype:
    values = weight[parse(matrix).values]
    dtype: torch.dtype = getattr(torch, result_dtype(name_of(values.dtype), name_of(x.dtype)))
    return dtype


def _fake_linear(
    x: torch.Tensor, weight: Tensors, bias: torch.Tensor | None, matrix: str, transposed: bool
) -> torch.Tensor:
    _same_device("x", x, weight, matrix, bias)
    M, K = _extents(matrix, transposed)
    torch._check(x.dim() > 0, lambda: f"x: expected shape [.., {K}], got no dimension")
    torch._check(
        x.shape[-1] == K, lambda: f"x: expected shape [.., {K}], the columns of W {(M, K)} last, got {x.shape}"
    )
    dtype = _result(weight, matrix, x)
    if bias is not None:
        other = other_dtype(x.dtype, name_of(weight[parse(matrix).values].dtype), bias.dtype)
        torch._check(not other, lambda: other)
        torch._check(
            bias.dim() == 1 and bias.shape[0] == M, lambda: f"bias: expected shape [{M}], got {tuple(bias.shape)}"
        )
    return x.new_empty((*x.shape[:-1], M), dtype=dtype)


def _fake_linear_backward(grad: torch.Tensor, weight: Tensors, matrix: str, transposed: bool) -> torch.Tensor:
    _same_device("grad", grad, weight, matrix)
    return grad.new_empty((*grad.shape[:-1], _extents(matrix, transposed)[1]), dtype=_result(weight, matrix, grad))


def _fake_spmm(weight: Tensors, B: torch.Tensor, matrix: str, transposed: bool) -> torch.Tensor:
    _same_device("B", B, weight, matrix)
    M, K = _extents(matrix, transposed)
    torch._check(B.dim() in (1, 2), lambda: f"B: expected shape [{K}, N] or [{K}], got {tuple(B.shape)}")
    torch._check(B.shape[0] == K, lambda: f"B: expected {K} rows, the columns of A {(M, K)}, got {tuple(B.shape)}")
    return B.new_empty((M, *B.shape[1:]), dtype=_result(weight, matrix, B))


def _fake_spmm_backward(weight: Tensors, grad: torch.Tensor, matrix: str, transposed: bool) -> torch.Tensor:
    _same_device("grad", grad, weight, matrix)
    rows = _extents(matrix, transposed)[1]
    return grad.new_empty((rows, *grad.shape[1:]), dtype=_result(weight, matrix, grad))


def _fake_dense(weight: Tensors, matrix: str) -> torch.Tensor:
    d = parse(matrix)
    return weight[d.values].new_empty(d.shape)


torch.library.register_fake("spformat::linear", _fake_linear, lib=LIBRARY)
torch.library.register_fake("spformat::linear_backward", _fake_linear_backward, lib=LIBRARY)
torch.library.register_fake("spformat::spmm", _fake_spmm, lib=LIBRARY)
torch.library.register_fake("spformat::spmm_backward", _fake_spmm_backward, lib=LIBRARY)
torch.library.register_fake("spformat::dense", _fake_dense, lib=LIBRARY)


# ------------------------------------------------------------------ gradients

_VALUES = (
    "a tensor of the weight requires a gradient, and gradients of sparse values (the SDDMM of dY and X) are not there "
    "yet: use requires_grad_(False), or train an adapter beside the weight"
)
_TRANSFORMED = (
    "spformat::{name} has reverse-mode gradients only, by backward() and torch.autograd.grad: forward mode (jvp) and "
    "torch.func.grad do not pass through it; give detached operands, or densify the layer (spformat.torch.densify)"
)
_TWICE = (
    "the second derivative of spformat::{name} is not there: call backward without create_graph=True, or densify the "
    "layer (spformat.torch.densify)"
)


def _refuse_values(weight: Tensors) -> None:
    if any(t.requires_grad for t in weight):
        raise UsageError(_VALUES)


def _refuse_transformed(name: str, args: Sequence[Any]) -> None:
    """UsageError for operands with a tangent, or that torch.func differentiates: the operators would lose both.

    Autograd comes to an operator once for each transformation around it, the innermost first.
    """
    forward = forward_ad._current_level >= 0
    interpreter = torch._C._functorch.peek_interpreter_stack()
    reverse = interpreter is not None and interpreter.key() == torch._C._functorch.TransformType.Grad
    if not forward and not reverse:
        return
    for given in args:
        for t in given if isinstance(given, list | tuple) else [given]:
            if isinstance(t, torch.Tensor) and (
                (reverse and t.requires_grad) or (forward and forward_ad.unpack_dual(t).tangent is not None)
            ):
                raise UsageError(_TRANSFORMED.format(name=name))


def _linear_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, weight, _, ctx.matrix, ctx.transposed = inputs
    _refuse_values(weight)
    ctx.save_for_backward(*weight)


def _linear_gradient(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    dx = dbias = None
    weight = ctx.saved_tensors  # read once, as activation checkpointing demands
    if ctx.needs_input_grad[0]:
        dx = torch.ops.spformat.linear_backward(grad, weight, ctx.matrix, ctx.transposed)
    if ctx.needs_input_grad[2]:
        dbias = grad.sum(dim=tuple(range(grad.dim() - 1))) if grad.dim() > 1 else grad
    return dx, [None] * len(weight), dbias, None, None


def _spmm_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    weight, _, ctx.matrix, ctx.transposed = inputs
    _refuse_values(weight)
    ctx.save_for_backward(*weight)


def _spmm_gradient(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    weight = ctx.saved_tensors  # read once, as activation checkpointing demands
    dB = torch.ops.spformat.spmm_backward(weight, grad, ctx.matrix, ctx.transposed)
    return [None] * len(weight), dB, None, None


def _refuse_twice(name: str) -> Any:
    def refuse(ctx: Any, *_: Any) -> None:
        raise UsageError(_TWICE.format(name=name))

    return refuse


torch.library.register_autograd("spformat::linear", _linear_gradient, setup_context=_linear_context, lib=LIBRARY)
torch.library.register_autograd("spformat::spmm", _spmm_gradient, setup_context=_spmm_context, lib=LIBRARY)
torch.library.register_autograd("spformat::linear_backward", _refuse_twice("linear"), lib=LIBRARY)
torch.library.register_autograd("spformat::spmm_backward", _refuse_twice("spmm"), lib=LIBRARY)


# ------------------------------------------------------------------ autocast


def _cast(x: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    wide = x is None or x.dtype is torch.float64 or not x.is_floating_point()
    return x if wide or x is None else x.to(dtype)


def _operand_dtype(values: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    """The dtype of dense operands under autocast: that of the weight, unless its values have one byte (int8, float8),
    which operands cannot be rounded to; then that of autocast."""
    return values if values.itemsize > 1 else wanted


def _under_autocast(device: str) -> None:
    """Dense operands take ``_operand_dtype``; the weight is never cast; the result has the dtype of autocast."""

    def linear(
        x: torch.Tensor, weight: Tensors, bias: torch.Tensor | None, matrix: str, transposed: bool
    ) -> torch.Tensor:
        wanted = torch.get_autocast_dtype(device)
        own = _operand_dtype(weight[parse(matrix).values].dtype, wanted)
        with torch.autocast(device, enabled=False):
            y = torch.ops.spformat.linear(_cast(x, own), weight, _cast(bias, own), matrix, transposed)
            return _cast(y, wanted)

    def spmm(weight: Tensors, B: torch.Tensor, matrix: str, transposed: bool) -> torch.Tensor:
        wanted = torch.get_autocast_dtype(device)
        own = _operand_dtype(weight[parse(matrix).values].dtype, wanted)
        with torch.autocast(device, enabled=False):
            return _cast(torch.ops.spformat.spmm(weight, _cast(B, own), matrix, transposed), wanted)

    LIBRARY.impl("linear", linear, f"Autocast{device.upper()}")
    LIBRARY.impl("spmm", spmm, f"Autocast{device.upper()}")


for _device in DEVICES:
    _under_autocast(_device.lower())


# ------------------------------------------------------------------ vmap


def _only_dense(name: str, other: str, weight_dims: Sequence[int | None], other_dim: int | None) -> None:
    if other_dim is not None or any(d is not None for d in weight_dims):
        raise UsageError(f"vmap over the weight or the {other} of spformat::{name} is not there: vmap over its dense "
                         "operand, or loop over the matrices")  # fmt: skip


def _batched_linear(
    info: Any, in_dims: Any, x: torch.Tensor, weight: Tensors, bias: torch.Tensor | None, matrix: str, transposed: bool
) -> tuple[torch.Tensor, int]:
    _only_dense("linear", "bias", in_dims[1], in_dims[2])
    return torch.ops.spformat.linear(x.movedim(in_dims[0], 0), weight, bias, matrix, transposed), 0


def _batched_linear_backward(
    info: Any, in_dims: Any, grad: torch.Tensor, weight: Tensors, matrix: str, transposed: bool
) -> tuple[torch.Tensor, int]:
    _only_dense("linear_backward", "weight", in_dims[1], None)
    return torch.ops.spformat.linear_backward(grad.movedim(in_dims[0], 0), weight, matrix, transposed), 0


def _batched_spmm(operator: Any) -> Any:
    def batched(
        info: Any, in_dims: Any, weight: Tensors, B: torch.Tensor, matrix: str, transposed: bool
    ) -> tuple[torch.Tensor, int]:
        """One product with the columns of all B side by side."""
        _only_dense("spmm", "weight", in_dims[0], None)
        B = B.movedim(in_dims[1], 1)  # [K, batch, ..]
        C = operator(weight, B.reshape(B.shape[0], -1), matrix, transposed)
        return C.reshape(C.shape[0], *B.shape[1:]), 1

    return batched


torch.library.register_vmap("spformat::linear", _batched_linear, lib=LIBRARY)
torch.library.register_vmap("spformat::linear_backward", _batched_linear_backward, lib=LIBRARY)
torch.library.register_vmap("spformat::spmm", _batched_spmm(torch.ops.spformat.spmm), lib=LIBRARY)
torch.library.register_vmap("spformat::spmm_backward", _batched_spmm(torch.ops.spformat.spmm_backward), lib=LIBRARY)
