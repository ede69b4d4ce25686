"""Which kernel takes a problem: every kernel's answer, best first. Sees no data and needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import backends
from ..backends.base import Backend, Kernel
from ..errors import DeviceUnavailable, NoKernelError, UsageError
from ..products.problem import Accepted, Problem, Rejected


@dataclass(frozen=True)
class Explanation:
    """Every kernel with its answer, in the order they were asked; ``str()`` is the text the CLI prints."""

    problem: Problem
    answers: tuple[Accepted | Rejected, ...]

    @property
    def chosen(self) -> str | None:
        """The kernel that runs: the first that accepted."""
        return next((a.kernel for a in self.answers if a), None)

    def __str__(self) -> str:
        p = self.problem
        lines = [
            f"A {p.M}x{p.K} ({p.a_dtype}, {p.format}, {p.device}) @ B {p.K}x{p.n or 'N'} ({p.b_dtype}, {p.b_layout})"
        ]
        lines.append(f"  runs on {self.chosen}" if self.chosen else "  no kernel takes this")
        lines += [f"  {a}" for a in self.answers]
        return "\n".join(lines)


def choose(problem: Problem, name: str | None) -> Kernel:
    """The first kernel that accepts; NoKernelError with every kernel's reasons, DeviceUnavailable for a backend asked
    for by name that is not here."""
    trace = ask(problem, name)
    for answer in trace.answers:
        if answer:
            backend = backends.get(answer.kernel.partition(".")[0])
            return next(k for k in backend.kernels() if k.name == answer.kernel)
    if name is not None:
        missing = named(name)[0].missing()
        if missing:
            raise DeviceUnavailable(f"backend {name!r} cannot run here: {'; '.join(missing)}", reasons=missing)
    raise NoKernelError(f"No kernel for 'spmm' with:\n{trace}", reasons=[str(a) for a in trace.answers])


def ask(problem: Problem, only: str | None = None, *, installed: bool = True) -> Explanation:
    """Every kernel's answer, best first."""
    answers: list[Accepted | Rejected] = []
    for name in (only,) if only else backends.order(problem.device):
        try:
            backend, kernel = named(name)
        except (ImportError, AttributeError) as e:  # a broken plug-in is a reason, not a crash
            answers.append(Rejected(name, (f"the backend does not load: {e}",)))
            continue
        missing = tuple(backend.missing()) if installed else ()
        first = getattr(backend, "preferred", _none_preferred)(problem)
        kernels = sorted(backend.kernels(), key=lambda k: (k.name != first, getattr(k, "rank", _no_rank)(problem)))
        for k in kernels:
            if kernel is not None and k.name != kernel:
                continue
            if problem.format not in k.formats:
                if kernel is not None:
                    answers.append(Rejected(k.name, (f"does not take format {problem.format}",)))
                continue
            refused = (*missing, *k.unsupported(without_epilogue(k, problem)))
            answers.append(Rejected(k.name, refused) if refused else Accepted(k.name))
        if missing and not any(problem.format in k.formats for k in kernels):
            answers.append(Rejected(name, missing))
    return Explanation(problem, tuple(answers))


def named(name: str) -> tuple[Backend, str | None]:
    """The backend of "cuda", or that of "cuda.spmm_csr" and this name; UsageError for one that is unknown."""
    head, dot, _ = name.partition(".")
    backend = backends.get(head)
    kernels = [k.name for k in backend.kernels()] if dot else []
    if dot and name not in kernels:
        raise UsageError(f"unknown kernel {name!r} (kernels of {head}: {', '.join(kernels)})", value=name)
    return backend, name if dot else None


def without_epilogue(kernel: Kernel, problem: Problem) -> Problem:
    """What a kernel is asked: where it has no epilogue the product alone, in float32 if it can: C is rounded once."""
    if not problem.epilogue or getattr(kernel, "epilogue", False):
        return problem
    wide = replace(problem, epilogue=False, out_dtype="float32")
    if problem.out_dtype in ("float16", "bfloat16") and not kernel.unsupported(wide):
        return wide
    return replace(problem, epilogue=False)


def _no_rank(problem: Problem) -> int:
    return 0


def _none_preferred(problem: Problem) -> str:
    return ""
