"""spformat.torch on a GPU: streams, graphs, compilers, gradients, conversion and loading where the tensors go."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spformat as sf

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'spformat[torch]'")

from torch_layers import DEPTH, PARAMS, ROWS, a_sum, bias, dense, layer, matrix, tokens, weights  # noqa: E402

import spformat.torch as st  # noqa: E402

pytestmark = pytest.mark.gpu
FORMATS = pytest.mark.parametrize("fmt", [*PARAMS, "sum"])


def on_device(fmt: str, dtype: str = "float16", with_bias: bool = True) -> Any:
    if fmt == "sum":
        return st.SparseLinear(a_sum(), bias(dtype) if with_bias else None).requires_grad_(False).cuda()
    return layer(fmt, dtype, with_bias).cuda()


@pytest.mark.parametrize("with_bias", [False, True])
@FORMATS
def test_products(fmt: str, with_bias: bool) -> None:
    """By the short way, again with the same memory, with layouts that go the long way, and by the operator."""
    m, b = on_device(fmt, with_bias=with_bias), bias().cuda() if with_bias else None
    for x in (tokens(5), tokens(1), tokens(2, 3), tokens(), tokens(0), tokens(64), tokens(6)[::2], tokens(4, 2)[:, 1]):
        x = x.cuda()
        wanted = dense(x, weights(), b)
        for _ in range(4):
            y = m(x)
            assert torch.equal(y, wanted)
            assert y.is_contiguous()
        text = m.description.text
        assert torch.equal(torch.ops.spformat.linear(x, m._tensors(), m.bias, text, False), wanted)
    B = tokens(14).cuda()[::2].T
    for gaps in (tokens(5).repeat_interleave(2, 1).cuda()[:, ::2], tokens(1).cuda().expand(3, -1)):
        assert torch.equal(m(gaps), dense(gaps, weights(), b))
        assert torch.equal(st.spmm(m.matrix, gaps.T), dense(gaps, weights()).T)
    assert torch.equal(st.spmm(m.matrix, B), dense(B.T, weights()).T)
    assert torch.equal(m.weight.cpu(), torch.from_numpy(weights()))


@pytest.mark.parametrize("with_bias", [False, True])
@FORMATS
def test_products_with_other_memory_at_every_call(fmt: str, with_bias: bool) -> None:
    """The launches are prepared once; each call has its own addresses and values, also on a side stream."""
    m, b = on_device(fmt, with_bias=with_bias), bias().cuda() if with_bias else None
    for rows in (1, 5, 16, 64):
        xs = [tokens(rows, seed=i).cuda() for i in range(1, 8)]
        room = torch.zeros(rows * DEPTH + 64, dtype=torch.float16, device="cuda")
        for start in (8, 1, 8):  # other alignments between
            xs.append(room[start : start + rows * DEPTH].view(rows, DEPTH).copy_(tokens(rows, seed=start)).clone())
            xs.append(room[start : start + rows * DEPTH].view(rows, DEPTH))
        torch.cuda.synchronize()
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                ys = [(x, m(x)) for _ in range(2) for x in xs]
                stream.synchronize()
                assert len({y.data_ptr() for _, y in ys}) == len(ys)
                for x, y in ys:
                    assert torch.equal(y, dense(x, weights(), b))


def test_a_graph_of_several_launches_runs_on_the_stream_of_torch() -> None:
    """With the same memory a product of several launches becomes a graph, which CuPy would put on its own stream."""
    from spformat.backends.cuda.runtime.hold import hold

    m, x, then = on_device("csr"), tokens(16).cuda(), tokens(16, seed=8).cuda()
    torch.cuda.synchronize()
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        for i in range(8):
            hold(5_000)
            x.copy_(then if i % 2 else tokens(16).cuda())
            y = m(x)
            wanted = x.clone()
            torch.cuda.current_stream().synchronize()
            assert torch.equal(y, dense(wanted, weights(), bias().cuda()))
            del y


def test_unaligned_and_foreign_operands() -> None:
    m = on_device("csr")
    memory = torch.zeros(3 * DEPTH + 1, dtype=torch.float16, device="cuda")
    x = memory[1:].view(3, DEPTH)
    x.copy_(tokens(3))
    assert torch.equal(m(x), dense(x, weights(), bias().cuda()))
    with pytest.raises(sf.errors.UsageError, match="on cpu"):
        m(tokens(3))
    with pytest.raises(sf.errors.UsageError, match="bias is on cpu"):
        st.linear(x, m.matrix, bias())


@FORMATS
def test_on_a_stream_of_torch_and_in_a_new_thread(fmt: str) -> None:
    from spformat.backends.cuda.runtime.hold import hold

    m, first, then = on_device(fmt), tokens(24).cuda(), tokens(24, seed=8).cuda()
    m(first)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            x = first.clone()
            hold(20_000)
            x.copy_(then)
            y = m(x).clone()
            torch.cuda.current_stream().synchronize()
            assert torch.equal(y, dense(then, weights(), bias().cuda()))
    results = []
    threads = [threading.Thread(target=lambda: results.append(m(then).clone())) for _ in range(3)]
    for t in threads:
        t.start(), t.join()
    torch.cuda.synchronize()
    assert len(results) == 3
    assert all(torch.equal(y, dense(then, weights(), bias().cuda())) for y in results)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@FORMATS
def test_a_graph_of_torch(fmt: str, mode: Any) -> None:
    m, x = on_device(fmt), torch.zeros((24, DEPTH), dtype=torch.float16, device="cuda")
    with mode():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                m(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = m(x)
            z = m(x)
        for seed in (6, 7):
            x.copy_(tokens(24, seed=seed))
            y.fill_(torch.nan), z.fill_(torch.nan)
            graph.replay()
            wanted = dense(x, weights(), bias().cuda())
            assert torch.equal(y, wanted)
            assert torch.equal(z, wanted)


@pytest.mark.filterwarnings("ignore")  # of torch's compilers
@pytest.mark.parametrize("fmt", ["two-four", "vector-nm", "bsr", "bitmask", "csr"])
def test_compiled_with_graphs(fmt: str) -> None:
    """No break; one graph of the compiler for all numbers of rows, 1 included; CUDA graphs replay with new contents."""
    torch._dynamo.reset()
    between = torch.nn.Linear(ROWS, DEPTH, bias=False).half().cuda()
    model = torch.nn.Sequential(on_device(fmt), torch.nn.ReLU(), between, on_device(fmt)).requires_grad_(False)
    between.weight.copy_(torch.randint(-1, 2, between.weight.shape) / 64)  # all sums are exact
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        for n in (5, 1, 2, 64):
            for seed in range(4):  # the first calls warm up, then a graph is recorded, then it is replayed
                x = tokens(n, seed=seed).cuda()
                torch._dynamo.decorators.mark_unbacked(x, 0)
                assert torch.equal(compiled(x).clone(), model(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_export() -> None:
    m = on_device("bitmask")
    program = torch.export.export(m, (tokens(3).cuda(),), dynamic_shapes=({0: torch.export.Dim("rows")},))
    for n in (2, 9):
        assert torch.equal(program.module()(tokens(n).cuda()), m(tokens(n).cuda()))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch 2.14, in opcheck itself
@pytest.mark.parametrize("fmt", PARAMS)
def test_opcheck(fmt: str) -> None:
    m = on_device(fmt)
    x, text = tokens(5).cuda().requires_grad_(), m.description.text
    torch.library.opcheck(torch.ops.spformat.linear.default, (x, m._tensors(), m.bias, text, False))
    torch.library.opcheck(torch.ops.spformat.spmm.default, (m._tensors(), x.detach().T, text, False))


@pytest.mark.parametrize("fmt", PARAMS)
def test_gradients(fmt: str) -> None:
    m = on_device(fmt)
    x = tokens(2, 3).cuda().requires_grad_()
    m.bias.requires_grad_()
    for _ in range(3):
        x.grad = m.bias.grad = None
        y = m(x)
        dy = torch.randint(-3, 4, y.shape, device="cuda").half()
        y.backward(dy)
        assert torch.equal(x.grad, (dy.double() @ torch.from_numpy(weights()).double().cuda()).half())
        assert torch.equal(m.bias.grad, dy.sum((0, 1)))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = m(x.float())
    assert y.dtype is torch.bfloat16
    assert torch.equal(y, dense(x, weights(), m.bias).bfloat16())


def test_changed_buffers_are_validated_on_the_device() -> None:
    m, x = on_device("csr"), tokens(3).cuda()
    first = m(x)
    m.weight_data.mul_(2)
    assert torch.equal(m(x), dense(x, 2 * weights(), bias().cuda()))
    m.load_state_dict(layer("csr").state_dict())
    assert torch.equal(m(x), first)
    m.weight_indices[7] = DEPTH
    with pytest.raises(sf.errors.IndexBoundsError, match=r"indices\[7\]"):
        m(x)


@FORMATS
def test_to_the_host_and_back(fmt: str) -> None:
    m = on_device(fmt)
    state = m.state_dict()
    assert all(t.is_cuda for t in state.values())
    host = m.cpu()
    assert torch.equal(host(tokens(3)), dense(tokens(3), weights(), bias()))
    again = host.cuda()
    assert torch.equal(again(tokens(3).cuda()).cpu(), host.cpu()(tokens(3)))


@pytest.mark.parametrize("fmt", PARAMS)
def test_converted_where_the_weight_is(fmt: str) -> None:
    linear = torch.nn.Linear(DEPTH, ROWS).half().cuda()
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(weights()))
    m = st.SparseLinear.from_linear(linear, fmt, **PARAMS[fmt])
    assert all(t.is_cuda for t in m.buffers())
    assert m.matrix.to("cpu") == matrix(fmt)
    torch.nn.init.normal_(linear.weight)
    sparsity = {} if fmt in ("two-four", "vector-nm") else {"sparsity": 0.5}
    pruned = st.SparseLinear.from_linear(linear, fmt, prune=True, **sparsity, **PARAMS[fmt])
    assert torch.equal(pruned.weight, linear.weight * (pruned.weight != 0))


def test_loaded_where_the_tensors_go(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(DEPTH, ROWS), torch.nn.Linear(ROWS, DEPTH)

        def forward(self, x: Any) -> Any:
            return self.down(self.up(x))

    tensors = {
        "up.weight": matrix("two-four"), "up.bias": bias().numpy(), "down.bias": np.ones(DEPTH, np.float16),
        "down.weight": sf.convert(np.ascontiguousarray(weights().T) / np.float16(64), "csr"),
    }  # fmt: skip
    sf.save(tmp_path / "model.safetensors", tensors)
    with torch.device("meta"):
        model = Model()
    layers = st.load_into(model, tmp_path / "model.safetensors", device="cuda")
    assert sorted(layers) == ["down", "up"]
    assert all(t.is_cuda for t in [*model.parameters(), *model.buffers()])
    x = tokens(4).cuda()
    h = dense(x, weights(), bias().cuda())
    wanted = dense(h, weights().T / np.float16(64), torch.ones(DEPTH, device="cuda").half())
    torch.testing.assert_close(model(x), wanted, rtol=1e-2, atol=0.1)
