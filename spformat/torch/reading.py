"""Which layers a ``forward`` calls with one input that nothing changes in between, read from its code.

Between the first and the last call of a group only what leaves the input as it is may stand: operators, shapes and
dtypes, assignments of variables, and calls that get nothing of the input. Everything else, and everything that is not
known here, ends the group.

For that, the memory that a value may be in is followed from the parameters of the function on: a value shares memory
with what it was computed of. Results of layers are new memory. Two parameters are taken to be two tensors, except where
one is changed in place for all to see (``y += 1``, ``y.add_(1)``, ``inplace=True``, ``out=``, ``y[0] = 1``): then the
other may be changed, too. What a call returns, or keeps, is taken to be of what it was given.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard

UNCHANGING = frozenset(
    "shape dtype device ndim layout itemsize nbytes is_cuda is_cpu is_meta is_sparse is_nested is_quantized "
    "requires_grad is_leaf".split()
)
"""Attributes of tensors that are no tensors."""
ASKING = frozenset(
    "size dim ndimension numel nelement element_size stride get_device is_contiguous is_floating_point".split()
)
"""Methods of tensors that only ask, and whose results are no tensors."""
_UNREADABLE = frozenset(("locals", "vars", "eval", "exec", "globals"))
"""Functions that reach variables without naming them."""
_GLOBALS, _SELF = "", "self"
Memory = frozenset[Any]
"""What a value may share memory with: names of parameters, ``self`` for what a module holds, and for a result of a call
the place of that call."""


class Call(NamedTuple):
    """``self.attribute(variable)``: when, and what the variable may share memory with."""

    time: int
    attribute: str
    memory: Memory


class Reader:
    """Goes through a function in the order in which it runs."""

    def __init__(self, function: ast.FunctionDef, layers: frozenset[str] | None, methods: frozenset[str]) -> None:
        self.uses: dict[str, int] = {}
        """Attribute of self -> how often it is named."""
        self.calls: dict[tuple[str, tuple[int, ...]], list[Call]] = {}
        """(variable, branches) -> the calls of attributes of self with the variable there."""
        self._changes: list[tuple[int, str | Memory | None]] = []
        """When a variable gets another value (its name), when something may be changed in place, and when anything
        (None)."""
        self._layers, self._methods = layers, methods
        self._time = 0
        self._branches: tuple[int, ...] = ()
        a = function.args
        given = [*a.posonlyargs, *a.args, *a.kwonlyargs, *(x for x in (a.vararg, a.kwarg) if x)]
        bound = list(_names_bound(function.body))
        self._variables = {x.arg for x in given} | set(bound)
        self._several = {name for name in bound if bound.count(name) > 1} | {x.arg for x in given if x.arg in bound}
        self._memory: dict[str, Memory] = {x.arg: frozenset([x.arg]) for x in given} | {_SELF: frozenset()}
        """Variable -> what its value may share memory with; also of self, of ``self.attribute`` and of what is no
        variable of the function (_GLOBALS): what they may have kept."""
        self._left: list[dict[str, Memory]] = []
        """The same at each ``break`` and ``continue`` of a loop."""
        self._everything = frozenset(x.arg for x in given if x.arg != _SELF)
        self.unclear = _SELF in bound or any(
            isinstance(node, ast.Global | ast.Nonlocal) or (isinstance(node, ast.Name) and node.id in _UNREADABLE)
            for node in ast.walk(function)
        )
        self._body(function.body)

    def changed(self, variable: str, first: Call, last: Call) -> bool:
        """Whether the value of the variable may have changed between two calls."""
        reachable = not first.memory or _SELF in first.memory  # by any call, and not by what it was given alone
        return any(
            what is None
            or what == variable
            or (isinstance(what, frozenset) and (reachable or bool(what & first.memory)))
            for time, what in self._changes
            if first.time < time < last.time
        )

    # ------------------------------------------------------------------ what happens

    def _change(self, what: str | Memory | None = None) -> None:
        self._time += 1
        self._changes.append((self._time, what))

    def _keeps(self, node: ast.AST, memory: Memory) -> None:
        """What is named here may from now on refer to this memory."""
        root = _root(node)
        if root is not None:
            name = root if self._is_variable(root) else _GLOBALS
            self._memory[name] = self._memory.get(name, frozenset()) | memory

    def _bind(self, target: ast.AST, memory: Memory) -> None:
        """Assign a value."""
        if isinstance(target, ast.Name):
            self._change(target.id)
            self._memory[target.id] = memory
        elif isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                self._bind(part, memory)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, memory)
        else:
            holder = self._value(target)
            self._change(holder if isinstance(target, ast.Subscript) and self._is_new(holder) else None)
            self._keeps(target, memory)
            if (_root(target) or "").partition(".")[0] == _SELF:
                self._memory[_SELF] |= memory  # what self calls may reach it

    def _is_variable(self, root: str | None) -> bool:
        """Whether a value is reached from a variable of the function, self among them."""
        return root is not None and root.partition(".")[0] in self._variables

    def _is_new(self, memory: Memory) -> bool:
        """Whether memory is that of results alone, and so none of what the function was given."""
        return bool(memory) and not memory & self._everything and _SELF not in memory

    # ------------------------------------------------------------------ branches

    @contextmanager
    def _branch(self, *key: Any) -> Iterator[None]:
        """What does not always run, or runs several times."""
        before = self._branches
        self._branches = (*before, hash(key))
        try:
            yield
        finally:
            self._branches = before

    def _ways(self, *ways: Sequence[ast.AST]) -> list[Memory]:
        """One of several ways is taken; returns what the last value of each may share memory with."""
        before, after, time = self._memory, [], self._time
        values: list[Memory] = []
        for i, way in enumerate(ways):
            self._memory = dict(before)
            value: Memory = frozenset()
            with self._branch(time, i):
                for node in way:
                    if isinstance(node, ast.stmt):
                        self._statement(node)
                    else:
                        value = self._value(node)
            after.append(self._memory)
            values.append(value)
        self._memory = _either(*after)
        return values

    def _repeated(self, begin: Callable[[], Any], body: list[ast.stmt]) -> None:
        """A loop: what one round leaves is there in the next."""
        self._change()
        left, memory = self._left, self._memory
        while True:
            self._left, self._memory = [], dict(memory)
            uses, calls, changes, time = dict(self.uses), _copy(self.calls), len(self._changes), self._time
            with self._branch(time, "loop"):
                begin()
                self._body(body)
            after = _either(memory, self._memory, *self._left)
            if after == memory:
                break
            memory = after
            self.uses, self.calls, self._time = uses, calls, time
            del self._changes[changes:]
        self._left, self._memory = left, memory
        self._change()

    def _unread(self, node: ast.AST) -> Memory:
        """Code that runs later, or whose variables are others: its layers are in no group."""
        self._change()
        named = set(_names_bound([node]))
        memory: Memory = frozenset([id(node)])
        for part in ast.walk(node):
            if _is_of_self(part):
                self.uses[part.attr] = self.uses.get(part.attr, 0) + 2
            if isinstance(part, ast.Name) and part.id in self._variables:
                named.add(part.id)
                memory |= self._everything if part.id in self._several else self._memory.get(part.id, self._everything)
        self._memory.update(dict.fromkeys(named - {_SELF}, memory))
        return memory

    # ------------------------------------------------------------------ statements

    def _body(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Expr(value) | ast.Return(value):
                if value is not None:
                    self._value(value)
            case ast.Assign(targets, value):
                memory = self._value(value)
                for target in targets:
                    self._bind(target, memory)
            case ast.AnnAssign(target, _, value):
                if value is not None:
                    self._bind(target, self._value(value))
            case ast.AugAssign(target, _, value):
                before = self._value(target)
                memory = self._value(value)
                if isinstance(target, ast.Name):
                    self._change(before if self._is_new(before) else None)
                self._bind(target, before | memory)
            case ast.If(test, body, orelse):
                self._value(test)
                self._ways(body, orelse)
            case ast.For(target, iterated, body, orelse):
                memory = self._value(iterated)
                self._repeated(lambda: self._bind(target, memory), body)
                self._ways(orelse, [])
            case ast.While(test, body, orelse):
                self._repeated(lambda: self._value(test), body)
                self._ways(orelse, [])
            case ast.With(items, body):
                self._with(items, body)
            case ast.Try(body, handlers, orelse, finalbody):
                self._try(body, handlers, orelse, finalbody)
            case ast.Raise() | ast.Assert():
                self._ways(list(ast.iter_child_nodes(node)), [])
            case ast.Import(names) | ast.ImportFrom(_, names):
                for alias in names:
                    self._memory[(alias.asname or alias.name).partition(".")[0]] = frozenset()
            case ast.Break() | ast.Continue():
                self._left.append(dict(self._memory))
            case ast.Pass():
                pass
            case _:  # del, match, functions and classes
                self._unread(node)

    def _with(self, items: list[ast.withitem], body: list[ast.stmt]) -> None:
        for item in items:
            memory = self._value(item.context_expr)
            if item.optional_vars is not None:
                self._bind(item.optional_vars, memory)
        self._change()
        self._ways(body, [])  # it may end early, by an error that it keeps to itself
        self._change()

    def _try(
        self, body: list[ast.stmt], handlers: list[ast.ExceptHandler], orelse: list[ast.stmt], final: list[ast.stmt]
    ) -> None:
        self._change()
        self._ways([*body, *orelse], [])
        for name in _names_bound([*body, *handlers]):  # an error may come before any of the assignments
            self._memory[name] = self._everything
        self._ways(*(handler.body for handler in handlers), [])
        self._ways(final)
        self._change()

    # ------------------------------------------------------------------ values

    def _parts(self, node: ast.AST) -> Memory:
        """What any of the values in a node may share memory with."""
        parts = [self._value(part) for part in ast.iter_child_nodes(node) if not isinstance(part, _MARKS)]
        return frozenset().union(*parts)

    def _value(self, node: ast.AST) -> Memory:
        """What a value may share memory with."""
        match node:
            case ast.Constant():
                return frozenset()
            case ast.Name(name):
                return self._memory.get(name, self._everything) if name in self._variables else self._kept(_GLOBALS)
            case ast.Attribute(of, name):
                if _is_of_self(node):
                    self.uses[name] = self.uses.get(name, 0) + 1
                    return frozenset([_SELF]) | self._kept(_SELF, f"self.{name}")
                memory = self._value(of)
                return frozenset() if name in UNCHANGING else memory
            case ast.Subscript(of, place):
                memory = self._value(of)
                self._value(place)
                return memory
            case ast.Call():
                return self._call(node)
            case ast.BinOp():
                return self._parts(node) - {_SELF} | {id(node)}
            case ast.UnaryOp() | ast.Tuple() | ast.List() | ast.Set() | ast.Dict() | ast.Starred():
                return self._parts(node)
            case ast.Compare() | ast.JoinedStr() | ast.FormattedValue() | ast.Slice():
                self._parts(node)
                return frozenset()
            case ast.BoolOp(_, [first, *others]):
                memory = self._value(first)
                with self._branch(self._time, "others"):
                    return memory.union(*[self._value(other) for other in others])
            case ast.IfExp(test, body, orelse):
                self._value(test)
                return frozenset().union(*self._ways([body], [orelse]))
            case ast.NamedExpr(target, value):
                memory = self._value(value)
                self._bind(target, memory)
                return memory
        return self._unread(node)  # lambda, comprehensions, yield, await

    def _kept(self, *names: str) -> Memory:
        return frozenset().union(*(self._memory.get(name, frozenset()) for name in names))

    def _call(self, node: ast.Call) -> Memory:
        f, given = node.func, [*node.args, *(keyword.value for keyword in node.keywords)]
        new: Memory = frozenset([id(node)])
        if _is_of_self(f) and len(node.args) == 1 and not node.keywords and self._is_layer(f.attr, node.args[0]):
            self._value(f)
            x, memory = node.args[0], self._value(node.args[0])
            self._time += 1
            if isinstance(x, ast.Name):
                self.calls.setdefault((x.id, self._branches), []).append(Call(self._time, f.attr, memory))
            return new
        # A function of self, or of a module of Python, is not itself changed by its call.
        named = _is_of_self(f) or not self._is_variable(_root(f) or _SELF)
        memory = self._value(f) - {_SELF} if named else self._value(f)
        memory = memory.union(*[self._value(x) for x in given])
        if isinstance(f, ast.Attribute) and f.attr in ASKING:
            return frozenset()
        self._change(memory if not _in_place(node) or self._is_new(memory) else None)
        memory -= {_SELF}
        for x in given:
            if not any(isinstance(part, ast.Call) for part in ast.walk(x)) and self._is_variable(_root(x)):
                self._keeps(x, memory)
        # What a method of a variable or of self was given may be kept there; a module of self returns its result.
        root = _root(f)
        if root is None:
            self._memory[_SELF] |= memory  # super().method(x)
        elif _is_of_self(f):
            if f.attr in self._methods:
                self._memory[_SELF] |= memory
        elif not named:
            self._keeps(f, memory)
        return memory | new

    def _is_layer(self, attribute: str, x: ast.AST) -> bool:
        return isinstance(x, ast.Name) if self._layers is None else attribute in self._layers


def _in_place(node: ast.Call) -> bool:
    """Whether a call says that it changes something in place."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return (name.endswith("_") and not name.endswith("__")) or any(
        keyword.arg in ("out", "inplace") and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value)
        for keyword in node.keywords
    )


_MARKS = (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop)


def _is_of_self(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _root(node: ast.AST) -> str | None:
    """The variable that a value is reached from: x of ``x.a[0].b(1)``, self.a of ``self.a.b``; None: no variable."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred | ast.Call):
        if _is_of_self(node):
            return f"self.{node.attr}"
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def _names_bound(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Variables that get a value anywhere in some code."""
    for top in nodes:
        for node in ast.walk(top):
            match node:
                case ast.Name(name, ast.Store() | ast.Del()):
                    yield name
                case ast.alias(name, other):
                    yield (other or name).partition(".")[0]
                case (
                    ast.ExceptHandler(_, str(name)) | ast.MatchAs(_, str(name)) | ast.MatchStar(str(name))
                    | ast.MatchMapping(_, _, str(name))
                ):  # fmt: skip
                    yield name
                case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                    yield name


def _either(*memories: dict[str, Memory]) -> dict[str, Memory]:
    """What holds after any one of several ways."""
    names = set().union(*memories)
    return {name: frozenset().union(*(m.get(name, frozenset()) for m in memories)) for name in names}


def _copy(calls: dict[Any, list[Any]]) -> dict[Any, list[Any]]:
    return {key: list(called) for key, called in calls.items()}
