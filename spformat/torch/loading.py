"""A packed checkpoint into a model: each tensor goes to its place as it is stored, and no dense copy is made."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ..arrays.torch_tensors import array_to_torch
from ..checkpoint.source import Source, open_source
from ..errors import UsageError, printable
from ..formats.base import Format
from ..formats.dense import Dense
from ..formats.stack import Stack
from ..storage.descriptor import Record
from ..storage.files import Path
from .conversion import WITHOUT_SHAPE
from .models import is_linear, refuse_plain_saving, replace, require_module
from .module import SparseLinear

NAMED = 5
"""Most names that an error lists of one kind."""


def load_into(model: torch.nn.Module, path: Path, device: Any = None) -> dict[str, SparseLinear]:
    """Fill a model with the tensors of a checkpoint; returns name -> layer for each that is sparse.

    path: a folder that ``spformat convert`` wrote, or a file; a dense checkpoint is read, too. The model may be on the
    meta device, so that weights of its own never exist. A stack of matrices [E, M, K] (expert weights) becomes dense,
    because no layer multiplies with it. Linear layers whose weights are sparse in the file become
    ``SparseLinear``; every other tensor replaces the parameter or buffer of its name, with the dtype of the file; a
    parameter of integers requires no gradient.
    device: where all tensors go ("cuda", "cuda:1", ..). Default: where the first parameter of the model is, or the host
    for a model on the meta device.

    Tensors are read shard by shard, checked and validated as by ``load``; beside those in place there are only the few
    that are being read. Names and shapes are compared first, and nothing is changed if they differ; contents are
    checked as they come, and an error of one tensor leaves those before it in place. Raises UsageError that names
    tensors which one side lacks, those that do not fit, and buffers that would stay on the meta device; and the errors
    of ``safe_open``.
    """
    require_module(model)
    source, places = open_source(path), Places(model)
    problems = places.problems(source)
    if problems:
        raise UsageError("; ".join(problems), path=source.path)
    where = _device(model, device)
    with torch.inference_mode(False), torch.no_grad():
        for name, x in source.tensors(source.records, where):
            if isinstance(x, Stack):
                places.put(name, array_to_torch(x.to_dense()))
            elif isinstance(x, Format) and not isinstance(x, Dense):
                places.put_sparse(name, x)
            else:
                places.put(name, array_to_torch(x.data if isinstance(x, Dense) else x))
        places.move_rest(where)
    if places.sparse:
        refuse_plain_saving(model)
    return places.sparse


def is_sparse(record: Record) -> bool:
    """Whether a tensor of a file becomes the weight of a ``SparseLinear``: a matrix in a format other than dense."""
    return record.format not in (None, Dense, Stack)


def _device(model: torch.nn.Module, device: Any) -> str:
    if device is None:
        first = next(model.parameters(), None)
        device = "cpu" if first is None or first.is_meta else first.device
    chosen = torch.device(device)
    if chosen.type == "cuda" and chosen.index is None:
        return f"cuda:{torch.cuda.current_device()}"
    return str(chosen)


class Places:
    """The places of a model that a checkpoint fills: name -> (module, attribute), under every name."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.sparse: dict[str, SparseLinear] = {}
        self._at: dict[str, tuple[torch.nn.Module, str]] = {}
        self._layers: dict[str, torch.nn.Module] = {}
        self._replaced: dict[int, SparseLinear] = {}
        self._rest: list[tuple[str, torch.nn.Module, str]] = []
        for prefix, module in model.named_modules(remove_duplicate=False):
            if isinstance(module, SparseLinear) and not module.has_own_weight:
                raise UsageError(f"{prefix}: fused projections are not loaded: load first, then fuse_projections")
            dot = f"{prefix}." if prefix else ""
            if isinstance(module, SparseLinear) or is_linear(module):
                self._layers[f"{dot}weight"] = module
            for leaf, t in [*module._parameters.items(), *module._buffers.items()]:
                if t is None or (isinstance(module, SparseLinear) and leaf != "bias"):
                    continue
                if leaf in module._non_persistent_buffers_set:
                    self._rest.append((dot + leaf, module, leaf))
                else:
                    self._at[dot + leaf] = module, leaf
        self._tied: dict[int, list[str]] = {}
        for name in self._at:
            self._tied.setdefault(id(self._tensor(name)), []).append(name)

    def _tensor(self, name: str) -> torch.Tensor:
        module, leaf = self._at[name]
        t: torch.Tensor = module._parameters.get(leaf)
        return module._buffers[leaf] if t is None else t

    def problems(self, source: Source) -> list[str]:
        """What keeps a checkpoint from filling the model: one text for each kind of difference."""
        records = {name: record for name, (_, record, _) in source.records.items()}
        wanted = {*self._at, *(n for n, layer in self._layers.items() if isinstance(layer, SparseLinear))}
        texts = _listed("the checkpoint has tensors that the model lacks", [n for n in records if n not in wanted])
        dense = {n for n, record in records.items() if n in self._at and not is_sparse(record)}
        filled = {other for n in dense for other in self._tied[id(self._tensor(n))]} | records.keys()
        given = {id(self._layers[n]) for n in records if n in self._layers}  # a layer may stand at several places
        filled |= {n for n, layer in self._layers.items() if id(layer) in given}
        texts += _listed("the model has tensors that the checkpoint lacks", sorted(wanted - filled))
        misfits = [text for n, record in records.items() if n in wanted for text in self._misfit(n, record)]
        texts += _listed("tensors that do not fit", misfits)
        meta = [name for name, module, leaf in self._rest if module._buffers[leaf].is_meta]
        return texts + _listed("buffers on the meta device that no checkpoint holds (create the model with them, as "
                               "transformers' from_pretrained does)", meta)  # fmt: skip

    def _misfit(self, name: str, record: Record) -> list[str]:
        layer = self._layers.get(name)
        if name in self._at and is_lazy(self._tensor(name)):
            return [f"{name} (it {WITHOUT_SHAPE})"]
        if record.format is not None and is_sparse(record):
            if layer is None:
                return [f"{name} (the weight of no linear layer, and {record.format.name} in the checkpoint)"]
            if layer is self.model:
                return [f"{name} ({record.format.name} in the checkpoint, and the model itself is a linear layer: use "
                        "SparseLinear(matrix, bias))"]  # fmt: skip
            shape: tuple[int, ...] = (layer.out_features, layer.in_features)
        elif isinstance(layer, SparseLinear):
            return [f"{name} (dense in the checkpoint, sparse in the model: densify it first)"]
        else:
            shape = tuple(self._tensor(name).shape)
        return [] if shape == record.shape else [f"{name} ({list(record.shape)}, the model has {list(shape)})"]

    def put_sparse(self, name: str, matrix: Format) -> None:
        """Replace the linear layer of a weight, under every name that it has."""
        old = self._layers[name]
        layer = self._replaced[id(old)] = SparseLinear(matrix, old.bias)
        for other, module in self._layers.items():
            if module is old:
                self.sparse[other.removesuffix("weight").removesuffix(".")] = layer
                replace(self.model, other.removesuffix("weight").removesuffix("."), layer)

    def put(self, name: str, x: torch.Tensor) -> None:
        """Replace a parameter or buffer, and those that are the same tensor; a parameter off the meta device keeps its
        identity, for an optimizer may know it. One that becomes integers requires no gradient any more."""
        old = self._tensor(name)
        is_parameter = isinstance(old, torch.nn.Parameter)
        graded = old.requires_grad and (x.is_floating_point() or x.is_complex())
        if is_parameter and torch._has_compatible_shallow_copy_type(old, x):
            old.requires_grad_(graded)  # before: torch takes no integers where a gradient is required
            old.data = x
            return
        new = torch.nn.Parameter(x, requires_grad=graded) if is_parameter else x
        for other in self._tied[id(old)]:
            module, leaf = self._at[other]
            for holder in {id(m): m for m in (module, self._replaced.get(id(module), module))}.values():
                if leaf in holder._parameters or leaf in holder._buffers:
                    setattr(holder, leaf, new)
        self._tied[id(new)] = self._tied[id(old)]

    def move_rest(self, device: str) -> None:
        """Move the buffers that no checkpoint holds."""
        for _, module, leaf in self._rest:
            module._buffers[leaf] = module._buffers[leaf].to(device)


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return [f"{what}: {', '.join(printable(n) for n in names[:NAMED])}{more}"]
