"""Layers of one input as one product: which ones, the same results, and nothing kept that is not current."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest

import spformat as sf

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'spformat[torch]'")

from torch_layers import DEPTH, ROWS, bias, layer, tokens  # noqa: E402

import spformat.torch as st  # noqa: E402
from spformat.errors import UsageError  # noqa: E402
from spformat.torch.fused import FusedLinear, Projection  # noqa: E402

CUT = ["two-four", "vector-nm", "bsr", "csr", "bitmask", "sr-bcrs"]
"""The formats of ``torch_layers`` whose rows can be put together."""


class Attention(torch.nn.Module):
    def __init__(self, fmt: str = "two-four", with_bias: bool = True, dtype: str = "float32") -> None:
        super().__init__()
        for seed, name in enumerate(("q", "k", "v")):
            setattr(self, name, layer(fmt, dtype, with_bias, seed=seed))

    def forward(self, x: Any) -> Any:
        return torch.stack([self.q(x), self.k(x), self.v(x)])


def fused(module: Any) -> FusedLinear:
    return next(m for m in module.modules() if isinstance(m, FusedLinear))


def nothing_pending(module: Any) -> bool:
    return all(m._pending.value is None for m in module.modules() if isinstance(m, FusedLinear))


# ------------------------------------------------------------------ results


@pytest.mark.parametrize("fmt", CUT)
@pytest.mark.parametrize("with_bias", [True, False])
def test_results_are_those_of_the_layers_from_one_product(
    fmt: str, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, x = Attention(fmt, with_bias), tokens(2, 3, dtype="float32")
    want, state = m(x), {name: t.clone() for name, t in m.state_dict().items()}
    assert list(st.fuse_projections(m)) == ["fused_q_k_v"]
    calls = []
    forward = st.SparseLinear.forward
    monkeypatch.setattr(st.SparseLinear, "forward", lambda self, x: calls.append(self) or forward(self, x))
    torch.testing.assert_close(m(x), want, rtol=0, atol=0)
    assert calls == [fused(m)]
    assert nothing_pending(m)
    now = m.state_dict()
    assert list(now) == list(state)
    assert [now._metadata[name]["matrix"] for name in "qkv"] == [getattr(m, name).description.text for name in "qkv"]
    for name, t in state.items():
        assert t.dtype == now[name].dtype
        assert torch.equal(t, now[name])
    for name, seed in (("q", 0), ("k", 1), ("v", 2)):
        before, projection = layer(fmt, "float32", with_bias, seed=seed), getattr(m, name)
        assert isinstance(projection, Projection)
        assert projection.matrix == before.matrix
        assert torch.equal(projection.weight, before.weight)
        assert projection.nbytes == before.nbytes
        assert repr(projection) == repr(before).replace("SparseLinear", "Projection")


def test_other_inputs_never_get_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    m, x, y = Attention(), tokens(4, dtype="float32"), tokens(4, dtype="float32", seed=9)
    plain = copy.deepcopy(m)
    st.fuse_projections(m)

    def same(name: str, x: Any) -> None:
        torch.testing.assert_close(getattr(m, name)(x), getattr(plain, name)(x), rtol=0, atol=0)

    same("q", x)
    same("k", y)  # another tensor
    same("v", x.clone())  # equal, but another object
    same("q", x)
    same("q", x)  # twice the same
    same("v", x)
    x.add_(1)  # the same object with other contents
    same("k", x)
    same("q", x)
    with torch.no_grad():  # other weights
        fused(m).weight_data.mul_(2)
    for name in "qkv":
        getattr(plain, name).weight_data.mul_(2)
    same("k", x)
    same("q", x)
    with torch.no_grad():
        fused(m).bias.add_(1)
    for name in "qkv":
        getattr(plain, name).bias.data.add_(1)
    same("v", x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same("k", x)
        assert m.q(x).dtype == torch.bfloat16
    same("q", x)
    with torch.inference_mode():
        z = x.clone()
        for name in "qkv":
            same(name, z)
    assert nothing_pending(m)


def test_gradients_are_those_of_the_layers_also_after_a_product_without() -> None:
    m, x = Attention().requires_grad_(True), tokens(4, dtype="float32").requires_grad_()
    plain, y = copy.deepcopy(m), x.detach().clone().requires_grad_()
    st.fuse_projections(m)
    with torch.no_grad():
        m.v(x)  # leaves results without a graph
    got, want = m(x), plain(y)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    weights = torch.arange(got.numel(), dtype=torch.float32).remainder(5).view_as(got)
    (got * weights).sum().backward()
    (want * weights).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=0)
    for name, g in zip("qkv", fused(m).bias.grad.split(ROWS), strict=True):
        torch.testing.assert_close(g, getattr(plain, name).bias.grad, rtol=0, atol=0)
    q = m.q(x)
    q.mul_(2).sum().backward()  # results may be changed in place, as those of a layer
    with pytest.raises(RuntimeError):
        torch.split(x * 1, DEPTH // 2, -1)[0].mul_(2)  # which views of torch.split do not allow


@pytest.mark.parametrize("fmt", ["two-four", "csr"])
def test_compiled_graphs_have_one_product_and_keep_nothing(fmt: str) -> None:
    m, x = Attention(fmt), tokens(4, dtype="float32")
    want = m(x)
    st.fuse_projections(m)
    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph.graph)
        return graph

    with torch.no_grad():
        compiled = torch.compile(m, fullgraph=True, backend=count)
        torch.testing.assert_close(compiled(x), want, rtol=0, atol=0)
        torch.testing.assert_close(compiled(x.clone()), want, rtol=0, atol=0)
        inductor = torch.compile(m, fullgraph=True)
        torch.testing.assert_close(inductor(x), want, rtol=0, atol=0)
    assert len(graphs) == 1
    assert sum("spformat" in str(n.target) for n in graphs[0].nodes if n.op == "call_function") == 1
    assert len(graphs[0].output_node().args[0]) == 1
    assert nothing_pending(m)


def test_exported_programs_have_one_product() -> None:
    m, x = Attention(), tokens(4, dtype="float32")
    want = m(x)
    st.fuse_projections(m)
    program = torch.export.export(m, (x,))
    assert sum("spformat" in str(n.target) for n in program.graph.nodes if n.op == "call_function") == 1
    torch.testing.assert_close(program.module()(x), want, rtol=0, atol=0)


class Reads(torch.nn.Module):
    """Reads the dense weight of a layer of a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Any) -> Any:
        return self.attention(x) + self.attention.k.weight[:, 0]


