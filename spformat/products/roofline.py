"""The bounds of a blocked product on a device: the time of its arithmetic and of its bytes.  No arrays, no GPU needed.

The analysis is that of NM-SpMM (IPDPS 2025): a tile of C loads a strip of A and the rows of B that its kept columns
name; operations per byte loaded (its Eq. 3) against the device's own ratio say whether arithmetic or loading bounds it
(the roofline). Its bounds on a blocking are here, too: shared memory (Eq. 4), the intensity with C (Eq. 5), and the
registers of a thread (Eq. 6). The modules ``ideal`` and ``rates`` have what a kernel takes beyond these bounds.

Units: operations (a multiply-add is two), bytes, microseconds (names end in ``us``); rates are per second.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..errors import UsageError
from .problem import Problem, itemsize

TENSOR_16, TF32_THREE, CUDA_32, CUDA_64 = "16-bit", "three TF32 products", "float32", "float64"
"""Kinds of arithmetic; one product of ``TF32_THREE`` counts once, though the tensor core computes three."""


@dataclass(frozen=True)
class Device:
    """Rates of a GPU. To use your own measurements, write ``dataclasses.replace(H200, memory=3.9e12)``."""

    name: str
    sm: int
    """Compute capability times ten."""
    processors: int
    """Streaming multiprocessors: so many tiles are computed at a time."""
    memory: float
    """Bytes per second, read and written, that a large copy reaches."""
    cache: float
    """Bytes per second from L2 into all processors together."""
    peak: Mapping[str, float]
    """Operations per second of dense arithmetic, by kind."""
    most_clusters: tuple[int, ...] = ()
    """Thread block clusters of one block, two blocks .. that run at a time, one block on a multiprocessor. () without
    clusters. Those of several blocks are fewer than multiprocessors allow: a cluster runs inside one group (GPC)."""

    def clusters(self, size: int, resident: int = 1) -> int:
        """At least how many clusters of ``size`` blocks run at a time, with ``resident`` blocks on a multiprocessor.

        Without a table of clusters, as many groups of ``size`` blocks as multiprocessors allow.
        """
        if size == 1 or not self.most_clusters:
            return self.processors * resident // size
        return self.most_clusters[size - 1] * resident

    def __hash__(self) -> int:
        return hash((self.name, self.sm, self.processors, self.memory, self.cache))


def _peaks(tensor_16: float, cuda_32: float, cuda_64: float) -> dict[str, float]:
    return {TENSOR_16: tensor_16, TF32_THREE: tensor_16 / 6, CUDA_32: cuda_32, CUDA_64: cuda_64}


_HOPPER_CLUSTERS = (132, 66, 39, 30, 22, 17, 15, 15)
"""As cuOccupancyMaxActiveClusters answered on two H200. Other chips may have other groups of multiprocessors."""
H200 = Device("H200", 90, 132, 4.2e12, 7.4e12, _peaks(989e12, 67e12, 34e12), _HOPPER_CLUSTERS)
H100 = Device("H100", 90, 132, 3.0e12, 7.4e12, _peaks(989e12, 67e12, 34e12), _HOPPER_CLUSTERS)
A100 = Device("A100", 80, 108, 1.8e12, 4.9e12, _peaks(312e12, 19.5e12, 9.7e12))
HOST = Device("host", 0, 2, 10e9, 40e9, {CUDA_32: 100e9, CUDA_64: 50e9})
"""Two cores of a server, in round numbers: bytes per second from memory and from the caches, operations per second of
all cores together. Constants of host kernels are fitted to the host at hand, so that only the proportions matter."""
DEVICES = {d.name: d for d in (H200, H100, A100)}
"""SXM boards. Peaks are the vendor's. Memory and cache of the H200 were measured (a copy; rows gathered by all
processors), those of the others are scaled by bandwidth and clock."""
_ARCHITECTURE = re.compile(r"sm_([7-9]\d|1\d\d)")
_OF_ARCHITECTURE = {d.sm: d for d in reversed(DEVICES.values())}
"""The first device of each architecture."""


@functools.lru_cache(maxsize=64)
def board_named(text: str) -> Device | None:
    """The device of ``DEVICES`` whose name is a word of a text ("NVIDIA H100 80GB HBM3"), or None."""
    return next((d for d in DEVICES.values() if d.name in text.split()), None)


def known_device(board: str, sm: int | None) -> Device | None:
    """The rates of a board by its name, else those of the first board of an architecture, or None."""
    return board_named(board) or _OF_ARCHITECTURE.get(sm or 0)


def device_for(board: str, sm: int, name: str = "") -> Device:
    """``known_device``; where none is known, a device of the architecture with the rates of the H200.

    name: of such a device; "sm_89", for instance, without it.
    """
    return known_device(board, sm) or replace(H200, name=name or f"sm_{sm}", sm=sm)


def device_named(device: str | Device) -> Device | None:
    """The device of this name, or the device itself; None for "cpu". UsageError for an unknown name.

    "sm_89" is the first board of that architecture, or, where none is known, one with the rates of the H200.
    """
    if isinstance(device, Device) or device == "cpu":
        return None if isinstance(device, str) else device
    named = DEVICES.get(device.upper()) if isinstance(device, str) else None
    if named is None and isinstance(device, str) and (match := _ARCHITECTURE.fullmatch(device)):
        named = device_for("", int(match[1]))
    if named is None:
        known = ", ".join((*DEVICES, "cpu"))
        of_your_own = (
            "or a Device of your own, dataclasses.replace(cost.DEVICES['H200'], name=.., memory=..), "
            "or an architecture like 'sm_89'"
        )
        raise UsageError(f"device: expected one of {known}, {of_your_own}, got {device!r:.80}", value=device)
    return named


def tile_intensity(
    rows: int, cols: int, kept: float, staged: float, itemsize: int, vector_length: float = float("inf")
) -> float:
    """Operations per byte that a tile of C loads, NM-SpMM's Eq. 3 with the sparse matrix on the left.

    rows, cols     of the tile of C (the paper's n_s, m_s)
    kept           columns of A multiplied, per k tile (w_s); kept / staged is n/m where B is not packed
    staged         rows of B loaded, per k tile: k_s, or the measured share of it where packing or gathering skips some
    vector_length  rows that share their columns: one index byte for each group and kept column
    """
    loaded = shared_bytes(rows, cols, kept, staged, itemsize, vector_length)
    return 2 * rows * cols * kept / loaded if loaded else 0.0


def shared_bytes(
    rows: int, cols: int, kept: float, staged: float, itemsize: int, vector_length: float = float("inf"),
    stages: int = 1,
) -> float:  # fmt: skip
    """Bytes of shared memory for the k tiles of a tile of C, NM-SpMM's Eq. 4 with the sparse matrix on the left.

    The values of A, the rows of B and the index bytes of one k tile, times ``stages``: how many k tiles are there at a
    time, two where one is loaded while another is multiplied. They must fit ``shared_limit``. The other arguments are
    those of ``tile_intensity``.
    """
    return stages * (itemsize * (rows * kept + staged * cols) + rows / vector_length * kept)


def block_intensity(
    rows: int, cols: int, kept: float, staged: float, k_tiles: float, itemsize: int,
    vector_length: float = float("inf"), out_itemsize: int = 4,
) -> float:  # fmt: skip
    """Operations per byte that a tile of C moves from start to end, NM-SpMM's Eq. 5: all its k tiles, and C itself.

    k_tiles is how many k tiles K is cut into, out_itemsize the bytes of an element of C, written once. For large K it
    nears ``tile_intensity``, whose other arguments it takes; for small K the bytes of C lower it.
    """
    moved = k_tiles * shared_bytes(rows, cols, kept, staged, itemsize, vector_length) + out_itemsize * rows * cols
    return 2 * rows * cols * kept * k_tiles / moved if moved else 0.0


def thread_registers(rows: int, cols: int, itemsize: int = 4) -> int:
    """32-bit registers in which a thread holds rows x cols sums, a column of A and a row of B, NM-SpMM's Eq. 6.

    For kernels on the CUDA cores, with operands and sums of ``itemsize`` bytes. A thread has 255 registers at most,
    those of addresses and indices among them.
    """
    return -(-itemsize * (rows * cols + rows + cols) // 4)


@dataclass(frozen=True)
class Blocking:
    """How a kernel cuts C = A @ B."""

    rows: int
    cols: int
    """Of a tile of C."""
    k_tiles: int
    kept: int
    """Columns of A multiplied per k tile, padding included."""
    staged: float
    """Rows of B loaded per k tile."""
    itemsize: int
    arithmetic: str

    def intensity(self) -> float:
        """Operations per byte that a tile loads."""
        return tile_intensity(self.rows, self.cols, self.kept, self.staged, self.itemsize)

    def shared_bytes(self, stages: int = 1) -> float:
        """Bytes of shared memory for so many k tiles at a time."""
        return shared_bytes(self.rows, self.cols, self.kept, self.staged, self.itemsize, stages=stages)

    def block_intensity(self, out_itemsize: int = 4) -> float:
        """Operations per byte that a tile moves from start to end, C included."""
        tile = self.rows, self.cols, self.kept, self.staged, self.k_tiles, self.itemsize
        return block_intensity(*tile, out_itemsize=out_itemsize)


_assumed_device: contextvars.ContextVar[Device | None] = contextvars.ContextVar("spformat_device", default=None)


@contextlib.contextmanager
def on(device: Device) -> Iterator[None]:
    """Inside the block, the rates of this device are used for every problem on a GPU."""
    token = _assumed_device.set(device)
    try:
        yield
    finally:
        _assumed_device.reset(token)


def device_of(p: Problem) -> Device:
    """The device whose rates are used for a problem: that of an ``on`` block, the problem's own, that of its
    architecture, or the H200."""
    if p.device == "cpu":
        return HOST
    return _assumed_device.get() or known_device(p.board, p.sm) or H200


SHARED_KB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
"""Kilobytes of shared memory that a block may have, by architecture."""


def shared_limit(sm: int | None) -> int:
    """Bytes of shared memory that a block may have on a device; the smallest known where it is not listed."""
    return 1024 * SHARED_KB.get(sm or 0, 99)


def moved_bytes(p: Problem) -> float:
    """Bytes of A's values with a 4-byte index each, of B and of C, each once."""
    dense = p.inner * p.n * itemsize(p.b_dtype) + p.rows * p.n * itemsize(p.out_dtype)
    return float(p.nnz * (itemsize(p.a_dtype) + 4) + dense)


UNKNOWN_US = 200.0
"""Fixed time of a call of a kernel without estimates: more than for kernels that have them."""
HOST_BYTES, HOST_OPERATIONS = 5e9, 2e9
"""Bytes and operations per second of a host, for kernels without estimates."""


def plain_us(p: Problem) -> float:
    """Microseconds for a kernel that gives no estimate of its own: a fifth of the bytes and a tenth of the operations
    that the device could do; on the host, those of one slow core."""
    operations, moved = 2.0 * p.nnz * p.n, moved_bytes(p)
    if p.device == "cpu":
        return UNKNOWN_US + 1e6 * (moved / HOST_BYTES + operations / HOST_OPERATIONS)
    device = device_of(p)
    peak = device.peak[{"float64": CUDA_64, "float32": CUDA_32}.get(p.a_dtype, TENSOR_16)]
    return UNKNOWN_US + 1e6 * (5 * moved / device.memory + 10 * operations / peak)


def epilogue_us(p: Problem) -> float:
    """Microseconds of one more pass over C: it is read in float32 and written."""
    return 2.0 + moved_us(p, p.rows * p.n * (4 + itemsize(p.out_dtype)))


def moved_us(p: Problem, nbytes: float) -> float:
    """Microseconds to read or write so many bytes of memory on the device of a problem."""
    return 1e6 * nbytes / (device_of(p).memory if p.device != "cpu" else HOST_BYTES)
