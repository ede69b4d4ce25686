"""Frozen layers: the weight once, in the order of kernels; what needs the arrays gets new ones, or is refused by name."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import spformat as sf

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'spformat[torch]'")

from torch_layers import DEPTH, ROWS, dense, layer, matrix, tokens, weights  # noqa: E402

import spformat.torch as st  # noqa: E402
from spformat.errors import UsageError  # noqa: E402
from spformat.torch import freezing  # noqa: E402
from spformat.torch.fused import FusedLinear  # noqa: E402

ORDERED = ["two-four", "bitmask", "sr-bcrs"]
"""The formats whose kernels have an order that replaces the arrays."""


class Bytes:
    """A kernel order for a CPU: the arrays end to end, each byte changed."""

    def __init__(self, a: sf.Format) -> None:
        self.layout = [(name, x.dtype, x.shape) for name, x in a.arrays().items()]
        whole = np.concatenate([x.reshape(-1).view(np.uint8) for x in a.arrays().values()])
        self.memory = np.append(~whole, np.zeros(len(whole) % 2, np.uint8))

    def arrays(self) -> tuple[Any, ...]:
        return self.memory, np.zeros(4, np.uint32)

    def restore(self) -> dict[str, Any]:
        out, at = {}, 0
        for name, dtype, shape in self.layout:
            n = int(np.prod(shape)) * dtype.itemsize
            out[name] = (~self.memory[at : at + n]).view(dtype).reshape(shape)
            at += n
        return out


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has an order, too: for all formats but csr, as on a GPU."""
    monkeypatch.setattr(freezing, "_on_device", lambda layer: True)
    monkeypatch.setattr(
        freezing, "put_in_order", lambda a: a.name in ORDERED and a.kernel_order("test", lambda: Bytes(a))
    )


def model(dtype: str = "float16") -> Any:
    return torch.nn.ModuleDict({fmt: layer(fmt, dtype) for fmt in (*ORDERED, "csr")})


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("fmt", ORDERED)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_frozen_layer_is_the_same_layer(fmt: str, dtype: str) -> None:
    m, plain, x = layer(fmt, dtype), layer(fmt, dtype), tokens(2, 3, dtype=dtype)
    state = {name: t.clone() for name, t in m.state_dict().items()}
    assert list(st.freeze(m)) == [""]
    assert [name for name, _ in m.named_buffers()] == ["weight_order_0", "weight_order_1"]
    assert torch.equal(m(x), plain(x))
    assert torch.equal(torch.ops.spformat.linear(x, m._tensors(), m.bias, m._text, False), plain(x))
    assert m.matrix == plain.matrix
    assert m.matrix.in_kernel_order
    assert torch.equal(m.weight, plain.weight)
    assert (m.dtype, m.device) == (plain.dtype, plain.device)
    assert m.nbytes == m._buffers["weight_order_0"].nbytes + 16
    assert repr(m).endswith(", frozen)")
    now = m.state_dict()
    assert list(now) == list(state)
    assert now._metadata == plain.state_dict()._metadata == {"": {"version": 1, "matrix": m.description.text}}
    for name, t in state.items():
        assert t.dtype == now[name].dtype
        assert torch.equal(t, now[name])
    assert st.freeze(m) == {}  # twice


@pytest.mark.usefixtures("on_cpu")
def test_others_stay_as_they_are_and_biases_train() -> None:
    m, wide = model(), model("float32")
    assert list(st.freeze(m)) == ORDERED
    assert st.freeze(wide["csr"]) == {}
    assert not m["csr"].is_frozen
    assert list(st.freeze(wide)) == []  # orders of 32-bit values would be tensors of another kind
    plain = layer()
    for each in (m["two-four"], plain):
        each.requires_grad_(True)
    x, y = (tokens(4).requires_grad_() for _ in range(2))
    (m["two-four"](x) * 2).sum().backward()
    (plain(y) * 2).sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert torch.equal(m["two-four"].bias.grad, plain.bias.grad)


@pytest.mark.usefixtures("on_cpu")
def test_copies_are_ordinary_layers() -> None:
    m, x = model(), tokens(4)
    st.freeze(m)
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        for fmt in ORDERED:
            assert not other[fmt].is_frozen
            assert list(other[fmt]._buffers) == list(layer(fmt)._buffers)
            assert list(other[fmt].state_dict()) == list(layer(fmt).state_dict())
            assert other[fmt].matrix == matrix(fmt)
            assert torch.equal(other[fmt](x), m[fmt](x))
        assert list(st.freeze(other)) == ORDERED
    assert list(st.densify(m)) == [*ORDERED, "csr"]
    assert torch.equal(m["bitmask"](x), layer("bitmask")(x))


