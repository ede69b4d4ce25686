"""The operators of spformat.torch: what compilers, exporters, autograd, autocast and vmap see of them."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

import spformat as sf

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'spformat[torch]'")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.library import opcheck  # noqa: E402
from torch_layers import DEPTH, PARAMS, ROWS, a_sum, bias, dense, layer, matrix, tokens, weights  # noqa: E402

import spformat.torch as st  # noqa: E402

OPS = torch.ops.spformat


def arguments(m: Any) -> tuple[list[Any], str]:
    return m._tensors(), m.description.text


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch 2.14, in opcheck itself
@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("fmt", [*PARAMS, "sum"])
def test_opcheck(fmt: str, graded: bool) -> None:
    m = st.SparseLinear(a_sum()) if fmt == "sum" else layer(fmt)
    weight, text = arguments(m)
    b = bias().requires_grad_(graded)
    for x in (tokens(5), tokens(2, 3)):
        opcheck(OPS.linear.default, (x.requires_grad_(graded), weight, b, text, False))
    opcheck(OPS.linear.default, (tokens(4, 96)[0, :, :ROWS].requires_grad_(graded), weight, None, text, True))
    opcheck(OPS.spmm.default, (weight, tokens(5).T.clone().requires_grad_(graded), text, False))
    opcheck(OPS.spmm.default, (weight, tokens().requires_grad_(graded), text, False))
    opcheck(OPS.linear_backward.default, (tokens(5)[:, :ROWS], weight, text, False))
    opcheck(OPS.spmm_backward.default, (weight, tokens(ROWS), text, False))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("fmt", PARAMS)
def test_gradients_of_the_dense_operand(fmt: str, transposed: bool) -> None:
    """dX = dY W, db = the sum of the rows of dY, dB = A^T dC; exact, as all numbers are small integers."""
    a, w = matrix(fmt), torch.from_numpy(weights()).double()
    A, W = (a.T, w.T) if transposed else (a, w)
    rows, depth = W.shape
    x = tokens(2, 3)[..., :depth].clone().requires_grad_()
    b = bias().requires_grad_() if not transposed else tokens()[:rows].clone().requires_grad_()
    y = st.linear(x, A, b)
    assert torch.equal(y, torch.nn.functional.linear(x.double(), W, b.double()).half())
    dy = torch.randint(-3, 4, y.shape, generator=torch.Generator().manual_seed(1)).half()
    y.backward(dy)
    assert torch.equal(x.grad, (dy.double() @ W).half())
    assert torch.equal(b.grad, dy.sum((0, 1)))
    B = x.detach()[0].T.clone().requires_grad_()
    st.spmm(A, B).backward(dy[0].T)
    assert torch.equal(B.grad, (W.T @ dy[0].T.double()).half())


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    """Both ways of torch; the one without reentrance lets a gradient read what was saved only once."""
    m = torch.nn.Sequential(layer("two-four", "float32"), torch.nn.ReLU(), torch.nn.Linear(ROWS, 4))
    A = matrix("csr", "float32")
    gradients = []
    for saved in (True, False):
        x = tokens(3, dtype="float32").requires_grad_()

        def forward(x: Any) -> Any:
            return m(st.spmm(A.T, st.spmm(A, x.T)).T)

        y = torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=reentrant) if saved else forward(x)
        m.zero_grad()
        y.square().sum().backward()
        gradients.append([x.grad, *(p.grad for p in m[2].parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert gradients[0][0].any()


def test_gradcheck() -> None:
    m = layer("csr", "float64")
    x = torch.randn(3, DEPTH, dtype=torch.float64, requires_grad=True)
    b = torch.randn(ROWS, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, b: st.linear(x, m.matrix, b), (x, b))
    assert torch.autograd.gradcheck(lambda B: st.spmm(m.matrix, B), (x.detach().T.clone().requires_grad_(),))


def test_gradients_of_narrower_operands_have_their_dtype() -> None:
    m = layer("csr", "float32")
    x = tokens(3).requires_grad_()
    y = m(x)
    assert y.dtype is torch.float32
    y.backward(torch.ones_like(y))
    assert x.grad.dtype is torch.float16
    assert torch.equal(x.grad, torch.from_numpy(weights()).sum(0).expand(3, DEPTH))


def test_an_adapter_beside_a_sparse_layer_trains() -> None:
    m = layer("two-four", with_bias=False)
    down, up = torch.nn.Linear(DEPTH, 4, bias=False).half(), torch.nn.Linear(4, ROWS, bias=False).half()
    first = torch.nn.Linear(DEPTH, DEPTH, bias=False).half()
    h = first(tokens(5))
    (m(h) + up(down(h))).float().square().mean().backward()
    assert all(layer.weight.grad is not None and layer.weight.grad.any() for layer in (first, down, up))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, when it loads forward mode
def test_what_has_no_gradient_is_refused_by_name() -> None:
    m, x = layer("csr", "float32"), tokens(3, dtype="float32").requires_grad_()
    with pytest.raises(sf.errors.UsageError, match=r"second derivative of spformat::linear is not there.*densify"):
        (first,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
        first.sum().backward()
    with pytest.raises(sf.errors.UsageError, match=r"second derivative of spformat::spmm"):
        B = x.detach().T.clone().requires_grad_()
        (first,) = torch.autograd.grad(st.spmm(m.matrix, B).square().sum(), B, create_graph=True)
        first.sum().backward()
    with forward_ad.dual_level():
        assert torch.equal(m(x.detach()), m(x))
        dual = forward_ad.make_dual(x.detach(), x.detach())
        with pytest.raises(sf.errors.UsageError, match=r"spformat::linear has reverse-mode gradients only"):
            m(dual)
        with pytest.raises(sf.errors.UsageError, match=r"spformat::spmm has reverse-mode gradients only"):
            st.spmm(m.matrix, dual.T)
    with pytest.raises(sf.errors.UsageError, match=r"torch\.func\.grad do not pass"):
        torch.func.grad(lambda z: m(z).sum())(x.detach())
    with pytest.raises(sf.errors.UsageError, match=r"forward mode \(jvp\)"):
        torch.func.jvp(m, (x.detach(),), (x.detach(),))
    m.weight_data.requires_grad_()
    with pytest.raises(
        sf.errors.UsageError, match=r"gradients of sparse values \(the SDDMM .* requires_grad_\(False\)"
    ):
        m(x.detach())
    with torch.no_grad():
        m(x)


def test_vmap() -> None:
    m, x = layer("two-four"), tokens(4, 3)
    y = m(x)
    assert torch.equal(torch.vmap(m)(x), y)
    assert torch.equal(torch.vmap(m, in_dims=1, out_dims=1)(x), y)
    assert torch.equal(torch.vmap(torch.vmap(m))(x), y)
    A, B = m.matrix, x.mT.contiguous()
    C = torch.vmap(lambda b: st.spmm(A, b))(B)
    assert torch.equal(C, torch.stack([st.spmm(A, b) for b in B]))
    assert torch.equal(torch.vmap(lambda b: st.spmm(A, b), in_dims=1, out_dims=1)(x[0].T.clone()), st.spmm(A, x[0].T))
    x.requires_grad_()
    torch.vmap(m)(x).sum().backward()
    assert torch.equal(x.grad, torch.from_numpy(weights()).sum(0).expand(x.shape))
    with pytest.raises(sf.errors.UsageError, match=r"vmap over the weight or the bias of spformat::linear"):
        torch.vmap(lambda b: st.linear(x.detach(), A, b))(torch.ones(2, ROWS).half())
    with pytest.raises(sf.errors.UsageError, match=r"vmap over the weight .* of spformat::spmm"):
        weight, text = arguments(m)
        torch.vmap(lambda data: OPS.spmm([data, weight[1]], B[0], text, False))(torch.stack([weight[0]] * 2))


@pytest.mark.parametrize("fmt", ["two-four", "ell-buckets"])
def test_compile_without_a_break_for_any_number_of_rows(fmt: str) -> None:
    torch._dynamo.reset()
    m = layer(fmt)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(m, fullgraph=True, backend=counter)
    for n in (5, 2, 64, 1):
        x = tokens(n)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        assert torch.equal(compiled(x), m(x))
    assert counter.frame_count == 1
    m.weight_data.mul_(2)  # the same graph, other contents
    assert torch.equal(compiled(x), dense(x, 2 * weights(), bias()))
    assert counter.frame_count == 1


def test_compile_learns_that_rows_change() -> None:
    torch._dynamo.reset()
    m = layer("csr")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(m, fullgraph=True, backend=counter)
    for n in (5, 2, 64, 7):
        assert torch.equal(compiled(tokens(n)), m(tokens(n)))
    assert counter.frame_count == 2


def test_a_compiled_model_trains() -> None:
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(DEPTH, DEPTH), layer("csr", "float32"), torch.nn.ReLU())
    x = tokens(6, dtype="float32")
    model(x).sum().backward()
    wanted = model[0].weight.grad.clone()
    model.zero_grad()
    torch.compile(model, fullgraph=True, backend="aot_eager")(x).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, wanted)
    assert wanted.any()


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11, in its loader
@pytest.mark.parametrize("fmt", ["two-four", "bitmask"])
def test_export_with_a_dynamic_batch(fmt: str) -> None:
    m = layer(fmt)
    program = torch.export.export(m, (tokens(3),), dynamic_shapes=({0: torch.export.Dim("rows")},))
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    loaded = torch.export.load(stored).module()
    for n in (2, 9):
        assert torch.equal(loaded(tokens(n)), m(tokens(n)))
    calls = [n for n in program.graph.nodes if n.op == "call_function"]
    assert [n.target for n in calls] == [OPS.linear.default]


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11, in its loader
def test_export_of_arrays_without_elements() -> None:
    """torch.export.save takes tensors without elements only with the strides that torch gives them."""
    m = st.SparseLinear(sf.convert(np.zeros((ROWS, DEPTH), np.float32), "csr"))
    assert m.weight_data.stride() == torch.empty(0).stride()
    for n in m, layer("vector-nm", "float32"):
        file = io.BytesIO()
        torch.export.save(torch.export.export(n, (tokens(2, dtype="float32"),)), file)
        file.seek(0)
        x = tokens(2, dtype="float32") * 2
        assert torch.equal(torch.export.load(file).module()(x), n(x))


class Reads(torch.nn.Module):  # type: ignore[misc]
    """A module that reads the dense weight of its layer: T5 its dtype, others its values."""

    def __init__(self, m: Any, values: bool) -> None:
        super().__init__()
        self.m, self.values = m, values

    def forward(self, x: Any) -> Any:
        y = self.m(x.to(self.m.weight.dtype))
        return y + self.m.weight[:, 0] if self.values else y


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("fmt", ["two-four", "csr", "sum"])
def test_a_dense_weight_is_read_in_graphs(fmt: str, values: bool) -> None:
    m = Reads(st.SparseLinear(a_sum()) if fmt == "sum" else layer(fmt), values)
    x = tokens(3, dtype="float32")
    expected = m(x)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(m, fullgraph=True, backend="aot_eager")(x), expected)
    for strict in (False, True):
        program = torch.export.export(m, (x,), strict=strict)
        assert torch.equal(program.module()(x), expected)
        graph = program.run_decompositions().graph  # without what is not used
        assert [n.target for n in graph.nodes].count(OPS.dense.default) == values


@pytest.mark.parametrize("fmt", [*PARAMS, "sum", "dense"])
def test_opcheck_of_the_dense_weight(fmt: str) -> None:
    m = st.SparseLinear(a_sum() if fmt == "sum" else sf.convert(weights(), fmt, **PARAMS.get(fmt, {})))
    opcheck(OPS.dense.default, arguments(m))
    assert torch.equal(OPS.dense(*arguments(m)), torch.from_numpy(weights()))


def test_fake_tensors_and_traces() -> None:
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    m = layer("csr")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = m(mode.from_tensor(tokens(2, 3)))
    assert y.shape == (2, 3, ROWS)
    graph = make_fx(lambda x: m(x))(tokens(2))
    assert OPS.linear.default in [n.target for n in graph.graph.nodes]
    assert torch.equal(graph(tokens(5)), m(tokens(5)))


@pytest.mark.filterwarnings("ignore")  # torch.jit.trace is deprecated
def test_a_traced_layer_is_recorded() -> None:
    m = layer("csr")
    with torch.no_grad():
        traced = torch.jit.trace(m, (tokens(2),))
        assert torch.equal(traced(tokens(2) * 2), m(tokens(2) * 2))


@pytest.mark.parametrize("graded", [False, True])
def test_a_weight_without_memory_gives_no_result_on_the_device_of_x(graded: bool) -> None:
    """The dispatcher would take the shape function for the kernel, and the result would be memory as it was found."""
    m, A = layer("csr").to("meta"), matrix("csr")
    with (
        torch.set_grad_enabled(graded),
        pytest.raises(sf.errors.UsageError, match=r"x on cpu, the matrix on meta|no contents"),
    ):
        m(tokens(2).requires_grad_(graded))
    with pytest.raises(sf.errors.UsageError, match="B on meta, the matrix on cpu"):
        st.spmm(A, tokens(2).T.to("meta"))
    with pytest.raises(sf.errors.UsageError, match="has no contents"):
        _ = m.matrix
    assert m(tokens(2).to("meta")).is_meta


@pytest.mark.parametrize("wrong", [tokens(2)[:, 1:], torch.tensor(1.0).half()])
def test_operands_of_other_shapes(wrong: Any) -> None:
    m = layer("csr")
    with pytest.raises(ValueError, match=r"x: expected shape \[\.\., 128\]"):
        m(wrong)
    with pytest.raises(RuntimeError, match=r"x: expected shape \[\.\., 128\]"):
        m.to("meta")(wrong.to("meta"))


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(compiled: bool) -> None:
    """x takes the dtype of the weight, which is never cast, and y that of autocast."""
    torch._dynamo.reset()
    for weight, given, wanted in (("float16", "float32", torch.bfloat16), ("float32", "bfloat16", torch.bfloat16)):
        m = layer("csr", weight)
        f = torch.compile(m, fullgraph=True, backend="aot_eager") if compiled else m
        x = tokens(3, dtype=given)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = f(x)
            C = st.spmm(m.matrix, x.T)
        assert y.dtype is C.dtype is wanted
        assert torch.equal(y, dense(x, weights(), bias()).to(wanted))
        assert torch.equal(C, dense(x, weights()).to(wanted).T)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert st.spmm(m.matrix, x.double().T).dtype is torch.float64  # autocast leaves it alone everywhere
    x = tokens(3, dtype="float32").requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        f(x).sum().backward()
    assert torch.equal(x.grad, torch.from_numpy(weights()).float().sum(0).expand(3, DEPTH))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_autocast_with_values_of_one_byte(values: Any, given: Any, with_bias: bool) -> None:
    """Operands are not rounded to such a dtype: float8_e4m3fn ends at 448 and has three bits of fraction."""
    w = torch.arange(-16, 16).repeat(8, 2).to(values)
    b = torch.arange(8.0) if with_bias else None
    m = st.SparseLinear(sf.convert(w, "csr"), b)
    x = (torch.arange(3 * 64).view(3, 64) * 101.0).to(given).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, C = m(x), st.spmm(m.matrix, x.detach().T)
    whole = x.detach().bfloat16().double() @ w.double().T
    assert y.dtype is C.dtype is torch.bfloat16
    scale = float(whole.abs().max())
    assert torch.allclose(C.double().T, whole, rtol=1e-2, atol=1e-2 * scale)
    assert torch.allclose(y.detach().double(), whole + (0 if b is None else b), rtol=1e-2, atol=1e-2 * scale)
    y.float().sum().backward()
    assert torch.equal(x.grad, w.to(given).sum(0).expand(3, 64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert st.linear(torch.ones(1, 64, dtype=torch.int8), sf.convert(w.to(torch.int8), "csr")).dtype is torch.int32


def test_functions_of_matrices() -> None:
    a, x = matrix("bitmask"), tokens(2, 3)
    assert torch.equal(st.linear(x, a, bias()), dense(x, weights(), bias()))
    assert torch.equal(st.linear(x[..., :ROWS], a.T), dense(x[..., :ROWS], weights().T))
    assert torch.equal(st.spmm(a, x[0].T), dense(x[0], weights()).T)
    assert torch.equal(st.spmm(a.T, x[0, 0, :ROWS]), dense(x[0, 0, :ROWS], weights().T))
    assert a.kernel_arrays("torch", lambda: None) is not None  # the tensors are kept with the matrix


def test_import_of_spformat_does_not_need_torch() -> None:
    import subprocess
    import sys

    code = "import sys; sys.modules['torch'] = None; import spformat, spformat.checkpoint, spformat.dispatch.api"
    subprocess.run([sys.executable, "-c", code], check=True)
