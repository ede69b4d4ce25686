"""Descriptions of operations without data, which need no GPU: operands and problems.

An ``Operand`` describes one argument; a ``Problem`` is an operation with its operands, its result and the device.
Kernels, the choice among them and the estimate of their time read these values and nothing else.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import index
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from ..arrays.dtypes import VALUE_TYPES, value_type
from ..arrays.library import device_of, namespace, round_up
from ..errors import UsageError
from ..formats.base import Format
from ..formats.hooks import Counts
from ..limits import MAX_DIM

if TYPE_CHECKING:
    from ..storage.descriptor import Record

ROW, COL, STRIDED = "row", "col", "strided"
DENSE = "dense"
WORKSPACE = 1 << 30
"""Bytes that a plan may use for copies beside its operands unless the caller says otherwise."""

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


def columns(n: Any) -> int:
    """``n`` as a number of columns of B; UsageError for anything else."""
    try:
        count = -1 if isinstance(n, bool) else index(n)
    except TypeError:
        count = -1
    if not 0 <= count <= MAX_DIM:
        raise UsageError(f"n: expected a number of columns, got {n!r:.80}", value=n)
    return count


def columns_text(n: int) -> str:
    """A number of columns in words."""
    return f"{n} column" if n == 1 else f"{n} columns"


def most_workspace(value: Any) -> Any:
    """``value``, a number of bytes for copies; UsageError for anything else."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not value >= 0:  # so NaN is refused, too
        raise UsageError(f"workspace: expected a number of bytes >= 0, got {value!r:.80}", value=value)
    return value


def scalar(name: str, value: Any) -> float:
    """``value`` as a float; TypeError for anything but a real number, also for None and text, which numpy accepts."""
    try:
        return float(value.__float__())
    except (AttributeError, TypeError, ValueError, OverflowError, RuntimeError):  # the last: several numbers in torch
        raise TypeError(f"{name}: expected a number, got {value!r:.80}") from None


@dataclass(frozen=True)
class Operand:
    """One argument of an operation, or its result: everything about it but the data."""

    format: str
    """Format id; ``dense`` for plain arrays."""
    shape: tuple[int, ...]
    dtype: str
    params: tuple[tuple[str, Any], ...] = ()
    stored: int = 0
    """Value slots of a sparse operand, padding included: ``Format.stored``."""
    layout: str = ROW
    """Of a dense operand of shape [R, C]: "row" (element r, c at r*ld + c), "col" (r + c*ld) or "strided"."""
    alignment: int = 0
    """Of a dense operand: the largest of 16, 8, 4, .. bytes that divides the distance between its lines (rows of a
    row-major operand, columns of a column-major one); 0 for lines without gaps, whose shape says it."""
    device: str = "cpu"
    """"cpu" or "cuda"."""
    parts: tuple[Operand, ...] = ()
    """The operands that this one is composed of, for formats with parts."""

    def __post_init__(self) -> None:
        if self.layout not in (ROW, COL, STRIDED):
            raise UsageError(f"layout: expected {ROW}, {COL} or {STRIDED}, got {self.layout!r:.80}")

    @property
    def kind(self) -> str:
        """ "dense" or "sparse"."""
        return DENSE if self.format == DENSE else "sparse"

    def on(self, device: str) -> Self:
        """The same on "cpu" or "cuda", all parts with it."""
        if self.device == device and not self.parts:
            return self
        return replace(self, device=device, parts=tuple(p.on(device) for p in self.parts))

    @classmethod
    def of(cls, x: Any, device: str | None = None) -> Self:
        """The description of a matrix, an array, or a tensor's record in a file. ``device``: instead of its own."""
        if isinstance(x, Format):
            where = device or ("cpu" if x.device == "cpu" else "cuda")
            parts = tuple(cls.of(part, where) for part in x.parts_by_name().values())
            return cls(x.name, x.shape, x.dtype.name, tuple(x.params().items()), x.stored, device=where, parts=parts)
        if hasattr(x, "strides"):
            where = device or ("cpu" if device_of(x) == "cpu" else "cuda")
            return cls(DENSE, x.shape, value_type(x.dtype).name, stored=int(x.size), layout=layout_of(x),
                       alignment=alignment_of(x), device=where)  # fmt: skip
        return cls._of_record(x, device or "cpu")

    @classmethod
    def of_counts(cls, fmt: type[Format], counts: Counts, params: dict[str, Any], device: str) -> Self | None:
        """The description of a matrix that would be converted to a format, from its counts; None if they do not decide
        how many items would be stored. params: all of them (``Format.params_of``)."""
        stored = fmt.stored_of(counts, params)
        if stored is None:
            return None
        return cls(fmt.name, counts.shape, counts.dtype, tuple(params.items()), stored, device=device)

    @classmethod
    def _of_record(cls, r: Record, device: str) -> Self:
        name = DENSE if r.format is None else r.format.name
        parts = tuple(cls._of_record(part, device) for part in r.parts.values())
        return cls(name, r.shape, r.dtype, tuple(r.params.items()), r.stored, device=device, parts=parts)


