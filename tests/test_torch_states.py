"""Buffers that others replace: states that ``load_state_dict`` takes and refuses, other dtypes, views."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'spformat[torch]'")

from torch_layers import DEPTH, layer, tokens, weights  # noqa: E402


@pytest.mark.parametrize("fmt", ["csr", "two-four"])
def test_a_view_as_another_dtype_is_another_matrix(fmt: str) -> None:
    """The same memory, read as other numbers: by the layer, by its weight and by the operator."""
    m = layer(fmt, with_bias=False)
    m(tokens(2))
    m.weight_data = m.weight_data.view(torch.bfloat16)
    wanted = torch.from_numpy(weights()).view(torch.bfloat16)
    assert m.weight.dtype is m.dtype is torch.bfloat16
    assert m.matrix.dtype == "bfloat16"
    assert torch.equal(m.weight, wanted)
    x = torch.eye(DEPTH, dtype=torch.bfloat16)  # products by 1 and 0 are exact
    assert torch.equal(m(x), wanted.T)
    assert torch.equal(torch.ops.spformat.linear(x, m._tensors(), None, m.description.text, False), wanted.T)
