"""Matrices over tensors: validated once, and multiplied with little work on the host.

``weight_of(tensors, text)`` is the validated matrix of some tensors. It is kept with the tensor of the values, and
recognised by the address, the version, the length and the dtype of every tensor, so that a change in place,
``load_state_dict``, ``.to()`` or a view as another dtype lead to a new matrix, which is validated again. Nothing that
has not been scanned reaches a kernel.

On a device, a product with an ``x`` that is seen again costs the host a few comparisons, the memory of the result and
the launch. Streams, memory and graphs are those of decision 0019: torch's current stream and allocator, and what is
prepared while a graph is captured belongs to that graph.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..arrays.dtypes import VALUE_TYPES, dtype_name
from ..arrays.torch_tensors import TorchStream, array_to_torch, check_operands, torch_to_array
from ..backends.cuda.runtime.addresses import PERIOD, alignment
from ..backends.cuda.runtime.launch import Operands
from ..backends.cuda.runtime.scratch import PER_THREAD
from ..dispatch import api
from ..errors import UsageError
from ..formats.base import Format
from ..formats.transposed import Transposed
from ..products.problem import COL, ROW, result_dtype
from .description import parse

SHAPES = 256
"""Shapes of x whose plans a weight keeps at hand; all of them stay cached with the matrix."""
OPERANDS = 64
"""Streams and alignments of the operands for which a product keeps launches, and addresses where these cannot be
replaced in the launches."""
MAX_ROWS = 2**31 - 2**16
"""Most rows of x in one call, as kernels count in 32 bits."""

SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)

current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""torch's current stream of a device, as an int. A torch without CUDA has no such function, and no such call."""

_weights = WeakTensorKeyDictionary()
"""Tensor of the values -> ``Weight``. An entry disappears with its tensor."""
_by_address: weakref.WeakValueDictionary[int, Weight] = weakref.WeakValueDictionary()
"""The same by the address of the values, for aliases of the tensor that graphs and transformations make. A weight keeps
its memory, so the address is that of no other tensor."""


def weight_of(tensors: Sequence[torch.Tensor], text: str) -> Weight:
    """The matrix that the tensors hold, validated; the same object as before while no tensor has changed.

    text: ``Description.text``. Raises the errors of the format for contents that are not valid, UsageError for tensors
    whose changes torch does not count.
    """
    description = parse(text)
    if len(tensors) != len(description.components):
        description.matrix(tensors)  # raises the error that says which tensors are expected
    values = tensors[description.values]
    weight: Weight | None = _weights.get(values)
    if weight is None:
        weight = _by_address.get(values.data_ptr())
        if weight is not None and weight.text == text and weight.is_current(tensors):
            _weights[values] = weight
    if weight is None or weight.text != text or not weight.is_current(tensors):
        weight = keep(Weight(text, tensors, description.matrix(tensors).validate()), values)
    return weight


def keep(weight: Weight, values: torch.Tensor) -> Weight:
    """Remember a validated matrix with the tensor of its values."""
    _weights[values] = _by_address[values.data_ptr()] = weight
    return weight


def forget(values: torch.Tensor) -> None:
    """Remember no matrix with a tensor: torch exchanges the contents of tensors only if nothing refers to them."""
    _weights.pop(values, None)


