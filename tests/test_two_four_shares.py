"""2:4 on Hopper in tiles as wide as N needs and equal shares of the work: what it takes and expects, how work is dealt, exact
products on a GPU or the emulated one."""

from __future__ import annotations

from typing import Any

import emulator
import numpy as np
import pytest
from emulator.process import printed
from test_two_four_kernels import BF16, LAYOUTS, matrix, problem, to_device, two_four

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.two_four import spmm_two_four_shares_sm90a as shares
from spformat.backends.cuda.two_four.two_four_records import SPARE
from spformat.products.roofline import device_of
from spformat.products.tiles import forced

KERNEL = shares.SpmmTwoFourShares()

# ------------------------------------------------------------------ without a GPU


def test_it_is_chosen_where_n_fits_other_tiles_badly() -> None:
    p = problem(3584, 18944, 150, b_layout="col", out_layout="col")
    assert sf.explain(p).chosen == KERNEL.name
    assert sf.explain(problem(4096, 4096, 4, b_layout="col", out_layout="col")).chosen != KERNEL.name


def test_tiles_fit_the_device_and_the_records() -> None:
    for tile in shares.TILES:
        assert tile.smem + 16 * tile.stages + 4 <= 227 * 1024
        assert tile.stages >= 2
        assert tile.span - 1 <= SPARE
    assert len({str(t) for t in shares.TILES}) == len(shares.TILES) == 64
    assert str(shares.Tile(208, True, 2)) == "128x208x64 even, pairs"


def test_a_pair_loads_half_of_b() -> None:
    """By the ideal times of loads: 36 KB weights and half of 26 KB, instead of all of it."""
    p = problem(10240, 8192, 200, b_layout="col", out_layout="col")
    device = device_of(p)
    alone, pair = (KERNEL.quantities(p, shares.Tile(208, False, n), device)[4] for n in (1, 2))
    assert pair < 0.75 * alone


@pytest.mark.parametrize("processors", [1, 3, 16, 132])
def test_every_block_has_work(processors: int) -> None:
    for tile in shares.TILES[::31]:
        for count in (0, 1, 2, 15, 80, 131, 132, 133, 1000):
            for steps in (1, 7, 8, 300):
                clusters = tile.clusters(count, steps, processors)
                assert min(count, processors) <= clusters <= min(processors, count * steps)


