"""spformat recommend: which format each tensor should have for the device at hand, or for another, and why."""

from __future__ import annotations

import shlex
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, TypeAlias

import typer

from . import completion, gpus
from .groups import grouped, together, without_numbers
from .hints import hint, words_of
from .matrices import each_matrix
from .options import Include, Json, Src, parse_bytes, value_dtype
from .output import console, indented, print_json
from .pipe import typed
from .tables import cell

if TYPE_CHECKING:
    from spformat.dispatch.recommend import Recommendations

    Row: TypeAlias = tuple[str, Recommendations]

EPILOG = (
    "spformat recommend ./model -n 16,2048 --device H200\n\n"
    "spformat recommend w.safetensors -n 1 --objective resident --json"
)
SHOWN = 3
"""Formats with their reasons that are printed without --long."""


def run(
    src: Src,
    n: list[str] = typer.Option(["16,2048"], "-n", "--columns", help="Columns of B (tokens), comma-separated."),
    device: str = typer.Option(
        "H200",
        "--device",
        "--gpu",
        help="The device that multiplies, which need not be here: H200, H100, A100, sm_80, ..; or cpu, this host.",
        autocompletion=gpus.names,
    ),
    objective: str = typer.Option(
        "time",
        help="What shall be least: time (the sum over the columns), bytes, or resident (bytes with workspaces).",
        autocompletion=completion.one_of("time", "bytes", "resident"),
    ),
    b_layout: str = typer.Option(
        "row",
        help="Layout of B: row, or col (torch's x of a linear layer).",
        autocompletion=completion.one_of("row", "col"),
    ),
    dtype: str = typer.Option("", help="Value type to ask for instead of that of the tensors.",
                              autocompletion=completion.dtypes),
    include: Include = None,
    max_workspace: str = typer.Option("", help="Most memory of a plan beside its operands (64MB; 0: none)."),
    long: bool = typer.Option(False, "--long", "-l", help="Every tensor, and every format with its reasons."),
    as_json: Json = False,
) -> None:  # fmt: skip
    """Formats of each matrix in SRC by the times that products are expected to take, with reasons; writes nothing."""
    from spformat.checkpoint.fastest import matrix_in, numbers
    from spformat.dispatch.recommend import recommend
    from spformat.products.problem import WORKSPACE

    asked: dict[str, Any] = {
        "device": gpus.device(device),
        "objective": objective,
        "b_layout": b_layout,
        "dtype": value_dtype(dtype),
    }
    asked["workspace"] = parse_bytes(max_workspace) if max_workspace else WORKSPACE
    widths = numbers(",".join(n))
    rows = [
        (r.name, recommend(matrix_in(f, r), widths, **asked)) for r, f in each_matrix(src, include, "read", as_json)
    ]
    if as_json:
        print_json({"path": typed(src), "tensors": [{"name": name} | r.to_json() for name, r in rows]})
        return
    _print(rows, long)
    stated_by_target = b_layout in ("row", "col") and not dtype and not max_workspace
    if stated_by_target and any(r[0].format != "dense" and r[0].total_us is not None for _, r in rows):
        columns = ",".join(map(str, widths))
        stated = {"objective": objective, "b_layout": b_layout}
        usual = {"objective": "time", "b_layout": "row"}
        target = ",".join(f"{key}={value}" for key, value in stated.items() if value != usual[key])
        words = ["spformat", "plan", typed(src), "--to", f"fastest:{target}" if target else "fastest", "-n", columns]
        words += [] if device == "H200" else ["--gpu", device]
        if any(r[0].total_us is None for _, r in rows):  # of a type that no kernel multiplies: plan would end with 3
            words += ["--misfit", "keep"]
        hint(shlex.join([*words, *words_of(include)]))


def _print(rows: list[Row], long: bool) -> None:
    """The text of each tensor; tensors whose texts differ only in numbers share one, with ranges for the numbers."""
    texts = [(name, r.text(None if long else SHOWN)) for name, r in rows]
    same: dict[Hashable, list[tuple[str, str]]] = {}
    for i, (name, text) in enumerate(texts):
        r = rows[i][1]
        key = i if long else (r.shape, r.dtype, tuple(x.format for x in r[:SHOWN]), without_numbers(text))
        same.setdefault(key, []).append((name, text))
    for members in same.values():
        for group in grouped(members, lambda row: row[0], lambda row: None):
            console().print(f"{cell(group.label)}:", soft_wrap=True)
        for line in together([text for _, text in members]).split("\n"):
            indented("  " + line)
