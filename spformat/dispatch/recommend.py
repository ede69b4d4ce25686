"""recommend(): which format a matrix should have, from its counts and the times that the kernels expect. No GPU needed.

Every format that holds the matrix exactly is described without converting it (``Operand.of_counts``), and the kernels
are asked as for any product. So a recommendation and ``explain`` of the converted matrix state the same times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, overload

from .. import backends
from ..arrays.dtypes import value_type
from ..errors import UsageError
from ..formats import format_texts, parse_spec, registered, spec_text
from ..formats.base import Format
from ..formats.bsr import BSR
from ..formats.csr import CSR
from ..formats.dense import Dense
from ..formats.sum import Sum
from ..preprocess.coordinates import DenseBlocks, dense_blocks_of, structure_of
from ..preprocess.structure import Structure
from ..products import rates, roofline
from ..products.problem import ROW, WORKSPACE, Operand, Problem, columns, columns_text, result_dtype
from ..products.roofline import Device, device_named
from .cost import LAUNCH_US
from .select import ask, named

OBJECTIVES = ("time", "bytes", "resident")
"""What is least in the first recommendation: the expected time, the bytes of the matrix, or those with workspaces."""
COLUMNS = (16, 2048)
"""Columns of B unless others are given: a few tokens, and a long prompt."""
_MIB = 1 << 20


@dataclass(frozen=True)
class Recommendation:
    """One format for a matrix, and what is to be expected of it."""

    format: str
    """Format text with its params, for ``convert``."""
    expected_us: dict[int, float | None]
    """Columns of B -> microseconds that the fastest kernel expects to take; None if no kernel takes the product."""
    kernels: dict[int, str | None]
    """Columns of B -> that kernel."""
    nbytes: int | None
    """Bytes of all arrays; None where only a conversion tells them."""
    workspace: dict[int, int]
    """Columns of B -> bytes of copies that the kernel needs beside A, B and C, as far as it states them."""
    stored: int
    """Values that are stored, padding included."""
    padding: float
    """Share of the stored values that are zero."""
    reasons: tuple[str, ...] = ()
    """What speaks for and against it, each from a number of this object or of the statistics."""

    @property
    def total_us(self) -> float | None:
        """The sum of the expected times: one product for each number of columns. None if one of them is not known."""
        return _total(self.expected_us.values())

    @property
    def resident_bytes(self) -> int | None:
        """Bytes of the matrix and of the largest workspace."""
        return None if self.nbytes is None else self.nbytes + max(self.workspace.values(), default=0)

    def value(self, objective: str) -> float:
        """What is least in the first recommendation for an objective; infinity if it is not known."""
        known = {"time": self.total_us, "bytes": self.nbytes, "resident": self.resident_bytes}[objective]
        return float("inf") if known is None else float(known)

    def __str__(self) -> str:
        times = ", ".join(f"{_us(us)} at {columns_text(n)}" for n, us in self.expected_us.items())
        more = f", {_us(self.total_us)} in all" if len(self.expected_us) > 1 else ""
        most = max(self.workspace.values(), default=0)
        workspace = f" and {_mib(most)} of workspace" if most else ""
        return f"{self.format}: {times}{more}, {_mib(self.nbytes)}{workspace}, {100 * self.padding:.1f} % padding"

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON types."""
        tree = asdict(self) | {"reasons": list(self.reasons)}
        tree |= {key: _by_text(tree[key]) for key in ("expected_us", "kernels", "workspace")}
        return tree | {"total_us": self.total_us, "resident_bytes": self.resident_bytes}

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Recommendation:
        """The object that ``to_json`` described."""
        by_number: dict[str, Any] = {key: _by_number(tree[key]) for key in ("expected_us", "kernels", "workspace")}
        fixed = {key: tree[key] for key in ("format", "nbytes", "stored", "padding")}
        return cls(**fixed, **by_number, reasons=tuple(tree["reasons"]))


