"""``benchmarks/papers.py``: headline figures and page of a run, without a GPU; small products and packing in the emulator."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import emulator
import pytest
from test_docs import DOCS, ROOT

sys.path.append(str(ROOT / "benchmarks"))
import papers_page

BENCHMARK = ROOT / "benchmarks" / "papers.py"


def row(name: str, n: int = 512, **us: float) -> dict[str, Any]:
    return {"name": name, "n": n, "us": {k.replace("_", " "): t for k, t in us.items()}, "wrong": {}}


def irregular(dtype: str, ours: float) -> dict[str, Any]:
    us = {"csr": ours, "ell-buckets": 2 * ours, "tca": 100.0, "tca, shared sums": 125.0, "cuSPARSE csr": 60.0,
          "torch csr": 40.0, "dense cuBLAS": 90.0}  # fmt: skip
    return row(f"cora {dtype}") | {"us": us}


def vectors(name: str, pattern: str, ours: float, n: int = 4096) -> dict[str, Any]:
    us = {"n:m": ours, "CUDA cores": 80.0, "CUDA cores, sm_90": 50.0, "dense cuBLAS": 100.0}
    return row(f"{name} {pattern}", n) | {"us": us}


PATTERNS = ("32:32", "16:32", "12:32", "8:32", "4:32")
SUITES = {
    "bert": [
        row("blocks 768x768 1.0 %", n, bsr=10.0, dbsr=ours, dense_cuBLAS=12.0)
        for n, ours in ((512, 8.0), (512, 16.0), (4096, 5.0))
    ],
    "shapes": [vectors(name, p, t) for name in ("A 512x512", "F 4096x4096") for p, t in zip(PATTERNS[1:], (50.0, 40.0, 25.0, 12.5), strict=True)],
    "two-four": [
        row("2:4") | {"us": {"called": 130.0, "wgmma.sp": 125.0, "mma.sp by TMA": 200.0, "mma.sp": 250.0, "cuBLAS torch": 180.0, "cuSPARSELt torch": 140.0, "cuSPARSELt row": 150.0}}
    ],
    "blocks": [
        row("bsr", bsr=10.0, torch_bsr=40.0, torch_dense=30.0, dense_cuBLAS=20.0),
        row("dbsr", dbsr=10.0, dense_cuBLAS=5.0),
    ],
    "unstructured": [row("sr-bcrs 8x16 90 % fp16") | {"us": {"sr-bcrs": 54.12, "cuSPARSE csr": 374.0, "torch csr": 380.0, "dense cuBLAS": 30.4}}],
    "graphs": [row("cora", n) | {"us": {"csr": 10.0, "hyb(1)": t, "cuSPARSE csr": 30.0}} for n, t in ((32, 8.0), (64, 12.5))],
    "operators": [irregular("float32", 10.0), irregular("float16", 20.0), irregular("float16", 5.0)],
    "nm": [
        *(vectors("2048x2048", p, t) for p, t in zip(PATTERNS, (80.0, 40.0, 25.0, 20.0, 10.0), strict=True)),
        vectors("4096x4096", "32:32", 1.0),
    ],
    "packing": [
        {"name": what, "what": what, "order": "logical", "us": 20.0, "gb_per_s": rate, "wrong": {}}
        for what, rate in (("exact", 1700.4), ("pruned", 1514.2), ("pruned", 1613.0), ("copy of as many bytes", 1827.0))
    ],
}  # fmt: skip
WANTED = {
    "over cuBLAS, float32": "its shapes A to F, L = 32, 8 products, at 50, 62.5, 75, 87.5 % zeros: 2.00x, 2.50x, 4.00x, 8.00x in the mean, "
    "2.00x at worst, with three TF32 products",
    "the same on CUDA cores": "4096^3, 16, 12, 8, 4:32: 2.00x, 2.00x, 2.00x, 2.00x, `cuda.spmm_vector_nm_sm90`",
    "layers of Llama": "1 layers, 5 products, 0, 50, 62.5, 75, 87.5 % zeros: 1.25x, 2.50x, 4.00x, 5.00x, 10.00x, 1.25x at worst, "
    "with three TF32 products; CUDA cores 1.25x, 1.25x, 1.25x, 1.25x, 1.25x; CUDA cores, sm_90 2.00x, 2.00x, 2.00x, 2.00x, 2.00x",
    "cases each of float16 and float32": "2 and 1 cases; tca: 0.40x and 0.40x cuSPARSE, 0.10x and 0.10x CSR on CUDA cores; "
    "tca, shared sums: 0.32x and 0.32x cuSPARSE, 0.08x and 0.08x CSR on CUDA cores",
    "float16 against the best": "0.10x, worst 0.05x, against the fastest of our CSR, ELL buckets and cuSPARSE",
    "against NVIDIA's sparse library": "4096^3: mma.sp 250.0 us, mma.sp by TMA 200.0 us, wgmma.sp 125.0 us; cuBLAS 180.0 us; cuSPARSELt 140.0 us, "
    "of whose rate they have 56 %, 70 %, 112 %",
    "pruning and packing": "1514 to 1613 GB/s at 4096 x 4096, a copy 1827 GB/s",
    "operators of graph networks": "`ell-buckets` 2.00x, `csr` 4.00x the best library, 3 cases, graphs and pruned weights, SpMM only",
    "block-pruned weights": "BSR and DBSR, bf16: 4.00x the best library, 1.00x dense, 2 cases",
    "pruned BERT": "DBSR 1.06x and 2.40x dense, 0.75x at worst; 0.88x and 2.00x BSR",
    "hyb against CSR against cuSPARSE": "2.40x to 3.75x cuSPARSE, 0.80x to 1.25x our CSR, 2 cases",
    "unstructured weights": "SR-BCRS, float16, 4096x4096, 90 % zeros, N = 512: 54.1 us; cuSPARSE 374.0 us, dense 30.4 us",
}
REPORT = {
    "environment": {"date": "2026-11-26", "device": "NVIDIA H200", "driver": 13000, "runtime": 13000, "versions": {"cupy-cuda13x": "14.2.0"}},
    "commit": "abc1234", "command": "python benchmarks/papers.py all", "cut": ["nm"], "suites": SUITES,
    "seconds": dict.fromkeys(SUITES, 9.6),
}  # fmt: skip


def test_the_headline_figures() -> None:
    """Every one, computed by hand from rows that are made up; a layer that was cut short is left out."""
    found = {h.figure: h.ours for h in papers_page.headlines(SUITES)}
    assert found == WANTED


def test_every_headline_is_a_row_of_the_page_of_papers() -> None:
    sections = re.split(r"^## ", (DOCS / "papers.md").read_text(), flags=re.MULTILINE)
    for h in papers_page.headlines(SUITES):
        (section,) = (text for text in sections if text.startswith(h.paper))
        table = section[section.index("| figure |") :]
        assert any(h.figure in line.split("|")[1] for line in table.splitlines()[2:] if line.startswith("|")), h


def test_nothing_is_said_of_what_was_not_measured() -> None:
    assert list(papers_page.headlines({})) == []
    only = {"two-four": [row("2:4") | {"us": {"wgmma.sp": 125.0}}]}
    (headline,) = papers_page.headlines(only)
    assert headline.ours.startswith("4096^3: wgmma.sp 125.0 us; cuBLAS nan us; cuSPARSELt nan us")


def test_the_page_of_a_run(tmp_path: Path) -> None:
    """Without CuPy, from the JSON of a run, as docs/results wants it."""
    file = tmp_path / "run.json"
    file.write_text(json.dumps(REPORT))
    code = f"import runpy, sys; sys.modules['cupy'] = None; sys.argv = ['papers.py', '--page', {str(file)!r}]; runpy.run_path({str(BENCHMARK)!r}, run_name='__main__')"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(BENCHMARK.parent)!r}); {code}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    page = done.stdout
    origin = dict(re.findall(r"^\| (\w+) \| (.+) \|$", page.split("\n\n")[1], re.MULTILINE))
    assert origin == {
        "date": "2026-11-26", "device": "one NVIDIA H200", "versions": "driver for CUDA 13.0, CUDA 13.0, CuPy 14.2.0",
        "commit": "abc1234", "command": "`python benchmarks/papers.py all`",
    }  # fmt: skip
    assert all(f"| {figure} | {ours} |" in page for figure, ours in WANTED.items())
    assert (
        "## NM-SpMM: layers of Llama, float32, vectors of 32\n\n6 cases, then its time was over, 10 s.\n\nWithout 1 products of"
        in page
    )
    assert "| blocks, N = 4096 | 1.20 / 1.20 (1) |" in page
    assert "| cora float32 | 512 | 10.0 | 20.0 | 100.0 | 125.0 | 60.0 | 40.0 | 90.0 |" in page
    assert "| float16, N = 512 | 4.00 / 2.00 (2) |" in page
    for block in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1, block


SMALL = """
import sys, types
from emulator import stand_in
stand_in.install(90)
import cupy as cp, numpy as np

