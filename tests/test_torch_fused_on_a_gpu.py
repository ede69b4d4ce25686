"""Layers of one input as one product, on a GPU: put together there, in graphs and in compilers, the same results."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'spformat[torch]'")

from test_torch_fused import CUT, Attention, fused, nothing_pending  # noqa: E402
from torch_layers import tokens  # noqa: E402

import spformat.torch as st  # noqa: E402


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("fmt", CUT)
def test_on_a_device_matrices_are_put_together_where_they_are(fmt: str, dtype: str) -> None:
    m, on_host = Attention(fmt, dtype=dtype).cuda(), Attention(fmt, dtype=dtype)
    st.fuse_projections(m)
    st.fuse_projections(on_host)
    assert fused(m).matrix.device == "cuda:0"
    assert fused(m).matrix == fused(on_host).matrix
    for name in "qkv":
        assert getattr(m, name).matrix == getattr(on_host, name).matrix


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["two-four", "bitmask", "csr"])
def test_on_a_device_in_graphs_and_without(fmt: str) -> None:
    m = Attention(fmt, dtype="float16").cuda()
    plain = copy.deepcopy(m)
    st.fuse_projections(m)
    with torch.no_grad():
        for rows in (1, 5, 64):
            xs = [tokens(rows, seed=seed).cuda() for seed in range(4)]
            for x in xs:
                assert torch.equal(m(x), plain(x))
            static, graph, stream = xs[0].clone(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                m(static)
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph):
                y = m(static)
            for x in xs:
                static.copy_(x)
                graph.replay()
                assert torch.equal(y, plain(x))
    assert nothing_pending(m)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of torch's compilers
def test_on_a_device_compiled_with_graphs() -> None:
    torch._dynamo.reset()
    m = Attention(dtype="float16").cuda()
    plain = copy.deepcopy(m)
    st.fuse_projections(m)
    compiled = torch.compile(m, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for rows in (4, 1, 64):
            for seed in range(4):
                x = tokens(rows, seed=seed).cuda()
                assert torch.equal(compiled(x).clone(), plain(x))
    torch._dynamo.reset()
