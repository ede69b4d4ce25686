"""Buffers that others replace: states that ``load_state_dict`` takes and refuses, other dtypes, views."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import spformat as sf

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'spformat[torch]'")

from torch_layers import DEPTH, PARAMS, ROWS, a_sum, bias, dense, layer, matrix, tokens, weights  # noqa: E402

import spformat.torch as st  # noqa: E402


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


@pytest.mark.parametrize("fmt", [*PARAMS, "sum"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_type_casts_the_values_alone(fmt: str, dtype: torch.dtype) -> None:
    """``Module.type`` gives every buffer the dtype: indices would be floats, or lose their high bits."""
    m = torch.nn.Sequential(st.SparseLinear(a_sum()) if fmt == "sum" else layer(fmt))
    wanted, x = copy.deepcopy(m).to(dtype), tokens(3).to(dtype)
    dtypes = {name: t.dtype for name, t in wanted.state_dict().items()}
    m.type(dtype)
    assert {name: t.dtype for name, t in m.state_dict().items()} == dtypes
    assert m[0].matrix == wanted[0].matrix
    assert torch.equal(m(x), wanted(x))


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


def with_small_values(dtype: str = "float32") -> np.ndarray[Any, Any]:
    """Weights of which a column in eight, with the vectors and bitmask words of it, is zero in float16."""
    w = weights(dtype)
    w[:, ::8] *= 1e-9
    return w


@pytest.mark.parametrize("fmt", PARAMS)
def test_a_state_that_is_rounded_to_zeros(fmt: str) -> None:
    """The values that become zero leave the matrix where its format stores no zeros, as ``.half()`` does it."""
    w = with_small_values()
    source = st.SparseLinear(sf.convert(w, fmt, **PARAMS[fmt]), bias("float32"))
    m = layer(fmt, seed=9)
    m(tokens(2))
    assert m.load_state_dict(source.state_dict()) == ([], [])
    wanted = w.astype(np.float16)
    assert 0 < np.count_nonzero(wanted) < np.count_nonzero(w)
    assert torch.equal(m.weight, torch.from_numpy(wanted))
    assert torch.equal(m(tokens(3)), dense(tokens(3), wanted, bias()))
    assert torch.equal(m.weight, source.half().weight)


def test_a_state_of_parts_that_is_rounded_to_zeros() -> None:
    """Also where the first part has none of these values, and in a change of the dtype."""
    w = with_small_values()
    left, right = weights("float32") * (np.arange(DEPTH) < 64), w * (np.arange(DEPTH) >= 64)
    a = sf.Sum.from_parts([sf.convert(left, "two-four"), sf.convert(right, "bitmask")])
    m = st.SparseLinear(a)
    other = copy.deepcopy(m)
    other.weight_1_data.fill_(1)
    other.half().load_state_dict(m.state_dict())
    wanted = torch.from_numpy(left + right).half()
    assert torch.equal(other.weight, wanted)
    assert torch.equal(other(tokens(3)), dense(tokens(3), wanted.numpy()))
    assert torch.equal(m.half().weight, wanted)
    assert torch.equal(m(tokens(3)), dense(tokens(3), wanted.numpy()))


def test_some_values_that_are_rounded_to_zeros() -> None:
    """The state has the values only; the bits of the layer follow from them."""
    m = st.SparseLinear(sf.convert(weights(), "bitmask"))
    data = m.weight_data.float()
    data[::3] *= 1e-9
    assert m.load_state_dict({"weight_data": data}, strict=False).missing_keys == ["weight_indptr", "weight_bitmask"]
    kept = data.half()
    assert torch.equal(m.weight[m.weight != 0], kept[kept != 0])
    assert torch.equal(m(tokens(3)), dense(tokens(3), m.weight.numpy()))


def test_a_damaged_state_that_is_rounded_is_refused() -> None:
    source = st.SparseLinear(sf.convert(with_small_values(), "bitmask"), bias("float32"))
    source.weight_bitmask.fill_(0)
    m = layer("bitmask")
    with pytest.raises(RuntimeError, match="weight: bitmask: "):
        m.load_state_dict(source.state_dict())
    assert m.matrix == matrix("bitmask")


@pytest.fixture
def swapping() -> Iterator[None]:
    """An option of torch: loading exchanges the contents of tensor objects, to which nothing else may refer."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("fmt", PARAMS)
def test_states_go_round_where_torch_swaps_tensors(fmt: str, used: bool, assign: bool) -> None:
    m, other = layer(fmt), layer(fmt, seed=9)
    values = other.weight_data
    if used:
        other(tokens(2))
        torch.ops.spformat.linear(tokens(2), other._tensors(), None, other.description.text, False)
    assert other.load_state_dict(m.state_dict(), assign=assign) == ([], [])
    assert other.matrix == matrix(fmt)
    assert torch.equal(other(tokens(3)), m(tokens(3)))
    assert (other.weight_data is values) == (values.shape == m.weight_data.shape)
    other.bfloat16()
    assert torch.equal(other(tokens(3).bfloat16()).half(), m(tokens(3)))


