"""spformat inspect: what is in a checkpoint, how sparse it is, and which format it fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from . import plots
from .groups import counted, each_of, grouped, together
from .hints import conversion_of, hint
from .options import Include, Json, Src
from .output import console, print_json, progress, size
from .pipe import typed
from .tables import cell, table

if TYPE_CHECKING:
    from spformat.preprocess.structure import Structure


@dataclass(frozen=True)
class Wanted:
    """What is computed of each matrix beside its structure."""

    coverage: bool
    picture: bool


_MAP = 320
"""Most cells of a drawn map along each side: as many as it has pixels."""

EPILOG = "spformat inspect ./model\n\nspformat inspect w.safetensors --long --include 're:.*down_proj'"


def run(
    src: Src,
    include: Include = None,
    long: bool = typer.Option(
        False,
        "--long",
        "-l",
        help="Every tensor, with its rows by length, what parts of a sum would take, and its bytes in every format.",
    ),
    plot: str = typer.Option(
        "",
        metavar="FILE",
        help="Also draw each matrix: nonzeros, rows by length, fill of blocks, bytes by format. A .html, or a .png "
        "(needs matplotlib).",
    ),
    device: str = typer.Option("cpu", help="Where nonzeros are counted: cpu, or cuda (cuda:1), a GPU."),
    as_json: Json = False,
) -> None:
    """Shape, dtype, zeros, pattern (2:4, n:m, vectors, blocks; how nearly) and smallest exact format of tensors."""
    if plot:
        plots.check(plot)
    wanted = Wanted(coverage=long or as_json, picture=bool(plot))
    rows = [_described(*item) for item in _structures(src, include, as_json, wanted, device)]
    if plot:
        plots.write(plot, typed(src).rstrip("/").rpartition("/")[2], rows)
        for row in rows:
            row.pop("picture", None)
    if as_json:
        print_json({"path": typed(src), "tensors": rows})
        return
    if long:
        for row in rows:
            _print_long(row)
        return
    groups = grouped(rows, lambda row: row["name"], _fate)
    packed = any(row["format"] != "plain" for row in rows)
    t = table("tensor", "shape", "dtype", *(["stored as"] * packed), "zeros", "pattern", "bytes", "smallest", "becomes",
              right=("zeros", "bytes", "becomes"))  # fmt: skip
    for group in groups:
        row, becomes = group.rows[0], sum(r["sizes"][r["smallest"]] for r in group.rows if "sizes" in r)
        t.add_row(
            group.label, "x".join(map(str, row["shape"])), row["dtype"], *([row["format"]] * packed),
            together([_zeros(r) for r in group.rows]), each_of([r.get("patterns", ()) for r in group.rows]),
            size(sum(r["bytes"] for r in group.rows)), row.get("smallest", ""), size(becomes) if "sizes" in row else "",
        )  # fmt: skip
    console().print(t)
    now, best = (
        sum(r["bytes"] for r in rows),
        sum(r["sizes"][r["smallest"]] if "sizes" in r else r["bytes"] for r in rows),
    )
    smallest = f"{size(best)} with the smallest exact format of each"
    console().print(f"{counted(groups)}: {size(now)}; {smallest}")
    if best < now:
        hint(conversion_of(src))


def _fate(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tensors have in common that share a line."""
    return tuple(row["shape"]), row["dtype"], row["format"], row.get("smallest"), bool(row.get("stored_zeros"))


def _zeros(row: dict[str, Any]) -> str:
    if "density" not in row:
        return ""
    return f"{100 * (1 - row['density']):.1f} %" + (f" ({row['stored_zeros']} stored)" if row["stored_zeros"] else "")


