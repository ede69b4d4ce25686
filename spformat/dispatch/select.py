"""Choose the kernel for a problem: every kernel's answer, and the one with the least expected time. Sees no data."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import backends
from ..arrays.dtypes import value_type
from ..backends.base import Backend
from ..errors import DeviceUnavailable, NoKernelError, UsageError
from ..formats import by_name
from ..formats.declare import OMITTED
from ..limits import MAX_DIM
from ..products import rates
from ..products.kernel import Accepted, Kernel, Rejected
from ..products.problem import Operand, Problem
from ..products.roofline import epilogue_us


@dataclass(frozen=True)
class Explanation:
    """Every kernel's answer: first those that accept, ordered by expected time, then the others in order of backends.

    ``str()`` is the text the CLI prints.
    """

    problem: Problem
    answers: tuple[Accepted | Rejected, ...]
    rates: str = ""
    """Which measurements the expected times come from."""

    @property
    def chosen(self) -> str | None:
        """The kernel that runs: of those that accept, the one that expects to take the least time."""
        return next((a.kernel for a in self.answers if a), None)

    @property
    def expected_us(self) -> float | None:
        """Microseconds that the chosen kernel expects to take."""
        return next((a.expected_us for a in self.answers if isinstance(a, Accepted)), None)

    def __str__(self) -> str:
        p = self.problem
        a, *others = p.operands
        dense = " and ".join(f"{'x'.join(map(str, o.shape))} ({o.dtype}, {o.layout})" for o in others)
        lines = [f"{p.operation} of A {'x'.join(map(str, a.shape))} ({a.dtype}, {a.format}, {a.device}) and B {dense}"]
        lines.append(f"  runs on {self.chosen}" if self.chosen else "  no kernel takes this")
        lines += [f"  {answer}" for answer in self.answers]
        lines += [f"  {self.rates}"] * bool(self.rates)
        return "\n".join(lines)


def choose(problem: Problem, name: str | None = None, without: str = "") -> Kernel:
    """The kernel with the least expected time among those that accept the problem.

    name: a backend or a kernel; only its kernels are considered. without: a kernel that is not considered. Raises
    NoKernelError with every kernel's reasons, and DeviceUnavailable for a backend given by name that cannot run here.
    """
    # First without the backends that refuse operands of this device: to import those of a GPU takes 50 ms.
    for every in (False, True):
        trace = ask(problem, name, without=without, every=every)
        for answer in trace.answers:
            if answer:
                return backends.kernel_named(answer.kernel)
    if name is not None:
        missing = named(name)[0].missing()
        if missing:
            raise DeviceUnavailable(f"backend {name!r} cannot run here: {'; '.join(missing)}", reasons=missing)
    raise NoKernelError(f"No kernel for {problem.operation!r} with:\n{trace}", reasons=[str(a) for a in trace.answers])


def checked(p: Problem) -> Problem:
    """A problem that a caller has written, with the usual params and full names of types; kernels take it as it is.

    UsageError or ArrayError for a format, params, types, sizes or a device that no matrix has.
    """
    a, *dense = (_checked_operand(x) for x in p.operands)
    integers = p.out.dtype in ("int32", "int64")
    out = replace(p.out, dtype=p.out.dtype if integers else value_type(p.out.dtype).name, shape=_sizes(p.out.shape))
    on_gpu = a.device == "cuda" and isinstance(p.sm, int) and not isinstance(p.sm, bool)
    if not on_gpu and (a.device != "cpu" or p.sm is not None):
        expected = "expected device 'cpu' and no sm, or 'cuda' and an sm such as 90"
        raise UsageError(f"Problem: {expected}, got {a.device!r:.40} and {p.sm!r:.40}")
    same = replace(p, operands=(a, *dense), out=out)
    return p if same == p else same


def _checked_operand(x: Operand) -> Operand:
    shape = _sizes(x.shape)
    try:
        given = dict(x.params) if isinstance(x.params, tuple) else {}
    except (TypeError, ValueError):
        given = {}
    if len(given) != len(x.params):
        raise UsageError(f"Problem: params: expected pairs such as (('blocksize', (32, 32)),), got {x.params!r:.80}")
    fmt = by_name(x.format)
    params = {} if x.parts else fmt.resolve_params(given)
    if not x.parts and not fmt.has_all_params(params):
        lacks = ", ".join(d.name for d in fmt.declared_params() if d.name not in params and d.default is not OMITTED)
        raise UsageError(f"Problem: {fmt.name}: expected all params of a matrix, got no {lacks}")
    if isinstance(x.stored, bool) or not isinstance(x.stored, (int, np.integer)) or x.stored < 0:
        raise UsageError(f"Problem: expected a number of stored values, got {x.stored!r:.80}")
    return replace(x, params=tuple(params.items()), dtype=value_type(x.dtype).name, shape=shape,
                   stored=int(x.stored), parts=tuple(map(_checked_operand, x.parts)))  # fmt: skip


def _sizes(shape: tuple[Any, ...]) -> tuple[int, ...]:
    bad = [n for n in shape if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or not 0 <= n <= MAX_DIM]
    if bad:
        raise UsageError(f"Problem: expected sizes in 0 .. 2^48-1, got shape {shape!r:.80}")
    return tuple(map(int, shape))


_INSTALLED: ContextVar[bool] = ContextVar("spformat_installed", default=True)
_inner: ContextVar[dict[Any, Explanation] | None] = ContextVar("spformat_inner_answers", default=None)
"""What was answered inside the call of ``ask`` that now runs: a composed kernel asks for its parts more than once."""


def installed_only() -> bool:
    """Whether kernels that are composed of others may ask only for what this machine has."""
    return _INSTALLED.get()


@contextlib.contextmanager
def of_any_machine() -> Iterator[None]:
    """Inside it kernels that are composed of others also ask for what this machine lacks: for products that were
    measured on another one."""
    token = _INSTALLED.set(False)
    try:
        yield
    finally:
        _INSTALLED.reset(token)


def ask(
    problem: Problem, only: str | None = None, *, installed: bool | None = None, without: str = "", every: bool = True
) -> Explanation:
    """Every kernel's answer. only: a backend or a kernel. without: a kernel that is not asked.

    every: also ask the backends that refuse operands of this device.

    installed: refuse what is missing on this machine. Kernels that are composed of others ask for those in the same
    way: inside another call the default is what that call was given, else True, or False within ``of_any_machine``.
    """
    wanted = installed_only() if installed is None else installed
    outer = _inner.get()
    if outer is None:
        tokens = _INSTALLED.set(wanted), _inner.set({})
        try:
            with rates.read_once():
                return _ask(problem, only, without, every)
        finally:
            _INSTALLED.reset(tokens[0])
            _inner.reset(tokens[1])
    key = problem, only, wanted, without, every
    if key not in outer:
        token = _INSTALLED.set(wanted)
        try:
            outer[key] = _ask(problem, only, without, every)
        finally:
            _INSTALLED.reset(token)
    return outer[key]


def _ask(problem: Problem, only: str | None, without: str, every: bool) -> Explanation:
    answers: list[Accepted | Rejected] = []
    for name in (only,) if only else backends.order(problem.device, every):
        answers += _answers(problem, name, without)
    accepted = sorted((a for a in answers if isinstance(a, Accepted)), key=lambda a: a.expected_us)  # stable
    return Explanation(problem, (*accepted, *(a for a in answers if not a)), rates.source(problem))


def _answers(p: Problem, name: str, without: str) -> Iterator[Accepted | Rejected]:
    try:
        backend, only = named(name)
        kernels = backend.kernels()
        unready = [k.name for k in kernels if not hasattr(k, "takes")]
        if unready:
            raise AttributeError(
                f"{unready[0]} has no attribute 'takes'; derive it from spformat.products.kernel.Kernel"
            )
    except (ImportError, AttributeError) as e:  # a broken plug-in is a reason, not a crash
        yield Rejected(name, (f"the backend does not load: {e}",))
        return
    missing, concerned = tuple(backend.missing()) if installed_only() else (), False
    wanted = p.operation, p.format
    for k in kernels:
        if k.name == without or (only is not None and k.name != only):
            continue
        if wanted not in k.takes:
            if only is not None:
                formats = sorted({f for operation, f in k.takes if operation == p.operation})
                what = f"format {p.format}" if formats else f"operation {p.operation}"
                yield Rejected(k.name, (f"does not take {what}",))
            continue
        concerned = True
        yield _answer(k, p, missing, only is not None)
    if missing and not concerned and only is None:
        yield Rejected(name, missing)


def _answer(k: Kernel, p: Problem, missing: tuple[str, ...], by_name: bool) -> Accepted | Rejected:
    own = without_epilogue(k, p)
    refused = [*missing, *k.unsupported(own)]
    waits = "" if by_name or not isinstance(k, Kernel) else k.only_by_name(own)  # a plug-in's need not derive from it
    if waits:
        refused.append(f"{waits}; it runs only where a call names it, with backend={k.name!r}")
    if not refused:
        needed = k.workspace_bytes(own)
        if needed > p.workspace:
            allowed = f"the call allows {p.workspace:,} (workspace=)"
            refused.append(f"needs a workspace of {needed:,} bytes, {allowed}")
    if refused:
        return Rejected(k.name, tuple(refused))
    expected = k.expected_us(own)
    return Accepted(k.name, math.inf if expected != expected else expected + (epilogue_us(p) if own is not p else 0.0))


def named(name: str) -> tuple[Backend, str | None]:
    """(backend, None) for a backend's name, (its backend, name) for a kernel's; UsageError for anything else."""
    if not isinstance(name, str):
        expected = "the name of a backend or kernel, as 'cpu' or 'cpu.spmm_csr'"
        raise UsageError(f"backend: expected {expected}, got {name!r:.80}", value=name)
    head, dot, _ = name.partition(".")
    backend = backends.get(head)
    kernels = [k.name for k in backend.kernels()] if dot else []
    if dot and name not in kernels:
        raise UsageError(f"unknown kernel {name!r} (kernels of {head}: {', '.join(kernels)})", value=name)
    return backend, name if dot else None


def without_epilogue(kernel: Kernel, problem: Problem) -> Problem:
    """The problem that a kernel itself has to solve: without an epilogue of its own, the product alone.

    That product is in float32 if the kernel can write float32, so that a 16-bit C is rounded only once.
    """
    if not problem.epilogue or kernel.epilogue:
        return problem
    if problem.out_dtype in ("float16", "bfloat16") and not kernel.unsupported(problem.alone_in_float32):
        return problem.alone_in_float32
    return problem.alone
