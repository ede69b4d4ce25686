"""Packing on a GPU: python benchmarks/pack.py [--blocks 256x256 ..] [--repeats 30]

GB/s of dense bytes (2 M K over the time) of dense bf16 -> two-four in every meta_order, exact and pruned, and of the
way back. Kernel times are CUDA events, medians, cold L2 (256 MB written between runs); results are compared with the
host's first. Beside them: `convert` as a user calls it (wall time, check included), and a copy of as many bytes.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import spformat as sf
from spformat.backends.cuda.runtime.scratch import Counters
from spformat.backends.cuda.two_four.two_four_pack import BLOCK, TwoFourPack
from spformat.formats.meta_orders import META_ORDERS
from spformat.preprocess import masks

SHAPES = ((4096, 4096), (8192, 8192), (11008, 4096), (8192, 8190))


def weights(cp: Any, shape: tuple[int, int]) -> Any:
    """Random normal bf16."""
    return (
        cp.random.default_rng(0)
        .standard_normal(shape, dtype=np.float32)
        .astype(sf.arrays.dtypes.VALUE_TYPES["bfloat16"].numpy)
    )


def median_us(cp: Any, call: Callable[[], object], flush: Any, repeats: int) -> float:
    """Median time between two events round ``call``, with ``flush`` written before each."""
    times = []
    for _ in range(repeats + 2):
        flush += 1
        start, end = cp.cuda.Event(), cp.cuda.Event()
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(cp.cuda.get_elapsed_time(start, end) * 1e3)
    return statistics.median(times[2:])


def check(cp: Any, packer: TwoFourPack) -> None:
    """Equal bytes from host and device, both ways, on a ragged matrix."""
    x = weights(cp, (1000, 1032))
    host = x.view("u2").get().view(x.dtype)
    for order in META_ORDERS:
        wanted = masks.prune_two_four(host, meta_order=order)
        data, meta = sf.TwoFour.empty_arrays(x)
        for source, prune in ((x, True), (cp.asarray(wanted.to_dense().view(np.uint16)).view(x.dtype), False)):
            refused = Counters()
            packer.pack(source, order, prune, data, meta, refused.address)
            refused.get()
            same = (data.view("u2").get() == wanted.data.view(np.uint16)).all() and (meta.get() == wanted.meta).all()
            out = cp.empty_like(x)
            packer.unpack(data, meta, order, out)
            back = out.view("u2").get() == wanted.to_dense().view(np.uint16)
            if not (same and back.all()):
                raise SystemExit(f"{packer} {order} prune={prune}: wrong")


def measure(cp: Any, packer: TwoFourPack, shape: tuple[int, int], repeats: int) -> list[dict[str, Any]]:
    """A row per order and direction."""
    x, flush, dense = weights(cp, shape), cp.zeros(1 << 26, np.float32), 2 * shape[0] * shape[1]
    fit = masks.prune_two_four(x).to_dense()
    rows = []

    def add(what: str, order: str, us: float) -> None:
        rows.append({"shape": shape, "block": f"{packer.cols}x{packer.threads}", "what": what, "order": order, "us": us,
                     "gb_per_s": dense / us / 1e3})  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)

    for order in META_ORDERS:
        data, meta, refused = *sf.TwoFour.empty_arrays(fit), Counters()
        for what, source, prune in (("exact", fit, False), ("pruned", x, True)):
            launch = functools.partial(packer.pack, source, order, prune, data, meta, refused.address)
            add(what, order, median_us(cp, launch, flush, repeats))
        packer.pack(fit, order, False, data, meta, refused.address)
        back = functools.partial(packer.unpack, data, meta, order, cp.empty_like(fit))
        add("back", order, median_us(cp, back, flush, repeats))
    target = cp.empty(dense * 25 // 32, cp.uint8)  # a copy that moves as many bytes: 3.125 for every element
    source = cp.zeros_like(target)
    add("copy of as many bytes", "-", median_us(cp, lambda: cp.copyto(target, source), flush, repeats))
    return rows


def wall(cp: Any, shape: tuple[int, int]) -> None:
    """What a user waits for, hot, with allocation and the answer of the check."""
    fit = masks.prune_two_four(weights(cp, shape)).to_dense()
    for name, call in (
        ("convert", lambda: sf.convert(fit, "two-four")),
        ("prune_two_four", lambda: masks.prune_two_four(fit)),
        ("general path", lambda: sf.TwoFour._encode(fit.shape, iter([fit]), fit, "ldmatrix")),
    ):
        times = []
        for _ in range(5 if name == "general path" else 30):
            cp.cuda.get_current_stream().synchronize()
            start = time.perf_counter()
            call()
            cp.cuda.get_current_stream().synchronize()
            times.append(time.perf_counter() - start)
        us = statistics.median(times) * 1e6
        print(
            json.dumps({"shape": shape, "what": name, "wall_us": us, "gb_per_s": 2e-3 * shape[0] * shape[1] / us}),
            flush=True,
        )


def main() -> None:
    """All shapes with each block."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = f"{BLOCK.cols}x{BLOCK.threads}"
    parser.add_argument("--blocks", nargs="+", default=[default], help="columns x threads of a block")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    import cupy as cp

    for text in options.blocks:
        packer = TwoFourPack(*map(int, text.split("x")))
        check(cp, packer)
        for shape in SHAPES:
            measure(cp, packer, shape, options.repeats)
    for shape in SHAPES:
        wall(cp, shape)


if __name__ == "__main__":
    main()
