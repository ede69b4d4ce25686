"""The fixture network in every format, on the host and on a GPU: the accuracy of the stored weights, unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spformat as sf

CHECKPOINTS = Path(__file__).parent.parent / "fixtures" / "checkpoint"
LAYERS = ("hidden1", "hidden2", "hidden3", "output")
FITTING = {  # what each layer was pruned to; elsewhere it stays dense
    "two-four": {"hidden1": {}},
    "vector-nm": {"hidden1": {"n": 2, "m": 4, "vector_length": 1}, "hidden2": {"n": 16, "m": 32, "vector_length": 32}},
}


def network(fmt: str) -> list[tuple[sf.Format, np.ndarray[Any, Any]]]:
    """(weight, bias) of every layer, the weights in ``fmt`` where they fit it."""
    layers = []
    with sf.safe_open(CHECKPOINTS / "digits" / "model.safetensors") as f:
        for name in LAYERS:
            w, b = f.array(f"{name}.weight"), f.array(f"{name}.bias").astype(np.float32)
            fits = FITTING.get(fmt, {n: {} for n in LAYERS})
            layers.append((sf.convert(w, fmt, **fits[name]) if name in fits else sf.convert(w, "dense"), b))
    return layers


def right(layers: list[tuple[sf.Format, Any]], images: Any, labels: np.ndarray[Any, Any], xp: Any) -> int:
    """Correct answers; activations rounded to bfloat16 between layers, sums in float32."""
    x = images
    for i, (w, b) in enumerate(layers):
        out = xp.empty((w.shape[0], x.shape[1]), np.float32)
        y = sf.spmm(w, x, out=out) + xp.asarray(b)[:, None]
        x = (xp.maximum(y, 0) if i < len(layers) - 1 else y).astype(images.dtype)
    answer = y.argmax(axis=0)
    return int((np.asarray(answer if xp is np else answer.get()) == labels).sum())


def digits() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    with sf.safe_open(CHECKPOINTS / "digits_test_set.safetensors") as f:
        images = f.array("images").astype(np.float32).T / 16
        return np.ascontiguousarray(images).astype(sf.arrays.dtypes.VALUE_TYPES["bfloat16"].numpy), f.array("labels")


@pytest.mark.parametrize("fmt", [f.name for f in sf.FORMATS])
def test_on_the_host(fmt: str) -> None:
    images, labels = digits()
    expected = right(network("dense"), images, labels, np)
    assert expected >= 0.97 * labels.size
    assert right(network(fmt), images, labels, np) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", [f.name for f in sf.FORMATS])
def test_on_the_gpu(fmt: str) -> None:
    import cupy

    images, labels = digits()
    expected = right(network("dense"), images, labels, np)
    layers = [(w.to("cuda"), b) for w, b in network(fmt)]
    got = right(layers, cupy.asarray(images), labels, cupy)
    print(f"{fmt}: {got} of {labels.size} right on the GPU, {expected} on the host")
    assert got == expected
