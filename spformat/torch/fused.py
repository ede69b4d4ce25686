"""Linear layers of one input as one product: q, k and v of an attention, gate and up of an MLP.

The rows of their weights lie below each other in one matrix, so that a decoder layer has four products and not seven,
each of which fills a GPU better. The modules that call ``q_proj``, ``k_proj`` and ``v_proj`` stay as they are: each of
these becomes a ``Projection``, which returns its columns of the common result. The first of them that is called with a
tensor computes it; the others take their columns, and after the last nothing is kept.

A result is never given for another input: it belongs to that tensor object, unchanged, to the contents of the weight
and to the modes of autograd and autocast. A projection that is called in another way computes the product again.

Where torch counts changes of the input, its count says whether it is unchanged. Tensors of inference mode have none,
and ``torch.compile`` shows none. There a result is given only between calls of the ``forward`` that was read by
``fuse_projections``, which has nothing between them that could change the input, and to projections without hooks.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch

from ..errors import UsageError
from ..formats.base import Format
from ..formats.vstack import row_range, vstack
from .module import SparseLinear, WithoutWeights
from .states import describe, refuse_in_plain_saving

_is_compiling, _is_dynamo = torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling
_autocast_is_on = torch._C._is_any_autocast_enabled
_tracing = torch._C._get_tracing_state
_grad_is_on, _inference_is_on = torch.is_grad_enabled, torch.is_inference_mode_enabled


class _Pending:
    """The results that projections have not taken yet: (input, state, their pieces), or None.

    The tuple is replaced as a whole, so that threads which share a model never read a mixture of two.
    """

    def __init__(self) -> None:
        self.value: tuple[torch.Tensor, Any, list[torch.Tensor | None]] | None = None


class FusedLinear(SparseLinear):
    """The rows of several ``SparseLinear`` layers as one weight; ``Projection`` modules give out the results.

    Its buffers are not part of a state dict: there the projections have the names and tensors of the layers.
    """

    has_own_weight = False

    def __init__(self, layers: Sequence[SparseLinear], caller: type | None = None) -> None:
        """layers: of one input, all with a bias or all without. UsageError where their weights cannot be one matrix.

        caller: the class whose ``forward`` calls the layers, in this order, and leaves the input as it is in between.
        """
        biases = [layer.bias for layer in layers]
        if any(b is None for b in biases) and any(b is not None for b in biases):
            raise UsageError("bias: expected one for all layers or for none")
        bias = None
        if biases[0] is not None:
            graded = {b.requires_grad for b in biases}
            if len(graded) > 1:
                raise UsageError("bias: expected that all require a gradient or none")
            with torch.inference_mode(False), torch.no_grad():
                bias = torch.nn.Parameter(torch.cat(biases), requires_grad=graded.pop())
        super().__init__(vstack([layer.matrix for layer in layers]), bias)
        self._non_persistent_buffers_set.update(self._names)
        self.sizes = [layer.out_features for layer in layers]
        self._pending = _Pending()
        self.caller = caller

    def piece(self, projection: Projection, x: torch.Tensor) -> torch.Tensor:
        """Columns of the product that belong to a projection, [.., sizes[place]]: a view of the whole result."""
        place, (state, counted) = projection.place, self._state(x)
        keep = take = counted
        if not counted and self._is_called_as_read(projection):
            keep, take = place == 0, place > 0
        pending = self._pending.value
        if take and pending is not None and pending[0] is x and pending[1] == state:
            pieces = pending[2]
            y = pieces[place]
            if y is not None:
                pieces[place] = None
                if all(piece is None for piece in pieces):
                    self._pending.value = None
                return y
        whole = self(x)
        # A view of several that one operation returns must not be changed in place while autograd records; a trace is
        # recorded again without gradients to check it, and has to be the same. vmap knows the other function alone.
        graded = whole.requires_grad or (not _is_compiling() and _tracing() is not None)
        parts = torch.unsafe_split_with_sizes if graded else torch.split_with_sizes
        pieces = list(parts(whole, self.sizes, -1))
        y, pieces[place] = pieces[place], None
        self._pending.value = (x, state, pieces) if keep and len(pieces) > 1 else None
        return y

    def _state(self, x: torch.Tensor) -> tuple[Any, bool]:
        """What a result depends on beside the identity of x, and whether it has the counts of all changes: then equal
        states give equal results."""
        device, tensors = x.device.type, self._tensors()
        if _is_dynamo():
            autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
            return (_grad_is_on(), autocast), False
        modes = _grad_is_on(), _inference_is_on(), _autocast_is_on() and torch.get_autocast_dtype(device)
        bias = self._parameters.get("bias")
        if bias is not None:
            tensors.append(bias)
        versions = [_version(t) for t in (x, *tensors)]
        places = None if _is_compiling() else [t.data_ptr() for t in tensors]  # torch.export has tensors without memory
        return (modes, versions, places), None not in versions

    def _is_called_as_read(self, projection: Projection) -> bool:
        """Whether the ``forward`` that was read calls the projection, with no other code in between."""
        if _is_dynamo():  # shows no callers
            return not (_has_hooks(projection) or _has_hooks(self))
        frame: FrameType | None = sys._getframe(2)  # that of projection.forward
        while frame is not None and frame.f_code in _CALLING:
            frame = frame.f_back
        return frame is not None and frame.f_code is _code_of(self.caller) and not _has_hooks(self)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_pending": _Pending()}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Nothing: the projections write what they stand for."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the projections refuse."""


