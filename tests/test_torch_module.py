"""SparseLinear: products, states, moves, copies; and that changed buffers are validated before a kernel reads them."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spformat as sf

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'spformat[torch]'")

from torch_layers import DEPTH, PARAMS, ROWS, a_sum, bias, dense, layer, matrix, tokens, weights  # noqa: E402

import spformat.torch as st  # noqa: E402
from spformat.torch.description import Description, parse  # noqa: E402
from spformat.torch.weights import Weight, weight_of, with_lines  # noqa: E402

KNOWN_TO_COLLECTIVES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
}  # fmt: skip


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("fmt", PARAMS)
def test_the_product_is_that_of_the_dense_weight(fmt: str, with_bias: bool) -> None:
    m, b = layer(fmt, with_bias=with_bias), bias() if with_bias else None
    for x in (tokens(5), tokens(2, 3), tokens(), tokens(0), tokens(6)[::2], tokens(DEPTH)[:, :].t()[:4]):
        y = m(x)
        assert torch.equal(y, dense(x, weights(), b))
        assert y.is_contiguous()
    assert torch.equal(m.weight, torch.from_numpy(weights()))
    assert m.weight is not m.weight
    assert m.matrix.is_validated


def test_a_matrix_of_parts() -> None:
    m = st.SparseLinear(a_sum())
    assert torch.equal(m(tokens(4)), dense(tokens(4), weights()))
    assert list(m.state_dict()) == [
        "weight_0_data", "weight_0_meta", "weight_1_indptr", "weight_1_indices", "weight_1_data",
    ]  # fmt: skip
    assert parse(m.description.text) == m.description
    assert pickle.loads(pickle.dumps(m)).matrix == a_sum()


@pytest.mark.parametrize("fmt", PARAMS)
def test_buffers_are_of_dtypes_that_collectives_know(fmt: str) -> None:
    m = layer(fmt)
    assert {t.dtype for t in m.buffers()} <= KNOWN_TO_COLLECTIVES
    assert m.nbytes - 8 * sum(len(t) for t in m.matrix.tables().values()) == m.matrix.nbytes
    assert m.matrix == matrix(fmt)


@pytest.mark.parametrize("fmt", PARAMS)
def test_states_go_round(fmt: str) -> None:
    """Into a layer with other contents, whose arrays may have other lengths."""
    m = layer(fmt, seed=3)
    fewer = weights(seed=9) * (np.arange(DEPTH) < 64)
    other = st.SparseLinear(sf.convert(fewer, fmt, **dict(m.description.params)), bias() + 1)
    assert not torch.equal(other(tokens(4)), m(tokens(4)))
    stored = io.BytesIO()
    torch.save(m.state_dict(), stored)
    stored.seek(0)
    assert other.load_state_dict(torch.load(stored)) == ([], [])
    assert torch.equal(other(tokens(4)), m(tokens(4)))
    assert other.matrix == m.matrix


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_have_memory_of_their_own(copied: Any) -> None:
    m = layer("bitmask")
    y = m(tokens(3))
    other = copied(m)
    other.weight_data.mul_(2)
    assert torch.equal(other(tokens(3)), dense(tokens(3), 2 * weights(), bias()))
    assert torch.equal(m(tokens(3)), y)
    assert len(pickle.dumps(m)) < 1.5 * m.nbytes  # what follows from the buffers is not stored beside them


def test_a_change_in_place_is_seen() -> None:
    m = layer("csr")
    x = tokens(3)
    first = m(x)
    m.weight_data.mul_(2)
    assert torch.equal(m(x), dense(x, 2 * weights(), bias()))
    m.weight_data.div_(2)
    assert torch.equal(m(x), first)
    m.weight_data = m.weight_data.clone().neg_()
    assert torch.equal(m(x), dense(x, -weights(), bias()))
    m.weight_data.data = m.weight_data.neg()  # another memory in the same tensor
    assert torch.equal(m(x), first)
    m.bias.add_(1)
    assert torch.equal(m(x), first + 1)


def broken(m: Any) -> None:
    m.weight_indices[7] = DEPTH


def unordered(m: Any) -> None:
    m.weight_indices.copy_(m.weight_indices.flip(0))


def of_another_length(m: Any) -> None:
    m.weight_indices = m.weight_indices[:-1]  # the same memory


def of_another_rank(m: Any) -> None:
    m.weight_indices = m.weight_indices[:, None].clone()


@pytest.mark.parametrize(
    ("damage", "error", "text"),
    [
        (broken, sf.errors.IndexBoundsError, r"indices\[7\]"),
        (unordered, sf.errors.OrderError, "indices"),
        (of_another_length, sf.errors.ArrayError, "nnz"),
        (of_another_rank, sf.errors.ArrayError, r"indices: expected 1 dimensions in C order, got shape"),
    ],
)
def test_damaged_buffers_reach_no_kernel(damage: Any, error: Any, text: str) -> None:
    """In the short way of the module and in the operator, every time."""
    m = layer("csr")
    m(tokens(2))
    damage(m)
    for _ in range(2):
        with pytest.raises(error, match=text):
            m(tokens(2))
        with pytest.raises(error, match=text):
            torch.ops.spformat.linear(tokens(2), m._tensors(), None, m.description.text, False)
        with pytest.raises(error, match=text):
            _ = m.matrix


def test_a_state_of_other_contents_is_validated() -> None:
    m = layer("csr")
    m(tokens(2))
    state = {k: v.clone() for k, v in m.state_dict().items()}
    state["weight_indptr"][5] = -1
    m.load_state_dict(state)
    with pytest.raises(sf.errors.PointerError, match="indptr"):
        m(tokens(2))


@pytest.mark.parametrize("fmt", ["csr", "two-four", "bitmask"])
def test_a_state_of_another_shape_is_refused_and_changes_nothing(fmt: str) -> None:
    m = layer(fmt, with_bias=False)
    other = st.SparseLinear(sf.convert(np.tile(weights(), (2, 2)), fmt))
    with pytest.raises(RuntimeError, match=f"weight: {fmt}: .*: dimension .* got"):
        m.load_state_dict(other.state_dict())
    assert torch.equal(m(tokens(3)), dense(tokens(3), weights()))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, when it loads forward mode
@pytest.mark.parametrize("graded", [False, True])
def test_tensors_that_are_computed(graded: bool) -> None:
    """By a parametrization, or by torch.nn.utils.prune: then the layer has no parameter or buffer of that name."""

    class Twice(torch.nn.Module):
        def forward(self, b: Any) -> Any:
            return b * 2

    with torch.set_grad_enabled(graded):
        m = layer("csr")
        torch.nn.utils.parametrize.register_parametrization(m, "bias", Twice())
        assert torch.equal(m(tokens(3)), dense(tokens(3), weights(), bias() * 2))
        m = layer("csr")
        torch.nn.utils.prune.l1_unstructured(m, "bias", 0.5)
        assert torch.equal(m(tokens(3)), dense(tokens(3), weights(), m.bias))
        m = layer("csr")
        torch.nn.utils.parametrize.register_parametrization(m, "weight_data", Twice())
        assert torch.equal(m(tokens(3)), dense(tokens(3), weights() * 2, bias()))
        assert "format=csr" in repr(m)


def test_what_a_layer_is_made_of() -> None:
    with pytest.raises(sf.errors.UsageError, match=r"expected a matrix of spformat, got Tensor: use spformat\.convert"):
        st.SparseLinear(torch.ones(4, 4))
    with pytest.raises(sf.errors.UsageError, match=rf"bias: expected shape \[{ROWS}\], got \[3\]"):
        st.SparseLinear(matrix("csr"), torch.ones(3))
    with pytest.raises(sf.errors.UsageError, match=r"expected a torch\.nn\.Linear, got Conv1d"):
        st.SparseLinear.from_linear(torch.nn.Conv1d(2, 2, 1), "csr")
    m = layer("csr")
    assert torch.equal(st.SparseLinear.from_linear(m, "bitmask").weight, m.weight)


def test_what_was_validated_is_not_validated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    m = layer("csr")
    monkeypatch.setattr(sf.CSR, "validate", lambda self: pytest.fail("scanned"))
    m(tokens(2)), m(tokens(3))
    aliases = [t.detach() for t in m._tensors()]  # as graphs and transformations make them
    assert weight_of(aliases, m.description.text) is m._weight
    monkeypatch.undo()
    fresh = [t.clone() for t in aliases]
    assert weight_of(fresh, m.description.text) is weight_of(fresh, m.description.text)


def test_the_matrix_goes_with_its_tensors() -> None:
    import gc
    import weakref

    m = layer("csr")
    seen = weakref.ref(m._weight)
    torch.ops.spformat.linear(tokens(2), m._tensors(), None, m.description.text, False)
    del m
    gc.collect()
    assert seen() is None


def test_other_dtypes() -> None:
    m = layer("csr")
    x = tokens(3)
    for name in ("bfloat16", "float32", "float64"):
        m = m.to(getattr(torch, name))
        y = m(x.to(getattr(torch, name)))
        assert y.dtype is getattr(torch, name)
        assert torch.equal(y.half(), dense(x, weights(), bias()))
    assert m.weight_indices.dtype is torch.int32
    two_four = layer("two-four")
    assert torch.equal(two_four.bfloat16()(x.bfloat16()), dense(x, weights(), bias()).bfloat16())
    before = two_four.state_dict()
    with pytest.raises(sf.errors.StructureError, match=r"two-four: values of dtype float64 .*densify\(model\)"):
        two_four.double()
    assert {k: v.dtype for k, v in two_four.state_dict().items()} == {k: v.dtype for k, v in before.items()}


@pytest.mark.parametrize("fmt", ["two-four", "bitmask", "vector-nm", "bsr"])
def test_values_that_a_dtype_rounds_to_zero(fmt: str) -> None:
    """They are zeros of the matrix then, which formats do not store as they store values."""
    w = weights("bfloat16").astype(np.float32)
    w[:, 3::8] *= 2.0**-40  # bfloat16 has them, float16 does not
    w = w.astype(sf.arrays.dtypes.VALUE_TYPES["bfloat16"].numpy)
    m = st.SparseLinear(sf.convert(w, fmt, **PARAMS[fmt])).half()
    wanted = w.astype(np.float16)
    assert 0 < np.count_nonzero(wanted) < np.count_nonzero(w)
    assert np.array_equal(m.weight.numpy(), wanted)
    assert torch.equal(m(tokens(3)), dense(tokens(3), wanted))


def test_values_of_parts_that_a_dtype_rounds_to_zero() -> None:
    m = st.SparseLinear(a_sum()).bfloat16()
    with torch.no_grad():
        m.weight_1_data[:5] *= 2.0**-40
    assert torch.equal(m.half().weight, m.weight)
    assert int((m.weight != 0).sum()) == np.count_nonzero(weights()) - 5


def test_inference_mode() -> None:
    m, x = layer("csr"), tokens(3)
    with torch.inference_mode():
        y = m(x)
        moved = copy.deepcopy(m).bfloat16()
        made = st.SparseLinear(matrix("csr"))
        assert not any(t.is_inference() for t in made.buffers())
        assert torch.equal(moved(x.bfloat16()), y.bfloat16())
        m.weight_data = m.weight_data * 2  # whose changes torch does not count
        assert m.weight_data.is_inference()
        assert torch.equal(m(x), dense(x, 2 * weights(), bias()))
        assert not m.weight_data.is_inference()
        with pytest.raises(sf.errors.UsageError, match=r"created in torch\.inference_mode\(\).*\.clone\(\)"):
            Weight(m.description.text, [t * 1 for t in m._tensors()], m.matrix)
    assert torch.equal(y, dense(x, weights(), bias()))


def test_on_the_meta_device() -> None:
    m = layer("ell-buckets").to("meta")
    assert m(tokens(2, 3).to("meta")).shape == (2, 3, ROWS)
    assert m.weight.shape == (ROWS, DEPTH)
    assert m.weight.is_meta
    assert "format=ell-buckets" in repr(m)
    m = layer("csr").to("meta").to_empty(device="cpu")
    m.load_state_dict(layer("csr").state_dict())
    assert torch.equal(m(tokens(2)), dense(tokens(2), weights(), bias()))


@pytest.mark.parametrize("fmt", [*PARAMS, "sum"])
def test_a_layer_from_the_header_of_a_file(fmt: str, tmp_path: Path) -> None:
    """Its buffers take the tensors as the file has them: in their dtypes, or as bytes."""
    a = a_sum() if fmt == "sum" else matrix(fmt)
    sf.save(tmp_path / "w.safetensors", {"w": a})
    with sf.safe_open(tmp_path / "w.safetensors") as f:
        record = f.info("w")
        m = st.SparseLinear.from_record(record, bias=torch.nn.Parameter(bias()))
        assert all(t.is_meta or t.dtype is torch.int64 for t in m.buffers())
        whole = st.SparseLinear(a)
        assert {k: (v.shape, v.dtype) for k, v in m.state_dict().items() if k != "bias"} == {
            k: (v.shape, v.dtype) for k, v in whole.state_dict().items()
        }
        for c in m.description.components:
            if not c.is_table:
                setattr(m, c.attribute, torch.from_numpy(f.array("w", array=c.path).copy()))
    with torch.no_grad():
        assert torch.equal(m(tokens(2)), dense(tokens(2), weights(), bias()))
    assert m.matrix == a


def test_repr_names_format_and_bytes() -> None:
    m = layer("bsr")
    text = repr(m)
    assert "in_features=128, out_features=96, bias=True, format=bsr, blocksize=(16, 16), dtype=float16" in text
    assert f"bytes={m.nbytes:,}" in text


def test_a_dense_layer_becomes_sparse() -> None:
    dense_layer = torch.nn.Linear(DEPTH, ROWS).half().eval()
    with torch.no_grad():
        dense_layer.weight.copy_(torch.from_numpy(weights()))
    m = st.SparseLinear.from_linear(dense_layer, "vector-nm", n=2, m=4, vector_length=32)
    assert m.bias is dense_layer.bias
    assert not m.training
    assert m.matrix == matrix("vector-nm")
    assert st.SparseLinear.from_linear(dense_layer, "bsr:blocksize=16x16").matrix == matrix("bsr")
    assert st.SparseLinear.from_linear(dense_layer, "bsr", blocksize=(16, 16)).matrix == matrix("bsr")
    assert st.SparseLinear.from_linear(dense_layer, "auto").description.format == "vector-nm"
    torch.nn.init.normal_(dense_layer.weight)
    with pytest.raises(sf.errors.StructureError, match=r"two-four: .* hold more than 2 nonzeros"):
        st.SparseLinear.from_linear(dense_layer, "two-four")
    pruned = st.SparseLinear.from_linear(dense_layer, "two-four", prune=True)
    kept = pruned.weight != 0
    assert torch.equal(pruned.weight, dense_layer.weight * kept)
    assert (kept.reshape(-1, 4).sum(1) == 2).all()
    half = st.SparseLinear.from_linear(dense_layer, "csr", prune=True, sparsity=0.75)
    assert int((half.weight != 0).sum()) == ROWS * DEPTH // 4


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm:FutureWarning")
@pytest.mark.parametrize("how", ["prune", "weight_norm"])
def test_a_weight_that_a_hook_computes_is_that_of_the_next_product(how: str) -> None:
    """Between a step of an optimizer and the next product ``weight`` and ``bias`` of the dense layer are old."""
    from torch.nn.utils import prune

    dense_layer = torch.nn.Linear(DEPTH, ROWS)
    if how == "prune":
        prune.l1_unstructured(dense_layer, "weight", 0.5)
        prune.l1_unstructured(dense_layer, "bias", 0.5)
    else:
        torch.nn.utils.weight_norm(dense_layer)
    with torch.no_grad():
        for p in dense_layer.parameters():
            p.mul_(2)
    m = st.SparseLinear.from_linear(dense_layer, "csr")
    x = torch.ones(3, DEPTH)
    assert torch.allclose(m(x), dense_layer(x), atol=1e-4)


def test_a_lazy_layer_does_not_become_sparse_before_it_has_a_shape() -> None:
    with pytest.raises(sf.errors.UsageError, match="call the model once before"):
        st.SparseLinear.from_linear(torch.nn.LazyLinear(ROWS), "csr")


@pytest.mark.parametrize("bias", [np.zeros(ROWS, np.float32), True, [0.0] * ROWS], ids=["array", "bool", "list"])
def test_a_bias_that_is_no_tensor_is_refused(bias: Any) -> None:
    with pytest.raises(sf.errors.UsageError, match=rf"bias: expected a torch tensor \[{ROWS}\] or None, got \w+"):
        st.SparseLinear(matrix("csr"), bias)


def test_descriptions_that_are_none() -> None:
    for text in ("", "{}", '{"format": "csr"}', '{"format": "none", "shape": [1, 1], "params": {}}'):
        with pytest.raises(sf.errors.UsageError):
            parse(text)
    with pytest.raises(sf.errors.UsageError, match="expected 3 tensors \\(indptr, indices, data\\), got 1"):
        weight_of([torch.zeros(1)], Description.of(matrix("csr")).text)


@pytest.mark.parametrize(
    ("x", "copied"),
    [
        (torch.arange(12.0).view(3, 4), False),
        (torch.arange(12.0).view(3, 4).T, False),
        (torch.arange(24.0).view(6, 4)[::2], False),
        (torch.arange(24.0).view(3, 8)[:, ::2], True),
        (torch.ones(()).expand(3, 4), True),
        (torch.ones(4).expand(3, 4), True),
        (torch.ones(()).expand(2, 3, 4), True),
        (torch.arange(24.0).view(2, 3, 4), False),
        (torch.arange(24.0).view(3, 2, 4).transpose(0, 1), True),
        (torch.arange(8.0)[::2], True),
        (torch.ones(()), False),
    ],
)
def test_operands_without_lines_are_copied(x: torch.Tensor, copied: bool) -> None:
    y = with_lines(x)
    assert torch.equal(x, y)
    assert y.shape == x.shape
    assert (y.data_ptr() != x.data_ptr()) == copied
    assert y.is_contiguous() or not copied
