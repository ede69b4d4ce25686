"""Which layers are read to have one input that nothing changes in between; and results where no count shows a change."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'spformat[torch]'")

from torch_layers import DEPTH, layer, tokens  # noqa: E402

import spformat.torch as st  # noqa: E402
from spformat.torch.fusing import called_with_one_input  # noqa: E402

# ------------------------------------------------------------------ which layers


class Written(torch.nn.Module):
    """One way to write a forward; ``a``, ``b`` and ``c`` are layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = layer(), layer(), layer()


def writing(*lines: str, layers: str | None = None) -> tuple[tuple[str, ...], ...]:
    """The groups of a class whose forward has these lines."""
    import linecache

    source = "class C(Written):\n    def forward(self, x, y=None):\n" + "".join(f"        {line}\n" for line in lines)
    name = f"<{len(linecache.cache)} {hash(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    space = {"Written": Written, "torch": torch, "__name__": __name__}
    exec(compile(source, name, "exec"), space)
    return called_with_one_input(space["C"], None if layers is None else frozenset(layers))


@pytest.mark.parametrize(
    ("lines", "groups"),
    [
        (["return self.a(x) + self.b(x)"], (("a", "b"),)),
        (["r = self.b(x)", "return self.c(x) * self.a(y), r"], (("b", "c"),)),
        (["return self.a(x), self.b(x), self.c(x)", "x = 1"], (("a", "b", "c"),)),
        (["x = x + 1", "return self.a(x) + self.b(x)"], (("a", "b"),)),
        (["x = self.a(x)", "return self.b(x)"], ()),
        (["r = self.a(x)", "x += 1", "return r + self.b(x)"], ()),
        (["r = self.a(x)", "x.mul_(2)", "return r + self.b(x)"], ()),
        (["r = self.a(x)", "x[0] = 2", "return r + self.b(x)"], ()),
        (["return self.a(x) + self.b(y)"], ()),
        (["return self.a(x) + self.b(x) + self.a(x)"], ()),
        (["return self.a(x) + self.b(x) + self.b.weight"], ()),
        (["if y is None:", "    return self.a(x)", "return self.b(x)"], ()),
        (["if y is None:", "    return self.a(x) + self.b(x)", "return self.c(x)"], (("a", "b"),)),
        (["return self.a(x) if y is None else self.b(x)"], ()),
        (["return y is None and self.a(x) + self.b(x)"], (("a", "b"),)),
        (["return self.a(x) or self.b(x)"], ()),
        (["return [self.a(x) for _ in range(2)], self.b(x)"], ()),
        (["for _ in range(2):", "    y = self.a(x)", "return y, self.b(x)"], ()),
        (["return self.a(x + 1) + self.b(x + 1)"], ()),
        (["return self.a(x, y) + self.b(x)"], ()),
    ],
)
def test_layers_of_one_input_are_read_from_the_code(lines: list[str], groups: Any) -> None:
    assert writing(*lines) == groups


@pytest.mark.parametrize(
    "lines",
    [
        ["self.act(x)"],
        ["f(x)"],
        ["f(other=[x])"],
        ["F.relu(x, inplace=True)"],
        ["torch.mul(x, 2, out=x)"],
        ["x.requires_grad_(True)"],
        ["y += 1"],  # which may be x, as everything that is given
        ["y.add_(1)"],
        ["y[0] = 1"],
        ["del x[0]"],
        ["self.b.bias = y"],
        ["with torch.no_grad():", "    pass"],
        ["for _ in range(2):", "    pass"],
        ["try:", "    f()", "finally:", "    pass"],
        ["match y:", "    case None:", "        pass"],
        ["yield r"],
        ["exec('x += 1')"],
        ["if y is None:", "    f(x)"],
        ["f(x if y is None else y)"],
        ["f(lambda: x.add_(1))"],
    ],
)
def test_what_may_change_the_input_separates_its_layers(lines: list[str]) -> None:
    assert writing("r = self.a(x)", *lines, "return r, self.b(x)", layers="abc") == ()