class Weight:
    """A validated matrix that shares the memory of tensors, and its products.

    It does not refer to the tensor objects, but its arrays keep their memory from being given to others.
    """

    __slots__ = ("__weakref__", "_device", "_on_device", "_products", "_seen", "matrix", "text")

    def __init__(self, text: str, tensors: Sequence[torch.Tensor], matrix: Format) -> None:
        if any(t.is_inference() for t in tensors):
            raise UsageError(
                "the tensors of a matrix were created in torch.inference_mode(), where torch does not count changes: "
                "create them outside of it, or give their .clone() from outside"
            )
        self.text, self.matrix = text, matrix
        matrix.keep_arrays()  # they are the tensors: nothing would be freed, and ``_by_address`` relies on them
        self._seen = [(t.data_ptr(), t._version, t.numel(), t.dtype) for t in tensors]
        self._products: dict[Any, Product] = {}
        self._device, self._on_device = tensors[0].get_device(), tensors[0].is_cuda

    def is_current(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the tensors are those of this matrix, with the contents that were validated."""
        try:
            return [(t.data_ptr(), t._version, t.numel(), t.dtype) for t in tensors] == self._seen
        except RuntimeError:  # a tensor of torch.inference_mode() has no version
            return False

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None, transposed: bool = False) -> torch.Tensor:
        """x @ A^T + bias, or x @ A + bias if ``transposed``, for x [.., K]: a new row-major tensor [.., M].

        x and bias are ordinary tensors on the device of the matrix, and no gradient is recorded.
        """
        if self._on_device and x.get_device() == self._device and x.is_contiguous():
            key = x.shape, x.dtype, bias is None, transposed, api.default_backend()
            product = self._products.get(key) or self._product(key, x, bias)
            if product is not None and (bias is None or product.takes(bias)):
                return product(x, bias)
        return self._by_arrays(x, bias, transposed)

    def _by_arrays(self, x: torch.Tensor, bias: torch.Tensor | None, transposed: bool) -> torch.Tensor:
        A = self.matrix.T if transposed else self.matrix
        other = "" if bias is None else other_dtype(x.dtype, dtype_name(self.matrix.dtype), bias.dtype)
        if other:
            raise TypeError(other)
        y: torch.Tensor
        if not (self._on_device or x.is_cuda or (bias is not None and bias.is_cuda)):
            # FSDP frees gathered parameters by resizing their memory, and what numpy has shared has a fixed size.
            b = None if bias is None else torch_to_array(bias.detach().clone())
            y = array_to_torch(api.linear(torch_to_array(x), A, b))
            return y
        with torch.no_grad():
            y = api.linear(with_lines(x) if x.is_cuda else x, A, None if bias is None else bias.resolve_neg())
            return y.contiguous()

    def _product(self, key: Any, x: torch.Tensor, bias: torch.Tensor | None) -> Product | None:
        """The product for operands like these; None if they are not for the short way."""
        shape, _, without_bias, transposed, _ = key
        M, K = self.matrix.shape[::-1] if transposed else self.matrix.shape
        rows = x.numel() // K if K else 0
        if not shape or shape[-1] != K or M < 2 or K < 2 or not 0 < rows < MAX_ROWS:
            return None
        product = Product(self.matrix.T if transposed else self.matrix, x, rows, not without_bias)
        if product.ready is None:
            return None
        if len(self._products) >= SHAPES:
            self._products.clear()
        self._products[key] = product
        return product


class Product:
    """x @ A^T + bias for contiguous x of one shape and dtype on a device: a plan, and its launches for known memory."""

    __slots__ = ("_calls", "_device", "_dtype", "_moving", "_rows", "_same", "_several", "_shape", "_strides", "ready")
    ready: Any
    """``Plan.ready``; None if the plan takes only arrays."""

    def __init__(self, A: Format | Transposed, x: torch.Tensor, rows: int, with_bias: bool) -> None:
        b_dtype = name_of(x.dtype)
        out = result_dtype(dtype_name((A.matrix if isinstance(A, Transposed) else A).dtype), b_dtype)
        (M, K), layout = A.shape, COL if rows > 1 else ROW  # the rows of x are the columns of B
        with TorchStream(x):
            plan = api.plan(
                A, rows, b_dtype=b_dtype, b_layout=layout, out_dtype=out, out_layout=layout, epilogue=with_bias
            )
        self.ready = plan.ready
        self._shape, self._rows, self._device = (*x.shape[:-1], M), rows, x.get_device()
        self._strides = (K, M) if rows > 1 else (1, 1)
        self._dtype = getattr(torch, out)
        self._same = self._dtype is x.dtype
        self._several = torch.cuda.device_count() > 1
        self._moving: dict[Any, Any] = {}  # stream and alignment -> the product at any addresses
        self._calls: dict[tuple[int, int, int, int], Any] = {}  # addresses -> a product that cannot be moved

    def takes(self, bias: torch.Tensor) -> bool:
        """Whether the bias is [M] in the dtype of the result, on its device."""
        fits = bias.dtype is self._dtype and bias.numel() == self._shape[-1] and bias.get_device() == self._device
        return fits and bias.dim() == 1 and bias.is_contiguous() and not bias.is_neg()

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._several and torch.cuda.current_device() != self._device:
            with torch.cuda.device(self._device):
                return self(x, bias)
        y: torch.Tensor = x.new_empty(self._shape) if self._same else x.new_empty(self._shape, dtype=self._dtype)
        b, c, bias_at, stream = at = (
            x.data_ptr(), y.data_ptr(), 0 if bias is None else bias.data_ptr(), current_stream(self._device)
        )  # fmt: skip
        # Memory as allocators give it has one alignment, so that one stream mostly means one entry.
        moving = self._moving.get(stream if (b | c | bias_at) % PERIOD == 0 else alignment(*at))
        if moving is not None:
            moving((b, c, bias_at))
            return y
        call = self._calls.get(at)
        if call is None:
            self._first(x, bias, at)
        else:
            call()
        return y

    def _first(self, x: torch.Tensor, bias: torch.Tensor | None, at: tuple[int, int, int, int]) -> None:
        """The product for memory that no launches are prepared for."""
        b, c, bias_at, stream = at
        with torch.no_grad():  # autograd, which records above the operator, has not turned itself off
            check_operands(x=x, bias=bias)
        with TorchStream(x):
            call, repeatable, moving = self.ready(Operands(b, c, self._rows, *self._strides, stream, bias_at))
            call()
        if not repeatable or stream == PER_THREAD:  # the handle is that of another stream in another thread
            return
        kept, key, value = (self._calls, at, call) if moving is None else (self._moving, alignment(*at), moving)
        if len(kept) >= OPERANDS:
            kept.clear()
        kept[key] = value


def require_dense(name: str, x: Any, fix: str = "") -> None:
    """TypeError for an operand that is no tensor, of which torch prints all contents; UsageError for a sparse one."""
    if not torch.overrides.is_tensor_like(x):
        raise TypeError(f"{name}: expected a torch tensor, got {type(x).__module__}.{type(x).__name__}{fix}")
    if isinstance(x, torch.Tensor) and x.layout in SPARSE:
        raise UsageError(f"{name}: expected a dense tensor, got {x.layout}: give {name}.to_dense()")


def with_lines(x: torch.Tensor) -> torch.Tensor:
    """``x`` [.., K], or a copy in C order where its rows and its columns both have gaps between their elements.

    Kernels of a device address lines of consecutive elements. torch's products copy such operands, too; the gradient of
    a sum, one element expanded to a whole matrix, is the usual one.
    """
    if x.dim() > 2:
        return with_lines(x.reshape(-1, x.shape[-1])).view(x.shape)
    if x.dim() < 2:
        return x if x.is_contiguous() else x.contiguous()
    (rows, cols), (down, across) = x.shape, x.stride()
    row_major = (cols <= 1 or across == 1) and (rows <= 1 or down >= cols)
    column_major = (rows <= 1 or down == 1) and (cols <= 1 or across >= rows)
    return x if row_major or column_major else x.contiguous()


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@functools.lru_cache(maxsize=256)
def other_dtype(x: torch.dtype, W: str, bias: torch.dtype) -> str:
    """What an error says where a bias has not the dtype of the result; "" where it has, or x no dtype of values."""
    given, kept = name_of(x), name_of(bias)
    if given not in VALUE_TYPES or result_dtype(W, given) == kept:
        return ""
    if result_dtype(W, W) == kept:
        return f"x: expected dtype {W}, as W and bias have, got {given}: use x.to(torch.{W}), or a layer in {given}"
    return f"bias: expected dtype {result_dtype(W, given)}, that of y for W in {W} and x in {given}, got {kept}"
