"""Choose the kernel for a problem: every kernel's answer, and the one with the least expected time. Sees no data."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from .. import backends
from ..backends.base import Backend
from ..errors import DeviceUnavailable, NoKernelError, UsageError
from ..products import rates
from ..products.kernel import Accepted, Kernel, Rejected
from ..products.problem import Problem
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
