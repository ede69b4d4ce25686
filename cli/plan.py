"""spformat plan: the table that convert would produce. Reads, never writes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer

from . import gpus
from .groups import counted, grouped, one_each, together, without_numbers
from .hints import again, conversion_of, hint, was_given
from .options import (
    ColumnsOfFastest,
    Exclude,
    Include,
    Json,
    Long,
    Misfit,
    NonFinite,
    Prune,
    Rules,
    Sparsity,
    Src,
    To,
    recipe,
)
from .output import console, print_json, progress, set_verdict, size, summary, warnings
from .refusals import reason, remedies
from .tables import cell, table

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = "spformat plan ./model --to auto\n\nspformat plan ./model --to dense --rule 're:.*mlp.*=two-four'"


def run(
    src: Src,
    to: To = "auto",
    rule: Rules = None,
    include: Include = None,
    exclude: Exclude = None,
    prune: Prune = "",
    sparsity: Sparsity = None,
    nonfinite: NonFinite = "refuse",
    misfit: Misfit = "error",
    columns: ColumnsOfFastest = [],  # noqa: B006
    gpu: gpus.OfFastest = "",
    fail_if_larger: bool = typer.Option(
        False, "--fail-if-larger", help="Exit 1 when a tensor would become larger than dense."
    ),
    long: Long = False,
    as_json: Json = False,
) -> None:
    """Target, bytes before and after, and why; warns where a format is larger than dense. Nothing is written."""
    outcomes = foresee(
        src, recipe(to, rule, include, exclude, prune, sparsity, nonfinite, misfit, columns, gpu), as_json
    )
    larger = fail_if_larger and any(o.larger_than_dense for o in outcomes)
    code = 3 if any(o.error for o in outcomes) else 1 if larger else 0
    set_verdict(code)
    show(outcomes, as_json, long, console())
    advise(src, outcomes, as_json)
    if code:
        raise typer.Exit(code)


def advise(src: str, outcomes: Any, as_json: bool) -> None:
    """The command to type next; none to prune a matrix in a file of its own, which convert does not."""
    from spformat.checkpoint.matrix_file import is_matrix

    if as_json:
        return
    if any(o.error for o in outcomes):
        if not was_given("--misfit"):
            hint(again("--misfit", "keep"))
    elif any(o.target != "keep" for o in outcomes) and not (is_matrix(src) and was_given("--prune")):
        hint(conversion_of(src, outcomes[0].target))


def foresee(src: str, chosen: Any, silent: bool, layout: str = "neutral", part: str = "") -> Any:
    """The outcomes that a conversion would have."""
    from spformat.checkpoint import Part, bytes_to_convert
    from spformat.checkpoint.foresee import foresee_checkpoint

    of = Part.parse(part) if part else None
    with progress(bytes_to_convert(src, chosen, of), "read", silent) as step:
        return foresee_checkpoint(src, chosen, lambda o: step(o.name, o.bytes_in), layout=layout, part=of)


def show_report(report: Any, as_json: bool, long: bool, path: str, **extra: Any) -> None:
    """Print the table of a finished conversion, the files that it did not copy, and old weights that stay beside it."""
    files, left, beside = [s.name for s in report.shards], list(report.left_behind), list(report.dense_beside)
    extra |= {"path": path, "files": files, "not_copied": left, "dense_beside": beside}
    show(report.outcomes, as_json, long, summary(), **extra)
    if left and not as_json:
        text = f"not copied: {_some(left)}; folders, weights that were not converted and very large files stay behind"
        warnings().print(text, style="yellow", soft_wrap=True)
    if beside and not as_json:
        text = f"{cell(path)} also holds a dense checkpoint, which stays: {_some(beside)}"
        more = "other loaders than spformat read that one, so move or remove it if it is an old one"
        warnings().print(f"{text}; {more}", style="yellow", soft_wrap=True)


def _some(names: list[str]) -> str:
    """The first names, and how many there are."""
    return ", ".join(cell(n) for n in names[:8]) + (f", .. ({len(names)} in all)" if len(names) > 8 else "")


def show(outcomes: Any, as_json: bool, long: bool, out: Console, **extra: Any) -> None:
    """Print the table, with ``long`` a line for each tensor; or one JSON document."""
    before, after = sum(o.bytes_in for o in outcomes), sum(o.bytes_out or 0 for o in outcomes)
    csr, dense = (_sum(_bytes_in(o, name) for o in outcomes) for name in ("csr", "dense"))
    if as_json:
        tree = {
            "bytes_in": before,
            "bytes_out": after,
            "bytes_csr": csr,
            "bytes_dense": dense,
            "tensors": [o.to_json() for o in outcomes],
        }
        if any(o.norm for o in outcomes):
            share = round(lost_share(outcomes), 9)
            tree |= {"pruned": sum(o.pruned for o in outcomes), "lost_norm_share": share}
            tree["mean_error"] = mean_error(outcomes)
        print_json(tree | json.loads(json.dumps(extra)))
        return
    fits = [o for o in outcomes if not o.error]
    named = one_each(outcomes, _name) if long else grouped(outcomes, _name, _fate)
    t = table("tensor", "shape", "dtype", "zeros", "target", "before", "after", "ratio", "note",
              right=("zeros", "before", "after", "ratio"))  # fmt: skip
    for group in named:
        o, old = group.rows[0], sum(o.bytes_in for o in group.rows)
        new = None if o.bytes_out is None else sum(o.bytes_out or 0 for o in group.rows)
        style = "red" if o.error else "yellow" if o.larger_than_dense else None
        t.add_row(
            group.label, "x".join(map(str, o.shape)), o.dtype, together([_zeros(o) for o in group.rows]), o.target,
            size(old), size(new), "" if new is None or not old else f"{new / old:.2f}x", note(group.rows), style=style,
        )  # fmt: skip
    out.print(t)
    if len(fits) == len(outcomes):
        ratio = f" ({after / before:.2f}x)" if before else ""
        others = ("" if csr is None else f"csr would be {size(csr)}, ") + f"dense {size(dense)}"
        out.print(f"{counted(named)}: {size(before)} -> {size(after)}{ratio}; {others}")
    else:
        out.print(f"{counted(named)}: {size(before)}")
    if any(o.pruned for o in outcomes):
        nonzeros = sum(o.pruned + (o.nnz or 0) for o in outcomes if o.norm)
        share = f"{100 * lost_share(outcomes):.2f} % of the Frobenius norm"
        taken = sum(o.pruned for o in outcomes)
        mean = f"mean error {mean_error(outcomes):.3g}"
        out.print(f"--prune set {taken:,} of {nonzeros:,} nonzero values to zero: {share}, {mean}")
    larger = [o for o in outcomes if o.larger_than_dense]
    if larger:
        text = f"warning: {len(larger)} tensor(s) become larger than dense; --to auto picks the smallest exact format"
        warnings().print(text, style="yellow", soft_wrap=True)
    if len(fits) < len(outcomes):
        text = f"{len(outcomes) - len(fits)} tensor(s) do not fit{remedies(o.error for o in outcomes)}"
        warnings().print(text, style="red", soft_wrap=True)


def _name(o: Any) -> str:
    return str(o.name)


def _fate(o: Any) -> tuple[Any, ...]:
    """What tensors have in common that share a line."""
    why = without_numbers(o.why) if o.target == "keep" else ""
    return o.shape, o.dtype, o.target, bool(o.error), why, o.larger_than_dense, o.bytes_out is None


def _zeros(o: Any) -> str:
    elements = math.prod(o.shape)
    return f"{100 * (1 - o.nnz / elements):.1f} %" if o.nnz is not None and elements else ""


def note(group: Sequence[Any]) -> str:
    """What is to be said of the tensors of a line. Of several refusals, the first."""
    o = group[0]
    why = reason(o.why for o in group) if o.target == "keep" and o.why.startswith("kept") else o.why
    notes = ["larger than dense!"] if o.larger_than_dense else [why] if o.target == "keep" else []
    if o.error:
        notes = [reason(o.error for o in group)]
    if negative := sum(o.negative_zeros for o in group):
        notes.append(f"{negative} -0.0 become +0.0")
    if dropped := sum(o.dropped_zeros for o in group):
        notes.append(f"{dropped} stored zeros dropped")
    if pruned := sum(o.pruned for o in group):
        notes.append(f"{pruned:,} values pruned, {100 * lost_share(group):.2f} % of the norm")
    return " ".join(notes)


def lost_share(outcomes: Iterable[Any]) -> float:
    """Relative Frobenius norm of what was pruned: the norm of all values set to zero over that of all before."""
    pruned = [o for o in outcomes if o.norm]
    lost, norm = (math.hypot(*(getattr(o, field) for o in pruned)) for field in ("lost_norm", "norm"))
    return lost / norm if norm else 0.0


def mean_error(outcomes: Iterable[Any]) -> float:
    """Mean of |w - pruned w| over all elements of the pruned matrices: NM-SpMM's pruning error, for unknown inputs."""
    pruned = [o for o in outcomes if o.norm]
    elements = sum(math.prod(o.shape) for o in pruned)
    return float(math.fsum(o.lost_sum for o in pruned) / elements) if elements else 0.0


def _bytes_in(o: Any, target: str) -> int | None:
    """Bytes of a tensor if it were stored in csr or dense; as it is now if it is not converted.

    None for csr if its nonzeros were not counted, as on the way to dense.
    """
    from spformat.arrays.dtypes import VALUE_TYPES, value_type
    from spformat.formats import by_name

    matrix = len(o.shape) in (2, 3) and o.dtype in VALUE_TYPES
    if o.target == "keep" or (o.nnz is None and not matrix):
        return int(o.bytes_in)
    if o.nnz is None and target != "dense":
        return None
    *stack, M, K = o.shape
    E = math.prod(stack)  # the matrices of a stack have row pointers of their own
    specs = by_name(target).array_specs((M, K), value_type(o.dtype).numpy, 0, {}) or {}
    full = by_name(target).array_specs((M, K), value_type(o.dtype).numpy, o.nnz or 0, {}) or {}
    empty, stored = (sum(math.prod(s) * d.itemsize for d, s in each.values()) for each in (specs, full))
    return int(E * empty + stored - empty)


def _sum(numbers: Iterable[int | None]) -> int | None:
    """The sum; None if a number is not known."""
    known = list(numbers)
    return None if None in known else sum(n for n in known if n is not None)
