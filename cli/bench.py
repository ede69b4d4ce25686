"""spformat bench: is it faster? Every kernel against dense and the vendor's libraries, measured here."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import typer

from . import calibration, completion, plots
from .inspect import structure_of
from .matrices import no_matrix
from .options import Include, Json, Src
from .output import console, notes, print_json, warnings
from .tables import cell, table

EPILOG = "spformat bench ./model-sp -n 1,16,256\n\nspformat bench w.safetensors --to two-four --device cuda -n 4096"

OWN = "With --calibrate"


def run(
    src: Src = "",
    n: list[str] = typer.Option(["16,256"], "-n", help="Columns of B (tokens), comma-separated."),
    to: str = typer.Option(
        "",
        "--to",
        help="Convert each matrix to this format first. Default: as stored; a dense one as `convert --to auto` would. "
        "With --calibrate: only these formats, comma-separated.",
        autocompletion=completion.one_format,
    ),
    include: Include = None,
    backend: str = typer.Option(
        "", help="Only these backends of ours, comma-separated (cpu, cuda).", autocompletion=completion.backends
    ),
    device: str = typer.Option("", help="cpu, cuda or cuda:1. Default: cuda when there is one."),
    limit: int = typer.Option(4, min=1, help="At most this many matrices (the largest of each shape first)."),
    repeats: int = typer.Option(50, min=1, help="Timed runs of each contender."),
    calibrate: bool = typer.Option(
        False,
        "--calibrate",
        help="Without SRC: measure this device, and fit the constants of the times that kernels expect.",
        rich_help_panel=OWN,
    ),
    validate: int = typer.Option(
        0, min=0, help="Check the expected times on so many products instead.", rich_help_panel=OWN
    ),
    seconds: float = typer.Option(120.0, min=1.0, help="How long to measure.", rich_help_panel=OWN),
    seed: int = typer.Option(0, help="Draws the products.", rich_help_panel=OWN),
    out: str = typer.Option("", help="Write this file of rates instead of your own.", rich_help_panel=OWN),
    kernels: str = typer.Option(
        "", help="Fit only these kernels, or those of a backend, comma-separated.", rich_help_panel=OWN
    ),
    columns: str = typer.Option("1-4096", metavar="LEAST-MOST", help="Only so many columns of B.", rich_help_panel=OWN),
    tiles: int = typer.Option(
        0, min=0, help="Tiles of a kernel for each product. Default: 3, with --kernels 6.", rich_help_panel=OWN
    ),
    points: str = typer.Option("", help="Also write the measured times into this new file.", rich_help_panel=OWN),
    from_points: list[str] = typer.Option(
        [], metavar="FILE", help="Fit to the times in this file, without measuring (repeatable).", rich_help_panel=OWN
    ),
    every_gpu: bool = typer.Option(
        False,
        "--every-gpu",
        help="The constants hold for all GPUs in proportion to their rates, not for this architecture alone.",
        rich_help_panel=OWN,
    ),
    commit: str = typer.Option(
        "", help="What was measured, for the files. Default: the version of spformat.", rich_help_panel=OWN
    ),
    plot: str = typer.Option("", help="Also draw the ratios into this PNG (needs matplotlib)."),
    as_json: Json = False,
) -> None:
    """Time A @ B for matrices of SRC: correctness first, alternating runs, cold and hot caches, medians."""
    from spformat import backends
    from spformat.checkpoint.fastest import numbers
    from spformat.errors import DeviceUnavailable, LimitError, StructureError, UsageError
    from spformat.formats.convert import convert
    from spformat.measure import bench, contenders
    from spformat.products.problem import result_dtype

    if plot:
        _check_plot(plot)
    if calibrate:
        if src:
            raise typer.BadParameter("--calibrate takes no SRC: it measures layers of its own")
        files = calibration.Files(out, points, tuple(from_points), every_gpu, commit)
        loaded = calibration.loaded(files, device, validate)
        where = calibration.device_of(loaded) if loaded else device or _default_device()
        scope = calibration.scope(where, seed, seconds, kernels, to, columns, tiles, validate)
        if not loaded:
            _check_kernels(where)
        if validate:
            calibration.validate(scope, as_json)
        else:
            calibration.calibrate(scope, files, loaded, as_json)
        return
    if not src:
        raise typer.BadParameter("expected SRC, a checkpoint or a matrix")
    if to.partition(":")[0] in ("fastest", "keep"):
        raise UsageError(
            f"--to: expected auto, dense or a format, as bsr:blocksize=16x16, got {to!r:.80}; without --to matrices "
            "are measured as they are stored, and `spformat tune SRC` measures which format is fastest"
        )
    where = device or _default_device()
    widths = numbers(",".join(n))
    only = tuple(filter(None, backend.split(",")))
    for name in only:
        if why := backends.get(name).missing():
            raise DeviceUnavailable(f"--backend {name}: {'; '.join(why)}")
    if not only:  # else dense products alone would be timed
        _check_kernels(where)
    said: list[str] = []

    def say(text: str) -> None:
        """With --json, stderr has errors alone, and notes belong to the document."""
        said.append(text) if as_json else notes().print(text, soft_wrap=True)

    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if where == "cpu" and busy > 0.5 * (os.cpu_count() or 1):
        text = f"load {busy:.1f} on {os.cpu_count()} cores: other work on this machine shows in the times below"
        said.append(text) if as_json else warnings().print(text, style="yellow")
    rows: list[dict[str, Any]] = []
    verdicts: list[str] = []
    t = table("tensor", "N", "contender", "cold us", "hot us", "host us", "TFLOP/s useful", "GB/s", "error", "note",
              right=("N", "cold us", "hot us", "host us", "TFLOP/s useful", "GB/s", "error"))  # fmt: skip
    environment = None
    for name, a in _matrices(src, include, limit, say):
        target = to or ("auto" if a.name == "dense" else "")
        if target == "auto":
            target = structure_of(a, src, name).smallest()
            what = "dense, and no format of it is smaller" if target == "dense" else f"as {target}"
            say(f"{cell(name)}: measured {what} (what `convert --to auto` makes of it)")
        try:
            fitted = (convert(a, target) if target else a).to(where)
        except (LimitError, StructureError) as e:
            raise e.at(path=src, tensor=name) from None
        for width in widths:
            B = contenders.operand(fitted, width)
            environment = environment or bench.environment(B)
            crowd = contenders.ours(fitted, B, only) + contenders.dense(fitted, B)
            crowd += contenders.sparse_library(fitted, B) + contenders.torch_peers(fitted, B)
            out_dtype = result_dtype(fitted.dtype.name, B.dtype.name)  # of the arrays that the contenders write
            case = bench.Case(f"{name} N={width}", fitted, B, tuple(crowd), out_dtype, {"nnz": fitted.nnz})
            results = bench.compare(case, repeats)
            rows += [row | {"tensor": name, "N": width, "format": fitted.name} for row in bench.to_json(results)]
            for r in results:
                t.add_row(name, str(width), r.name, *(_number(v) for v in (r.cold_us, r.hot_us, r.host_us)),
                          f"{r.useful_tflops:.3f}", f"{r.gbytes_per_s:.0f}", f"{r.error:.2f}", r.note,
                          style=None if r.peer else "bold")  # fmt: skip
            verdicts.append(f"{cell(name)} N={width}: {bench.verdict(results)}")
    if not as_json:
        console().print(t)
        console().print(
            "The column error is a share of the bound for float32 sums, wrong above 1; only ratios of one run count."
        )
    for text in verdicts:
        say(text)
    if as_json:
        print_json({"environment": environment, "results": rows, "notes": said})
    if plot:
        _plot(rows, plot)


def _number(value: float) -> str:
    return "-" if value != value else f"{value:.1f}"


def _check_kernels(where: str) -> None:
    """DeviceUnavailable if products are to be timed on a host that has none of our kernels."""
    from spformat import backends
    from spformat.errors import DeviceUnavailable

    why = backends.get("cpu").missing() if where == "cpu" else ()
    if why:
        raise DeviceUnavailable(f"no kernel of ours runs on the CPU here: {'; '.join(why)}")


def _default_device() -> str:
    from spformat import backends

    return "cpu" if backends.get("cuda").missing() else "cuda"


def _matrices(src: str, include: list[str] | None, limit: int, say: Callable[[str], None]) -> Any:
    """(name, Format) of the largest matrices; one matrix of each shape comes first, then the second of each.

    say: is told how many are left out.
    """
    from spformat.checkpoint.recipe import included
    from spformat.checkpoint.source import open_source
    from spformat.checkpoint.stacks import StackedFile, holds_matrices, records_of
    from spformat.formats.foreign import as_format

    source = open_source(src)
    chosen = [source.records[name] for name in included(source.records, include)]
    matrices: list[Any] = [(tensor, shard, r) for shard, tensor, _ in chosen if holds_matrices(tensor)
                           for r in records_of(tensor)]  # fmt: skip
    matrices.sort(key=lambda item: -item[2].shape[0] * item[2].shape[1])
    seen: dict[Any, int] = {}
    ranked = []
    for item in matrices:
        key = (item[2].shape, item[2].format)
        seen[key] = seen.get(key, 0) + 1
        ranked.append((seen[key], item))
    ranked.sort(key=lambda pair: pair[0])
    if not ranked:
        raise no_matrix(len(chosen))
    if len(ranked) > limit:
        say(f"the {limit} largest of {len(ranked)} matrices, one of each shape first; --limit takes more")
    for _, (tensor, shard, r) in ranked[:limit]:
        with source.open(shard) as f:
            opened: Any = StackedFile(f, [tensor])
            yield r.name, as_format(opened.read(r.name))


def _check_plot(path: str) -> None:
    """UsageError or OutputError, before the measurement, if the plot could not be written after it."""
    from spformat.errors import UsageError

    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'spformat[plot]'")
    if not path.lower().endswith(".png"):
        raise UsageError(f"--plot: expected a name in .png, got {path!r}")
    plots.check(path)


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
        axis.set_title(f"{cell(tensor)}, N = {width}", fontsize=9, parse_math=False)  # a $ in a name begins no formula
        axis.invert_yaxis()
        axis.tick_params(labelsize=7)
    axes[-1, 0].set_xlabel("microseconds, cold cache (lower is better)")
    figure.tight_layout()
    plots.publish_figure(path, figure, dpi=150)
