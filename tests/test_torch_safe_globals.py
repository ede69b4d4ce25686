"""torch.load with its default weights_only=True: layers, matrices and what is in them."""

from __future__ import annotations

import io

import numpy as np
import pytest

import spformat as sf

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'spformat[torch]'")

from torch_layers import PARAMS, layer, tokens  # noqa: E402

import spformat.torch as st  # noqa: E402, F401


@pytest.mark.parametrize("what", ["layer", "state", "matrix", "transposed", "many"])
@pytest.mark.parametrize("fmt", PARAMS)
def test_torch_load_with_weights_only(fmt: str, what: str) -> None:
    """Torch's default since 2.6: import spformat.torch is all that it needs."""
    m = layer(fmt)
    saved = {
        "layer": m, "state": m.state_dict(), "matrix": m.matrix, "transposed": m.matrix.T,
        "many": {"w": m.matrix, "layers": [m], "bias": m.bias},
    }[what]  # fmt: skip
    stored = io.BytesIO()
    torch.save(saved, stored)
    stored.seek(0)
    x = torch.load(stored, weights_only=True)
    if what == "layer":
        assert torch.equal(x(tokens(5)), m(tokens(5)))
    elif what == "state":
        assert all(torch.equal(t, m.state_dict()[k]) for k, t in x.items())
    elif what == "many":
        assert x["w"] == m.matrix
        assert torch.equal(x["layers"][0](tokens(5)), m(tokens(5)))
    else:
        a = x.T if what == "transposed" else x
        assert a == m.matrix
        assert not a.is_validated
        assert torch.equal(sf.spmm(a, tokens(5).mT), sf.spmm(m.matrix, tokens(5).mT))


def test_every_value_type_is_loaded_with_weights_only() -> None:
    from spformat.arrays.dtypes import VALUE_TYPES

    for row in VALUE_TYPES.values():
        a = sf.convert(np.eye(8).astype(row.numpy), "csr")
        stored = io.BytesIO()
        torch.save(a, stored)
        stored.seek(0)
        assert torch.load(stored, weights_only=True) == a


def test_only_a_format_is_rebuilt() -> None:
    from spformat.formats.base import _rebuild

    with pytest.raises(sf.errors.UsageError, match="expected a format"):
        _rebuild(dict, {"a": 1})  # type: ignore[arg-type]