@dataclass(frozen=True)
class Recommendations(Sequence[Recommendation]):
    """Recommendations for one matrix, the best first: a sequence. ``str()`` is the text the CLI prints."""

    shape: tuple[int, int]
    dtype: str
    device: str
    n: tuple[int, ...]
    objective: str
    rates: str
    """Which measurements the expected times come from."""
    statistics: dict[str, Any]
    """The counts that the reasons rest on: density, rows, gather reuse, block fill, groups that fit 2:4."""
    ranked: tuple[Recommendation, ...]
    excluded: dict[str, str]
    """Format -> why it cannot hold the matrix, or why nothing is known of it."""

    @overload
    def __getitem__(self, i: int) -> Recommendation: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Recommendation]: ...
    def __getitem__(self, i: int | slice) -> Recommendation | Sequence[Recommendation]:
        return self.ranked[i]

    def __len__(self) -> int:
        return len(self.ranked)

    def __str__(self) -> str:
        return self.text()

    def text(self, most: int | None = None) -> str:
        """The statistics, and the first ``most`` recommendations with their reasons, a line each."""
        s, least = self.statistics, {"time": "the least time", "bytes": "the fewest bytes"}
        goal = least.get(self.objective, "the fewest bytes with workspaces")
        lines = [f"{'x'.join(map(str, self.shape))} {self.dtype} on {self.device}, {goal} first; {self.rates}"]
        if self.objective == "time" and len(self.n) > 1:
            lines[0] += "; in all: one product for each number of columns"
        lines += [f"  {line}" for line in _described(s)]
        for i, r in enumerate(self.ranked[:most], 1):
            lines.append(f"  {i}. {r}")
            lines += [f"       {reason}" for reason in r.reasons]
        if most is not None and len(self) > most:
            lines.append("  then " + ", ".join(r.format for r in self.ranked[most:]))
        return "\n".join([*lines, *(f"  not {name}: {why}" for name, why in self.excluded.items())])

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON types."""
        fixed: dict[str, Any] = {key: getattr(self, key) for key in _FIXED}
        ranked = [r.to_json() for r in self.ranked]
        return fixed | {"shape": list(self.shape), "n": list(self.n), "recommendations": ranked}

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Recommendations:
        """The object that ``to_json`` described."""
        ranked = tuple(map(Recommendation.from_json, tree["recommendations"]))
        fixed = {key: tree[key] for key in _FIXED}
        return cls(**fixed, shape=(tree["shape"][0], tree["shape"][1]), n=tuple(tree["n"]), ranked=ranked)


_FIXED = ("dtype", "device", "objective", "rates", "statistics", "excluded")


def recommend(
    A: Any, n: int | Iterable[int] = COLUMNS, *, dtype: Any = None, device: str | Device = "H200",
    objective: str = "time", b_layout: str = ROW, workspace: int = WORKSPACE, backend: str | None = None,
    more: Iterable[str] = (),
) -> Recommendations:  # fmt: skip
    """Which formats suit a matrix, the best first, with the time that a product with each expects to take, and why.

    A: a matrix [M, K] on the host (numpy, any spformat format, scipy, torch), or its ``Structure``. A sparse one is
        counted from its coordinates, and never made dense.
    n: columns of B, one or several.
    dtype: the value type of A, B and C; default that of A. Values that would round to zero are counted as nonzeros.
    device: a name in ``cost.DEVICES`` (none needs to be here), an architecture like "sm_89", a ``Device`` with your
        figures, or "cpu" for this host.
    objective: "time": the sum of the expected times, one product for each n. "bytes": of the matrix. "resident": of the
        matrix and the largest workspace that its kernels state. Of equal ones, the faster or smaller comes first.
    b_layout: "row", or "col" (torch's x of a linear layer). workspace, backend: as for ``plan``.
    more: further format texts to consider ("ell-buckets:widths=8x24").

    A matrix on the host with blocks of 32 or 64 that are at least half full is also considered as a sum: those blocks,
    and the rest in csr, where that is at most a tenth full. The counts of a ``Structure`` do not tell that.

    Dense is always among them. A format that cannot hold A exactly is not: ``excluded`` says why. Expected times are
    those of ``explain``; how far they are from measured ones is on the page about recommendations.

    Raises UsageError for an unknown device, objective or format, an n below 1, or a matrix on a device; what
    ``convert`` raises for values that are not representable.
    """
    further = format_texts("more", more)
    counts, covers = structure_of(A), dense_blocks_of(A)
    if dtype is not None:
        counts = replace(counts, dtype=value_type(dtype).name)
    if objective not in OBJECTIVES:
        raise UsageError(f"objective: expected one of {', '.join(OBJECTIVES)}, got {objective!r:.80}", value=objective)
    one = not isinstance(n, Iterable) or isinstance(n, str) or getattr(n, "ndim", 1) == 0  # an array of no dimensions
    widths = tuple(dict.fromkeys(columns(k) for k in ((n,) if one else n)))  # type: ignore[union-attr]
    if not widths or min(widths) < 1:
        raise UsageError(f"n: expected numbers of columns, at least 1, got {n!r:.80}", value=n)
    if backend is not None:
        named(backend)  # raises for an unknown name
    target = device_named(device)
    asked = _Asked(counts, widths, target, b_layout, workspace, backend)
    with roofline.on(target) if target else nullcontext(), rates.read_once():
        ranked, excluded = asked.candidates(further)
        ranked += map(asked.sum_of_blocks, covers)
        ranked = list(_possible(ranked, math.prod(counts.shape), target is not None))
        line = rates.source(asked.problem(Operand(Dense.name, counts.shape, counts.dtype), widths[0]))
    second = "bytes" if objective == "time" else "time"
    ranked.sort(key=lambda r: (r.value(objective), r.value(second)))  # stable: of equal ones, the simpler
    name = target.name if target else "cpu"
    return Recommendations(
        counts.shape, counts.dtype, name, widths, objective, line, _statistics(counts, covers),
        _with_reasons(ranked, objective), excluded,
    )  # fmt: skip


@dataclass(frozen=True)
class _Asked:
    """A matrix by its counts, and the products that are asked for."""

    counts: Structure
    n: tuple[int, ...]
    device: Device | None
    b_layout: str
    workspace: int
    backend: str | None

    @property
    def place(self) -> str:
        return "cpu" if self.device is None else "cuda"

    def problem(self, a: Operand, n: int) -> Problem:
        (M, K), dtype = a.shape, a.dtype
        return Problem.product(
            a.format, a.params, M, K, n, a.stored, dtype, dtype, result_dtype(dtype, dtype), self.b_layout,
            device=self.place, sm=self.device.sm if self.device else None, workspace=self.workspace, parts=a.parts,
        )  # fmt: skip

    def candidates(self, more: Iterable[str]) -> tuple[list[Recommendation], dict[str, str]]:
        """(what is known of every format that holds the matrix, format -> why it does not), the simpler ones first."""
        found: dict[str, Recommendation] = {}
        excluded: dict[str, str] = {}
        for fmt in sorted(registered(), key=lambda f: f.tie_rank):
            if self.counts.dtype not in fmt.value_dtypes:
                excluded[fmt.name] = f"it takes no values of dtype {self.counts.dtype}"
                continue
            given = [*fmt.candidates(self.counts), *fmt.alternatives(self.counts)]
            if not given and (why := fmt.remark(self.counts, {})):
                excluded[fmt.name] = why
            for params in given:
                self._add(fmt, params, found, excluded)
        for text in more:
            fmt, params = parse_spec(text)
            if self.counts.dtype not in fmt.value_dtypes or not fmt.fits(self.counts, fmt.resolve_params(params)):
                excluded[text] = "the counts do not prove that it holds the matrix"
            else:
                self._add(fmt, fmt.resolve_params(params), found, excluded)
        return list(found.values()), excluded

    def _add(
        self, fmt: type[Format], given: dict[str, Any], found: dict[str, Recommendation], excluded: dict[str, str]
    ) -> None:
        params = fmt.params_of(self.counts, given)
        a = None if params is None else Operand.of_counts(fmt, self.counts, params, self.place)
        if params is None or a is None:
            excluded[spec_text(fmt, given)] = "its stored items are not counted; convert the matrix and ask explain"
            return
        defaults = {d.name: d.default for d in fmt.declared_params()}
        shown = {k: v for k, v in params.items() if k in given or v != defaults[k]}
        text = spec_text(fmt, shown)
        if text not in found:
            found[text] = self._recommendation(text, fmt, a, params)

    def sum_of_blocks(self, cover: DenseBlocks) -> Recommendation:
        """The sum of the blocks that are at least half full, and of the rest in CSR."""
        shape, dtype, b = self.counts.shape, self.counts.dtype, cover.size
        rest = replace(self.counts, nnz=self.counts.nnz - cover.nonzeros)
        blocks, params = replace(rest, blocks={b: (cover.blocks, 0)}), {"blocksize": (b, b)}
        nbytes = (BSR.bytes_of(blocks, params) or 0) + (CSR.bytes_of(rest, {}) or 0)
        pairs: tuple[tuple[type[Format], dict[str, Any], int], ...]
        pairs = (BSR, params, cover.blocks * b * b), (CSR, {}, rest.nnz)
        parts = [Operand(f.name, shape, dtype, tuple(q.items()), n, device=self.place) for f, q, n in pairs]
        a = Operand(Sum.name, shape, dtype, (), sum(x.stored for x in parts), device=self.place, parts=tuple(parts))
        share = 100 * (cover.nonzeros / self.counts.nnz)
        half = f"{cover.blocks} blocks of {b}x{b} are at least half full, with {share:.1f} % of the nonzeros"
        return self._described(f"bsr:blocksize={b}x{b},density>=0.5+csr", a, nbytes, half)

    def _recommendation(self, text: str, fmt: type[Format], a: Operand, params: dict[str, Any]) -> Recommendation:
        return self._described(text, a, fmt.bytes_of(self.counts, params), fmt.remark(self.counts, params))

    def _described(self, text: str, a: Operand, nbytes: int | None, remark: str) -> Recommendation:
        us: dict[int, float | None] = {}
        kernels: dict[int, str | None] = {}
        workspace: dict[int, int] = {}
        for n in self.n:
            p = self.problem(a, n)
            # As explain does: what is missing here does not count for a GPU that need not be here.
            answer = ask(p, self.backend, installed=self.device is None, every=False)
            us[n], kernels[n], workspace[n] = answer.expected_us, answer.chosen, 0
            if answer.chosen is not None:
                workspace[n] = backends.kernel_named(answer.chosen).workspace_bytes(p)
        padding = 1 - self.counts.nnz / a.stored if a.stored else 0.0
        return Recommendation(
            text, us, kernels, nbytes, workspace, a.stored, max(0.0, padding), (remark,) if remark else (),
        )  # fmt: skip


def _possible(ranked: list[Recommendation], elements: int, on_gpu: bool) -> Iterator[Recommendation]:
    """The recommendations with times that are possible, where constants extrapolate to less.

    A product on a GPU takes an empty launch at least. More columns do not take less time than fewer, which any kernel
    could pad. And a matrix without zeros to skip is not multiplied faster than a dense one.
    """
    dense = next((r.expected_us for r in ranked if r.format == Dense.name), {})
    for r in ranked:
        us, raised, least = dict(r.expected_us), [], LAUNCH_US if on_gpu else 0.0
        for n, expected in sorted(us.items()):
            if expected is None:
                continue
            of_dense = dense.get(n) if r.stored >= elements else None
            least = max(expected, least, of_dense or 0.0)
            if expected < least:
                us[n] = least
                raised.append(columns_text(n))
        why = f"raised to what is possible, as constants extrapolate to less: at {', '.join(raised)}"
        yield replace(r, expected_us=us, reasons=(*r.reasons, why)) if raised else r


def _with_reasons(ranked: list[Recommendation], objective: str) -> tuple[Recommendation, ...]:
    """The recommendations, with what the comparison with dense says of each, and how far the times can be trusted."""
    dense = next((r for r in ranked if r.format == Dense.name), None)
    rest = [r for r in ranked if r is not dense]
    out = []
    for i, r in enumerate(ranked):
        said = list(r.reasons)
        if r is dense:
            if i == 0 and rest and objective == "time" and r.total_us is not None:
                second, text = rest[0], "no kernel takes all products with another format"
                if second.total_us is not None:
                    text = f"{second.format}, the next, expects {_us(second.total_us)} in all"
                said.append(f"stay dense: {text}")
        elif dense is not None and (text := _speed(r, dense)):
            said.append(text)
        most = max(r.workspace.values(), default=0)  # the text of a recommendation names the largest
        for n, nbytes in r.workspace.items():
            if nbytes and nbytes == most:
                said.append(f"{r.kernels[n]} needs {_mib(nbytes)} of workspace at {columns_text(n)}")
        said += [f"no kernel takes it at {columns_text(n)}" for n, us in r.expected_us.items() if us is None]
        out.append(replace(r, reasons=tuple(said)))
    return tuple(out)


def _speed(r: Recommendation, dense: Recommendation) -> str:
    """How fast it is, of the speed of dense."""
    pairs = [(n, us, dense.expected_us[n]) for n, us in r.expected_us.items()]
    ratios = [f"{of / us:.2f} at {columns_text(n)}" for n, us, of in pairs if us is not None and of is not None]
    return "times the speed of dense: " + ", ".join(ratios) if ratios else ""


def _statistics(s: Structure, covers: list[DenseBlocks]) -> dict[str, Any]:
    """The counts that reasons rest on, as JSON types."""
    return {
        "nnz": s.nnz,
        "density": s.density,
        "rows": {"mean": s.mean_row, "longest": s.longest_row, "spread": s.row_spread},
        "gather_reuse": {str(h): s.gather_reuse(h) for h in s.vector_counts},
        "block_fill": {str(b): s.block_fill(b) for b in s.blocks},
        "half_full_blocks": {str(c.size): {"blocks": c.blocks, "share": c.nonzeros / s.nnz} for c in covers},
        "two_four_share": s.two_four_share,
    }


def _described(s: dict[str, Any]) -> Iterator[str]:
    """The statistics in words."""
    yield f"{100 * (1 - s['density']):.1f} % zeros, {s['nnz']} nonzeros"
    rows = s["rows"]
    longest = f"the longest {rows['longest']}, coefficient of variation {rows['spread']:.2f}"
    yield f"rows: {rows['mean']:.1f} nonzeros on average, {longest}"
    yield "gather reuse: " + ", ".join(f"{v:.1f} at height {h}" for h, v in s["gather_reuse"].items())
    yield "block fill: " + ", ".join(f"{100 * v:.1f} % at {b}" for b, v in s["block_fill"].items())
    for b, c in s.get("half_full_blocks", {}).items():  # of an earlier version: not counted
        yield f"blocks of {b}x{b} at least half full: {c['blocks']}, with {100 * c['share']:.1f} % of the nonzeros"
    yield f"groups of four that fit 2:4: {100 * s['two_four_share']:.1f} %"


def _total(times: Iterable[float | None]) -> float | None:
    known = list(times)
    return None if None in known else sum(us for us in known if us is not None)


def _us(us: float | None) -> str:
    return "no time" if us is None else f"{us:.1f} us"


def _mib(nbytes: int | None) -> str:
    return "bytes unknown" if nbytes is None else f"{nbytes / _MIB:.2f} MiB"


def _by_text(tree: dict[Any, Any]) -> dict[str, Any]:
    return {str(k): v for k, v in tree.items()}


def _by_number(tree: dict[str, Any]) -> dict[int, Any]:
    return {int(k): v for k, v in tree.items()}
