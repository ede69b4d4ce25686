"""Tables, headline figures and the page of results of a run of benchmarks/papers.py; none of it needs a GPU."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple, TypeAlias

from papers_cases import EXACT, TCA, TWO_FOUR

Row: TypeAlias = dict[str, Any]
Rows: TypeAlias = Sequence[Row]
Pair: TypeAlias = tuple[str, str | tuple[str, ...]]
"""Ours, and the name of a peer or the starts of several."""

DENSE = ("dense", "torch dense", "cuBLAS")
SPARSE = ("cuSPARSE csr", "torch csr", "torch bsr")
"""How the names of libraries start: those that multiply the dense matrix, and those that multiply the sparse one."""
PEERS = (*DENSE, *SPARSE, "cuSPARSELt")
ZEROS = {"32:32": "0", "16:32": "50", "12:32": "62.5", "8:32": "75", "4:32": "87.5"}
"""Kept of 32 -> per cent of zeros."""
TITLES = {
    "bert": "SparseTIR: pruned BERT, float16",
    "shapes": "NM-SpMM: shapes A to F, float32, vectors of 32",
    "two-four": "2:4 in bf16 beside cuSPARSELt, 4096^3",
    "blocks": "SparseTIR: block-pruned weights, bf16",
    "unstructured": "SparseTIR: unstructured weights, SR-BCRS, float16",
    "graphs": "SparseTIR: hyb beside CSR and cuSPARSE, float32",
    "operators": "SparseTIR and TCA-SpMM: graphs and pruned weights",
    "tca": "TCA-SpMM: graphs",
    "parts": "SparseTIR: hyb in column parts on a graph of Reddit's size, float32",
    "nm": "NM-SpMM: layers of Llama, float32, vectors of 32",
    "packing": "2:4: pruning and packing, 4096 x 4096, bf16",
}
VERSIONS = {"cupy-cuda13x": "CuPy", "cupy-cuda12x": "CuPy", "torch": "torch", "nvidia-cusparselt-cu13": "cuSPARSELt"}
"""Packages that the page names, as it calls them."""
DEVICE_FLOAT32 = 67e12
"""Operations a second of the CUDA cores of an H200, from its datasheet."""


class Headline(NamedTuple):
    """A figure of docs/papers.md."""

    paper: str
    figure: str
    """Words of the first cell of its row there."""
    ours: str


# ------------------------------------------------------------------ headline figures


def ratios(rows: Rows, ours: str, peers: str | tuple[str, ...]) -> list[float]:
    """How many times as fast as ``fastest`` of the peers, in each row that has both."""
    both = [(r["us"][ours], fastest(r["us"], peers)) for r in rows if ours in r["us"]]
    return [peer / us for us, peer in both if peer == peer]


def fastest(us: Mapping[str, float], peers: str | tuple[str, ...]) -> float:
    """The time of the contender of this name, or of the fastest whose name starts so; NaN if there is none."""
    named = [t for name, t in us.items() if (name == peers if isinstance(peers, str) else name.startswith(peers))]
    return min(named, default=math.nan)


def mean(values: Sequence[float]) -> str:
    """The geometric mean of ratios, as docs/papers.md writes it."""
    return f"{geometric_mean(values):.2f}x" if values else "-"


def worst(values: Sequence[float]) -> str:
    """The least of ratios, written the same way."""
    return f"{min(values):.2f}x" if values else "-"


def span(values: Sequence[float]) -> str:
    """The least and the largest of ratios."""
    return f"{min(values):.2f}x to {max(values):.2f}x" if values else "-"


def means(rows: Rows, patterns: Sequence[str], ours: str) -> str:
    """The mean against dense for each pattern of n:m."""
    return ", ".join(mean(ratios([r for r in rows if r["name"].endswith(f" {p}")], ours, DENSE)) for p in patterns)


def headlines(suites: Mapping[str, Rows]) -> Iterator[Headline]:
    """Every figure that the suites of a run give, in the order of docs/papers.md."""
    yield from nm_headlines(suites)
    if rows := suites.get("operators") or suites.get("tca"):
        yield from tca_headlines(rows)
    if rows := suites.get("two-four"):
        yield Headline("2:4 GEMM", "against NVIDIA's sparse library", two_four_times(rows[0]["us"]))
    if rows := suites.get("packing"):
        rate = [r["gb_per_s"] for r in rows if r["what"] == "pruned"]
        copy = next(r["gb_per_s"] for r in rows if "copy" in r["what"])
        text = f"{min(rate):.0f} to {max(rate):.0f} GB/s at 4096 x 4096, a copy {copy:.0f} GB/s"
        yield Headline("2:4 GEMM", "pruning and packing", text)
    yield from tir_headlines(suites)


def nm_headlines(suites: Mapping[str, Rows]) -> Iterator[Headline]:
    """NM-SpMM: its shapes, 4096^3 on CUDA cores, and the layers of Llama."""
    if rows := suites.get("shapes"):
        percent, patterns = ", ".join([*ZEROS.values()][1:]), [*ZEROS][1:]
        text = f"its shapes A to F, L = 32, {len(rows)} products, at {percent} % zeros"
        text += f": {means(rows, patterns, 'n:m')} in the mean, {worst(ratios(rows, 'n:m', DENSE))} at worst"
        text += ", with three TF32 products"
        yield Headline("NM-SpMM", "over cuBLAS, float32", text)
        cube = [r for r in rows if r["name"].startswith("F ")]
        for label, kernel in EXACT.items():
            if any(label in r["us"] for r in cube):
                text = f"4096^3, 16, 12, 8, 4:32: {means(cube, patterns, label)}, `{kernel}`"
                yield Headline("NM-SpMM", "the same on CUDA cores", text)
    if rows := whole_layers(suites.get("nm", ())):
        layers = len({r["name"].split()[0] for r in rows})
        text = f"{layers} layers, {len(rows)} products, {', '.join(ZEROS.values())} % zeros"
        text += f": {means(rows, [*ZEROS], 'n:m')}, {worst(ratios(rows, 'n:m', DENSE))} at worst"
        text += ", with three TF32 products"
        for label in EXACT:
            text += f"; {label} {means(rows, [*ZEROS], label)}" if any(label in r["us"] for r in rows) else ""
        yield Headline("NM-SpMM", "layers of Llama", text)


def whole_layers(rows: Rows) -> Rows:
    """The rows of ``nm`` without those of a layer that the end of the time cut short."""
    counts = Counter(r["name"].split()[0] for r in rows)
    return [r for r in rows if counts[r["name"].split()[0]] == max(counts.values())]


def tca_headlines(rows: Rows) -> Iterator[Headline]:
    """TCA-SpMM by value type, and float16 against the fastest of everything else in the run."""
    types = {t: [r for r in rows if r["name"].endswith(t)] for t in ("float16", "float32")}
    text = f"{' and '.join(str(len(some)) for some in types.values())} cases"
    for label in TCA:
        over = [" and ".join(mean(ratios(some, label, peer)) for some in types.values()) for peer in (SPARSE, "csr")]
        text += f"; {label}: {over[0]} cuSPARSE, {over[1]} CSR on CUDA cores"
    yield Headline("TCA-SpMM", "cases each of float16 and float32", text)
    if others := ratios(types["float16"], "tca", ("csr", "ell-buckets", *SPARSE)):
        text = f"{mean(others)}, worst {worst(others)}, against the fastest of our CSR, ELL buckets and cuSPARSE"
        yield Headline("TCA-SpMM", "float16 against the best", text)


def two_four_times(us: Mapping[str, float]) -> str:
    """Our three kernels beside cuSPARSELt and cuBLAS, each launched from a CUDA graph."""
    times = {name: us[name] for name in TWO_FOUR.values() if name in us}
    text = f"4096^3: {', '.join(f'{name} {t:.1f} us' for name, t in times.items())}"
    library, dense = fastest(us, ("cuSPARSELt",)), fastest(us, DENSE)
    rates = ", ".join(f"{100 * library / t:.0f} %" for t in times.values())
    return f"{text}; cuBLAS {dense:.1f} us; cuSPARSELt {library:.1f} us, of whose rate they have {rates}"


def tir_headlines(suites: Mapping[str, Rows]) -> Iterator[Headline]:
    """The figures of SparseTIR's section."""
    if rows := suites.get("operators"):
        text = ", ".join(f"`{label}` {mean(ratios(rows, label, SPARSE))}" for label in ("ell-buckets", "csr"))
        text += f" the best library, {len(rows)} cases, graphs and pruned weights, SpMM only"
        yield Headline("SparseTIR", "operators of graph networks", text)
    if rows := suites.get("blocks"):
        over = {p: [x for f in ("bsr", "dbsr") for x in ratios(rows, f, p)] for p in (SPARSE, DENSE)}
        text = f"BSR and DBSR, bf16: {mean(over[SPARSE])} the best library, {mean(over[DENSE])} dense"
        text += f", {len(over[DENSE])} cases"
        yield Headline("SparseTIR", "block-pruned weights", text)
    if rows := [r for r in suites.get("bert", ()) if r["name"].startswith("blocks")]:
        widths = [[r for r in rows if r["n"] == n] for n in (512, 4096)]
        dense, bsr = (" and ".join(mean(ratios(some, "dbsr", p)) for some in widths) for p in (DENSE, "bsr"))
        text = f"DBSR {dense} dense, {worst(ratios(rows, 'dbsr', DENSE))} at worst; {bsr} BSR"
        yield Headline("SparseTIR", "pruned BERT", text)
    if rows := suites.get("graphs"):
        library, csr = (ratios(rows, "hyb(1)", peers) for peers in (SPARSE, "csr"))
        text = f"{span(library)} cuSPARSE, {span(csr)} our CSR, {len(csr)} cases"
        yield Headline("SparseTIR", "hyb against CSR against cuSPARSE", text)
    if rows := [r for r in suites.get("unstructured", ()) if "90 %" in r["name"]]:
        ours, sparse, dense = (f"{fastest(rows[0]['us'], names):.1f} us" for names in ("sr-bcrs", SPARSE, DENSE))
        text = f"SR-BCRS, float16, 4096x4096, 90 % zeros, N = 512: {ours}; cuSPARSE {sparse}, dense {dense}"
        yield Headline("SparseTIR", "unstructured weights", text)


