"""``fuse_projections``: which layers of a model have one input, read from the code of the modules that call them."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..checkpoint.recipe import matcher
from ..errors import UsageError
from ..formats.vstack import check_vstack
from .fused import FusedLinear, Projection
from .models import replace, require_module
from .module import SparseLinear
from .reading import Call, Reader

NAMED = 5
"""Most reasons that an error lists."""


def fuse_projections(model: torch.nn.Module, modules: str = "*") -> dict[str, FusedLinear]:
    """Multiply once for ``SparseLinear`` layers of one input, as q, k and v, or gate and up; returns name -> fused.

    modules: a pattern over the names of the modules that call the layers ("model.layers.0.self_attn"), as rules have
    it; "re:.." is a regular expression.

    Layers of one module are fused if its ``forward`` calls each of them once, with the same variable, and if nothing
    between these calls could change it: no assignment, no call that gets the tensor or what shares memory with it, no
    ``with`` block. Attentions and MLPs of Llama, Mistral, Qwen and Gemma in transformers are such modules, and others
    that are written like them. They stay where they are and become ``Projection`` modules, whose results
    are columns of one product: not contiguous if there are several rows. The fused layer is a new module of their
    parent. Its weight is a new matrix; the memory of the old ones is given back if nobody else has it.

    Names in state dicts and in ``save_pretrained`` are as before; loading is refused, so load first. Raises UsageError
    if no such layers are there, or if some cannot be fused: other formats, params, dtypes or devices, a bias in some
    only, rows that the format cannot cut (32 for two-four), a layer with a ``forward`` of its own or at several places.
    The model is changed only if all can be.
    """
    require_module(model)
    pattern = matcher(modules)
    chosen = {name: m for name, m in model.named_modules() if pattern.search(name)}
    if not chosen:
        raise UsageError(f"modules {modules!r} matches none of the modules of {type(model).__name__}")
    places: dict[int, int] = {}
    for _, m in model.named_modules(remove_duplicate=False):
        places[id(m)] = places.get(id(m), 0) + 1
    groups: list[tuple[str, torch.nn.Module, tuple[str, ...]]] = []
    problems: list[str] = []
    for name, m in chosen.items():
        for children in _groups(m):
            problem = _problem(m, children, places)
            if problem:
                problems.append(f"{name or 'the model'}: {', '.join(children)}: {problem}")
            groups.append((name, m, children))
    if problems:
        more = f"; and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
        raise UsageError("; ".join(problems[:NAMED]) + more + '. Name others by modules="re:.."')
    if not groups:
        raise UsageError(_nothing(chosen))
    fused: dict[str, FusedLinear] = {}
    for name, m, children in groups:
        own = "fused_" + "_".join(children)
        fused[f"{name}.{own}" if name else own] = _fuse(model, name, m, children, own)
    return fused


def _fuse(model: torch.nn.Module, name: str, m: torch.nn.Module, children: tuple[str, ...], own: str) -> FusedLinear:
    layers = [getattr(m, child) for child in children]
    new = FusedLinear(layers, type(m))
    new.training = layers[0].training
    for place, (child, layer) in enumerate(zip(children, layers, strict=True)):
        replace(model, f"{name}.{child}" if name else child, Projection(layer, new, place))
    m.add_module(own, new)
    return new


def _groups(m: torch.nn.Module) -> Iterator[tuple[str, ...]]:
    """The names of sparse layers of a module that are fused with each other."""
    if "forward" in vars(m):
        return
    cls: Any = type(m)
    layers = frozenset(name for name, child in m._modules.items() if _leaves_its_input(child))
    for children in called_with_one_input(cls, layers):
        sparse = tuple(c for c in children if type(m._modules.get(c)) is SparseLinear)
        if len(sparse) > 1:
            yield sparse


def _leaves_its_input(layer: Any) -> bool:
    """Whether a module is known not to change what it is called with. Hooks on sparse layers are looked at in calls."""
    if type(layer) is torch.nn.Linear:
        return "forward" not in vars(layer) and not layer._forward_hooks and not layer._forward_pre_hooks
    return type(layer) is SparseLinear


def _problem(m: torch.nn.Module, children: tuple[str, ...], places: dict[int, int]) -> str:
    """Why layers of one input cannot be fused; "" if they can."""
    layers = [m._modules[c] for c in children]
    if any(places[id(layer)] > 1 for layer in layers):
        return "a layer has several places in the model"
    if any("forward" in vars(layer) for layer in layers):
        return "a layer has a forward of its own"
    if any(layer.device.type == "meta" for layer in layers):
        return "a layer is on the meta device"
    biases = [layer.bias for layer in layers]
    if len({b is None for b in biases}) > 1:
        return "some have a bias and some have none"
    if len({b.requires_grad for b in biases if b is not None}) > 1:
        return "some biases require a gradient and some do not"
    try:
        check_vstack([layer.matrix for layer in layers])
    except UsageError as e:
        return str(e.message)
    return ""


def _nothing(modules: dict[str, torch.nn.Module]) -> str:
    """Why no layers of some modules are fused."""
    sparse = {
        type(m).__name__: [c for c, layer in m._modules.items() if type(layer) is SparseLinear]
        for m in modules.values()
    }
    several = {cls: children for cls, children in sparse.items() if len(children) > 1}
    if not several:
        return "expected modules with several SparseLinear layers, got none: spformat.torch.sparsify or load first"
    cls, children = next(iter(several.items()))
    return (
        f"expected modules whose forward calls several of their SparseLinear layers once each, as in self.q_proj(x), "
        f"self.k_proj(x), with one variable, and nothing in between that could change it; {cls}, which has "
        f"{', '.join(children)}, is not written so"
    )


@functools.lru_cache(maxsize=1024)
def called_with_one_input(cls: Any, layers: frozenset[str] | None = None) -> tuple[tuple[str, ...], ...]:
    """Names of attributes of a class of modules that its ``forward`` calls once each with the same variable, in groups.

    layers: the attributes that are linear layers, which leave their input as it is; None: all that are called so.
    Nothing between the first and the last call of a group can change the variable or its contents (``reading`` says how
    that is known), and ``forward`` uses the attributes in no other way. They are in the order of the calls. () if there
    is no source, or none that is understood.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(cls.forward))))
    except (OSError, TypeError, SyntaxError):
        return ()
    function = tree.body[0]
    return groups_of(function, layers, dir(cls)) if isinstance(function, ast.FunctionDef) else ()


def groups_of(
    function: ast.FunctionDef, layers: frozenset[str] | None, methods: Iterable[str]
) -> tuple[tuple[str, ...], ...]:
    """As ``called_with_one_input``, of the source of a method. methods: the attributes of its class."""
    read = Reader(function, layers, frozenset(methods))
    groups: list[list[Call]] = []
    for (variable, _), calls in read.calls.items() if not read.unclear else ():
        run: list[Call] = []
        for call in calls:
            if read.uses[call.attribute] > 1:
                continue
            if run and read.changed(variable, run[0], call):
                groups.append(run)
                run = []
            run.append(call)
        groups.append(run)
    return tuple(tuple(call.attribute for call in run) for run in groups if len(run) > 1)