def _structures(src: str, include: list[str] | None, silent: bool, wanted: Wanted, device: str) -> Any:
    """(name, stored format, shape, dtype, bytes, Structure or None, stored zeros, what else is wanted), one tensor in
    memory at a time. device: where the nonzeros are counted."""
    from spformat.arrays.library import has_dtype, to_device
    from spformat.checkpoint.recipe import included
    from spformat.checkpoint.source import open_source
    from spformat.checkpoint.stacks import holds_matrices, matrices_in, records_of
    from spformat.formats.base import Format
    from spformat.preprocess.structure import analyse, stacked

    source = open_source(src)
    names = included(source.records, include)
    total = sum(source.records[n][2] for n in names)
    with progress(total, "read", silent) as step:
        for name, f in source.opened(names):
            _, record, nbytes = source.records[name]
            stored = record.format.name if record.format else "plain"
            structure, zeros, more = None, 0, {}
            if holds_matrices(record):
                matrices = matrices_in(f, record)
                structures, extras = [], []
                for r in records_of(record):
                    place = device if has_dtype(device, r.dtype) else "cpu"
                    x = matrices.read(r.name, place) if r.format else matrices.array(r.name, device=place)
                    zeros += x.stored_zeros if isinstance(x, Format) else 0
                    x = _dense(x, src, r.name)
                    structures.append(analyse(x))
                    if wanted.coverage or wanted.picture:
                        x = to_device(x, "cpu")
                    extras.append(_more(structures[-1], x, wanted))
                    del x
                structure = stacked(structures) if len(record.shape) == 3 else structures[0]
                more = _together(extras)
            step(name, nbytes)
            yield name, stored, record.shape, record.dtype, nbytes, structure, zeros, more


def structure_of(x: Any, path: str, tensor: str | None = None) -> Structure:
    """Structure of a matrix; LimitError with its place where it is too large to be looked at densely."""
    from spformat.preprocess.structure import analyse

    return analyse(_dense(x, path, tensor))


def _dense(x: Any, path: str, tensor: str | None) -> Any:
    from spformat import Format
    from spformat.errors import LimitError

    try:
        return x.to_dense() if isinstance(x, Format) else x
    except LimitError as e:
        e.message += "; a conversion to a format named with --to needs no dense matrix"
        raise e.at(path=path, tensor=tensor) from None


