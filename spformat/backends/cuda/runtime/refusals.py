"""The reasons for which several CUDA kernels refuse a problem, each in one place and in the same words."""

from __future__ import annotations

from ....products.kernel import reasons
from ....products.problem import STRIDED, Problem


def on_device(p: Problem) -> list[str]:
    """Operands that are not on a CUDA device."""
    return reasons((p.device != "cuda", f"operands are on {p.device}; move them with .to('cuda')"))


def arch(p: Problem, sm: int, why: str = "") -> list[str]:
    """An architecture older than ``sm`` (compute capability times ten)."""
    return reasons((p.sm is None or p.sm < sm, f"needs sm_{sm} or newer{why}, got {p.sm_name}"))


def types(p: Problem, values: tuple[str, ...], outs: tuple[str, ...] | None = None) -> list[str]:
    """Values of A outside ``values``, a B of another type, an out outside ``outs`` (default: A's type and float32)."""
    outs = outs or ((p.a_dtype,) if p.a_dtype == "float64" else (p.a_dtype, "float32"))
    outs = tuple(dict.fromkeys(outs))
    return reasons(
        (p.a_dtype not in values, f"a.dtype must be one of {', '.join(values)}, got {p.a_dtype}"),
        (p.b_dtype != p.a_dtype, f"b.dtype must equal a.dtype ({p.a_dtype}), got {p.b_dtype}"),
        (p.out_dtype not in outs, f"out.dtype must be {' or '.join(outs)}, got {p.out_dtype}"),
    )


def strides(p: Problem) -> list[str]:
    """Operands without unit stride along one axis."""
    strided = STRIDED in (p.b_layout, p.out_layout)
    return reasons((strided, "B and out must be row- or column-major; use ascontiguousarray"))


def every(p: Problem, sm: int, values: tuple[str, ...], outs: tuple[str, ...] | None = None) -> list[str]:
    """Every reason of the above."""
    return on_device(p) + types(p, values, outs) + strides(p) + arch(p, sm)
