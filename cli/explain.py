"""spformat explain: which kernel would multiply this tensor, and why not the others."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from .options import Include, Json, Src, parse_bytes
from .output import cell, console, print_json

if TYPE_CHECKING:
    from spformat.products.kernel import Accepted, Rejected

ARCHITECTURES = (70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)
"""Compute capabilities, times ten. Below 80 only libraries of the vendor run, and every kernel of ours says so."""
EPILOG = "spformat explain w.safetensors -n 256   |   spformat explain w.safetensors -n 16 --gpu sm_90"


def run(
    src: Src,
    n: int = typer.Option(512, "-n", help="Columns of B (tokens)."),
    gpu: str = typer.Option("", "--gpu", "--device", help="Ask for a GPU you may not have: sm_80, sm_90, sm_100."),
    backend: str = typer.Option("", help="Only this backend."),
    include: Include = None,
    b_layout: str = typer.Option("row", help="Layout of B: row, or col (torch's x of a linear layer)."),
    max_workspace: str = typer.Option("", help="Most memory of a plan beside its operands (64MB; 0: none)."),
    as_json: Json = False,
) -> None:
    """Every kernel with its answer, for every matrix in SRC; nothing is multiplied."""
    from spformat.arrays.dtypes import VALUE_TYPES
    from spformat.checkpoint.recipe import included
    from spformat.checkpoint.source import open_source
    from spformat.dispatch import cost
    from spformat.dispatch.api import explain
    from spformat.products.problem import WORKSPACE, Operand, Problem, result_dtype

    workspace = WORKSPACE if max_workspace == "" else parse_bytes(max_workspace)
    sm = None if gpu in ("", "cpu") else _architecture(gpu)
    source = open_source(src)
    out = []
    for name in included(source.records, include):
        _, r, _ = source.records[name]
        if len(r.shape) != 2 or r.dtype not in VALUE_TYPES:
            continue
        a = Operand.of(r)
        problem = Problem.product(
            a.format, a.params, a.shape[0], a.shape[1], n, a.stored, a.dtype, a.dtype, result_dtype(a.dtype, a.dtype),
            b_layout, device="cpu" if sm is None else "cuda", sm=sm, workspace=workspace, parts=a.parts,
        )  # fmt: skip
        answer = explain(problem, backend=backend or None, installed=sm is None)
        known = next((d for d in cost.DEVICES.values() if d.sm == sm), None)  # the first board of an architecture
        costs = cost.estimate(problem, n, device=known, backend=backend or None) if known and answer.chosen else None
        out.append((name, answer, costs))
    if as_json:
        print_json([
            {"tensor": name, "chosen": e.chosen, "rates": e.rates, "kernels": [_answer(a) for a in e.answers],
             "cost": c and asdict(c) | {"bound": c.bound}} for name, e, c in out
        ])  # fmt: skip
        return
    for name, e, c in out:
        console().print(f"{cell(name)}: {e}" + (f"\n  {c}" if c else ""), soft_wrap=True)


def _architecture(gpu: str) -> int:
    """90 of "sm_90", "sm_90a" and "90"; BadParameter for a GPU that nobody builds."""
    match = re.fullmatch(r"(?:sm_)?([1-9]\d{1,2})(a?)", gpu)
    sm = int(match.group(1)) if match else 0
    if not match or sm not in ARCHITECTURES or (match.group(2) and sm < 90):
        known = ", ".join(f"sm_{number}" for number in ARCHITECTURES)
        raise typer.BadParameter(f"expected cpu or one of {known} (sm_90a and later ones with an a, too), got {gpu!r}")
    return sm


def _answer(a: Accepted | Rejected) -> dict[str, Any]:
    expected = getattr(a, "expected_us", None)
    return {
        "kernel": a.kernel,
        "accepted": bool(a),
        "expected_us": expected,
        "reasons": list(getattr(a, "reasons", ())),
    }