class Random:
    def __init__(self, seed=0):
        self.host = np.random.default_rng(seed)
    def standard_normal(self, shape, dtype):
        return cp.asarray(self.host.standard_normal(shape, dtype))
    def random(self, shape, dtype):
        return cp.asarray(self.host.random(shape, dtype))

cp.random = types.SimpleNamespace(default_rng=Random)
import pack, papers, papers_cases as cases
import spformat as sf
from spformat.backends.cuda.runtime.compile_ahead import CompileAhead
from spformat.measure import bench
bench.FLUSH = 1 << 12

def unavailable(a, B):
    raise ImportError("no library")

x = np.where(np.random.default_rng(1).random((70, 70)) < 0.1, np.float32(1.5), np.float32(0))
csr = sf.CSR.from_dense(x).to("cuda")
vectors = cases.vectors(64, 64, 8)
for case in (
    cases.Case("vectors", 16, vectors, [cases.contenders.dense], cases.CUDA_CORES),
    cases.Case("graph", 16, [("csr", csr), ("hyb", sf.convert(csr, "ell-buckets"))], [unavailable], cases.TENSOR_CORES),
):
    with CompileAhead(1) as ahead:
        assert ahead.compile_for(papers.attempts(case)) > 1
    row = papers.measure(case, 1)
    print(case.name, sorted(row["us"]), row["wrong"], sorted(row["kernels"]))
