"""This project's CUDA kernels on the CPU: for development without a GPU.

A ``.cu`` file is compiled with g++; the threads of a block are fibers of one thread of the operating system, so that shared
memory, barriers, operations of warps and atomics work. Every array ends before a page that cannot be touched.

    PYTHONPATH=tests python -m emulator --formats csr --cases 20       conversions, compared with the numpy code
    PYTHONPATH=tests python -m emulator --kernels spmm_csr --cases 20  products, compared with numpy
    PYTHONPATH=tests python -m pytest -p emulator.plugin -m gpu tests/test_x.py     tests for a GPU, as far as CuPy is imitated

``Kernel`` runs one kernel on numpy arrays. ``stand_in`` is a CuPy whose launches run here, so that launchers and edges run
unchanged; it belongs into a process of its own.

Reported, with the line: access outside of arrays, of shared memory or of arrays of known size; misaligned access;
shifts by the width or more; integer division by zero; deadlocks and threads that meet at different barriers; warp operations
whose mask does not name the caller; instructions of a warp that a lane does not reach; metadata of 2:4 out of order; too much
shared memory; impossible grids; loops without end. A missing barrier shows as a wrong result where threads are shuffled: then
one warp may run far ahead. What cp.async copies arrives with the wait for its group; until then its place holds 0xFF. Shared
memory is filled with 0xCD before each block, new arrays with 0xFF.

Hopper: the blocks of a cluster run together. What other units do (bulk copies, st.async, wgmma) is done at a random time, at
the latest when it is waited for; device/asynchronous.h, copy_engine.h and warpgroups.h say how, and what is reported.

Not seen: races between clusters (they run one after the other), the order of memory, speed, registers, flushed denormals, the
last bits of sums on tensor cores. cuBLAS is numpy.
Not emulated: other PTX than that in ``ptx.py``, ``ptx_sm80.py`` and ``ptx_sm90.py``: reaching it is an error.
"""

from .build import EmulatorError, missing
from .kernel import Kernel

__all__ = ["EmulatorError", "Kernel", "missing"]
