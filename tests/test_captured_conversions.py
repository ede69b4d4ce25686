"""Conversions that may be captured in a CUDA graph: one launch, no memory beside the result, nothing for the host to read.

They are listed in docs/backends.md.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversions import Device

import spformat as sf
from spformat.formats.base import Format
from spformat.preprocess import masks

DENSE = (
    "csr",
    "bsr:blocksize=8x16",
    "dbsr:blocksize=16x8",
    "sr-bcrs",
    "bitmask",
    "two-four",
    "vector-nm:n=2,m=4,vector_length=1",
)
VECTORS = {"n": 2, "m": 4, "vector_length": 8}
FROM_DENSE: dict[str, Callable[[Any], Any]] = {
    "magnitude_nm": lambda w: masks.magnitude_nm(w, 2, 4, nonfinite="keep"),
    "prune_two_four": lambda w: masks.prune_two_four(w, nonfinite="keep"),
    "prune_vector_nm": lambda w: masks.prune_vector_nm(w, **VECTORS, nonfinite="keep"),
    "prune_vector_nm, packed": lambda w: masks.prune_vector_nm(
        w, **VECTORS, tile_rows=16, tile_cols=8, nonfinite="keep"
    ),
}  # fmt: skip


def weights(seed: int) -> np.ndarray[Any, Any]:
    """float16 [64, 128] in 2:4, of which every group has two nonzeros."""
    x = np.random.default_rng(seed).normal(size=(64, 128)).astype(np.float16)
    return masks.apply(x, masks.magnitude_nm(x, 2, 4))


def arrays(result: Any) -> list[Any]:
    """All arrays of a result, on the host."""
    given = list(result.arrays().values()) if isinstance(result, Format) else [result]
    return [a.get() for a in given]


def assert_replayed(call: Callable[[], Any], change: Callable[[], None]) -> None:
    """The graph of ``call`` writes the result of what is there when it is launched."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        call()  # compiles, and leaves memory in the pool of this stream
        stream.synchronize()
        stream.begin_capture()
        result = call()
        graph = stream.end_capture()
        change()
        stream.synchronize()
        graph.launch(stream)
        stream.synchronize()
        got = arrays(result)
        for a, b in zip(got, arrays(call()), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("target", DENSE)
def test_to_dense(target: str) -> None:
    pytest.importorskip("cupy")
    a = sf.convert(weights(1), target).to("cuda").validate()
    values = a.arrays()["data"]
    assert_replayed(a.to_dense, lambda: values.fill(3))


@pytest.mark.gpu
def test_bitmask_to_csr() -> None:
    pytest.importorskip("cupy")
    a = sf.convert(weights(1), "bitmask").to("cuda").validate()
    assert_replayed(a.to_csr, lambda: a.data.fill(3))


@pytest.mark.gpu
@pytest.mark.parametrize("what", FROM_DENSE)
def test_pruning_that_keeps_what_is_not_finite(what: str) -> None:
    pytest.importorskip("cupy")
    place = Device()
    x, other = place.array(weights(1), "C"), place.array(weights(2), "C")
    wanted = arrays(FROM_DENSE[what](other))

    def change() -> None:
        x[...] = other

    assert_replayed(lambda: FROM_DENSE[what](x), change)
    for a, b in zip(arrays(FROM_DENSE[what](x)), wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_page_lists_them() -> None:
    text = (Path(__file__).parents[1] / "docs" / "backends.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("- **Graphs of conversions**"))
    text = text[text.index(line) :].split("\n- **")[0]
    names = [name.partition(":")[0] for name in DENSE] + [n.partition(",")[0] for n in FROM_DENSE]
    assert not [name for name in names if f"`{name}`" not in text]
