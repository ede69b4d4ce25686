"""What a kernel is asked, and what it answers: values that hold no arrays and need no GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import index
from typing import Any

from ..errors import UsageError

ROW, COL, STRIDED = "row", "col", "strided"
OVERWRITES = "out overlaps the arrays of A; the product would overwrite what it reads"

_RANK = {"int8": 0, "float8_e5m2": 1, "float8_e4m3fn": 1, "float16": 2, "bfloat16": 2, "float32": 3, "float64": 4}


def result_dtype(a: str, b: str) -> str:
    """dtype of A @ B when ``out`` is not given: the wider operand; sums are never narrower than float32.

    int8 with int8 gives int32; 8-bit floats with 8-bit operands and float16 with bfloat16 give float32.
    """
    if a == b == "int8":
        return "int32"
    if _RANK[a] == _RANK[b]:
        return a if a == b and _RANK[a] >= 2 else "float32"
    wide = max(a, b, key=_RANK.__getitem__)
    return wide if _RANK[wide] >= 2 else "float32"


def tile_class(n: int) -> int:
    """Upper end of the class that ``n`` columns of B fall in: 0, 8, 16, 32, .. 4096; plans are shared in a class."""
    try:
        n = index(n)
    except TypeError:
        raise UsageError(f"n: expected a number of columns, got {n!r:.80}") from None
    if n < 0:
        raise UsageError(f"n: expected a number of columns, got {n}")
    if n == 0:
        return 0
    return min(4096, max(8, 1 << (n - 1).bit_length()))


def scalar(name: str, value: Any) -> float:
    """``value`` as a float; TypeError for what is no real number (None and text, which numpy would take, among it)."""
    try:
        return float(value.__float__())
    except (AttributeError, TypeError):
        raise TypeError(f"{name}: expected a number, got {value!r:.80}") from None


@dataclass(frozen=True)
class Problem:
    """C[M,N] = A[M,K] @ B[K,N] as a kernel sees it before it sees any data. Hashable; safe to build without a GPU."""

    format: str
    params: tuple[tuple[str, Any], ...]
    M: int
    K: int
    n: int
    """Tile class of N (``tile_class``), not N itself: N is a run-time argument of a plan."""
    nnz: int
    """Stored items of A (padding not counted where the format knows it)."""
    a_dtype: str
    b_dtype: str
    out_dtype: str
    b_layout: str = ROW
    """"row": B[k,n] at k*ldb + n; "col": at k + n*ldb; "strided": neither (host only)."""
    out_layout: str = ROW
    device: str = "cpu"
    """"cpu" or "cuda"."""
    sm: int | None = None
    """Compute capability times ten, 90 for an H200; None on the host."""
    device_id: int = 0
    epilogue: bool = False
    """alpha * A @ B + beta * C + bias instead of A @ B; alpha, beta and bias come with the call."""
    operation: str = "spmm"
    """"spmm": C[M,N] = A @ B[K,N]; "spmm_transposed": C[K,N] = A^T @ B[M,N]."""

    def __post_init__(self) -> None:
        for name, layout in (("b_layout", self.b_layout), ("out_layout", self.out_layout)):
            if layout not in (ROW, COL, STRIDED):
                raise UsageError(f"{name}: expected {ROW}, {COL} or {STRIDED}, got {layout!r:.80}")

    @property
    def p(self) -> dict[str, Any]:
        """The params as a dict."""
        return dict(self.params)

    @property
    def rows(self) -> int:
        """Rows of C: M, or K where A is read transposed."""
        return self.K if self.operation == "spmm_transposed" else self.M

    @property
    def inner(self) -> int:
        """Rows of B: K, or M where A is read transposed."""
        return self.M if self.operation == "spmm_transposed" else self.K

    @property
    def sm_name(self) -> str:
        return "no GPU" if self.sm is None else f"sm_{self.sm}"


def reasons(*pairs: tuple[Any, str]) -> list[str]:
    """The texts whose condition holds."""
    return [text for refused, text in pairs if refused]


@dataclass(frozen=True)
class Accepted:
    """A kernel takes the problem."""

    kernel: str

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return f"{self.kernel}: accepted"


@dataclass(frozen=True)
class Rejected:
    """A kernel does not take the problem, and every reason why."""

    kernel: str
    reasons: tuple[str, ...]

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"{self.kernel}: " + "; ".join(self.reasons)


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """One product, ready to run: ``plan(B)`` or ``plan(B, out=C)``.

    A plan keeps the arrays of A, never the Format object, so that the weak plan cache can empty.
    ``run(B, out)`` gets operands that match ``problem``; ``out`` is None where the plan allocates it. Where ``problem``
    has an epilogue, it is ``run(B, out, alpha, beta, bias)``.
    """

    kernel: str
    problem: Problem
    run: Callable[..., Any] = field(repr=False)
    tile: str = ""
    workspace: int = 0
    """Bytes the plan owns beside the arrays of A."""
    reads: list[tuple[int, int, Any]] | None = field(default=None, repr=False)
    """(first address, the one behind the last, the array) of the arrays of A: written by the dispatcher, for a ``run``
    that refuses an ``out`` that touches them. None where the dispatcher shall look before every run."""
    prepare: Callable[..., Any] | None = field(default=None, repr=False)
    """What ``run`` does for new operands, for a backend that makes another plan out of this one."""

    def __call__(self, B: Any, out: Any = None, *, alpha: float = 1.0, beta: float = 0.0, bias: Any = None) -> Any:
        """A @ B, written to ``out`` if given; alpha, beta and bias only where the plan was made with an epilogue."""
        if self.problem.epilogue:
            return self.run(B, out, scalar("alpha", alpha), scalar("beta", beta), bias)
        if bias is None and alpha == 1 and beta == 0:
            return self.run(B, out)
        raise UsageError("this plan computes A @ B alone; alpha, beta and bias need plan(.., epilogue=True)")
