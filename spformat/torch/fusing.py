"""``fuse_projections``: which layers of a model have one input, read from the code of the modules that call them."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch

from ..checkpoint.recipe import matcher
from ..errors import UsageError
from ..formats.vstack import check_vstack
from .fused import FusedLinear, Projection
from .models import replace
from .module import SparseLinear

NAMED = 5
"""Most reasons that an error lists."""


def fuse_projections(model: torch.nn.Module, modules: str = "*") -> dict[str, FusedLinear]:
    """Multiply once for ``SparseLinear`` layers of one input, as q, k and v, or gate and up; returns name -> fused.

    modules: a pattern over the names of the modules that call the layers ("model.layers.0.self_attn"), as rules have
    it; "re:.." is a regular expression.

    Layers of one module are fused if its ``forward`` calls each of them once, with the same variable, which does not
    change between these calls: attentions and MLPs of Llama, Mistral, Qwen and Gemma in transformers are such modules,
    and others that are written like them. They stay where they are and become ``Projection`` modules, whose results
    are columns of one product: not contiguous if there are several rows. The fused layer is a new module of their
    parent. Its weight is a new matrix; the memory of the old ones is given back if nobody else has it.

    Names in state dicts and in ``save_pretrained`` are as before; loading is refused, so load first. Raises UsageError
    if no such layers are there, or if some cannot be fused: other formats, params, dtypes or devices, a bias in some
    only, rows that the format cannot cut (32 for two-four), a layer with a ``forward`` of its own or at several places.
    The model is changed only if all can be.
    """
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
    new = FusedLinear(layers)
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
    for children in called_with_one_input(cls):
        sparse = tuple(c for c in children if type(m._modules.get(c)) is SparseLinear)
        if len(sparse) > 1:
            yield sparse


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
        f"self.k_proj(x), with one variable that does not change in between; {cls}, which has {', '.join(children)}, "
        "is not written so"
    )


@functools.lru_cache(maxsize=1024)
def called_with_one_input(cls: Any) -> tuple[tuple[str, ...], ...]:
    """Names of attributes of a class of modules that its ``forward`` calls once each with the same variable, in groups.

    A group is left out if the variable is assigned to or changed in place between the first and the last of its calls,
    and an attribute is left out if ``forward`` uses it in any other way. () if there is no source.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(cls.forward))))
    except (OSError, TypeError, SyntaxError):
        return ()
    read = _Reader()
    read.visit(tree)
    groups = []
    for (variable, _), called in read.calls.items():
        once = sorted((at, attr) for attr, at in called if read.uses[attr] == 1)
        if len(once) > 1 and not any(once[0][0] < at < once[-1][0] for at in read.changes.get(variable, [])):
            groups.append(tuple(attr for _, attr in once))
    return tuple(groups)


_Position = tuple[int, int]


class _Reader(ast.NodeVisitor):
    """What a function does with attributes of ``self`` and with its variables."""

    def __init__(self) -> None:
        self.uses: dict[str, int] = {}
        """Attribute of self -> how often it is named."""
        self.calls: dict[tuple[str, tuple[int, ...]], list[tuple[str, _Position]]] = {}
        """(variable, branches) -> the calls ``self.attribute(variable)`` there."""
        self.changes: dict[str, list[_Position]] = {}
        """Variable -> where it is assigned to or changed in place, and where that statement ends: in ``x = f(x)`` the
        assignment comes last."""
        self._branches: tuple[int, ...] = ()
        self._end: _Position = (0, 0)

    def generic_visit(self, node: ast.AST) -> None:
        """Fields that do not always run, or run several times, are branches of their own."""
        end_before = self._end
        if isinstance(node, ast.stmt):
            self._end = node.end_lineno or 0, node.end_col_offset or 0
        for name, value in ast.iter_fields(node):
            before = self._branches
            if isinstance(node, _BRANCHING) and name in _BRANCHES:
                self._branches = (*before, hash((id(node), name)))
            for at, child in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(node, ast.BoolOp) and at == 1:
                    self._branches = (*before, id(node))
                if isinstance(child, ast.AST):
                    self.visit(child)
            self._branches = before
        self._end = end_before

    def _change(self, variable: str, node: ast.expr) -> None:
        self.changes.setdefault(variable, []).extend([_at(node), self._end])

    def visit_Call(self, node: ast.Call) -> None:
        """A call of an attribute of self with a variable, or a method that changes a variable in place."""
        f, x = node.func, node.args[0] if len(node.args) == 1 and not node.keywords else None
        if _is_of_self(f) and isinstance(x, ast.Name):
            self.calls.setdefault((x.id, self._branches), []).append((f.attr, _at(node)))
        if isinstance(f, ast.Attribute) and f.attr.endswith("_") and isinstance(f.value, ast.Name):
            self._change(f.value.id, node)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """An attribute of self."""
        if _is_of_self(node):
            self.uses[node.attr] = self.uses.get(node.attr, 0) + 1
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        """A variable that is assigned to or deleted."""
        if not isinstance(node.ctx, ast.Load):
            self._change(node.id, node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Elements of a variable that are assigned to."""
        if not isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name):
            self._change(node.value.id, node)
        self.generic_visit(node)


_BRANCHING = (
    ast.If, ast.IfExp, ast.For, ast.While, ast.Try, ast.ExceptHandler, ast.Lambda, ast.ListComp, ast.SetComp,
    ast.DictComp, ast.GeneratorExp, ast.match_case,
)  # fmt: skip
_BRANCHES = ("body", "orelse", "handlers", "finalbody", "elt", "key", "value", "generators")


def _is_of_self(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _at(node: ast.expr) -> _Position:
    return node.lineno, node.col_offset
