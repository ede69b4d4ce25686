"""The CUDA backend: one launcher and one ``.cu`` twin per kernel, compiled at first use through CuPy's NVRTC."""

from __future__ import annotations

import functools

from ...arrays.library import import_cupy
from ...errors import DeviceUnavailable
from .bitmask.spmm_bitmask import SpmmBitmask
from .bitmask.spmm_bitmask_expanding_sm90a import SpmmBitmaskExpanding
from .bitmask.spmm_bitmask_mma import SpmmBitmaskTF32
from .bitmask.spmm_bitmask_tc import SpmmBitmaskTensor
from .bitmask.spmm_bitmask_tokens import SpmmBitmaskTokens
from .bsr import (
    spmm_bsr,
    spmm_bsr_sm90a,
    spmm_bsr_stream_sm90a,
    spmm_bsr_strips_sm90a,
    spmm_bsr_tokens,
)
from .bsr.spmm_bsr_expanding_sm90a import SpmmBSRExpanding
from .csr.spmm_csr import SpmmCSR
from .csr.spmm_csr_expanding_sm90a import SpmmCSRExpanding
from .csr.spmm_csr_panel import SpmmCSRPanel
from .csr.spmm_csr_records import SpmmCSRRecords
from .csr.spmm_csr_tc import SpmmCSRTensor
from .csr.spmm_csr_vector import SpmmCSRVector
from .dense.expand_then_dense import ExpandThenDense
from .ell_buckets.spmm_ell_buckets import SpmmELLBuckets
from .runtime.kernel import CudaKernel
from .sr_bcrs.spmm_sr_bcrs import SpmmSRBCRS
from .sr_bcrs.spmm_sr_bcrs_expanding_sm90a import SpmmSRBCRSExpanding
from .sr_bcrs.spmm_sr_bcrs_sm90a import SpmmSRBCRSHopper
from .sr_bcrs.spmm_sr_bcrs_tc import SpmmSRBCRSTensor
from .sr_bcrs.spmm_sr_bcrs_vector import SpmmSRBCRSVector
from .sum.spmm_sum import SpmmSum
from .sum.spmm_sum_rows import SpmmSumRows
from .two_four import spmm_two_four
from .two_four.spmm_two_four_shares_sm90a import SpmmTwoFourShares
from .two_four.spmm_two_four_sm90 import SpmmTwoFourSm90
from .two_four.spmm_two_four_sm90a import SpmmTwoFourSm90a
from .two_four.spmm_two_four_tokens import SpmmTwoFourTokens
from .vector_nm.spmm_vector_nm import SpmmVectorNM
from .vector_nm.spmm_vector_nm_expanding_sm90a import SpmmVectorNMExpanding
from .vector_nm.spmm_vector_nm_mma import SpmmVectorNMTensor
from .vector_nm.spmm_vector_nm_sm90 import SpmmVectorNMSm90
from .vector_nm.spmm_vector_nm_sm90a import SpmmVectorNMSm90a
from .vector_nm.spmm_vector_nm_tma_sm90a import SpmmVectorNMTMA
from .vector_nm.spmm_vector_nm_tokens import SpmmVectorNMTokens
from .vector_nm.spmm_vector_nm_tokens_tc import SpmmVectorNMTokensTensor

KERNELS: tuple[CudaKernel, ...] = (
    spmm_bsr_sm90a.KERNEL,
    spmm_bsr_stream_sm90a.KERNEL,
    spmm_bsr_strips_sm90a.KERNEL,
    spmm_bsr.KERNEL,
    spmm_bsr_tokens.KERNEL,
    SpmmCSR(),
    SpmmCSRTensor(),
    SpmmELLBuckets(),
    SpmmSRBCRSHopper(),
    SpmmSRBCRSTensor(),
    SpmmSRBCRS(),
    SpmmBitmaskTensor(),
    SpmmBitmask(),
    SpmmBitmaskExpanding(),
    SpmmBitmaskTokens(),
    SpmmBitmaskTF32(),
    SpmmTwoFourSm90a(),
    SpmmTwoFourTokens(),
    SpmmTwoFourSm90(),
    spmm_two_four.KERNEL,
    SpmmVectorNMSm90a(),
    SpmmVectorNMTMA(),
    SpmmVectorNMTensor(),
    SpmmVectorNMSm90(),
    SpmmVectorNM(),
    SpmmVectorNMTokens(),
    SpmmVectorNMTokensTensor(),
    SpmmVectorNMExpanding(),
    ExpandThenDense(),
    SpmmSum(),
    SpmmTwoFourShares(),
    SpmmCSRVector(),
    SpmmCSRPanel(),
    SpmmCSRRecords(),
    SpmmSRBCRSVector(),
    SpmmSumRows(),
    SpmmCSRExpanding(),
    SpmmSRBCRSExpanding(),
    SpmmBSRExpanding(),
)
"""One line per kernel. Of kernels that expect the same time, the first is chosen."""


class CudaBackend:
    """Kernels for operands on an NVIDIA GPU of sm_80 or newer."""

    name = "cuda"

    def missing(self) -> list[str]:
        """What is missing: CuPy, a driver or a device."""
        return list(_missing())

    def kernels(self) -> tuple[CudaKernel, ...]:
        """All kernels; asking them needs no GPU."""
        return KERNELS


@functools.cache
def _missing() -> tuple[str, ...]:
    try:
        cupy = import_cupy()
    except DeviceUnavailable as e:
        return (e.message,)
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as e:
        return (f"no usable CUDA driver: {e}",)
    return () if count else ("no CUDA device is visible",)


BACKEND = CudaBackend()
