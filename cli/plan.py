"""spformat plan: the table that convert would produce. Reads, never writes."""

from __future__ import annotations

import json
import math
from typing import Any

import typer

from .options import Exclude, Include, Json, Misfit, NonFinite, Prune, Rules, Sparsity, Src, To, recipe
from .output import cell, console, notes, print_json, progress, size, table

EPILOG = "spformat plan ./model --to auto   |   spformat plan ./model --to dense --rule 're:.*mlp.*=two-four'"


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
    fail_if_larger: bool = typer.Option(False, help="Exit 1 when a tensor would become larger than dense."),
    as_json: Json = False,
) -> None:
    """Per tensor: target, bytes before and after, and why; warns where a format is larger than dense."""
    outcomes = foresee(src, recipe(to, rule, include, exclude, prune, sparsity, nonfinite, misfit), as_json)
    show(outcomes, as_json)
    if any(o.error for o in outcomes):
        raise typer.Exit(3)
    if fail_if_larger and any(o.larger_than_dense for o in outcomes):
        raise typer.Exit(1)


def foresee(src: str, chosen: Any, quiet: bool) -> Any:
    """The outcomes that a conversion would have."""
    from spformat.checkpoint.run import foresee_checkpoint
    from spformat.checkpoint.source import open_source

    total = sum(size for _, _, size in open_source(src).records.values())
    with progress(total, "read", quiet) as step:
        return foresee_checkpoint(src, chosen, progress=lambda o: step(o.name, o.bytes_in))


def show_report(report: Any, as_json: bool, path: str, **extra: Any) -> None:
    """Print the table of a finished conversion, and the files that it did not copy."""
    files, left = [s.name for s in report.shards], list(report.left_behind)
    show(report.outcomes, as_json, path=path, files=files, not_copied=left, **extra)
    if left and not as_json:
        names = ", ".join(cell(n) for n in left[:8]) + (f", .. ({len(left)} in all)" if len(left) > 8 else "")
        text = f"not copied: {names}; folders, weights that were not converted and very large files stay behind"
        notes().print(text, style="yellow", soft_wrap=True)


def show(outcomes: Any, as_json: bool, **extra: Any) -> None:
    """Print the table, or one JSON document."""
    before, after = sum(o.bytes_in for o in outcomes), sum(o.bytes_out or 0 for o in outcomes)
    csr, dense = (sum(_bytes_in(o, name) for o in outcomes) for name in ("csr", "dense"))
    if as_json:
        tree = {
            "bytes_in": before,
            "bytes_out": after,
            "bytes_csr": csr,
            "bytes_dense": dense,
            "tensors": [o.to_json() for o in outcomes],
        }
        print_json(tree | json.loads(json.dumps(extra)))
        return
    t = table("tensor", "shape", "dtype", "zeros", "target", "before", "after", "ratio", "note",
              right=("zeros", "before", "after", "ratio"))  # fmt: skip
    for o in outcomes:
        elements = o.shape[0] * o.shape[1] if len(o.shape) == 2 else 0
        zeros = f"{100 * (1 - o.nnz / elements):.1f} %" if o.nnz is not None and elements else ""
        ratio = f"{o.bytes_out / o.bytes_in:.2f}x" if o.bytes_out is not None and o.bytes_in else ""
        note = o.error or ("larger than dense!" if o.larger_than_dense else o.why if o.target == "keep" else "")
        if o.negative_zeros:
            note += f" {o.negative_zeros} -0.0 become +0.0"
        if o.dropped_zeros:
            note += f" {o.dropped_zeros} stored zeros dropped"
        style = "red" if o.error else "yellow" if o.larger_than_dense else None
        t.add_row(o.name, "x".join(map(str, o.shape)), o.dtype, zeros, o.target, size(o.bytes_in), size(o.bytes_out),
                  ratio, note.strip(), style=style)  # fmt: skip
    console().print(t)
    ratio = f" ({after / before:.2f}x)" if before else ""
    others = f"csr would be {size(csr)}, dense {size(dense)}"
    console().print(f"{len(outcomes)} tensors: {size(before)} -> {size(after)}{ratio}; {others}")
    larger = [o for o in outcomes if o.larger_than_dense]
    if larger:
        text = f"warning: {len(larger)} tensor(s) become larger than dense; --to auto picks the smallest exact format"
        notes().print(text, style="yellow")
    failed = [o for o in outcomes if o.error]
    if failed:
        notes().print(
            f"{len(failed)} tensor(s) do not fit: --misfit keep or --misfit bitmask goes on without them", style="red"
        )


def _bytes_in(o: Any, target: str) -> int:
    """Bytes of a tensor if it were stored in csr or dense; as it is now if it is not converted."""
    from spformat.arrays.dtypes import value_type
    from spformat.formats import by_name

    if o.nnz is None:
        return int(o.bytes_in)
    specs = by_name(target).array_specs(o.shape, value_type(o.dtype).numpy, o.nnz, {}) or {}
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in specs.values())
