"""spformat merge: one checkpoint of the parts that `convert --part i/n` wrote."""

from __future__ import annotations

from typing import Annotated

import typer

from . import plan
from .options import Json, Layout, Long
from .output import notes

EPILOG = "spformat merge ./model-sp\n\nsbatch --dependency=afterok:$JOB --wrap 'spformat merge ./model-sp'"


def run(
    dst: Annotated[str, typer.Argument(help="The folder that the parts were written to.")],
    source: str = typer.Option("", help="Where SRC is now, if not where the parts found it."),
    checksums: bool = typer.Option(
        False, "--checksums", help="Read every file and its input again and compare hashes, not only sizes."
    ),
    layout: Layout = "neutral",
    long: Long = False,
    as_json: Json = False,
) -> None:
    """Join the finished parts in DST: shards that parts share are put together, the manifest is written last."""
    from spformat.checkpoint import merge_parts

    report = merge_parts(dst, source or None, checksums=checksums, layout=layout)
    plan.show_report(report, as_json, long, report.path)
    if not as_json:
        notes().print(f"{report.path}: {len(report.shards)} file(s) merged", style="green")
