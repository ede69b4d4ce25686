"""spformat tune: which format of each tensor is fastest on the device at hand, measured and remembered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from . import completion
from .groups import counted, grouped, together
from .matrices import each_matrix
from .options import Include, Json, Long
from .output import console, print_json
from .pipe import typed
from .tables import cell, table

if TYPE_CHECKING:
    from spformat.measure.tune import Tuned

EPILOG = "spformat tune w.safetensors -n 1,16 --seconds 30\n\nspformat tune --export tuned.json"


def run(
    src: str = typer.Argument("", help="A .safetensors file, a folder of them, a .smtx, .mtx or .npz matrix."),
    n: list[str] = typer.Option(
        ["16,2048"], "-n", "--columns", help="Columns of B (tokens), comma-separated; their sum counts."
    ),
    seconds: float = typer.Option(10.0, min=0.1, help="Time for each matrix that is not remembered."),
    device: str = typer.Option("cpu", help="cpu, cuda or cuda:<id>."),
    most: int = typer.Option(6, min=1, help="Formats to try: so many that `recommend` names first, and dense."),
    b_layout: str = typer.Option(
        "row",
        help="Layout of B: row, or col (torch's x of a linear layer).",
        autocompletion=completion.one_of("row", "col"),
    ),
    include: Include = None,
    fresh: bool = typer.Option(False, "--fresh", help="Measure again what is remembered."),
    export: str = typer.Option("", metavar="FILE", help="Write all remembered results into a JSON file."),
    import_: str = typer.Option("", "--import", metavar="FILE", help="Remember the results in such a file."),
    long: Long = False,
    as_json: Json = False,
) -> None:
    """Measure the formats that `recommend` names first for each matrix in SRC, and remember the fastest."""
    from spformat.checkpoint.fastest import numbers
    from spformat.measure import tune

    if export or import_:
        if src or (export and import_):
            raise typer.BadParameter("expected SRC, --export FILE or --import FILE")
        count = tune.export_results(export) if export else tune.import_results(import_)
        where = f"written to {export}" if export else f"remembered in {tune.path()}"
        print_json({"results": count}) if as_json else console().print(f"{count} results {where}", soft_wrap=True)
        return
    if not src:
        raise typer.BadParameter("expected SRC, a checkpoint or a matrix")
    widths = numbers(",".join(n))
    options: dict[str, Any] = {"seconds": seconds, "device": device, "most": most, "b_layout": b_layout, "fresh": fresh}
    rows = [
        (r.name, tune.tune(f.read(r.name) if r.format else f.array(r.name), widths, **options))
        for r, f in each_matrix(src, include, "tune", as_json)
    ]
    if as_json:
        print_json({"path": typed(src), "tensors": [{"name": name} | t.to_json() | {"format": t.format}
                                                    for name, t in rows]})  # fmt: skip
        return
    if long:
        for name, t in rows:
            console().print(f"{cell(name)}:\n{t}", soft_wrap=True)
        return
    _print(rows)


def _print(rows: list[tuple[str, Tuned]]) -> None:
    """A line for each tensor, or for layers of one shape that have the same fastest format."""
    t = table("tensor", "shape", "fastest", "us", "us of dense", "tried", right=("us", "us of dense", "tried"))
    groups = grouped(rows, lambda row: row[0], lambda row: (row[1].shape, row[1].dtype, row[1].format))
    for group in groups:
        results = [result for _, result in group.rows]
        first = results[0]
        t.add_row(
            group.label, "x".join(map(str, first.shape)), first.format,
            together([f"{r.trials[0].total_us:.1f}" for r in results]), together([_of_dense(r) for r in results]),
            together([str(sum(bool(trial.us) for trial in r.trials)) for r in results]),
        )  # fmt: skip
    console().print(t)
    devices = dict.fromkeys(f"{r.where}, measured {r.date}" for _, r in rows)
    console().print(f"{counted(groups)}; on {'; '.join(devices)}; the times are sums over the columns of B")


def _of_dense(r: Tuned) -> str:
    return next((f"{t.total_us:.1f}" for t in r.trials if t.format == "dense" and t.us), "")
