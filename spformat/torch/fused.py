"""Linear layers of one input as one product: q, k and v of an attention, gate and up of an MLP.

The rows of their weights lie below each other in one matrix, so that a decoder layer has four products and not seven,
each of which fills a GPU better. The modules that call ``q_proj``, ``k_proj`` and ``v_proj`` stay as they are: each of
these becomes a ``Projection``, which returns its columns of the common result. The first of them that is called with a
tensor computes it; the others take their columns, and after the last nothing is kept.

A result is never given for another input: it belongs to that tensor object, unchanged, to the contents of the weight
and to the modes of autograd and autocast. A projection that is called in another way computes the product again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import UsageError
from ..formats.base import Format
from ..formats.vstack import row_range, vstack
from .module import SparseLinear, WithoutWeights
from .states import describe

_is_compiling = torch.compiler.is_compiling
_autocast_is_on = torch._C._is_any_autocast_enabled
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

    def __init__(self, layers: Sequence[SparseLinear]) -> None:
        """layers: of one input, all with a bias or all without. UsageError where their weights cannot be one matrix."""
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

    def piece(self, place: int, x: torch.Tensor) -> torch.Tensor:
        """Columns of the product that belong to layer ``place``, [.., sizes[place]]: a view of the whole result."""
        state, pending = self._state(x), self._pending.value
        if pending is not None and pending[0] is x and pending[1] == state:
            pieces = pending[2]
            y = pieces[place]
            if y is not None:
                pieces[place] = None
                if all(piece is None for piece in pieces):
                    self._pending.value = None
                return y
        whole = self(x)
        # A view of several that one operation returns must not be changed in place while autograd records.
        graded = whole.requires_grad and not _is_compiling()
        parts = torch.unsafe_split_with_sizes if graded else torch.split_with_sizes
        pieces = list(parts(whole, self.sizes, -1))
        y, pieces[place] = pieces[place], None
        self._pending.value = (x, state, pieces) if len(pieces) > 1 else None
        return y

    def _state(self, x: torch.Tensor) -> Any:
        """What a result depends on beside the identity of x; equal states give equal results. None in a compiler,
        which sees changes by itself."""
        if _is_compiling():
            return None
        bias, autocast = self._parameters.get("bias"), _autocast_is_on() and torch.get_autocast_dtype(x.device.type)
        try:
            contents = [(t._version, t.data_ptr()) for t in self._tensors()]
        except RuntimeError:  # buffers that were created in inference mode; the next product replaces them
            return object()
        bias_now = None if bias is None else (_version(bias), bias.data_ptr())
        return _version(x), _grad_is_on(), _inference_is_on(), autocast, contents, bias_now

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_pending": _Pending()}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Nothing: the projections write what they stand for."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the projections refuse."""


def _version(t: torch.Tensor) -> int:
    """How often torch has counted a change; 0 for a tensor of inference mode, where it does not count.

    Of an input nothing is lost: ``fuse_projections`` has read that nothing changes it between the calls.
    """
    try:
        version: int = t._version
    except RuntimeError:
        return 0
    return version


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
        return fused.piece(self.place, x)

    @property
    def matrix(self) -> Format:
        """The rows of this layer, which share the memory of the fused weight where they can."""
        whole: Format = self._fused.matrix
        return row_range(whole, self.first_row, self.first_row + self.out_features)

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