def cuda_device_of(x: Format) -> tuple[int, int, str]:
    """(compute capability, as 90 for sm_90, number, ``Problem.board``) of the device on which a matrix is."""
    array = x.resident()
    device = array.device
    board = _boards.get(device.id)
    if board is None:
        name: bytes = namespace(array).cuda.runtime.getDeviceProperties(device.id)["name"]
        board = _boards[device.id] = name.decode()
    return int(device.compute_capability), device.id, board


_boards: dict[int, str] = {}
"""``Problem.board`` of the devices that were asked for."""


def layout_of(x: Any) -> str:
    """ "row", "col" or "strided": how the elements of a two-dimensional array lie."""
    rows, cols = x.shape
    size = x.dtype.itemsize
    if cols <= 1 or x.strides[1] == size:
        return ROW if rows <= 1 or x.strides[0] >= cols * size else STRIDED
    if rows <= 1 or x.strides[0] == size:
        return COL if x.strides[1] >= rows * size else STRIDED
    return STRIDED


LINE = 16
"""Bytes that a thread, or the copy engine, loads at once where the lines of an operand start on such boundaries."""
PITCH = 8
"""Copies of both operands have a multiple of so many columns: rows of 16-bit values are whole units of 16 bytes."""
CACHE_LINE = 128
"""Bytes of a line of the L2 cache of a GPU."""


def pitch_of(along: int, size: int) -> int:
    """Elements between lines of a copy whose lines have ``along`` elements of ``size`` bytes.

    Lines start on 16 bytes and have room for a multiple of ``PITCH`` columns. Those of more than half a cache line
    start on cache lines: a box of the copy engine then lies in whole ones.
    """
    return round_up(along, CACHE_LINE // size if 2 * along * size > CACHE_LINE else max(PITCH, LINE // size))


def alignment_of(x: Any) -> int:
    """``Operand.alignment`` of a two-dimensional array."""
    rows, cols = x.shape
    layout, size = layout_of(x), x.dtype.itemsize
    lines, along, pitch = (rows, cols, x.strides[0]) if layout == ROW else (cols, rows, x.strides[1])
    if layout == STRIDED or lines <= 1 or pitch == along * size:
        return 0
    return aligned(pitch)


def aligned(pitch: int) -> int:
    """The largest of 16, 8, 4, .. that divides a distance in bytes."""
    return LINE if pitch == 0 else min(LINE, pitch & -pitch)


Result = TypeVar("Result")


class computed_once(Generic[Result]):  # noqa: N801 - a decorator
    """``functools.cached_property`` without the lock that it takes in Python 3.11: the kernels read dozens of these for
    every new problem. Two threads may both compute a value, which is the same then."""

    def __init__(self, function: Callable[[Any], Result]) -> None:
        self._function, self._name = function, function.__name__
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: Any = None) -> Result:
        if instance is None:  # asked of the class, as documentation tools do
            return self  # type: ignore[return-value]
        value = self._function(instance)
        instance.__dict__[self._name] = value  # found before this descriptor from now on, since it has no __set__
        return value


