"""SpMM on CSR with CUDA cores: rows sorted by length, a sub-warp per row sized to N.  Kernel: spmm_csr.cu."""

from __future__ import annotations

import functools
from typing import Any

from ....arrays.dtypes import VALUE_TYPES
from ....products.kernel import spmm_of
from ....products.problem import Problem
from ..runtime import jit
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import Launch, restored
from ..runtime.row_tiles import Device, Tile, choose_tile
from ..runtime.row_work import (
    BinTable,
    RowGathering,
    bin_table,
    gather,
    row_gather_reasons,
    rows_by_length,
)
from ..runtime.transpose import row_major
from .csr_records import instead_of_arrays

ARCHS = ("sm_80",)


class SpmmCSR(RowGathering, CudaKernel):
    """Float sums in a fixed order; every N, any alignment. B or C column-major: through a transposed copy."""

    name = "cuda.spmm_csr"
    takes = spmm_of("csr")
    archs = ARCHS
    resident = True

    def unsupported(self, p: Problem) -> list[str]:
        return row_gather_reasons(p)

    def only_by_name(self, p: Problem) -> str:
        return instead_of_arrays(p)

    def instances(self) -> tuple[str, ...]:
        """C++ names for the compile tests: every value type, wide and scalar loads, both index types."""
        tiles = [
            choose_tile(vec, 4, n, 1000, 1000, 10**5, Device()) for vec, n in ((4, 32), (4, 512), (1, 1), (1, 100))
        ]
        names = [f"spmm_csr<float, float, int, {t.template()}, false, false>" for t in tiles]
        half = choose_tile(8, 2, 128, 1000, 1000, 10**5, Device()).template()
        double = choose_tile(2, 8, 64, 1000, 1000, 10**5, Device()).template()
        for t in ("__half", "__nv_bfloat16"):
            names += [f"spmm_csr<{t}, {out}, long long, {half}, true, false>" for out in (t, "float")]
        names.append(f"spmm_csr<double, double, int, {double}, true, false>")
        names.append("spmm_csr<__half, __half, int, 8, 8, 2, 8, 4, 512, 1, true, true>")
        return tuple(names)

    def prepared(self, a: Any, p: Problem) -> Prepared:
        stored = restored(a)
        rows, indices, data = rows_by_length(a, p), stored.indices, stored.data
        value, out = VALUE_TYPES[p.a_dtype], VALUE_TYPES[p.out_dtype]
        index = "long long" if indices.dtype.itemsize == 8 else "int"
        arch, nnz = jit.architecture(p.sm or 0, ARCHS), int(data.size)

        @functools.cache
        def kernels(tile: Tile) -> list[tuple[Launch, int]]:
            flags = f"{bool(rows.pieces)}, {tile.resident}".lower()
            instance = f"spmm_csr<{value.cuda}, {out.cuda}, {index}, {tile.template()}, {flags}>"
            smem = p.K * tile.columns * value.numpy.itemsize if tile.resident else 0
            function = jit.load("csr/spmm_csr.cu", instance, arch, p.device_id, smem)
            table = bin_table(rows, tile.slots, tile.fill)
            fixed = (table, rows.records, indices, data, nnz, p.K, rows.cuts)
            signature = (BinTable, *"PPPqqPPPPPiiqq")
            return [(Launch(function, signature, fixed, tile.threads, smem, waits=tile.early), table.blocks)]

        prepare, tile = gather(self, p, rows, kernels)
        return Prepared(row_major(p, prepare), tile=str(tile), workspace=rows.records.nbytes)