# ------------------------------------------------------------------ tables


def table(rows: Rows, group: Callable[[Row], str], pairs: Sequence[Pair] = ()) -> Iterator[str]:
    """How many times faster than each peer: geometric mean / worst (cases) of the rows of a group.

    pairs: without them everything of ours beside everything else.
    """
    names = list(dict.fromkeys(name for r in rows for name in r["us"]))
    ours = [name for name in names if not name.startswith(PEERS)]
    peers = [name for name in names if name not in ours]
    pairs = pairs or [(a, b) for a in ours for b in (*peers, *ours) if a != b]
    words: dict[Any, str] = {DENSE: "dense", SPARSE: "best library"}
    yield "| | " + " | ".join(f"{a} over {words.get(b, b)}" for a, b in pairs) + " |"
    yield "|---|" + "---|" * len(pairs)
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[group(row)].append(row)
    for key, some in groups.items():
        over = [ratios(some, a, b) for a, b in pairs]
        cells = [f"{geometric_mean(x):.2f} / {min(x):.2f} ({len(x)})" if x else "-" for x in over]
        yield f"| {key} | " + " | ".join(cells) + " |"


def times(rows: Rows) -> Iterator[str]:
    """Microseconds of each contender in each case."""
    names = list(dict.fromkeys(name for r in rows for name in r["us"]))
    yield "| microseconds | N | " + " | ".join(names) + " |"
    yield "|---|---|" + "---|" * len(names)
    for r in rows:
        cells = (f"{r['us'][name]:.1f}" if name in r["us"] else "-" for name in names)
        yield f"| {r['name']} | {r['n']} | " + " | ".join(cells) + " |"