two_four = papers.measure(cases.Case("2:4", 64, [("called", cases.gpu.random_two_four(256, 256))], [cases.from_graphs]), 1)
print(sorted(two_four["us"]))
pack.check(cp, papers.TwoFourPack())
print(len(pack.measure(cp, papers.TwoFourPack(), (64, 64), 1)))
"""


def test_small_products_and_packing_in_the_emulator() -> None:
    if reason := emulator.missing():
        pytest.skip(f"no emulator: {reason}")
    paths = f"import sys; sys.path[:0] = [{str(ROOT / 'tests')!r}, {str(BENCHMARK.parent)!r}, {str(ROOT)!r}]\n"
    done = subprocess.run(
        [sys.executable, "-c", paths + SMALL], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith(("{", "left out"))]
    assert lines == [
        "vectors ['CUDA cores', 'CUDA cores, sm_90', 'dense cuBLAS', 'n:m'] {} ['n:m']",
        "graph ['csr', 'hyb', 'tca', 'tca, shared sums'] {'a library': 'ImportError: no library'} ['csr', 'hyb']",
        "['called', 'cuBLAS cupy, called', 'mma.sp', 'mma.sp by TMA', 'wgmma.sp']",
        "13",
    ]


def test_unknown_suites_are_refused() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "bart"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "expected all, or some of bert, shapes" in done.stderr
    assert "got bart" in done.stderr
