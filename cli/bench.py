"""spformat bench: is it faster? Every kernel against dense and the vendor's libraries, measured here."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import typer

from .options import Include, Json, SrcOrMatrix, is_matrix
from .output import cell, console, notes, print_json, table

EPILOG = "spformat bench ./model-sp -n 1,16,256   |   spformat bench w.safetensors --to two-four --device cuda -n 4096"


def run(
    src: SrcOrMatrix,
    n: str = typer.Option("16,256", "-n", help="Columns of B (tokens), comma-separated."),
    to: str = typer.Option("", "--to", help="Convert each matrix to this format first (default: as stored)."),
    include: Include = None,
    backend: str = typer.Option("", help="Only these backends of ours, comma-separated (cpu, cuda)."),
    device: str = typer.Option("", help="cpu, cuda or cuda:1. Default: cuda when there is one."),
    limit: int = typer.Option(4, min=1, help="At most this many matrices (the largest of each shape first)."),
    repeats: int = typer.Option(50, min=1, help="Timed runs of each contender."),
    tune: bool = typer.Option(
        False, help="Time every kernel and tile instead, and keep the fastest in the table that plans look up."
    ),
    plot: str = typer.Option("", help="Also draw the ratios into this PNG (needs matplotlib)."),
    as_json: Json = False,
) -> None:
    """Time A @ B for matrices of SRC: correctness first, alternating runs, cold and hot caches, medians."""
    from spformat import backends
    from spformat.formats.convert import convert
    from spformat.measure import bench, contenders

    if plot:
        _check_plot(plot)
    where = device or _default_device()
    widths = _widths(n)
    only = tuple(filter(None, backend.split(",")))
    for name in only:
        backends.get(name)
    if tune:
        _tune(src, include, limit, to, where, widths, repeats, as_json)
        return
    rows: list[dict[str, Any]] = []
    t = table("tensor", "N", "contender", "cold us", "hot us", "host us", "TFLOP/s useful", "GB/s", "error", "note",
              right=("N", "cold us", "hot us", "host us", "TFLOP/s useful", "GB/s", "error"))  # fmt: skip
    environment = None
    for name, a in _matrices(src, include, limit):
        fitted = (convert(a, to) if to else a).to(where)
        for width in widths:
            B = contenders.operand(fitted, width)
            environment = environment or bench.environment(B)
            crowd = contenders.ours(fitted, B, only) + contenders.dense(fitted, B)
            crowd += contenders.sparse_library(fitted, B) + contenders.torch_peers(fitted, B)
            out_dtype = "float32" if fitted.dtype.itemsize > 2 else fitted.dtype.name
            case = bench.Case(f"{name} N={width}", fitted, B, tuple(crowd), out_dtype, {"nnz": fitted.nnz})
            results = bench.compare(case, repeats)
            rows += [row | {"tensor": name, "N": width} for row in bench.to_json(results)]
            for r in results:
                t.add_row(name, str(width), r.name, *(_number(v) for v in (r.cold_us, r.hot_us, r.host_us)),
                          f"{r.useful_tflops:.3f}", f"{r.gbytes_per_s:.0f}", f"{r.error:.2f}", r.note,
                          style=None if r.peer else "bold")  # fmt: skip
            notes().print(f"{cell(name)} N={width}: {bench.verdict(results)}")
    if as_json:
        print_json({"environment": environment, "results": rows})
    else:
        console().print(t)
        console().print("error: share of the bound for float32 sums, wrong above 1; only ratios within one run count")
    if plot:
        _plot(rows, plot)


def _tune(
    src: str, include: list[str] | None, limit: int, to: str, where: str, widths: list[int], repeats: int, as_json: bool
) -> None:
    """Rows of the user's table of measurements, one for each matrix and N."""
    from spformat.formats.convert import convert
    from spformat.measure import tune as tuning

    t = table("tensor", "N", "kernel", "tile", "cold us", "tried", right=("N", "cold us", "tried"))
    rows, like = [], None
    for name, a in _matrices(src, include, limit):
        fitted = (convert(a, to) if to else a).to(where)
        like = fitted.values
        for row, results in tuning.tune(fitted, widths, repeats):
            rows.append(row)
            t.add_row(name, str(row.n), row.kernel, row.tile, _number(row.us), str(len(results)))
    path = tuning.save(rows, like, f"spformat bench --tune -n {','.join(map(str, widths))}")
    if as_json:
        print_json({"path": str(path), "rows": [row._asdict() for row in rows]})
    else:
        console().print(t)
        console().print(f"{path}: {len(rows)} row(s); SPFORMAT_MEASURED=off leaves it out", soft_wrap=True)


def _widths(n: str) -> list[int]:
    """The numbers of columns in "16,256"."""
    parts = [part.strip() for part in n.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(f"-n: expected numbers of columns like 16,256, got {n!r}")
    return [int(part) for part in parts]


def _number(value: float) -> str:
    return "-" if value != value else f"{value:.1f}"


def _default_device() -> str:
    from spformat import backends

    return "cpu" if backends.get("cuda").missing() else "cuda"


def _matrices(src: str, include: list[str] | None, limit: int) -> Any:
    """(name, Format) of the largest matrices; one matrix of each shape comes first, then the second of each."""
    from spformat.arrays.dtypes import VALUE_TYPES
    from spformat.checkpoint.recipe import included
    from spformat.checkpoint.source import open_source
    from spformat.formats.foreign import as_format
    from spformat.interop.matrices import read_matrix

    if is_matrix(src):
        yield src, read_matrix(src)
        return
    source = open_source(src)
    chosen = ((name, *source.records[name]) for name in included(source.records, include))
    matrices = [(name, shard, r) for name, shard, r, _ in chosen if len(r.shape) == 2 and r.dtype in VALUE_TYPES]
    matrices.sort(key=lambda item: -item[2].shape[0] * item[2].shape[1])
    seen: dict[Any, int] = {}
    ranked = []
    for item in matrices:
        key = (item[2].shape, item[2].format)
        seen[key] = seen.get(key, 0) + 1
        ranked.append((seen[key], item))
    ranked.sort(key=lambda pair: pair[0])
    for _, (name, shard, _) in ranked[:limit]:
        with source.open(shard) as f:
            yield name, as_format(f.read(name))


def _check_plot(path: str) -> None:
    """UsageError or OutputError, before the measurement, if the plot could not be written after it."""
    from spformat.errors import OutputError, UsageError

    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'spformat[plot]'")
    if not path.lower().endswith(".png"):
        raise UsageError(f"--plot: expected a name in .png, got {path!r}")
    if not os.access(os.path.dirname(path) or ".", os.W_OK):
        raise OutputError("--plot: cannot write into the folder", path=path)


def _plot(rows: list[dict[str, Any]], path: str) -> None:
    """Bars: time of every contender, by tensor and N."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = list(dict.fromkeys((r["tensor"], r["N"]) for r in rows))
    figure, axes = plt.subplots(len(cases), 1, figsize=(9, 0.6 + 1.8 * len(cases)), squeeze=False)
    for (tensor, width), axis in zip(cases, axes[:, 0], strict=True):
        bars = [r for r in rows if (r["tensor"], r["N"]) == (tensor, width) and r["cold_us"] is not None]
        names = [r["name"] for r in bars]
        axis.barh(names, [r["cold_us"] for r in bars], color=["tab:gray" if r["peer"] else "tab:blue" for r in bars])
        axis.set_title(f"{tensor}, N = {width}", fontsize=9)
        axis.invert_yaxis()
        axis.tick_params(labelsize=7)
    axes[-1, 0].set_xlabel("microseconds, cold cache (lower is better)")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