def _described(
    name: str, stored: str, shape: tuple[int, ...], dtype: str, nbytes: int, s: Structure | None, stored_zeros: int,
    more: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    row: dict[str, Any] = {"name": name, "format": stored, "shape": list(shape), "dtype": dtype, "bytes": nbytes}
    if s is None:
        return row
    facts = _facts_of.get(id(s))
    if facts is None or facts[0] is not s:
        facts = _facts_of[id(s)] = s, _facts(s)
    return row | {"stored_zeros": stored_zeros} | facts[1] | more


_facts_of: dict[int, tuple[Structure, dict[str, Any]]] = {}
"""What was said of a Structure, by its id: tiny matrices of one pattern share one."""


def _facts(s: Structure) -> dict[str, Any]:
    tightest = {f"{s.n_of(m, length)}:{m}" + (f" L={length}" if length > 1 else ""): True
                for m, length in s.window_max if s.n_of(m, length)}  # fmt: skip
    return {
        "nnz": s.nnz,
        "density": round(s.density, 6),
        "sparsity": round(1 - s.density, 6),
        "negative_zeros": s.negative_zeros,
        "two_four": {"fits": s.is_two_four, "bad_groups": s.bad_groups, "groups": s.groups},
        "n_m": list(tightest),
        "kept_share": {str(rows): round(s.kept_share(rows), 4) for rows in s.tile_columns},
        "blocks": {str(b): {"stored": n, "rows": r, "fill": _fill(s, b)} for b, (n, r) in s.blocks.items()},
        "rows_by_length": s.rows_by_length(),
        "sizes": s.sizes(),
        "smallest": s.smallest(),
        "patterns": list(_patterns(s)),
    }


def _more(s: Structure, x: Any, wanted: Wanted) -> dict[str, Any]:
    from spformat.formats.csr import CSR
    from spformat.formats.picture import block_fill, density_map

    more: dict[str, Any] = {"coverage": _coverage(s, x)} if wanted.coverage else {}
    if wanted.picture:
        a = CSR.from_dense(x)
        more["picture"] = density_map(a, _MAP), block_fill(a)
    return more


def _coverage(s: Structure, x: Any) -> dict[str, int]:
    from spformat.preprocess.coverage import covered

    if id(s) not in _covered_of:
        _covered_of[id(s)] = s, covered(x)
    return _covered_of[id(s)][1]


_covered_of: dict[int, tuple[Structure, dict[str, int]]] = {}
"""What parts of a sum would take of the matrix of a Structure, by its id."""


def _together(extras: list[dict[str, Any]]) -> dict[str, Any]:
    """What else is wanted of a tensor, from that of its matrices: of a stack the sums, and the mean of the maps."""
    more: dict[str, Any] = {}
    if "coverage" in extras[0]:
        taken = {k: sum(e["coverage"][k] for e in extras) for k in extras[0]["coverage"]}
        nnz = taken.pop("nnz")
        more["coverage"] = {rule: round(n / nnz, 4) for rule, n in taken.items()} if nnz else {}
    if "picture" in extras[0]:
        maps, fills = zip(*(e["picture"] for e in extras), strict=True)
        more["picture"] = sum(maps) / len(maps), [sum(counts) for counts in zip(*fills, strict=True)]
    return more


def _fill(s: Structure, b: int) -> float:
    stored = s.blocks[b][0] * b * b
    return round(s.nnz / stored, 4) if stored else 0.0


def _patterns(s: Structure) -> Any:
    """What the matrix is, or nearly is, in words."""
    if not s.nnz:
        yield "all zero"
        return
    if s.is_two_four:
        yield "2:4"
    elif s.groups and s.bad_groups / s.groups < 0.05:
        yield f"nearly 2:4 ({s.bad_groups} of {s.groups} groups too full)"
    for length in (32, 8):
        patterns = [(m, n) for m in (32, 16, 8, 4) if (n := s.n_of(m, length))]
        if patterns:
            m, n = min(patterns, key=lambda f: f[1] / f[0])
            yield f"{n}:{m} vectors of {length}"
            break
    for b in (64, 32, 16):
        grid = s.grid(b)
        if s.blocks[b][0] < 0.9 * grid and _fill(s, b) > 0.8:
            yield f"{b}x{b} blocks, {100 * (1 - s.blocks[b][0] / grid):.0f} % empty"
            break
    if 0 < s.density < 0.9 and not s.is_two_four:
        yield "unstructured" if s.density > 0.3 else "sparse"


def _print_long(row: dict[str, Any]) -> None:
    out = console()
    out.print(f"{cell(row['name'])}  {'x'.join(map(str, row['shape']))} {row['dtype']}, {size(row['bytes'])}, "
              f"stored as {row['format']}", style="bold")  # fmt: skip
    if "density" not in row:
        return
    zeros = f", {row['negative_zeros']} elements are -0.0" if row["negative_zeros"] else ""
    zeros += f", {row['stored_zeros']} zeros stored" if row["stored_zeros"] else ""
    out.print(f"  nonzeros {row['nnz']} ({100 * row['density']:.2f} %){zeros}; {'; '.join(row['patterns'])}")
    out.print(f"  2:4: {row['two_four']['bad_groups']} of {row['two_four']['groups']} groups hold more than two")
    out.print(f"  n:m that fit: {', '.join(row['n_m']) or 'none'}")
    shares = ", ".join(f"{100 * share:.0f} % for {rows} rows" for rows, share in row["kept_share"].items())
    out.print(f"  rows of B that a tile needs: {shares}")
    if row["coverage"]:
        parts = ", ".join(f"{100 * share:.1f} % {rule}" for rule, share in row["coverage"].items())
        out.print(f"  nonzeros that the first part of a sum would take: {parts}")
    out.print("  rows by length: " + ", ".join(f"{k}: {v}" for k, v in row["rows_by_length"].items() if v))
    for text, nbytes in sorted(row["sizes"].items(), key=lambda item: item[1]):
        mark = "  <- smallest" if text == row["smallest"] else ""
        out.print(f"  {size(nbytes):>12}  {nbytes / max(1, row['sizes']['dense']):5.2f}x  {text}{mark}")