Kind = tuple[str, int, int]
"""A target of ``convert``, and the rows and columns."""


def of_kind(kind: Kind, seed: int) -> Any:
    """A layer of a kind, with integers that differ with the seed; a row or column less leaves the others as they are."""
    target, rows, columns = kind
    w = np.zeros((128, 128), np.float32)
    w[:ROWS] = weights("float32", seed)
    return st.SparseLinear.from_linear(linear(w[:rows, :columns]), target)


def linear(w: np.ndarray[Any, Any]) -> Any:
    m = torch.nn.Linear(w.shape[1], w.shape[0])
    m.weight, m.bias = torch.nn.Parameter(torch.from_numpy(w.copy())), torch.nn.Parameter(torch.arange(float(len(w))))
    return m


MISMATCHES: list[tuple[Kind, Kind]] = [
    (("csr", 128, 128), ("csc", 128, 128)),
    (("two-four:meta_order=ldmatrix", 96, 128), ("two-four:meta_order=logical", 96, 128)),
    (("two-four", 96, 124), ("two-four", 96, 128)),
    (("vector-nm:n=2,m=4,vector_length=32", 96, 126), ("vector-nm:n=2,m=4,vector_length=32", 96, 128)),
    (("bitmask", 96, 124), ("bitmask", 96, 128)),
    *(((fmt, 96, 64), (fmt, 96, 128)) for fmt in ("csr", "bsr:blocksize=16x16", "sr-bcrs", "coo")),
    *(((fmt, 64, 128), (fmt, 96, 128)) for fmt in ("dbsr:blocksize=16x16", "coo", "csc", "ell-buckets")),
]


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(("given", "wanted"), MISMATCHES, ids=lambda kind: "-".join(map(str, kind)))
def test_a_state_of_another_matrix_is_refused(given: Kind, wanted: Kind, stored: bool) -> None:
    """Its arrays have the names and lengths of such a matrix, so that only what it says of itself tells."""
    source, m = of_kind(given, 3), of_kind(wanted, 9)
    expected = m.weight
    state = source.state_dict()
    if given[1] != wanted[1]:
        state["bias"] = m.bias  # of another length, which torch says
    if stored:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file)
    m(torch.ones(1, wanted[2]))
    with pytest.raises(RuntimeError) as raised:
        m.load_state_dict(state)
    assert f"weight: expected a matrix {m.description.text}, got {source.description.text}" in str(raised.value)
    assert torch.equal(m.weight, expected)
    # The same state in a model: torch knows it by the place of the layer.
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), m)
    state = torch.nn.Sequential(torch.nn.Linear(2, 2), source).state_dict()
    state["1.bias"] = m.bias
    with pytest.raises(RuntimeError, match=r"1\.weight: expected a matrix"):
        model.load_state_dict(state)
    assert torch.equal(m.weight, expected)


@pytest.mark.parametrize("fmt", [*PARAMS, "sum"])
def test_states_that_say_nothing_of_the_matrix_are_taken(fmt: str) -> None:
    """Plain dicts, as safetensors gives them, and what earlier versions stored. Names are those of the arrays."""
    m = st.SparseLinear(a_sum() if fmt == "sum" else matrix(fmt))
    state = m.state_dict()
    assert list(state) == list(m._buffers)
    assert state._metadata == {"": {"version": 1, "matrix": m.description.text}}
    plain, earlier = dict(state), state.copy()
    earlier._metadata = OrderedDict({"": {"version": 1}})
    for given in (plain, earlier, state):
        other = copy.deepcopy(m)
        other._buffers[other._values_name].neg_()
        assert other.load_state_dict(given) == ([], [])
        assert torch.equal(other.weight, m.weight)


def test_what_a_state_says_is_read_as_params_not_as_text() -> None:
    """Another version may write it in another order, or leave out a param that has its default."""
    m = layer("two-four")
    state = m.state_dict()
    state._metadata[""]["matrix"] = '{"params": {}, "shape": [96, 128], "format": "two-four"}'
    assert layer("two-four", seed=9).load_state_dict(state) == ([], [])
    state._metadata[""]["matrix"] = '{"params": {}, "shape": [96, 128], "format": "of-tomorrow"}'
    with pytest.raises(RuntimeError, match=r"weight: expected a matrix \{.*, got \{.*of-tomorrow"):
        m.load_state_dict(state)


def test_a_state_without_the_arrays_of_a_layer_says_nothing_of_it() -> None:
    state = layer("csr").state_dict()
    for name in [name for name in state if name != "bias"]:
        del state[name]
    m = layer("bitmask")
    m.bias.zero_()
    assert m.load_state_dict(state, strict=False).unexpected_keys == []
    assert torch.equal(m.bias, bias())