def _version(t: torch.Tensor) -> int | None:
    """How often torch has counted a change; None for a tensor of inference mode, where it does not count."""
    try:
        version: int = t._version
    except RuntimeError:
        return None
    return version


def _has_hooks(m: torch.nn.Module) -> bool:
    return bool(m._forward_hooks or m._forward_pre_hooks)


@functools.lru_cache(maxsize=1024)
def _code_of(cls: Any) -> CodeType | None:
    """The code of the ``forward`` of a class, as it was when a result was first asked for."""
    code: CodeType | None = getattr(inspect.unwrap(cls.forward), "__code__", None) if cls is not None else None
    return code


class Projection(SparseLinear):
    """One of the layers of a ``FusedLinear``: a ``SparseLinear`` whose weight is some rows of a larger one.

    It has no buffers and no parameters of its own; ``weight``, ``matrix``, ``bias`` and the entries in a state dict are
    those of its rows.
    """

    def __init__(self, layer: SparseLinear, fused: FusedLinear, place: int) -> None:
        """layer: the one that it stands for, number ``place`` of those of ``fused``."""
        torch.nn.Module.__init__(self)
        self.out_features, self.in_features = layer.out_features, layer.in_features
        self.description, self.training = layer.description, layer.training
        self._names, self._weight, self.is_frozen = (
            tuple(c.attribute for c in layer.description.components),
            None,
            False,
        )
        self.place, self.first_row = place, sum(fused.sizes[:place])
        self.__dict__["_fused"] = fused  # not registered: it is a module of the parent already

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [.., in_features] -> y [.., out_features], a view whose rows have gaps between them."""
        fused: FusedLinear = self._fused
        return fused.piece(self, x)

    @property
    def matrix(self) -> Format:
        """The rows of this layer, which share the memory of the fused weight where they can."""
        whole: Format = self._fused.matrix
        return row_range(whole, self.first_row, self.first_row + self.out_features)

    def _traced_weight(self) -> torch.Tensor:
        weight: torch.Tensor = self._fused._traced_weight()
        return weight[self.first_row : self.first_row + self.out_features]

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias of this layer, a view; None if there is none."""
        whole = self._fused.bias
        return None if whole is None else whole[self.first_row : self.first_row + self.out_features]

    @property
    def _values(self) -> torch.Tensor:
        return self._fused._values

    @property
    def nbytes(self) -> int:
        """Bytes of the rows of this layer."""
        return self.matrix.nbytes

    @property
    def has_buffers(self) -> bool:
        """False."""
        return False

    def _tensors(self) -> list[torch.Tensor]:
        return self.description.tensors(self.matrix)

    def _apply(self, fn: Any, recurse: bool = True) -> Projection:
        return self  # the fused layer moves

    def fill(self, matrix: Format) -> None:
        """Refused: UsageError."""
        raise UsageError("the weight of a fused projection cannot be replaced: fill the layer, then fuse_projections")

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        refuse_in_plain_saving()
        bias = self.bias
        if bias is not None:
            destination[prefix + "bias"] = bias if keep_vars else bias.detach()
        describe(destination, prefix, self.description)
        if isinstance(destination, WithoutWeights):
            return
        for component, t in zip(self.description.components, self._tensors(), strict=True):
            destination[prefix + component.attribute] = t

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: Any,
        unexpected_keys: Any, error_msgs: list[str],
    ) -> None:  # fmt: skip
        if any(name.startswith(prefix) for name in state_dict):
            error_msgs.append(f"{prefix}weight: fused projections are not loaded: load first, then fuse_projections")


_CALLING = frozenset(
    f.__code__ for f in (Projection.forward, torch.nn.Module._call_impl, torch.nn.Module._wrapped_call_impl)
)
"""What runs between a ``forward`` that calls a projection without hooks and ``FusedLinear.piece``."""
