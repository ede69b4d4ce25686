"""``SparseLinear``: ``torch.nn.Linear`` whose weight is a matrix of spformat."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd import forward_ad

from ..arrays.dtypes import VALUE_TYPES
from ..arrays.torch_tensors import array_to_torch
from ..errors import SpformatError, StructureError, UsageError
from ..formats import by_name
from ..formats.base import Format
from ..storage.descriptor import Record
from . import operators  # noqa: F401 - registers spformat::linear
from .conversion import cast, converted, current_weight, some_become_zero
from .description import Description, empty_tensors, parse
from .states import describe, refuse_in_plain_saving, require_fit, rounded
from .weights import Weight, forget, keep, name_of, require_dense, weight_of

_autocast_is_on = torch._C._is_any_autocast_enabled
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_HELD = ("_text", "_names", "_values_name", "is_frozen")
"""Attributes that say which tensors a layer holds."""
_ASSIGNED = (
    "the dense weight of a sparse layer is not assigned: use layer.fill(matrix) with a matrix of the same format and "
    "shape, or spformat.torch.densify(model) first"
)
_transformation, _tracing = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state


class WithoutWeights(OrderedDict[str, Any]):
    """A destination for ``state_dict`` in which layers need not write arrays that they would have to compute."""


class SparseLinear(torch.nn.Module):  # type: ignore[misc]
    """y = x W^T + bias with a sparse W [out_features, in_features]; x is [.., in_features].

    The tensors of the matrix are buffers named after the arrays of its format (``weight_data``, ``weight_indptr``, ..),
    so ``state_dict``, ``.to()``, deepcopy, pickle, DDP and FSDP treat them as they treat any buffer. They are validated
    before the first product, and again when they have changed. ``bias`` is a parameter, or None.

    Gradients flow to x and to the bias. The values have none: one that requires a gradient is refused.
    """

    has_own_weight = True
    """False for a layer that only holds the weights of others: a checkpoint does not have it."""

    def __init__(self, weight: Format, bias: torch.Tensor | None = None) -> None:
        """weight: a matrix [out_features, in_features] on any device; its memory is shared where it can be written.

        bias: [out_features] on the same device, in the dtype of the results; a Parameter is taken as it is.
        """
        super().__init__()
        if not isinstance(weight, Format):
            raise UsageError(
                f"weight: expected a matrix of spformat, got {type(weight).__name__}: use spformat.convert(weight, "
                "format), or SparseLinear.from_linear(linear, format)"
            )
        description = Description.of(weight.ensure_valid())
        with torch.inference_mode(False):  # where torch counts changes in place
            tensors = description.tensors(weight)
        names = (c.attribute for c in description.components)
        self._declare(description, dict(zip(names, tensors, strict=True)), bias)
        matrix = description.matrix(tensors).alias()  # of the same contents, so it is valid, too
        self._weight: Weight | None = keep(Weight(self._text, tensors, matrix), tensors[description.values])

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, format: str, *, prune: bool = False, sparsity: float | None = None, **params: Any
    ) -> SparseLinear:
        """The sparse layer with the weight and the bias of a dense one, on its device. The bias is shared.

        format: an id ("two-four"), or a text with params as the command takes it ("bsr:blocksize=32x32"); params: those
        of the format. prune: zero the smallest values where the weight does not fit the format; sparsity: the share to
        zero, for formats that leave it open. Without ``prune`` the weight must fit exactly: StructureError says where
        it does not. A weight that ``torch.nn.utils.prune`` masks is that of the next product. UsageError for a layer of
        another kind: the weight of transformers' Conv1D is W^T.
        """
        if not isinstance(linear, torch.nn.Linear | SparseLinear):
            raise UsageError(f"linear: expected a torch.nn.Linear, got {type(linear).__name__}")
        matrix = converted(current_weight(linear), format, prune=prune, sparsity=sparsity, **params)
        layer = cls(matrix, linear.bias)
        layer.training = linear.training
        return layer

    @classmethod
    def from_record(cls, record: Record, bias: torch.Tensor | None = None, device: Any = "meta") -> SparseLinear:
        """A layer for a sparse tensor of a file (``safe_open(path).info(name)``), without its contents.

        Its buffers have the shapes and dtypes of the file, uninitialised on ``device``; load a state dict or set the
        buffers before the first product. bias: as of the constructor, on any device.
        """
        layer = cls.__new__(cls)
        torch.nn.Module.__init__(layer)
        with torch.inference_mode(False):
            tensors = empty_tensors(record, device)
        layer._declare(Description.of(record), tensors, bias)
        return layer

    def _declare(
        self, description: Description, tensors: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> None:
        self.out_features, self.in_features = description.shape
        self.description = description
        self._use(description, tensors)
        if bias is not None and not isinstance(bias, torch.Tensor):
            got = f"{type(bias).__module__}.{type(bias).__name__}"
            raise UsageError(f"bias: expected a torch tensor [{self.out_features}] or None, got {got}")
        if bias is not None and tuple(bias.shape) != (self.out_features,):
            raise UsageError(f"bias: expected shape [{self.out_features}], got {list(bias.shape)}")
        if bias is not None and not isinstance(bias, torch.nn.Parameter):
            bias = torch.nn.Parameter(bias, requires_grad=bias.is_floating_point())
        self.register_parameter("bias", bias)
        self._weight = None

    def _use(self, description: Description, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take these tensors of a matrix as buffers. Operators get them with the text of ``description``."""
        self._text, self._names = description.text, tuple(tensors)
        self._values_name = self._names[description.values]
        self.is_frozen = description.order > 0
        for name, t in tensors.items():
            self.register_buffer(name, t, persistent=not self.is_frozen)

    def keep_in_order(self, matrix: Format, tensors: list[torch.Tensor]) -> None:
        """Hold the weight as tensors in the order of kernels and no longer as arrays: for ``freeze``.

        matrix: the weight, in kernel order (``Format.in_kernel_order``), in the memory of the tensors.
        """
        for name in self._names:
            del self._buffers[name]
            self._non_persistent_buffers_set.discard(name)
        description = dataclasses.replace(self.description, order=len(tensors))
        self._use(description, dict(zip((c.attribute for c in description.components), tensors, strict=True)))
        self._weight = keep(Weight(self._text, tensors, matrix), tensors[description.values])

    @property
    def has_buffers(self) -> bool:
        """Whether the tensors of the weight are buffers of this module, and no parametrization computes them."""
        return all(name in self._buffers for name in self._names)

    # ---------------------------------------------------------------- the product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [.., in_features] -> y [.., out_features]."""
        if not torch.compiler.is_compiling():
            try:
                bias = self._parameters["bias"]
            except KeyError:  # parametrized, or pruned by torch.nn.utils.prune
                bias = self.bias
            if self._is_ordinary(x, bias):
                weight = self._weight
                if weight is None or not weight.is_current(self._tensors()):
                    weight = self._validated()
                return weight.linear(x, bias)
            require_dense("x", x)
            return torch.ops.spformat.linear(x, self._tensors(), bias, self._text, False)
        return torch.ops.spformat.linear(x, [getattr(self, name) for name in self._names], self.bias, self._text, False)

    def _is_ordinary(self, x: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Whether the dispatcher would only call the kernel: nothing is recorded, cast, traced or transformed."""
        return (
            type(x) is torch.Tensor
            and not _function_modes()
            and not _dispatch_modes()
            and not _autocast_is_on()
            and not (torch.is_grad_enabled() and self._records(x, bias))
            and _transformation() is None
            and _tracing() is None
            and forward_ad._current_level < 0
            and x.layout is torch.strided
            and not x.is_neg()
            and not x.is_meta
        )

    def _records(self, x: torch.Tensor, bias: torch.Tensor | None) -> bool:
        return x.requires_grad or bool(bias is not None and bias.requires_grad) or self._values.requires_grad

    def _tensors(self) -> list[torch.Tensor]:
        buffers = self._buffers
        try:
            return [buffers[name] for name in self._names]
        except KeyError:  # a parametrization computes one
            return [getattr(self, name) for name in self._names]

    def _validated(self) -> Weight:
        """The validated matrix of the buffers. Those that were created in inference mode are replaced by copies."""
        for name, t in zip(self._names, self._tensors(), strict=True):
            if t.is_inference() and name in self._buffers:
                with torch.inference_mode(False):
                    self._buffers[name] = t.clone()
        self._weight = weight_of(self._tensors(), self._text)
        return self._weight

    def fill(self, matrix: Format) -> None:
        """Replace the contents, as those that ``from_record`` leaves open, by those of a matrix on any device.

        UsageError for a matrix of another format, shape or params, and for a frozen layer.
        """
        if self.is_frozen:
            raise UsageError("a frozen weight is not replaced: fill the layer first, then freeze")
        filled = SparseLinear(matrix)
        if filled.description != self.description:
            raise UsageError(f"expected a matrix {self._text}, got {filled._text}")
        for name in self._names:
            self._buffers[name] = filled._buffers[name]
        self._weight = filled._weight

    # ---------------------------------------------------------------- reading

    @property
    def matrix(self) -> Format:
        """The matrix, validated; its arrays share the memory of the buffers."""
        weight = self._weight
        if weight is None or not weight.is_current(self._tensors()):
            weight = self._validated()
        return weight.matrix

    def _traced_weight(self) -> torch.Tensor:
        """The dense weight in a graph."""
        return torch.ops.spformat.dense([getattr(self, name) for name in self._names], self._text)

    @property
    def weight(self) -> torch.Tensor:
        """The dense weight [out_features, in_features], a new tensor at every access."""
        if torch.compiler.is_compiling():
            return self._traced_weight()
        values = self._values
        if values.is_meta:
            return torch.empty(self.description.shape, dtype=values.dtype, device="meta")
        return array_to_torch(self.matrix.to_dense())

    @weight.setter
    def weight(self, _: Any) -> None:
        raise UsageError(_ASSIGNED)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """As of torch; one that is assigned as ``weight``, or that ``torch.nn.utils.prune`` makes of it, is refused."""
        if name in ("weight", "weight_orig"):
            raise UsageError(_ASSIGNED)
        super().register_parameter(name, param)

    @property
    def _values(self) -> torch.Tensor:
        name = self._values_name
        values: torch.Tensor = self._buffers[name] if name in self._buffers else getattr(self, name)
        return values

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self._values.dtype

    @property
    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of the matrix."""
        return sum(t.nbytes for t in self._tensors())

    def extra_repr(self) -> str:
        """Sizes, format with params, bytes beside those of the dense weight."""
        d, values = self.description, self._values
        dense = self.out_features * self.in_features * values.element_size()
        params = "".join(f", {key}={value}" for key, value in d.params)
        share = f" ({self.nbytes / dense:.0%} of dense)" if dense else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"format={d.format}{params}, dtype={name_of(values.dtype)}, bytes={self.nbytes:,}{share}"
            f"{', frozen' if self.is_frozen else ''}"
        )

    # ---------------------------------------------------------------- moving and storing

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__ | {"_weight": None}  # follows from the buffers; a copy has others
        if self.is_frozen:  # a copy is an ordinary layer
            plain = SparseLinear.__new__(SparseLinear)
            torch.nn.Module.__init__(plain)
            plain._use(self.description, self._arrays())
            state |= {key: vars(plain)[key] for key in (*_HELD, "_buffers", "_non_persistent_buffers_set")}
            if not self.has_own_weight:
                state["_non_persistent_buffers_set"] = set(plain._names)
        return state

    def _arrays(self) -> dict[str, torch.Tensor]:
        """Name -> tensor of each array of the format; of a frozen layer new ones."""
        with torch.inference_mode(False):
            tensors = self.description.tensors(self.matrix.restored())
        return dict(zip((c.attribute for c in self.description.components), tensors, strict=True))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        refuse_in_plain_saving()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        describe(destination, prefix, self.description)
        if self.is_frozen and not isinstance(destination, WithoutWeights):
            destination.update({prefix + name: t for name, t in self._arrays().items()})

    def _apply(self, fn: Any, recurse: bool = True) -> SparseLinear:
        before, old = self._tensors(), self._values
        moved = fn(torch.empty(0, dtype=old.dtype, device=old.device))
        dtype = moved.dtype
        if self.is_frozen and (dtype is not old.dtype or moved.device != old.device):
            raise UsageError(
                f"a frozen weight stays {name_of(old.dtype)} on {old.device}: move the model first, then freeze; "
                "a copy (copy.deepcopy) is not frozen"
            )
        if dtype is not old.dtype:
            self._require(dtype)
        with torch.inference_mode(False):  # where torch counts changes in place
            super()._apply(fn, recurse)
            for component, name, t in zip(parse(self._text).components, self._names, before, strict=True):
                if not component.is_values and name in self._buffers and self._buffers[name].dtype is not t.dtype:
                    self._buffers[name] = t.to(self._buffers[name].device)  # Module.type casts indices, too
            rounds = dtype is not old.dtype and not (old.is_meta or self._values.is_meta)
            if rounds and some_become_zero(*map(self.description.values_of, (before, self._tensors()))):
                matrix = cast(weight_of(before, self._text).matrix, dtype)
                where = self.device
                for name, t in zip(self._names, self.description.tensors(matrix), strict=True):
                    self._buffers[name] = t.to(where)
        return self

    def _require(self, dtype: torch.dtype) -> None:
        name = name_of(dtype)
        cls = by_name(self.description.format)
        if name not in VALUE_TYPES or name not in cls.value_dtypes:
            takes = ", ".join(cls.value_dtypes)
            raise StructureError(
                f"{cls.name}: values of dtype {name} are not representable; it takes {takes}. "
                "spformat.torch.densify(model) gives layers of any dtype",
                unit="dtype", found=name,
            )  # fmt: skip

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: Any,
        unexpected_keys: Any, error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Tensors of other lengths, of a matrix of the same description with other contents, replace the buffers.

        A state that says it is of another matrix, lengths that no such matrix has, and other lengths of some arrays
        only are an error here, and the layer stays as it is. Values of another dtype are rounded, as by ``.to(dtype)``.
        """
        if self.is_frozen:
            error_msgs.append(f"{prefix}weight: frozen weights are not loaded: load first, then freeze")
            return
        here = dict(zip(self._names, self._tensors(), strict=True))
        given = {name: state_dict[prefix + name] for name in here if prefix + name in state_dict}
        assign = local_metadata.get("assign_to_params_buffers", False)
        try:
            require_fit(self.description, here, given, local_metadata)
            other = rounded(self.description, here, given) if self.has_buffers and not assign else {}
        except SpformatError as e:
            error_msgs.append(f"{prefix}weight: {e}")
            return
        if other:
            self._buffers.update({name: t for name, t in other.items() if name not in given})
            given = {name: other[name] for name in given}
            state_dict = {**state_dict, **{prefix + name: t for name, t in given.items()}}
        for name, t in given.items():
            old = here[name]
            copied = assign or old.is_meta or not t.is_meta  # of others torch says that they have no contents
            if t.shape != old.shape and t.dim() == old.dim() and copied and name in self._buffers:
                with torch.inference_mode(False):
                    self._buffers[name] = torch.empty(t.shape, dtype=old.dtype, device=old.device)
        forget(here[self._values_name])  # for torch.__future__.set_swap_module_params_on_conversion
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