@pytest.mark.usefixtures("on_cpu")
def test_compiled_and_refused_where_the_process_does_not_know_it() -> None:
    m, x = layer(), tokens(4)
    want = m(x)
    st.freeze(m)
    with torch.no_grad():
        assert torch.equal(torch.compile(m, fullgraph=True)(x), want)
    clones = [t.clone() for t in m._tensors()]
    with pytest.raises(UsageError, match="two-four: a frozen weight can be multiplied only in its process"):
        torch.ops.spformat.linear(x, clones, m.bias, m._text, False)
    m.weight_order_0.add_(0)
    with pytest.raises(UsageError, match="unchanged"):
        m(x)


@pytest.mark.usefixtures("on_cpu")
def test_moving_and_loading_are_refused() -> None:
    m = layer()
    state = m.state_dict()
    st.freeze(m)
    m.to("cpu", torch.float16)  # where it is
    m.bias.data.add_(0)
    want = dense(tokens(4), weights(), m.bias)
    for move in (lambda: m.float(), lambda: m.to("meta")):
        with pytest.raises(
            UsageError, match=r"a frozen weight stays float16 on cpu: move the model first, then freeze"
        ):
            move()
    with pytest.raises(RuntimeError, match="weight: frozen weights are not loaded: load first, then freeze"):
        m.load_state_dict(state)
    with pytest.raises(UsageError, match="a frozen weight is not replaced"):
        m.fill(layer(seed=8).matrix)
    assert torch.equal(m(tokens(4)), want)


@pytest.mark.usefixtures("on_cpu")
def test_fused_layers_freeze() -> None:
    from test_torch_fused import Attention

    m, x = Attention(dtype="float16"), tokens(4)
    state, want = m.state_dict(), m(x)
    st.fuse_projections(m)
    assert list(st.freeze(m)) == ["fused_q_k_v"]
    assert torch.equal(m(x), want)
    now = m.state_dict()
    assert list(now) == list(state)
    assert all(torch.equal(t, now[name]) for name, t in state.items())
    other = copy.deepcopy(m)
    assert list(other.state_dict()) == list(state)
    assert not other.fused_q_k_v.is_frozen
    assert isinstance(other.fused_q_k_v, FusedLinear)
    assert torch.equal(other(x), want)


def test_only_on_a_gpu() -> None:
    with pytest.raises(
        UsageError, match=r"expected layers on a GPU, got two-four \(cpu\) and 3 more: move the model first"
    ):
        st.freeze(model())
    with pytest.raises(UsageError, match="got none"):
        st.freeze(torch.nn.Linear(3, 3))


# ------------------------------------------------------------------ on a GPU


def big(fmt: str) -> Any:
    w = np.random.default_rng(0).integers(1, 4, (1024, 1024)).astype(np.float16)
    w = w * np.tile([1, 0, 1, 0], (1024, 256)).astype(np.float16)
    if fmt == "sr-bcrs":
        w[:, 256:] = 0
    return st.SparseLinear(sf.convert(w, fmt)).requires_grad_(False)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ORDERED)
def test_on_a_device_the_weight_is_there_once(fmt: str) -> None:
    import gc

    import cupy

    def used() -> int:
        gc.collect()
        return int(torch.cuda.memory_allocated()) + int(cupy.get_default_memory_pool().used_bytes())

    m, on_host = big(fmt).cuda(), big(fmt)
    x = torch.ones(64, 1024, dtype=torch.float16, device="cuda")
    with torch.no_grad():
        want = [m(x[:n]) for n in (1, 16, 64)]
        twice = used()  # workspaces of plans are in it
        assert list(st.freeze(m)) == [""]
        for n, y in zip((1, 16, 64), want, strict=True):
            assert torch.equal(m(x[:n]), y)
    del y
    assert m.nbytes < 1.1 * on_host.nbytes
    assert twice - used() > 0.9 * on_host.nbytes
    state, host = m.state_dict(), on_host.state_dict()
    assert all(torch.equal(state[name].cpu(), t) for name, t in host.items())
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = m(x)
    x.mul_(2)
    graph.replay()
    assert torch.equal(y, 2 * want[2])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of torch's compilers
@pytest.mark.parametrize("fmt", ["two-four", "bitmask"])
def test_on_a_device_compiled(fmt: str) -> None:
    torch._dynamo.reset()
    m, plain = layer(fmt).cuda(), layer(fmt).cuda()
    st.freeze(m)
    compiled = torch.compile(m, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for seed in range(4):
            x = tokens(5, seed=seed).cuda()
            assert torch.equal(compiled(x).clone(), plain(x))
    x = tokens(3).cuda().requires_grad_()
    m(x).sum().backward()
    got = x.grad.clone()
    x.grad = None
    plain(x).sum().backward()
    assert torch.equal(got, x.grad)
    assert (m.in_features, m.out_features) == (DEPTH, ROWS)
    torch._dynamo.reset()