def test_the_dense_weight_of_a_projection_is_read_in_graphs() -> None:
    m, x = Reads(), tokens(4, dtype="float32")
    st.fuse_projections(m)
    want = m(x)
    assert isinstance(m.attention.k, Projection)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(m, backend="aot_eager", fullgraph=True)(x), want)
    assert torch.equal(torch.export.export(m, (x,)).module()(x), want)


class Rectified(Attention):
    """Changes a result in place."""

    def forward(self, x: Any) -> Any:
        q, k = self.q(x), self.k(x)
        q.relu_()
        k *= 2
        return q, k, self.v(x)


@pytest.mark.parametrize("way", ["aot_eager", "inductor", "export"])
def test_results_are_changed_in_place_in_graphs_with_gradients(way: str) -> None:
    torch._dynamo.reset()
    m, x = Rectified(), tokens(4, dtype="float32").requires_grad_()
    want = m(x)
    gradient = torch.autograd.grad(sum(y.square().sum() for y in want), x)[0]
    assert list(st.fuse_projections(m)) == ["fused_q_k_v"]
    graph = torch.export.export(m, (x,)).module() if way == "export" else torch.compile(m, backend=way, fullgraph=True)
    got = graph(x)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    torch.testing.assert_close(torch.autograd.grad(sum(y.square().sum() for y in got), x)[0], gradient, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")  # torch.jit.trace is deprecated
@pytest.mark.parametrize("graded", [True, False])
def test_traces_check_themselves(graded: bool) -> None:
    m, x = Attention().requires_grad_(True), tokens(4, dtype="float32")
    want = m(x * 2)
    st.fuse_projections(m)
    with torch.set_grad_enabled(graded):
        torch.testing.assert_close(torch.jit.trace(m, (x,))(x * 2), want, rtol=0, atol=0)


# ------------------------------------------------------------------ moving, copying, storing


def test_copies_and_pickles_are_whole() -> None:
    m, x = Attention(), tokens(4, dtype="float32")
    want = m(x)
    st.fuse_projections(m)
    m.q(x)  # something is pending
    file = io.BytesIO()
    torch.save(m, file)
    file.seek(0)
    with torch.serialization.safe_globals([Attention]):
        loaded = torch.load(file)
    for other in (copy.deepcopy(m), loaded):
        assert other.q._fused is fused(other)
        assert fused(other) is not fused(m)
        assert nothing_pending(other)
        torch.testing.assert_close(other(x), want, rtol=0, atol=0)
    assert not nothing_pending(m)


def test_copies_of_inference_mode_are_given_no_stale_results() -> None:
    m, x = Attention(), tokens(4, dtype="float32")
    want = m(x)
    st.fuse_projections(m)
    with torch.inference_mode():
        other = copy.deepcopy(m)
        torch.testing.assert_close(other(x.clone()), want, rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(other(x), want, rtol=0, atol=0)
    assert nothing_pending(other)


def test_dtypes_and_devices_move_once() -> None:
    m = Attention()
    st.fuse_projections(m)
    m.half()
    assert m.q.dtype == m.v.bias.dtype == torch.float16
    want = Attention(dtype="float16")
    x = tokens(4)
    torch.testing.assert_close(m(x), want(x), rtol=0, atol=0)
    assert m.to("meta").k.weight.is_meta
    assert m(x.to("meta")).shape == (3, 4, ROWS)


def test_densify_and_sparsify_lead_on() -> None:
    m, x = Attention(), tokens(4, dtype="float32")
    want = m(x)
    st.fuse_projections(m)
    assert list(st.densify(m)) == ["q", "k", "v"]
    assert [name for name, _ in m.named_modules()] == ["", "q", "k", "v"]
    torch.testing.assert_close(m(x), want, rtol=0, atol=0)


def test_loading_is_refused_and_names_the_order() -> None:
    m = Attention()
    state = m.state_dict()
    st.fuse_projections(m)
    with pytest.raises(
        RuntimeError, match=r"q.weight: fused projections are not loaded: load first, then fuse_projections"
    ):
        m.load_state_dict(state)
    with pytest.raises(UsageError, match="cannot be replaced"):
        m.q.fill(layer().matrix)


def test_a_packed_folder_is_not_loaded_into_fused_layers(tmp_path: Any) -> None:
    m = Attention()
    sf.save(tmp_path / "m.safetensors", {"q.weight": m.q.matrix})
    st.fuse_projections(m)
    with pytest.raises(UsageError, match="fused_q_k_v: fused projections are not loaded: load first"):
        st.load_into(m, tmp_path / "m.safetensors")


def test_hooks_stay_with_the_projections() -> None:
    m, x, seen = Attention(), tokens(4, dtype="float32"), []
    m.k.register_forward_hook(lambda module, args, y: seen.append((module, y.shape)))
    st.fuse_projections(m)
    m(x)
    assert seen == [(m.k, (4, ROWS))]


# ------------------------------------------------------------------ refusals


def other(**layers: Any) -> Attention:
    m = Attention()
    for name, new in layers.items():
        setattr(m, name, new)
    return m


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: other(k=layer("csr", "float32")),
            r"the model: q, k, v: .*format: .* got two-four, csr, two-four\. Name",
        ),
        (lambda: other(k=layer("two-four", "float16")), r"q, k, v: two-four: vstack: dtype: .* float32, float16"),
        (lambda: other(v=layer("two-four", "float32", False)), "some have a bias and some have none"),
        (lambda: other(v=layer("two-four", "float32").requires_grad_(True)), "some biases require a gradient"),
        (lambda: Attention("ell-buckets"), "ell-buckets.*: its arrays do not follow from those of its rows"),
        (lambda: Attention().to("meta"), "a layer is on the meta device"),
        (lambda: (m := Attention()) and other(q=m.q, k=m.q), "a layer has several places"),
        (lambda: torch.nn.Sequential(layer(), layer()), "Sequential, which has 0, 1, is not written so"),
        (lambda: torch.nn.Linear(3, 3), "expected modules with several SparseLinear layers, got none"),
        (lambda: other(k=torch.nn.Identity(), v=torch.nn.Identity()), "several SparseLinear layers, got none"),
    ],
)
def test_what_cannot_be_fused_is_refused_by_name(build: Any, text: str) -> None:
    m = build()
    before = dict(m.named_modules())
    with pytest.raises(UsageError, match=text):
        st.fuse_projections(m)
    assert dict(m.named_modules()) == before


def test_rows_that_do_not_fit_and_patterns() -> None:
    m = torch.nn.ModuleDict({"a": Attention("bitmask"), "b": Attention("ell-buckets")})
    with pytest.raises(UsageError, match=r'b: q, k, v: ell-buckets.* Name others by modules="re:'):
        st.fuse_projections(m)
    with pytest.raises(UsageError, match="modules 'c' matches none"):
        st.fuse_projections(m, "c")
    assert list(st.fuse_projections(m, "a")) == ["a.fused_q_k_v"]
    with pytest.raises(UsageError, match="got none"):
        st.fuse_projections(m, "re:^a")  # twice
    short = st.SparseLinear(
        sf.convert(layer("two-four", "float32").weight[:20].numpy(), "two-four"), bias("float32")[:20]
    )
    with pytest.raises(UsageError, match="rows: expected a multiple of 32 in all matrices but the last, got 20"):
        st.fuse_projections(other(q=short.requires_grad_(False)))