@pytest.mark.parametrize(
    ("before", "between"),
    [
        ("h = x", "h += 1"),
        ("h = x.view(-1)", "h.zero_()"),
        ("h = [x]", "f(h)"),
        ("h = list(); h.append(x)", "f(h[0])"),
        ("h = self.norm(x)", "f(h)"),
        ("h = x; x = self.norm(x)", "h.add_(1)"),
        ("h = lambda: x.add_(1)", "h()"),
        ("h = (x.add_(1) for _ in range(2))", "next(h)"),
        ("self.saved = x", "self.change()"),
        ("self.register_buffer('saved', x)", "self.zero_grad()"),
        ("x = self.c(x)", "self.act(x)"),
        ("x = self.position", "self.change()"),
        ("x = torch.zeros(2)", "f(x)"),
    ],
)
def test_other_names_of_the_input_are_followed(before: str, between: str) -> None:
    assert writing(before, "r = self.a(x)", between, "return r, self.b(x)", layers="abc") == ()
    assert writing(before, "r = self.a(x)", "f(r)", "return r, self.b(x)", layers="abc") == (
        (("a", "b"),) if "self.position" not in before else ()
    )


@pytest.mark.parametrize(
    "line",
    [
        "r = self.norm(r.view(*x.shape[:-1], -1, self.width)).transpose(1, 2)",
        "r = torch.relu_(r); r += 1; r[0] = 0",
        "r = f(r, y, x.size(0), dtype=x.dtype)",  # y is another tensor, and f is not said to change it
        "r = r * x + y",
        "z = x",
        "if y is None: r = f(r)",
        "if x.dim() == 2 and y is not None: raise ValueError(f'{x.shape}')",
        "y = self.c(y)",
    ],
)
def test_what_leaves_the_input_as_it_is_may_stand_between(line: str) -> None:
    assert writing("r = self.a(x)", line, "return r, self.b(x)", layers="abc") == (("a", "b"),)


def test_layers_before_and_after_a_change_are_two_groups() -> None:
    lines = ["r = self.a(x), self.b(x)", "f(x)", "return r, self.c(x), self.d(x)"]
    assert writing(*lines, layers="abcd") == (("a", "b"), ("c", "d"))
    assert writing(*lines, layers="abc") == (("a", "b"),)