def summary(suite: str, rows: Rows) -> Iterator[str]:
    """The tables of a suite."""
    if suite == "packing":
        yield "| | order of the metadata | us | GB/s of dense bytes |"
        yield "|---|---|---|---|"
        yield from (f"| {r['what']} | {r['order']} | {r['us']:.1f} | {r['gb_per_s']:.0f} |" for r in rows)
        return
    if suite == "bert":
        for kind in ("blocks", "anywhere"):
            if some := [r for r in rows if r["name"].startswith(kind)]:
                yield from table(some, lambda r: f"{r['name'].split()[0]}, N = {r['n']}")
                yield ""
    elif suite in ("nm", "shapes"):
        if left_out := len(rows) - len(rows := whole_layers(rows)):
            yield f"Without {left_out} products of a layer that was not finished.\n"
        over_dense = [(label, DENSE) for label in ("n:m", *EXACT)]
        if suite == "nm":
            yield from table(rows, lambda r: f"{r['name'].split()[1]}, {r['n']} columns", over_dense)
            yield ""
        yield from table(rows, lambda r: r["name"].split()[-1], over_dense)
        yield ""
    elif suite in ("operators", "blocks", "unstructured"):
        pairs = [(a, b) for a in ("csr", "ell-buckets", *TCA, "bsr", "dbsr", "sr-bcrs") for b in (SPARSE, DENSE)]
        pairs = [(a, b) for a, b in pairs if any(a in r["us"] for r in rows)]
        many = suite == "operators"
        yield from table(rows, lambda r: f"{r['name'].split()[-1] if many else r['name']}, N = {r['n']}", pairs)
        yield from list(table(rows, lambda r: "all", pairs))[2:]
        yield ""
    elif suite != "two-four":
        yield from table(rows, lambda r: f"{r['name']}, {r['n']} columns")
        yield ""
    if suite != "nm":
        yield from times(rows)
    for row in rows:
        for name, why in row["wrong"].items():
            yield f"\nnot counted: {row['name']}, {row['n']} columns, {name}: {why}"


