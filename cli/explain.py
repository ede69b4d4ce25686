"""spformat explain: which kernel would multiply this tensor, and why not the others."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import typer

from . import completion, gpus
from .groups import grouped, together, without_numbers
from .hints import hint, words_of
from .matrices import no_matrix
from .options import Include, Json, Long, Src, parse_bytes
from .output import console, indented, notes, print_json
from .pipe import typed
from .tables import cell

if TYPE_CHECKING:
    from spformat.dispatch.cost import Cost
    from spformat.dispatch.select import Explanation
    from spformat.products.kernel import Accepted, Rejected

    Row: TypeAlias = tuple[str, Explanation, Cost | None]

EPILOG = "spformat explain w.safetensors -n 256\n\nspformat explain w.safetensors -n 16 --gpu H100"


def run(
    src: Src,
    n: list[str] = typer.Option(["512"], "-n", "--columns", help="Columns of B (tokens), comma-separated."),
    gpu: str = typer.Option(
        "",
        "--gpu",
        "--device",
        help="Ask for a GPU you may not have: H100, A100, .., or sm_80, sm_90, sm_100.",
        autocompletion=gpus.names,
    ),
    backend: str = typer.Option("", help="Only this backend, or this kernel.", autocompletion=completion.kernels),
    include: Include = None,
    b_layout: str = typer.Option(
        "row",
        help="Layout of B: row, or col (torch's x of a linear layer).",
        autocompletion=completion.one_of("row", "col"),
    ),
    max_workspace: str = typer.Option("", help="Most memory of a plan beside its operands (64MB; 0: none)."),
    long: Long = False,
    as_json: Json = False,
) -> None:
    """Every kernel with its answer, for every shape of matrix in SRC; nothing is multiplied."""
    from spformat.checkpoint.fastest import numbers
    from spformat.checkpoint.recipe import included
    from spformat.checkpoint.source import open_source
    from spformat.checkpoint.stacks import holds_matrices, nbytes_of, records_of
    from spformat.dispatch import cost
    from spformat.dispatch.api import backend_name, explain
    from spformat.products import roofline
    from spformat.products.problem import WORKSPACE, Operand, Problem, result_dtype

    workspace = WORKSPACE if max_workspace == "" else parse_bytes(max_workspace)
    sm, board = (None, "") if gpu in ("", "cpu") else gpus.architecture(gpu)
    named = backend_name(backend or None) if sm is None else backend or None  # here SPFORMAT_BACKEND counts, too
    if board and not as_json:  # then stderr has errors alone
        notes().print(f"{gpu} is sm_{sm}")
    # the board that was named, or the first of its architecture
    known = roofline.known_device(board, sm)
    source = open_source(src)
    out: list[Row] = []
    asked: dict[tuple[Problem, int], tuple[Explanation, Cost | None]] = {}
    tensors = [source.records[name][1] for name in included(source.records, include)]
    matrices = [m for tensor in filter(holds_matrices, tensors) for m in records_of(tensor)]
    if not matrices:
        raise no_matrix(len(tensors))
    widths = numbers(",".join(n))
    for r, width in itertools.product(matrices, widths):
        a = Operand.of(r)
        problem = Problem.product(
            a.format, a.params, *a.shape, width, a.stored, a.dtype, a.dtype, result_dtype(a.dtype, a.dtype),
            b_layout, device="cpu" if sm is None else "cuda", sm=sm, workspace=workspace, parts=a.parts,
        )  # fmt: skip
        nbytes = nbytes_of(r)  # a problem alone does not say how many indices blocks and parts of a sum have
        if (problem, nbytes) not in asked:  # layers of one model ask the same again and again
            with roofline.on(known) if known else nullcontext():
                answer = explain(problem, backend=named, installed=sm is None)
            estimated = known if answer.chosen else None
            costs = estimated and cost.estimate(problem, width, device=estimated, backend=named, nbytes=nbytes)
            asked[problem, nbytes] = answer, costs
        out.append((r.name, *asked[problem, nbytes]))
    if as_json:
        print_json([
            {"tensor": name, "n": e.problem.n, "chosen": e.chosen, "rates": e.rates,
             "kernels": [_answer(a) for a in e.answers], "cost": c and asdict(c) | {"bound": c.bound}}
            for name, e, c in out
        ])  # fmt: skip
        return
    left_out: set[str] = set()
    if not long:
        out = [(name, _of_device(e, sm is not None or bool(named), left_out), c) for name, e, c in out]
    _print(out, long)
    if any(e.problem.operands[0].format == "dense" for _, e, _ in out):
        words = ["spformat", "recommend", typed(src), "-n", ",".join(map(str, widths))]
        words += ["--device", gpu] if gpu else []
        words += ["--max-workspace", max_workspace] if max_workspace else []
        words += ["--b-layout", b_layout] if b_layout != "row" else []
        hint(shlex.join([*words, *words_of(include)]))
    if left_out and sm is None:
        text = (
            f"{len(left_out)} kernels for GPUs are left out: --gpu H100 asks about a GPU, --long says why they refuse"
        )
        notes().print(text, soft_wrap=True)


def _print(rows: list[Row], long: bool) -> None:
    """The answers, each below the names of all tensors that have it."""
    same: dict[Hashable, list[Row]] = {}
    for i, row in enumerate(rows):
        same.setdefault(i if long else _said(row), []).append(row)
    for members in same.values():
        for group in grouped(members, lambda row: row[0], lambda row: None):
            console().print(f"{cell(group.label)}:", soft_wrap=True)
        text = together([_text(row) for row in members])
        for line in text.split("\n"):
            indented("  " + line.lstrip())


_ON_HOST = ("cpu", "reference")
"""The backends whose kernels multiply on the host."""


def _of_device(e: Explanation, on_gpu: bool, left_out: set[str]) -> Explanation:
    """Without the kernels that only run on another device than the one that was asked about; their names are added to
    ``left_out``."""
    kept = [a for a in e.answers if a or (_may_run_on_gpu(a) if on_gpu else a.kernel.partition(".")[0] in _ON_HOST)]
    left_out |= {a.kernel for a in e.answers if a not in kept}
    return replace(e, answers=tuple(kept))


def _may_run_on_gpu(a: Accepted | Rejected) -> bool:
    return any(not reason.startswith("operands are on") for reason in getattr(a, "reasons", ()))


def _text(row: Row) -> str:
    _, e, c = row
    return f"{e}\n{c}" if c else str(e)


def _said(row: Row) -> Hashable:
    """What tensors have in common whose answers are one text: all but the times, which follow from their nonzeros."""
    _, e, _ = row
    a = e.problem.operands[0]
    return (
        e.problem.n,
        a.shape,
        a.format,
        str(a.params),
        a.dtype,
        tuple(x.kernel for x in e.answers),
        without_numbers(_text(row)),
    )


def _answer(a: Accepted | Rejected) -> dict[str, Any]:
    expected = getattr(a, "expected_us", None)
    return {
        "kernel": a.kernel,
        "accepted": bool(a),
        "expected_us": expected,
        "reasons": list(getattr(a, "reasons", ())),
    }