@dataclass(frozen=True)
class Problem:
    """An operation on operands, as a kernel sees it before it sees any data. Hashable; built without a GPU.

    ``operands`` and ``out`` describe every operation. The names below them are those of a product of one matrix A
    [M, K] with one dense operand B: the operations ``spmm`` (C[M, N] = A @ B) and ``spmm_transposed``
    (C[K, N] = A^T @ B).
    """

    operation: str
    operands: tuple[Operand, ...]
    out: Operand
    sm: int | None = None
    """Compute capability times ten, 90 for an H200; None on the host."""
    device_id: int = 0
    epilogue: bool = False
    """alpha * A @ B + beta * C + bias instead of A @ B; alpha, beta and bias come with the call."""
    workspace: int = WORKSPACE
    """Most bytes of ``Kernel.workspace_bytes``; a kernel that needs more is refused."""
    row_length: int = 0
    """Stored items of the row, or row of blocks, of A in which an average item lies (``Format.row_length``); 0: not
    known."""
    board: str = ""
    """The GPU as its vendor calls it ("NVIDIA H100 80GB HBM3"), whose rates are used if they are known. Empty for one
    that is not at hand: then those of the architecture."""

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone. What was computed from them is of this process: another one gives texts other hashes."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @computed_once
    def _hash(self) -> int:
        """Stored because the caches of expected times need it in every call."""
        return hash((self.operation, self.operands, self.out, self.sm, self.epilogue))

    @classmethod
    def product(
        cls, format: str, params: tuple[tuple[str, Any], ...], M: int, K: int, n: int, nnz: int, a_dtype: str,
        b_dtype: str, out_dtype: str, b_layout: str = ROW, out_layout: str = ROW, device: str = "cpu",
        sm: int | None = None, device_id: int = 0, epilogue: bool = False, *, operation: str = "spmm",
        workspace: int = WORKSPACE, parts: tuple[Operand, ...] = (), b_alignment: int = 0, out_alignment: int = 0,
        row_length: int = 0, board: str = "",
    ) -> Self:  # fmt: skip
        """The problem of a product from plain numbers, for a matrix or a GPU that need not exist here.

        format, params, M, K, nnz, a_dtype: of A, as stored. n: columns of B and C. The rest as the properties below.
        """
        for name, layout in (("b_layout", b_layout), ("out_layout", out_layout)):
            if layout not in (ROW, COL, STRIDED):
                raise UsageError(f"{name}: expected {ROW}, {COL} or {STRIDED}, got {layout!r:.80}")
        rows, inner = (K, M) if operation == "spmm_transposed" else (M, K)
        a = Operand(format, (M, K), a_dtype, params, nnz, device=device, parts=tuple(p.on(device) for p in parts))
        b = Operand(DENSE, (inner, n), b_dtype, (), inner * n, b_layout, b_alignment, device)
        out = Operand(DENSE, (rows, n), out_dtype, (), rows * n, out_layout, out_alignment, device)
        most = most_workspace(workspace)
        return cls(operation, (a, b), out, sm, device_id, epilogue, most, row_length, board)

    def changed(self, **changes: Any) -> Self:
        """A product with other values of the properties below (``n=8``, ``out_dtype="float32"``)."""
        names = ("sm", "device_id", "epilogue", "workspace", "row_length", "board")
        own = {k: changes.pop(k) for k in names if k in changes}
        if not changes:
            return replace(self, **own)
        fields: dict[str, Any] = {
            "format": self.format, "params": self.params, "M": self.M, "K": self.K, "n": self.n, "nnz": self.nnz,
            "a_dtype": self.a_dtype, "b_dtype": self.b_dtype, "out_dtype": self.out_dtype, "b_layout": self.b_layout,
            "out_layout": self.out_layout, "device": self.device, "operation": self.operation,
            "parts": self.operands[0].parts, "b_alignment": self.operands[1].alignment,
            "out_alignment": self.out.alignment, "row_length": self.row_length,
        }  # fmt: skip
        for name in ("b", "out"):  # another layout has other lines
            if f"{name}_layout" in changes:
                fields[f"{name}_alignment"] = 0
        rest = {name: getattr(self, name) for name in ("sm", "device_id", "epilogue", "workspace", "board")}
        return type(self).product(**(fields | rest | own | changes))

    # ---------------------------------------------------------------- the names of a product

    @computed_once
    def format(self) -> str:
        """Format id of A."""
        return self.operands[0].format

    @computed_once
    def params(self) -> tuple[tuple[str, Any], ...]:
        """Parameters of A's format, as pairs."""
        return self.operands[0].params

    @computed_once
    def p(self) -> dict[str, Any]:
        """The params as a dict."""
        return dict(self.operands[0].params)

    @computed_once
    def M(self) -> int:  # noqa: N802
        """Rows of A as it is stored."""
        return self.operands[0].shape[0]

    @computed_once
    def K(self) -> int:  # noqa: N802
        """Columns of A as it is stored."""
        return self.operands[0].shape[1]

    @computed_once
    def n(self) -> int:
        """Columns of B and of C."""
        return self.operands[1].shape[1]

    @computed_once
    def rows(self) -> int:
        """Rows of C."""
        return self.out.shape[0]

    @computed_once
    def inner(self) -> int:
        """Rows of B."""
        return self.operands[1].shape[0]

    @computed_once
    def nnz(self) -> int:
        """Value slots of A, padding included: ``Format.stored``."""
        return self.operands[0].stored

    @computed_once
    def a_dtype(self) -> str:
        """dtype of A's values."""
        return self.operands[0].dtype

    @computed_once
    def b_dtype(self) -> str:
        """dtype of B."""
        return self.operands[1].dtype

    @computed_once
    def out_dtype(self) -> str:
        """dtype of C."""
        return self.out.dtype

    @computed_once
    def b_layout(self) -> str:
        """ "row": B[k, n] at k*ldb + n; "col": at k + n*ldb; "strided": neither (host only)."""
        return self.operands[1].layout

    @computed_once
    def out_layout(self) -> str:
        """The same of C."""
        return self.out.layout

    @computed_once
    def device(self) -> str:
        """ "cpu" or "cuda"."""
        return self.operands[0].device

    @computed_once
    def alone(self) -> Problem:
        """The same product without an epilogue. On a GPU its result is written to a buffer with aligned lines."""
        lines = {"out_alignment": LINE} if self.device == "cuda" else {}
        return self.changed(epilogue=False, **lines)

    @computed_once
    def alone_in_float32(self) -> Problem:
        """The same product without an epilogue, and with a C of float32."""
        return self.alone.changed(out_dtype="float32")

    @property
    def sm_name(self) -> str:
        """The architecture as text, for messages."""
        return "no GPU" if self.sm is None else f"sm_{self.sm}"


def itemsize(dtype: str) -> int:
    """Bytes of an element of a value type, or of int32 and int64 results."""
    return VALUE_TYPES[dtype].numpy.itemsize if dtype in VALUE_TYPES else {"int32": 4, "int64": 8}[dtype]
