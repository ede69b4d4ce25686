"""SpMM on CSR with CUDA cores: rows sorted by length, a sub-warp per row sized to N.  Kernel: spmm_csr.cu."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ...arrays import ceil_div
from ...dtypes import VALUE_TYPES
from ...problem import Plan, Problem
from . import jit
from .launch import Launch, Operands, device_plan
from .row_work import (
    BinTable,
    Device,
    Tile,
    bin_table,
    choose_tile,
    column_slabs,
    device_of,
    longest_piece,
    order_rows,
    row_gather_reasons,
    vector_width,
)
from .transpose import row_major

ARCHS = ("sm_80",)


class SpmmCSR:
    """Float sums in a fixed order; every N, any alignment. B or C column-major: through a transposed copy."""

    name = "cuda.spmm_csr"
    formats = frozenset({"csr"})
    archs = ARCHS

    def unsupported(self, p: Problem) -> list[str]:
        return row_gather_reasons(p)

    def instances(self) -> tuple[str, ...]:
        """C++ names for the compile tests: every value type, wide and scalar loads, both index types."""
        tiles = [
            choose_tile(vec, 4, n, 1000, 1000, 10**5, Device()) for vec, n in ((4, 32), (4, 512), (1, 1), (1, 100))
        ]
        names = [f"spmm_csr<float, float, int, {t.template()}>" for t in tiles]
        half = choose_tile(8, 2, 128, 1000, 1000, 10**5, Device()).template()
        names += [f"spmm_csr<{t}, {o}, long long, {half}>" for t in ("__half", "__nv_bfloat16") for o in (t, "float")]
        names.append(f"spmm_csr<double, double, int, {choose_tile(2, 8, 64, 1000, 1000, 10**5, Device()).template()}>")
        return (*names, "spmm_csr_pieces<float, __half>", "spmm_csr_pieces<double, double>")

    def plan(self, a: Any, p: Problem) -> Plan:
        import cupy

        indptr, indices, data = a.indptr, a.indices, a.data
        with cupy.cuda.Device(p.device_id):
            starts = indptr[:-1].astype(np.int64)
            lengths = indptr[1:].astype(np.int64) - starts
            rows = order_rows(starts, lengths, cupy.arange(p.M, dtype=np.int64), longest_piece(p.nnz))
        value, out = VALUE_TYPES[p.a_dtype], VALUE_TYPES[p.out_dtype]
        size, out_size, nnz = value.numpy.itemsize, out.numpy.itemsize, int(data.size)
        sums = "double" if p.a_dtype == "float64" else "float"
        index = "long long" if indices.dtype.itemsize == 8 else "int"
        device = device_of(p.device_id)

        @functools.cache
        def kernel(tile: Tile) -> tuple[Launch, int]:
            instance = f"spmm_csr<{value.cuda}, {out.cuda}, {index}, {tile.template()}>"
            table = bin_table(rows, tile.slots, tile.fill)
            function = jit.load("spmm_csr.cu", instance, jit.architecture(p.sm or 0, ARCHS), p.device_id)
            fixed = (table, rows.records, indices, data, nnz)
            signature = (BinTable, "P", "P", "P", "q", "P", "P", "P", "i", "i", "q", "q")
            return Launch(function, signature, fixed, tile.threads), table.blocks

        @functools.cache
        def add_pieces() -> Launch:
            instance = f"spmm_csr_pieces<{sums}, {out.cuda}>"
            function = jit.load("spmm_csr.cu", instance, jit.architecture(p.sm or 0, ARCHS), p.device_id)
            return Launch(function, ("P", "P", "P", "i", "q"), (rows.cuts,), 256)

        @functools.lru_cache(maxsize=256)
        def choose(n: int, vec: int) -> Tile:
            return choose_tile(vec, size, n, p.K, p.M, nnz, device)

        def launch(o: Operands) -> None:
            vec = vector_width(size, out_size, o.n, o.b, o.c, o.ldb, o.ldc)
            tile = choose(o.n, vec)
            main, blocks = kernel(tile)
            for slab in column_slabs(o, tile.columns, size, out_size):
                width = ceil_div(slab.n, tile.columns)
                prefetch = ((p.K - 1) * slab.ldb + slab.n) * size if tile.prefetch and p.K else 0
                partial = cupy.empty(rows.pieces * slab.n, np.dtype(sums)) if rows.pieces else None
                at = 0 if partial is None else partial.data.ptr
                main(
                    (ceil_div(blocks, tile.tasks), width, 1),
                    slab.stream,
                    at,
                    slab.b,
                    slab.c,
                    slab.n,
                    slab.ldb * size,
                    slab.ldc,
                    prefetch,
                )
                if partial is not None:
                    add_pieces()(
                        (len(rows.cuts), min(ceil_div(slab.n, 256), 65535), 1),
                        slab.stream,
                        at,
                        slab.c,
                        slab.n,
                        slab.ldc,
                    )

        tile = choose(max(1, p.n), max(1, 16 // size))
        kernel(tile)
        return device_plan(self.name, p, row_major(p, launch), tile=str(tile), workspace=rows.records.nbytes)
