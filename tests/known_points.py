"""Points whose constants are known, for the tests of ``bench --calibrate``."""

from __future__ import annotations

import math
from typing import Any

import pytest

from spformat.measure import bench, calibration_cases, calibration_fit
from spformat.measure.calibration_points import YARDSTICK, About, Point, kernels_by_name
from spformat.products.problem import COL, Problem

ABOUT = About("NVIDIA H200", 90, "2026-11-24", "c655aaa", 7, "spformat bench --calibrate --seed 7")
EXPANDING = kernels_by_name("cuda")["cuda.spmm_vector_nm_expanding_sm90a"]
VECTOR = (("n", 8), ("m", 32), ("vector_length", 32))


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that a test can wait for, and caches that are emptied fast."""
    monkeypatch.setattr(bench, "FLUSH", 1 << 16)
    monkeypatch.setattr(calibration_cases, "LAYERS", ((96, 64), (64, 128)))


def vector(n: int, **changes: Any) -> Problem:
    p = Problem.product("vector-nm", VECTOR, 4096, 4096, n, 1 << 22, "bfloat16", "bfloat16", "bfloat16")
    return p.changed(device="cuda", sm=90, b_layout=COL, out_layout=COL, **changes)


def truth(points: int = 60, factor: float = 2.0) -> list[Point]:
    """Every option of one kernel, ``factor`` times as long as it expects; a rival that takes what it expects; dense."""
    rival, out = kernels_by_name("cuda")["cuda.spmm_vector_nm_tma_sm90a"], []
    for case in range(1, points + 1):
        p = vector(64 + 8 * case)
        for x in calibration_fit.priced([Point(EXPANDING, p, t, 1.0, math.nan, case) for t in EXPANDING.options(p)]):
            out.append(x._replace(us=factor * x.expected, expected=math.nan))
        out.append(Point(rival, p, rival.best(p).tile, rival.expected_us(p), math.nan, case))
        out.append(Point(YARDSTICK, p, None, 1.5 * rival.expected_us(p), math.nan, case))
    return out
