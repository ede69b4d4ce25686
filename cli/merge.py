"""spformat merge: one checkpoint of the parts that `convert --part i/n` wrote."""

from __future__ import annotations

from typing import Annotated

import typer

from . import plan
from .options import Json
from .output import notes

EPILOG = "spformat merge ./model-sp   |   sbatch --dependency=afterok:$JOB --wrap 'spformat merge ./model-sp'"


def run(
    dst: Annotated[str, typer.Argument(help="The folder that the parts were written to.")],
    source: str = typer.Option("", help="Where SRC is now, if not where the parts found it."),
    checksums: bool = typer.Option(
        False, help="Read every file and its input again and compare hashes, not only sizes."
    ),
    layout: str = typer.Option("neutral", help="As of `spformat convert`."),
    as_json: Json = False,
) -> None:
    """Join the finished parts in DST: shards that parts share are put together, the manifest is written last."""
    from spformat.checkpoint import merge_parts

    report = merge_parts(dst, source or None, checksums=checksums, layout=layout)
    plan.show_report(report, as_json, report.path)
    if not as_json:
        notes().print(f"{report.path}: {len(report.shards)} file(s) merged", style="green")
