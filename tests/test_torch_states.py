"""Buffers that others replace: states that ``load_state_dict`` takes and refuses, other dtypes, views."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'spformat[torch]'")

from torch_layers import DEPTH, layer, matrix, tokens, weights  # noqa: E402


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


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "given",
    [
        {"weight_data": torch.ones(77)},
        {"weight_data": torch.ones(77), "weight_indices": torch.zeros(77)},  # of one length, but not that of indptr
        {"weight_data": torch.ones(77, 1)},
    ],
    ids=["values", "values and indices", "another rank"],
)
def test_some_arrays_of_other_lengths_are_refused(given: dict[str, torch.Tensor], strict: bool) -> None:
    """The others would be those of another matrix. The layer stays as it is."""
    m = layer("csr")
    m(tokens(2))
    with pytest.raises(
        RuntimeError, match=r"weight: csr: .*data: expected shape \[6144\], .*, got \[77(, 1)?\]: give indptr"
    ):
        m.load_state_dict(given | {"bias": torch.zeros(96)}, strict=strict)
    assert m.matrix == matrix("csr")
    assert torch.equal(m(tokens(2)), layer("csr")(tokens(2)))  # with its bias


def test_some_arrays_of_the_same_lengths_are_taken() -> None:
    """As nn.Linear takes a part of a state that fits."""
    m = layer("csr", with_bias=False)
    names = m.load_state_dict({"weight_data": 2 * m.weight_data}, strict=False)
    assert names == (["weight_indptr", "weight_indices"], [])
    assert torch.equal(m.weight, 2 * torch.from_numpy(weights()))


def test_what_is_no_tensor_is_refused() -> None:
    m = layer("csr")
    state = m.state_dict() | {"weight_indptr": 0 * m.weight_indptr, "weight_data": weights()}
    with pytest.raises(RuntimeError, match="csr: data: expected a tensor, got ndarray"):
        m.load_state_dict(state)
    assert m.matrix == matrix("csr")


def test_a_state_without_memory_is_refused() -> None:
    m = layer("csr")
    length = {name: len(t) for name, t in m.state_dict().items()} | {"weight_data": 77}
    empty = {name: torch.empty(n, device="meta") for name, n in length.items()}
    with pytest.raises(RuntimeError, match="size mismatch for weight_data"):
        m.load_state_dict(empty)
    assert m.matrix == matrix("csr")
