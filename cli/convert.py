"""spformat convert: a checkpoint or a matrix file into other formats, exactly or not at all."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import completion, gpus, plan
from .hints import again, hint
from .inspect import structure_of
from .options import (
    ColumnsOfFastest,
    Exclude,
    Include,
    Json,
    Layout,
    Long,
    Misfit,
    NonFinite,
    Prune,
    Rules,
    Sparsity,
    Src,
    To,
    recipe,
    value_dtype,
)
from .output import console, notes, print_json, progress, size, summary, warnings
from .pipe import stands_for, typed
from .tables import cell
from .url import copied

if TYPE_CHECKING:
    from spformat.checkpoint import Recipe

MANY = "Many cores and machines"
ONE = "Files with one matrix: .smtx, .mtx, .npz"

EPILOG = (
    "spformat convert ./model ./model-sp --to auto\n\nspformat convert ./model-sp ./dense --to dense\n\n"
    "spformat convert ffn.smtx ffn.safetensors --to sr-bcrs --values normal"
)


_OF_CHECKPOINTS = (
    "rule", "include", "exclude", "prune", "sparsity", "nonfinite", "misfit", "in_place", "resume", "device", "part",
    "executor", "workers", "scheduler", "staging", "layout",
)  # fmt: skip
_OF_MATRICES = ("values", "seed", "dtype")
_OF_FOLDERS = tuple(name for name in _OF_CHECKPOINTS if name not in ("include", "exclude"))


def run(
    ctx: typer.Context,
    src: Src,
    dst: Annotated[
        str,
        typer.Argument(
            help="A folder; or one file: .safetensors for a single shard, .npz, .mtx or .smtx for one matrix."
        ),
    ],
    to: To = "auto",
    rule: Rules = None,
    include: Include = None,
    exclude: Exclude = None,
    prune: Prune = "",
    sparsity: Sparsity = None,
    nonfinite: NonFinite = "refuse",
    misfit: Misfit = "error",
    columns: ColumnsOfFastest = [],  # noqa: B006
    gpu: str = typer.Option(
        "",
        "--gpu",
        help="With --to fastest: the device that will multiply, H200 (default), another board, sm_89, .., or cpu.",
        autocompletion=gpus.names,
    ),
    in_place: bool = typer.Option(False, "--in-place", help="Allow DST to be SRC, one file; replaced at the end."),
    sort: bool = typer.Option(False, "--sort", help="Sort the columns of CSR rows that a file holds out of order."),
    force: bool = typer.Option(False, "--force", "-f", help="Replace what DST holds, file by file, at each rename."),
    resume: bool = typer.Option(
        False, "--resume", help="Finish an interrupted run: finished shards are known by their hashes."
    ),
    device: str = typer.Option(
        "cpu",
        help="Where matrices are converted: cpu, cuda, cuda:<id>, or several as cuda:0,cuda:1; same bytes. "
        "The name of a board means --gpu.",
    ),
    part: str = typer.Option(
        "", metavar="I/N", help="Only part I of N (job arrays); `spformat merge DST` joins them.", rich_help_panel=MANY
    ),
    executor: str = typer.Option(
        "",
        help="Convert side by side on 'threads', 'processes' or 'dask'.",
        rich_help_panel=MANY,
        autocompletion=completion.one_of("threads", "processes", "dask"),
    ),
    workers: int = typer.Option(
        0, min=0, help="How many, on this machine. Default: one a core.", rich_help_panel=MANY, show_default=False
    ),
    scheduler: str = typer.Option(
        "",
        metavar="ADDRESS",
        help="A dask scheduler, e.g. tcp://host:8786; without one, --executor dask starts workers here.",
        rich_help_panel=MANY,
    ),
    staging: str = typer.Option(
        "",
        metavar="FOLDER",
        help="Where copies of remote files are kept. Default: a temporary folder.",
        rich_help_panel=MANY,
    ),
    layout: Layout = "neutral",
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the table and write nothing."),
    values: str = typer.Option(
        "",
        help="'ones' or 'normal' instead of the file's values.",
        rich_help_panel=ONE,
        autocompletion=completion.one_of("ones", "normal"),
    ),
    seed: int = typer.Option(0, help="For --values normal.", rich_help_panel=ONE),
    dtype: str = typer.Option(
        "",
        help="Value type, e.g. bfloat16 (rounds; refuses overflow).",
        rich_help_panel=ONE,
        autocompletion=completion.dtypes,
    ),
    long: Long = False,
    as_json: Json = False,
) -> None:
    """Convert SRC into DST. Every value is kept with its bits, or the run stops before anything has its final name."""
    from spformat.checkpoint.matrix_file import is_matrix
    from spformat.checkpoint.remote import staged
    from spformat.checkpoint.start import check_conversion
    from spformat.checkpoint.transfers import is_remote, without_scheme
    from spformat.limits import using

    if typed(src) == "-" and part:
        raise typer.BadParameter("--part: parts and merge read the same file: write what the pipe brings to one first")
    if dst == "-":
        raise typer.BadParameter("DST: expected a file or folder, got -: nothing is written to a pipe; ./- is a folder")
    if is_matrix(src) or is_matrix(dst):
        src, dst = without_scheme(src), without_scheme(dst)
    remote = next(filter(is_remote, (dst, src)), None)
    if remote and in_place:
        raise typer.BadParameter(f"--in-place is for a local file, and {remote} is a URL")
    if is_remote(dst) and (is_matrix(src) or is_matrix(dst)):
        raise typer.BadParameter(f"one matrix is written to a local file, and {dst} is a URL: upload the file then")
    of_checkpoints = _OF_CHECKPOINTS
    if device != "cpu" and not device.startswith("cuda"):  # a board is where products will run
        gpus.architecture(device)  # raises for a name of no GPU
        gpu, device = gpu or device, "cpu"
        of_checkpoints = tuple(name for name in _OF_CHECKPOINTS if name != "device")
    if is_matrix(src):
        _refuse(ctx, of_checkpoints, f"checkpoints, and {src} is a matrix file")
        _refuse_same(src, dst)
        from spformat.interop.matrices import read_matrix

        if values != "normal":
            _refuse(ctx, ("seed",), "--values normal")
        to = recipe(to, None, None, None, "", None, "refuse", "error", columns, gpu).to
        with staged(src, "") as here:
            if here.source != src:
                stands_for(here.source, src)
            a = read_matrix(here.source, values=values or None, seed=seed, dtype=value_dtype(dtype))
        _matrix(src, os.path.splitext(os.path.basename(src))[0], a, dst, to, values, force, dry_run, as_json)
        return
    if is_matrix(dst):
        _refuse(ctx, (*_OF_FOLDERS, "seed", "dtype"), f"checkpoints, and {dst} is a matrix file")
        _refuse_same(src, dst)
        to = recipe(to, None, None, None, "", None, "refuse", "error", columns, gpu).to
        with staged(src, "") as here, using(sort=sort):
            name, x = _only_matrix(here.source, dst, include, exclude)
            _matrix(src, name, x, dst, to, values, force, dry_run, as_json)
        return
    _refuse(ctx, _OF_MATRICES, f".smtx, .mtx and .npz files, and {src} is none")
    chosen = recipe(to, rule, include, exclude, prune, sparsity, nonfinite, misfit, columns, gpu)
    kind = executor or ("dask" if scheduler else "")
    options = {"force": force, "resume": resume, "in_place": in_place, "device": device, "part": part or None}
    options["layout"] = layout
    places = {
        "staging": staging,
        "force": force,
        "resume": resume,
        "part": part,
        "moved": copied(as_json),
    }
    with staged(src, dst if is_remote(dst) or not dry_run else "", **places) as here, using(sort=sort):
        if dry_run:  # which leaves the block with an exit, so nothing is uploaded
            target, several = here.target or without_scheme(dst), _is_executor(kind, workers, scheduler)
            check_conversion(here.source, target, chosen, several=several, **options)
            outcomes = plan.foresee(here.source, chosen, as_json, layout, part)
            plan.show(outcomes, as_json, long, console(), dry_run=True)
            raise typer.Exit(3 if any(o.error for o in outcomes) else 0)
        paths = (here.source, os.path.dirname(os.path.abspath(here.target)))
        options |= {"staging": staging}
        with (
            _explaining_interrupts(dst, here, options, as_json),
            _workers(kind, workers, scheduler, paths) as several,
        ):
            options = {k: v for k, v in options.items() if k != "staging"} | {"executor": several}
            _checkpoint(here.source, here.target, chosen, as_json, long, dst, options)


@contextmanager
def _explaining_interrupts(dst: str, here: Any, options: dict[str, Any], as_json: bool) -> Iterator[None]:
    """After Ctrl-C, a signal that ends the command or a full disk, say what is on disk and which command goes on from
    there."""
    from spformat.errors import WriteError

    try:
        yield
    except WriteError as e:  # the disk may be full, and the error says so
        text, more = _left_by(dst, here, options)
        e.message += f"; {text}: when that is mended, --resume goes on" if more else ""
        raise
    except (KeyboardInterrupt, SystemExit) as e:
        code = 130 if isinstance(e, KeyboardInterrupt) else e.code
        if code in (129, 130, 143):
            text, more = _left_by(dst, here, options)
            if as_json:
                error = {
                    "code": "Interrupted",
                    "message": text,
                    "exit_code": code,
                    "path": dst,
                    "command": again(*more) if more else None,
                }
                sys.stderr.write(json.dumps(error) + "\n")
            else:
                warnings().print(f"stopped: {text}", style="yellow", soft_wrap=True)
                if more:
                    warnings().print(f"go on with: {again(*more)}", soft_wrap=True)
        raise


def _left_by(dst: str, here: Any, options: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """(what an interrupted conversion has left, the option that goes on from there or none)."""
    from spformat.checkpoint import finished_files
    from spformat.checkpoint.transfers import is_remote, without_scheme

    there, remote = finished_files(here.target, options["part"]), is_remote(without_scheme(dst))
    if remote and not options["staging"]:
        return f"nothing was written to {dst}, and the local copies were removed; --staging FOLDER keeps them", ()
    if there is None:
        return f"nothing was written to {dst}", ()
    place = f", in {here.target}" if remote else ""
    count = f"{len(there) or 'no'} finished file" + ("s" if len(there) > 1 else "")
    return f"{dst} has {count}, and a journal{place}", ("--resume",)


def _refuse(ctx: typer.Context, names: tuple[str, ...], what: str) -> None:
    """UsageError for an option that was given but would have no effect."""
    from spformat.errors import UsageError

    for name in names:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            raise UsageError(f"--{name.replace('_', '-')} is for {what}")


def _refuse_same(src: str, dst: str) -> None:
    """OutputError if DST is SRC: --force is for results, and what a matrix file loses (--values, --dtype) is gone."""
    from spformat.errors import OutputError
    from spformat.storage.files import same_file

    if same_file(src, dst):
        raise OutputError("input and output are the same file; give DST another name", path=dst)


def _is_executor(kind: str, count: int, scheduler: str) -> bool:
    """Whether there is an executor; UsageError for options that contradict one another."""
    from spformat.checkpoint.executors import check_kind

    if kind:
        check_kind(kind, scheduler)
    elif count:
        raise typer.BadParameter("--workers needs --executor")
    return bool(kind)


@contextmanager
def _workers(kind: str, count: int, scheduler: str, paths: tuple[str, ...]) -> Iterator[Any]:
    """Workers of the executor, or None without one."""
    if not _is_executor(kind, count, scheduler):
        yield None
        return
    from spformat.checkpoint import open_workers

    with open_workers(kind, count, scheduler, paths) as workers:
        if kind == "dask":
            notes().print(f"dask: {workers.count} worker thread(s), {size(workers.in_flight)} in flight at most")
        yield workers


def _checkpoint(
    src: str, dst: str, chosen: Recipe, as_json: bool, long: bool, shown: str, options: dict[str, Any]
) -> None:
    from spformat.checkpoint import bytes_to_convert, convert_checkpoint

    total = bytes_to_convert(src, chosen, options["part"])
    start = time.perf_counter()
    with progress(total, "convert", as_json, lines=True) as step:
        report = convert_checkpoint(src, dst, chosen, progress=lambda o: step(o.name, o.bytes_in), **options)
    seconds = time.perf_counter() - start
    plan.show_report(report, as_json, long, shown, resumed=report.resumed)
    if not as_json:
        rate = f", {total / seconds / 1e9:.2f} GB/s" if total > 10**7 else ""
        again = f", {report.resumed} file(s) were finished already" if report.resumed else ""
        for text in report.redone:
            warnings().print(f"done again: {text}", style="yellow")
        part = f"part {options['part']}: " if options["part"] else ""
        notes().print(f"{shown}: {part}{len(report.shards)} file(s) in {seconds:.1f} s{rate}{again}", style="green")
        if part and options["layout"] != "neutral":  # a part writes neither index nor config
            hint(shlex.join(["spformat", "merge", shown, "--layout", options["layout"]]))


def _only_matrix(src: str, dst: str, include: list[str] | None, exclude: list[str] | None) -> tuple[str, Any]:
    """(name, Format) of the only matrix that the options choose; UsageError for none or several."""
    from spformat.checkpoint import Recipe, open_source, plan_tensors
    from spformat.errors import UsageError
    from spformat.formats.foreign import as_format

    source = open_source(src)
    plans = plan_tensors(source, Recipe(include=tuple(include or ()), exclude=tuple(exclude or ())))
    matrices = [plan for plan in plans if plan.target != "keep"]
    if len(matrices) != 1 or len(matrices[0].shape) != 2:
        names = ", ".join(cell(plan.name) for plan in matrices[:4]) + (", .." if len(matrices) > 4 else "")
        kind, got = os.path.splitext(dst)[1], str(len(matrices)) if len(matrices) != 1 else "a stack of them"
        message = f"a {kind} file holds one matrix, got {got} ({names or 'no 2-D tensor of numbers'})"
        raise UsageError(f"{message}; choose one with --include NAME, or name a folder as DST", path=src)
    with source.open(matrices[0].shard) as f:
        return matrices[0].name, as_format(f.read(matrices[0].name))


def _matrix(
    src: str, name: str, a: Any, dst: str, to: str, values: str, force: bool, dry_run: bool, as_json: bool
) -> None:
    """Convert one matrix into a container, where it has this name, or into a matrix file."""
    from spformat import Dense, save, save_dense
    from spformat.checkpoint.fastest import is_fastest, resolved
    from spformat.checkpoint.matrix_file import is_matrix
    from spformat.checkpoint.tensor_plans import TensorOutcome, counted
    from spformat.errors import LimitError, StructureError, UsageError
    from spformat.formats.convert import convert
    from spformat.interop.matrix_output import check_matrix, target_of, write_matrix
    from spformat.preprocess.structure import count_nonzeros
    from spformat.storage.output import check_target

    if not is_matrix(dst) and not dst.endswith(".safetensors"):
        raise UsageError(
            f"a matrix becomes one file: expected DST to end in .safetensors, .npz, .mtx or .smtx, got {dst!r}"
        )
    try:
        target = resolved(to, a) if is_fastest(to) else to
        if is_matrix(dst):
            target = target_of(dst, target)
        else:
            target = structure_of(a, src).smallest() if to == "auto" else a.name if to == "keep" else target
        converted = convert(a, target)
    except (LimitError, StructureError) as e:
        raise e.at(path=src, tensor=name) from None
    if dry_run:
        check_target(dst, overwrite=force)
        if is_matrix(dst):
            check_matrix(dst, converted, pattern_only=values == "ones")
    elif is_matrix(dst):
        dtype = write_matrix(dst, converted, target, pattern_only=values == "ones", overwrite=force)
        if dtype not in (converted.dtype.name, "pattern"):
            was = converted.dtype.name
            text = f"{was} became {dtype}, which holds the same values: a matrix file has no {was}"
            warnings().print(text, style="yellow")
    else:
        write = save_dense if to == "dense" else save
        write(dst, {name: converted}, overwrite=force)
    o = TensorOutcome(name, target, "", converted.shape, converted.dtype.name, a.nbytes, converted.nbytes)
    o = counted(o, type(converted), a, count_nonzeros(a.data) if isinstance(a, Dense) else (0, 0))
    if as_json:
        tree = {
            "name": name,
            "target": target,
            "shape": list(o.shape),
            "bytes_in": o.bytes_in,
            "bytes_out": o.bytes_out,
        }
        lost = {"negative_zeros": o.negative_zeros, "dropped_zeros": o.dropped_zeros}
        print_json(tree | {k: n for k, n in lost.items() if n} | {"path": None if dry_run else dst})
    else:
        zeros = plan.note([o])
        summary().print(
            f"{cell(name)}: {a.name} {size(o.bytes_in)} -> {target} {size(o.bytes_out)}"
            + ("" if dry_run else f" in {dst}")
            + (f"; {zeros}" if zeros else "")
        )