def test_attentions_and_mlps_of_transformers_are_written_so() -> None:
    pytest.importorskip("transformers")
    from importlib import import_module

    for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3"):
        modeling = import_module(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
        attention, mlp = (getattr(modeling, name + kind) for kind in ("Attention", "MLP"))
        assert called_with_one_input(attention) == (("q_proj", "k_proj", "v_proj"),)
        assert called_with_one_input(mlp) == (("gate_proj", "up_proj"),)


@pytest.mark.parametrize(
    ("module", "cls", "groups"),
    [
        ("bert", "BertSelfAttention", (("query", "key", "value"),)),
        ("bert", "BertCrossAttention", (("key", "value"),)),
        ("t5", "T5Attention", (("k", "v"),)),
        ("t5", "T5DenseGatedActDense", (("wi_0", "wi_1"),)),
        ("whisper", "WhisperAttention", (("k_proj", "v_proj"),)),
        ("phi", "PhiAttention", (("q_proj", "k_proj", "v_proj"),)),
        ("gptj", "GPTJAttention", (("q_proj", "k_proj", "v_proj"),)),
        ("gpt_neo", "GPTNeoSelfAttention", (("q_proj", "k_proj", "v_proj"),)),
        ("opt", "OPTAttention", (("q_proj", "k_proj", "v_proj"),)),
        ("qwen2_moe", "Qwen2MoeAttention", (("q_proj", "k_proj", "v_proj"),)),
    ],
)
def test_other_modules_of_transformers_are_read(module: str, cls: str, groups: Any) -> None:
    pytest.importorskip("transformers")
    from importlib import import_module

    found = getattr(import_module(f"transformers.models.{module}.modeling_{module}"), cls)
    linear = frozenset("query key value q k v o wi_0 wi_1 wo q_proj k_proj v_proj out_proj".split())
    assert called_with_one_input(found, linear) == groups


# ------------------------------------------------------------------ results without counts


class Pair(torch.nn.Module):  # type: ignore[misc]
    """Two layers of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = layer("two-four", "float32", seed=0), layer("two-four", "float32", seed=1)
        self.act = torch.nn.ReLU(inplace=True)
        self.requires_grad_(True)
        for m in (self.q, self.k):
            m.requires_grad_(False)
            m.bias.requires_grad_(True)

    def forward(self, x: Any) -> Any:
        return self.q(x), self.k(x)


class Activated(Pair):
    def forward(self, x: Any) -> Any:
        q = self.q(x)
        self.act(x)
        return q, self.k(x)


class OtherName(Pair):
    def forward(self, x: Any) -> Any:
        v = x.view(-1)
        q = self.q(x)
        v.zero_()
        return q, self.k(x)


class WithoutGradient(Pair):
    def forward(self, x: Any) -> Any:
        q = self.q(x)
        with torch.no_grad():
            k = self.k(x)
        return q, k


class Autocast(Pair):
    def forward(self, x: Any) -> Any:
        q = self.q(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            k = self.k(x)
        return q, k


def compiled(m: Any, x: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(m, backend="eager", fullgraph=True)(x)


def exported(m: Any, x: Any) -> Any:
    return torch.export.export(m, (x.clone(),)).module()(x)


def in_inference_mode(m: Any, x: Any) -> Any:
    with torch.inference_mode():
        return m(x.clone())


WAYS = [in_inference_mode, compiled, exported]


def compare(m: Any, plain: Any, way: Callable[[Any, Any], Any]) -> None:
    x = tokens(4, dtype="float32")
    for got, want in zip(way(m, x.clone()), way(plain, x.clone()), strict=True):
        assert got.requires_grad == want.requires_grad
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cls", [Activated, OtherName, WithoutGradient, Autocast])
def test_a_changed_input_or_mode_gives_other_results(cls: Any, way: Any) -> None:
    m = torch.nn.ModuleDict({"one": Pair(), "two": cls()})
    plain = copy.deepcopy(m)
    assert "one.fused_q_k" in st.fuse_projections(m)
    compare(m["two"], plain["two"], way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hook", ["before k", "after q", "after the product"])
def test_hooks_may_change_the_input(hook: str, way: Any) -> None:
    m = Pair()
    plain = copy.deepcopy(m)
    (fused,) = st.fuse_projections(m).values()

    def change(module: Any, args: Any, *_: Any) -> None:
        with torch.no_grad():
            args[0].add_(1)

    if hook == "before k":
        for module in (m, plain):
            module.k.register_forward_pre_hook(change)
    elif hook == "after q":
        for module in (m, plain):
            module.q.register_forward_hook(change)
    else:
        fused.register_forward_hook(change)
        plain.q.register_forward_hook(change)
    compare(m, plain, way)


def test_calls_from_elsewhere_in_inference_mode() -> None:
    m = Pair()
    plain = copy.deepcopy(m)
    st.fuse_projections(m)
    for first in "qk":
        with torch.inference_mode():
            x = tokens(4, dtype="float32")
            getattr(m, first)(x)
            x.add_(1)
            for name in "kq":
                torch.testing.assert_close(getattr(m, name)(x), getattr(plain, name)(x), rtol=0, atol=0)
            getattr(m, first)(x)
            x.add_(1)
            for got, want in zip(m(x), plain(x), strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_module_around_a_projection_in_inference_mode() -> None:
    class Around(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Any) -> Any:
            y = self.inner(x)
            x.add_(1)
            return y

    m = Pair()
    plain = copy.deepcopy(m)
    st.fuse_projections(m)
    m.q, plain.q = Around(m.q), Around(plain.q)
    compare(m, plain, in_inference_mode)


def test_one_product_in_inference_mode_also_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    m = Pair()
    st.fuse_projections(m)
    calls = []
    forward = st.SparseLinear.forward

    @functools.wraps(forward)
    def counted(self: Any, x: Any) -> Any:
        calls.append(type(self).__name__)
        return forward(self, x)

    monkeypatch.setattr(st.SparseLinear, "forward", counted)
    for module in (m, copy.deepcopy(m)):
        with torch.inference_mode():
            for _ in range(2):
                module(torch.ones(2, DEPTH))
    assert calls == ["FusedLinear"] * 4


def test_modes_of_calls_in_a_compiled_function() -> None:
    m = Pair()
    st.fuse_projections(m)

    def calls(m: Any, x: Any) -> Any:
        q = m.q(x)
        with torch.no_grad():
            k = m.k(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return q, k, m.k(x)

    torch._dynamo.reset()
    q, k, low = torch.compile(calls, backend="eager", fullgraph=True)(m, tokens(2, dtype="float32"))
    assert q.requires_grad
    assert not k.requires_grad
    assert low.dtype is torch.bfloat16