def summary_of_headlines(suites: Mapping[str, Rows]) -> Iterator[str]:
    """The headline figures as a table."""
    yield "| paper | figure | ours |"
    yield "|---|---|---|"
    yield from (f"| {h.paper} | {h.figure} | {h.ours} |" for h in headlines(suites))


def release(number: int) -> str:
    """13.0 of the 13000 that CUDA answers."""
    return f"{number // 1000}.{number % 1000 // 10}"


def page(report: Mapping[str, Any]) -> Iterator[str]:
    """The page of results of a run, from its JSON."""
    about, suites = report["environment"], report["suites"]
    versions = [f"driver for CUDA {release(about['driver'])}", f"CUDA {release(about['runtime'])}"]
    versions += [f"{VERSIONS[name]} {number}" for name, number in about["versions"].items() if name in VERSIONS]
    yield "# Every figure of the papers' page, in one run\n"
    yield "| | |\n|---|---|"
    yield f"| date | {about['date']} |\n| device | one {about['device']} |\n| versions | {', '.join(versions)} |"
    yield f"| commit | {report['commit']} |\n| command | `{report['command']}` |\n"
    yield "One process; cold L2, medians, contenders in turn, every result checked first. Above 1 means that ours was"
    yield "faster. Ratios: geometric mean / worst (cases). [Papers](../papers.md) quotes the headline figures.\n"
    yield "## Headline figures\n"
    yield from summary_of_headlines(suites)
    for suite, rows in suites.items():
        whole = "" if suite not in report["cut"] else ", then its time was over"
        yield f"\n## {TITLES[suite]}\n\n{len(rows)} cases{whole}, {report['seconds'][suite]:.0f} s.\n"
        yield from summary(suite, rows)


def plot(rows: Rows, path: Path, memory: float) -> None:
    """The roofline of float32 on CUDA cores, as SVG: a dot for the faster kernel there, a ring for spmm(), for each
    product of ``nm``.

    memory: bytes a second that a copy on the device reads and writes.
    """
    left, top = 70, 20
    edge = DEVICE_FLOAT32 / memory

    def at(intensity: float, rate: float) -> tuple[float, float]:
        x = left + 120 * (math.log10(intensity) + 0.5)
        return round(x, 1), round(top + 150 * (math.log10(2 * DEVICE_FLOAT32) - math.log10(rate)), 1)

    def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'

    roof = ((0.5, 0.5 * memory), (edge, DEVICE_FLOAT32), (3000.0, DEVICE_FLOAT32))
    points = " ".join(f"{x},{y}" for x, y in (at(*p) for p in roof))
    shapes = [f'<polyline fill="none" stroke="black" points="{points}"/>']
    colours = {"32:32": "#666", "16:32": "#1b6ca8", "12:32": "#2a9d62", "8:32": "#d98324", "4:32": "#b23a48"}
    for row in rows:
        colour = colours[row["name"].split()[1]]
        exact = min((row["us"][kind] for kind in EXACT if kind in row["us"]), default=0.0)
        for us, look in ((row["us"].get("n:m"), f'fill="none" stroke="{colour}"'), (exact, f'fill="{colour}"')):
            if us:
                x, y = at(row["flop"] / row["bytes"], row["flop"] / us * 1e6)
                shapes.append(f'<circle cx="{x}" cy="{y}" r="2.5" {look}/>')
    for i, (kind, colour) in enumerate(colours.items()):
        shapes.append(f'<circle cx="{left + 20}" cy="{top + 18 * i + 10}" r="4" fill="{colour}"/>')
        shapes.append(text(left + 30, top + 18 * i + 14, kind, "start"))
    shapes += [text(at(v, 1e12)[0], 395, str(v)) for v in (1, 10, 100, 1000)]
    shapes += [text(left - 8, at(1, v)[1], f"{v / 1e12:.0f}", "end") for v in (1e12, 1e13, 1e14)]
    shapes.append(text(300, 415, "operations for each byte from memory"))
    shapes.append(text(8, 14, "Tera-operations a second over the kept values", "start"))
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 560 425" font-family="sans-serif" font-size="12">'
    path.write_text(head + "\n".join(shapes) + "</svg>\n")