@pytest.mark.parametrize("M", [1, 128, 129, 300, 384])
def test_units_cover_all_rows(M: int) -> None:
    assert shares.Tile(48, True, 2).units(M, 97) == 3 * -(-M // 256)
    assert shares.Tile(48, True).units(M, 97) == 3 * -(-M // 128)


# ------------------------------------------------------------------ products, on a GPU


def exact(shape: tuple[int, int, int], tile: shares.Tile, layouts: tuple[str, str], **changes: Any) -> None:
    """Small integers, several runs, NaN before C and between its lines."""
    M, K, N = shape
    rng = np.random.default_rng(sum(shape))
    p = problem(M, K, N, b_layout=layouts[0], out_layout=layouts[1], **changes)
    value, result = VALUE_TYPES[p.a_dtype].numpy, VALUE_TYPES[p.out_dtype].numpy
    a, dense = two_four(M, K, value, rng, "fragment")
    B = rng.integers(-3, 4, (K, N)).astype(value)
    wanted = (dense.astype(np.float64) @ B.astype(np.float64)).astype(result).astype(np.float64)
    with forced(KERNEL.name, str(tile)):
        plan = KERNEL.plan(a.to("cuda"), p)
    assert plan.tile == str(tile)
    b = matrix(B, layouts[0], -(K if layouts[0] == "col" else N) % 8)
    for gap in (0, 3, 8, 8):
        c = matrix(np.full((M, N), np.nan, np.float32).astype(result), layouts[1], gap)
        plan(b, c)
        lines = (c if c.base is None else c.base).get().view(result)
        lines = lines.reshape((N, M + gap) if layouts[1] == "col" else (M, N + gap))
        got = lines[:, : lines.shape[1] - gap]
        assert np.array_equal((got.T if layouts[1] == "col" else got).astype(np.float64), wanted)
        assert np.isnan(lines[:, lines.shape[1] - gap :].astype(np.float32)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("cols", [16, 48, 208])
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_products_are_exact(cols: int, even: bool, cluster: int, layouts: tuple[str, str]) -> None:
    """Ragged in all three extents, and more K than a share needs: 19 steps."""
    exact((131, 1208, 203), shares.Tile(cols, even, cluster), layouts)


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("cols", [32, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 240, 256])
def test_other_widths(cols: int, cluster: int) -> None:
    tile = shares.Tile(cols, True, cluster)
    exact((131, 1208, 203), tile, ("col", "col"), a_dtype="float16", b_dtype="float16", out_dtype="float32")


@pytest.mark.gpu
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("M", [1, 100, 261])
def test_pairs_with_an_odd_number_of_row_tiles(M: int, layouts: tuple[str, str], even: bool) -> None:
    """The second block of the last pair has no rows, but loads its half of B."""
    exact((M, 712, 59), shares.Tile(48, even, 2), layouts)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [2, 3, 4, 5, 8])
@pytest.mark.parametrize(("M", "N", "cols"), [(131, 203, 208), (128, 16, 16), (261, 59, 48)])
def test_parts_of_k(M: int, N: int, cols: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """19 steps, so that some blocks have more than others; strips that divide by the number of blocks and that do not."""
    monkeypatch.setattr(shares, "MOST_PARTS", parts)
    monkeypatch.setattr(shares, "LEAST_OF_PART", 2)
    monkeypatch.setattr(shares, "NARROW", 0)
    exact((M, 1208, N), shares.Tile(cols, False, parts=parts), ("col", "col"))


def test_parts_are_as_many_as_run_at_one_time() -> None:
    """The clusters of an H100: 30 of four blocks, 39 of three."""
    wide = {"b_layout": "col", "out_layout": "col"}
    assert [str(t) for t in shares.in_parts(problem(3584, 3584, 136, **wide), 144)] == ["128x144x64 parts 4"]
    assert [t.parts for t in shares.in_parts(problem(4096, 4096, 136, **wide), 144)] == [3]
    assert shares.in_parts(problem(14336, 4096, 136, **wide), 144) == []
    assert shares.in_parts(problem(4096, 4096, 48, **wide), 48) == shares.in_parts(problem(4096, 4096, 136), 144) == []
    assert [t.parts for t in shares.in_parts(problem(1024, 512, 136, **wide), 144)] == [2]  # of four steps and more


def with_processors(monkeypatch: pytest.MonkeyPatch, processors: int) -> None:
    """Launches for a device with so few; on the emulated one and on a GPU."""
    device = shares.row_tiles.device_of(0)._replace(sms=processors)
    monkeypatch.setattr(shares.row_tiles, "device_of", lambda *_: device)
    monkeypatch.setattr(shares, "max_clusters", lambda *_: processors)
    monkeypatch.setattr(shares, "LEAST_STEPS", 1)


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("clusters", [1, 3, 4, 7])
def test_shares_of_several_tiles(clusters: int, cluster: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole rounds before the shares, and tiles of up to seven clusters."""
    with_processors(monkeypatch, clusters)
    for shape in ((300, 520, 40), (5, 520, 9), (300, 64, 70), (200, 1000, 16)):
        exact(shape, shares.Tile(16, True, cluster), ("row", "row"))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", ["128x208x64 even", "128x208x64 even, pairs", "128x208x64 parts 4"])
def test_alpha_beta_and_bias(tile: str) -> None:
    M, K, N = 131, 1208, 203
    rng = np.random.default_rng(3)
    a, dense = two_four(M, K, BF16, rng, "ldmatrix")
    B, old, bias = (rng.integers(-3, 4, s).astype(BF16) for s in ((K, N), (M, N), M))
    with forced(KERNEL.name, tile):
        plan = KERNEL.plan(a.to("cuda"), problem(M, K, N, b_layout="col", out_layout="col", epilogue=True))
    c = matrix(old, "col", 3)
    plan(matrix(B, "col", 0), c, alpha=0.5, beta=-2.0, bias=to_device(bias))
    wanted = 0.5 * (dense @ B.astype(np.float64)) - 2.0 * old.astype(np.float64) + bias.astype(np.float64)[:, None]
    assert np.array_equal(c.base.get().view(BF16).reshape(N, M + 3)[:, :M].T, wanted.astype(BF16))


# ------------------------------------------------------------------ planted defects, in the emulator

PLANTED = """
from emulator import stand_in
from emulator.planted import plant, three_runs

planted = plant({old!r}, {new!r}, header=("spformat/parts_of_k.cuh", "spformat/even_shares.cuh"))
stand_in.install(90)
import test_two_four_shares as t


def equal():
    layout = "row" if {parts} == 1 else "col"
    t.shares.MOST_PARTS = {parts}
    t.exact({shape}, t.shares.Tile({cols}, {parts} == 1, {cluster}, {parts}), (layout, layout))
    return True


three_runs(equal, planted, timeout=4.0)
"""


def planted(old: str, new: str, **changes: Any) -> str:
    """What three runs with a defect printed."""
    case = {"shape": (131, 1208, 203), "cols": 208, "cluster": 1, "parts": 1} | changes
    return printed(PLANTED.format(old=old, new=new, **case))


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("", "", "equal"),
        ("slab > 0);", "1);", "DIFFERENT"),
        ("if (end < slabs)", "if (end < 0)", "DIFFERENT"),
        ("int count = 1;", "int count = 1; return count;", "DIFFERENT"),
        ("(TN + 63) / 64; ", "TN / 64; ", "DIFFERENT"),
        ("share * least_ + min(share, longer_)", "share * least_", "access outside of the arrays"),
        (
            "even ? clusters - 1 - place_in_grid",
            "even ? place_in_grid",
            "a thread that waits for another block that does not run yet",
        ),
    ],
    ids=["none", "old sums", "nobody adds", "one share adds", "last panel", "steps left out", "waits for later blocks"],
)
def test_a_planted_defect_is_found(old: str, new: str, text: str) -> None:
    seen = planted(old, new)
    assert (set(seen.split()) == {text}) if text == "equal" else (text in seen), seen


PARTS_PLANTED = [
    # name, old, new
    ("none", "", ""),
    ("a strip left out", "if (own < count)", "if (own + 1 < count)"),
    ("the first part's sums several times", "at + part * (2 * HALF)", "at"),
    ("the next strip", "col + 16 * OWN * part", "col + 16 * OWN * part + 16"),
    ("the same steps", "slabs * part / Parts", "0"),
    ("reads before others have sent", "barrier::wait_cluster(bar, 0);", ";"),
    ("sends before others are ready", "    cluster::wait();\n    constexpr int OWN", "    constexpr int OWN"),
]  # fmt: skip


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(("old", "new"), [x[1:] for x in PARTS_PLANTED], ids=[x[0] for x in PARTS_PLANTED])
def test_a_defect_in_parts_is_found(old: str, new: str) -> None:
    seen = planted(old, new, shape=(131, 1208, 203), parts=4)
    assert (set(seen.split()) == {"equal"}) == (not old), seen


PAIRS_PLANTED = [
    # name, old, new
    ("none", "", ""),
    ("released to the own block only", "if (threadIdx.x % 128 < Cluster) barrier", "if (threadIdx.x % 128 == rank) barrier"),
    ("waits for one block's release", "barrier::init(empty + 8 * s, 2 * Cluster)", "barrier::init(empty + 8 * s, 2)"),
    ("expects half of the bytes", "barrier::expect(full + 8 * stage, SLAB)", "barrier::expect(full + 8 * stage, SLAB / 2)"),
    ("half of B is not there", "rank * BOX_Y;", "0;"),
    ("half of B for one block", "along, across, 3)", "along, across, u16(1 << rank))"),
    ("the same rows twice", "* Cluster + rank) * ROWS", "* Cluster) * ROWS"),
    ("sums of the other block", "(work.share + 1) * Cluster + rank", "(work.share + 1) * Cluster"),
    ("leaves before the other", "if constexpr (Cluster > 1) cluster::sync();\n}", "}"),
]  # fmt: skip


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(("old", "new"), [x[1:] for x in PAIRS_PLANTED], ids=[x[0] for x in PAIRS_PLANTED])
def test_a_defect_in_pairs_is_found(old: str, new: str) -> None:
    """Two rows of tiles and one, so that a pair is half empty; more steps than there are stages."""
    seen = planted(old, new, shape=(300, 1208, 203), cluster=2)
    assert (set(seen.split()) == {"equal"}) == (not old), seen
