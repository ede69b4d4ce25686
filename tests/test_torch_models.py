"""Whole models: rules of the command, dense and sparse layers, packed checkpoints into models."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spformat as sf
from spformat.checkpoint import Recipe, Rule, convert_checkpoint

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'spformat[torch]'")

from torch_layers import DEPTH, ROWS, weights  # noqa: E402

import spformat.torch as st  # noqa: E402

RULES = ("re:up|down=two-four", "*.down.weight=bitmask")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(DEPTH, ROWS)
        self.down = torch.nn.Linear(ROWS, DEPTH, bias=False)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(x)))


class Model(torch.nn.Module):
    """A tied head, a layer that stands at two places, persistent and other buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, DEPTH)
        self.first = Block()
        self.again = self.first
        self.last = Block()
        self.register_buffer("scale", torch.full((1,), 2.0))
        self.register_buffer("positions", torch.arange(DEPTH) / DEPTH, persistent=False)
        self.head = torch.nn.Linear(DEPTH, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids) + self.positions
        return self.head(self.last(self.again(self.first(x)))) * self.scale


IDS = torch.arange(7)


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    made = Model().half()
    with torch.no_grad():
        for i, linear in enumerate((made.first.up, made.last.up)):
            linear.weight.copy_(torch.from_numpy(weights(seed=i)) / 64)
        for i, linear in enumerate((made.first.down, made.last.down)):
            linear.weight.copy_(torch.from_numpy(weights(seed=i).T * (np.arange(ROWS) % 4 < 2)) / 64)
    return made.requires_grad_(False)


@pytest.fixture
def packed(model: Any, tmp_path: Path) -> Path:
    """A folder of two shards, as the command writes it, without the name of the tied head."""
    state = {k: v for k, v in model.state_dict().items() if k != "head.weight" and not k.startswith("again")}
    source = tmp_path / "dense"
    source.mkdir()
    for i, part in enumerate((("embed", "first"), ("last", "scale")), 1):
        shard = {k: v for k, v in state.items() if k.startswith(part)}
        sf.save_dense(source / f"model-{i:05}-of-00002.safetensors", shard)
    convert_checkpoint(source, tmp_path / "packed", Recipe("keep", tuple(map(Rule.parse, RULES))))
    return tmp_path / "packed"


def formats(model: Any) -> dict[str, str]:
    modules = model.named_modules(remove_duplicate=False)
    return {name: m.description.format for name, m in modules if isinstance(m, st.SparseLinear)}


WANTED = {
    "first.up": "two-four", "first.down": "bitmask", "again.up": "two-four", "again.down": "bitmask",
    "last.up": "two-four", "last.down": "bitmask",
}  # fmt: skip


def test_rules_of_the_command(model: Any) -> None:
    before, bias = model(IDS), model.first.up.bias
    names = st.sparsify(model, RULES)
    assert formats(model) == WANTED == {name: m.description.format for name, m in names.items()}
    assert model.again.up is model.first.up
    assert model.first.up.bias is bias
    torch.testing.assert_close(model(IDS), before, rtol=2e-2, atol=2e-1)  # other orders of float16 sums
    names = st.densify(model)
    assert formats(model) == {}
    assert sorted(names) == sorted(WANTED)
    assert torch.equal(model(IDS), before)
    assert model.again.up is model.first.up
    assert isinstance(model.first.up.weight, torch.nn.Parameter)


def test_one_layer_at_two_places(model: Any) -> None:
    up = model.first.up
    twice = torch.nn.ModuleDict({"a": torch.nn.Sequential(up), "b": torch.nn.Sequential(up)})
    st.sparsify(twice, "b.0.weight=csr")
    assert formats(twice) == {"b.0": "csr"}
    st.densify(twice)
    twice = torch.nn.ModuleDict({"a": torch.nn.Sequential(up), "b": torch.nn.Sequential(up)})
    st.sparsify(twice, "*weight=csr")
    assert twice.a[0] is twice.b[0]
    assert formats(twice) == {"a.0": "csr", "b.0": "csr"}
    st.densify(twice)
    assert twice.a[0] is twice.b[0]


def test_each_place_of_a_layer_has_the_format_of_its_rule(model: Any) -> None:
    up = model.first.up
    twice = torch.nn.ModuleDict({"a": torch.nn.Sequential(up), "b": torch.nn.Sequential(up), "c": up})
    layers = st.sparsify(twice, ["re:[ac].*weight=csr", "b.0.weight=bitmask"])
    assert formats(twice) == {"a.0": "csr", "b.0": "bitmask", "c": "csr"}
    assert {name: layer.description.format for name, layer in layers.items()} == formats(twice)
    assert twice.a[0] is twice.c
    assert torch.equal(twice.b[0].weight, up.weight)


def test_a_recipe_and_single_rules(model: Any) -> None:
    st.sparsify(model, Recipe("csr", (Rule.parse("*down*=keep"),), exclude=("head.weight",)))
    assert formats(model) == {"first.up": "csr", "again.up": "csr", "last.up": "csr"}
    st.sparsify(model, "last.down.weight=auto")
    assert formats(model)["last.down"] in ("two-four", "vector-nm", "bitmask")
    with pytest.raises(sf.errors.UsageError, match="a Recipe has its own prune"):
        st.sparsify(model, Recipe(), prune=True)


def test_nothing_is_pruned_unless_asked(model: Any) -> None:
    torch.nn.init.normal_(model.last.up.weight)
    with pytest.raises(
        sf.errors.StructureError, match=r"tensor 'last.up.weight': two-four: .*more than 2 nonzeros.*prune=True"
    ):
        st.sparsify(model, RULES)
    assert formats(model) == {}  # the others stay as they were, too
    dense = model.last.up.weight.clone()
    st.sparsify(model, RULES[:1], prune=True)
    kept = model.last.up.weight != 0
    assert torch.equal(model.last.up.weight, dense * kept)
    assert int(kept.sum()) == ROWS * DEPTH // 2
    st.densify(model)
    with pytest.raises(sf.errors.UsageError, match="needs --sparsity"):
        st.sparsify(model, "last.up.weight=csr", prune=True)
    st.sparsify(model, "last.up.weight=csr", prune=True, sparsity=0.75)
    assert int((model.last.up.weight != 0).sum()) == ROWS * DEPTH // 4


def test_weights_that_hooks_compute_are_those_of_the_next_product() -> None:
    """torch.nn.utils.prune writes ``weight`` before a product, so that after a step of an optimizer it is an old one."""
    from torch.nn.utils import prune

    m = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
    prune.global_unstructured([(m[0], "weight"), (m[0], "bias")], prune.L1Unstructured, amount=0.5)
    with torch.no_grad():
        m[0].weight_orig.mul_(2)
        m[0].bias_orig.mul_(3)
    expected, kept = m[0].weight_orig * m[0].weight_mask, m[0].bias_orig * m[0].bias_mask
    st.sparsify(m, "0.weight=csr")
    assert torch.equal(m[0].weight, expected)
    assert torch.equal(m[0].bias, kept)
    assert m[0](torch.ones(1, 32)).isfinite().all()
    assert m[0].matrix.nnz < 64 * 32


def test_layers_keep_their_hooks() -> None:
    m = torch.nn.Sequential(torch.nn.Linear(32, 64))
    seen: list[str] = []
    handle = m[0].register_forward_hook(lambda *_: seen.append("after"))
    m[0].register_forward_pre_hook(lambda *_, **__: seen.append("before"), with_kwargs=True)
    m[0].register_full_backward_hook(lambda *_: seen.append("gradient"))
    x = torch.ones(2, 32, requires_grad=True)
    st.sparsify(m, "re:.*=csr")
    m(x).sum().backward()
    assert seen == ["before", "after", "gradient"]
    st.densify(m)
    handle.remove()
    m(x)
    assert seen == ["before", "after", "gradient", "before"]


def test_a_forward_of_an_object_is_not_replaced() -> None:
    m = torch.nn.Sequential(torch.nn.Linear(32, 64))
    m[0].forward = lambda x: x
    assert not st.models.is_linear(m[0])
    with pytest.raises(sf.errors.UsageError):  # no layer is left for the rule
        st.sparsify(m, "re:.*=csr")


def test_a_layer_that_is_called_in_another_way_is_not_replaced() -> None:
    class Doubled(torch.nn.Linear):  # type: ignore[misc]
        def __call__(self, x: Any) -> Any:
            return 2 * super().__call__(x)

    m, x = torch.nn.Sequential(Doubled(32, 64), torch.nn.Linear(64, 32)), torch.ones(2, 32)
    wanted = m(x)
    assert list(st.sparsify(m, "re:.*=csr")) == ["1"]
    assert torch.allclose(m(x), wanted, atol=1e-5)


def test_lazy_layers_without_a_shape_are_refused_by_name(tmp_path: Path) -> None:
    """The others can be sparse before the first call."""
    m = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.LazyLinear(32))
    with pytest.raises(sf.errors.UsageError, match=r"'1.weight': this layer has no shape yet.*call the model once"):
        st.sparsify(m, "re:.*weight=csr")
    assert formats(m) == {}
    state = {
        name: torch.ones(shape) for name, shape in {"1.weight": (32, 64), "1.bias": (32,), "0.bias": (64,)}.items()
    }
    sf.save(tmp_path / "w.safetensors", state | {"0.weight": sf.convert(np.eye(64, 32, dtype=np.float32), "csr")})
    with pytest.raises(sf.errors.UsageError, match=r"1\.bias \(it has no shape yet.*1\.weight \(it has no shape"):
        st.load_into(m, tmp_path / "w.safetensors")
    assert list(st.sparsify(m, "0.weight=csr")) == ["0"]
    m(torch.ones(2, 32))
    assert list(st.sparsify(m, "1.weight=csr")) == ["1"]
    st.densify(m)
    st.load_into(m, tmp_path / "w.safetensors")


def test_a_sparse_layer_itself_is_not_made_dense_in_its_place() -> None:
    layer = st.SparseLinear(sf.convert(np.eye(64, dtype=np.float32), "csr"))
    with pytest.raises(sf.errors.UsageError, match=r"the model itself is a SparseLinear: .*layer\.weight"):
        st.densify(layer)


@pytest.mark.parametrize("rules", [None, 5, [5], ["re:.*=csr", None]], ids=str)
def test_what_is_no_rule_is_refused(model: Any, rules: Any) -> None:
    with pytest.raises(sf.errors.UsageError, match='rules: expected texts "PATTERN=FORMAT" or Rule objects, got '):
        st.sparsify(model, rules)


@pytest.mark.parametrize("sparsity", ["half", "0.5", float("nan"), 1, -0.1])
def test_what_is_no_share_is_refused(model: Any, sparsity: Any) -> None:
    with pytest.raises(sf.errors.UsageError, match=r"sparsity: expected a share in \[0, 1\), got "):
        st.sparsify(model, "re:.*=two-four", prune=True, sparsity=sparsity)


def test_rules_without_a_layer_are_refused(model: Any) -> None:
    for rule in ("*.side.weight=csr", "embed.weight=csr", "first.up.bias=csr"):
        with pytest.raises(
            sf.errors.UsageError, match=f"rule '{rule[:-4].replace('*', '.')}' matches none of 7 tensors"
        ):
            st.sparsify(model, rule)
    attention = torch.nn.MultiheadAttention(8, 2)  # reads the weight of its out_proj itself
    with pytest.raises(sf.errors.UsageError, match="matches none of 0"):
        st.sparsify(attention, "out_proj.weight=csr")
    with pytest.raises(
        sf.errors.UsageError, match=r"the model itself is a linear layer: use SparseLinear\.from_linear"
    ):
        st.sparsify(torch.nn.Linear(4, 4), "weight=csr")


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_packed_folder_into_a_model(model: Any, packed: Path, device: str) -> None:
    """The same outputs as with the layers converted in place, and nothing of the dense weights."""
    st.sparsify(model, RULES)
    wanted = model(IDS)
    with torch.device(device):
        loaded = Model()
    if device == "meta":
        with pytest.raises(
            sf.errors.UsageError, match=r"buffers on the meta device that no checkpoint holds.*positions"
        ):
            st.load_into(loaded, packed)
        assert all(p.is_meta for p in loaded.parameters())
        loaded.positions = model.positions
    embedding = loaded.embed.weight
    layers = st.load_into(loaded, packed)
    loaded.positions = model.positions
    assert formats(loaded) == WANTED == {name: m.description.format for name, m in layers.items()}
    assert torch.equal(loaded(IDS), wanted)
    assert loaded.again.up is loaded.first.up
    assert loaded.head.weight is loaded.embed.weight
    assert (loaded.embed.weight is embedding) == (device == "cpu")
    assert loaded.embed.weight.dtype is torch.float16
    assert loaded.first.up.bias.requires_grad
    assert not any(t.is_inference() for t in [*loaded.parameters(), *loaded.buffers()])
    layers = st.load_into(loaded, packed)  # sparse layers take their tensors as well
    assert torch.equal(loaded(IDS), wanted)


def test_contents_are_not_scanned_twice(model: Any, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scans, lock = [], threading.Lock()
    scan = sf.TwoFour.validate

    def counted(self: Any) -> Any:
        with lock:
            scans.append(self)
        return scan(self)

    monkeypatch.setattr(sf.TwoFour, "validate", counted)
    st.load_into(model, packed)
    model(IDS)
    assert len(scans) == 2  # the two files' tensors, by the reader


def test_a_file_and_a_dense_checkpoint(model: Any, tmp_path: Path) -> None:
    before = model(IDS)
    state = {k: v for k, v in model.state_dict().items() if not k.startswith("again")}
    sf.save_dense(tmp_path / "model.safetensors", state)
    fresh = Model()
    fresh.positions = model.positions
    assert st.load_into(fresh, tmp_path / "model.safetensors") == {}
    assert torch.equal(fresh(IDS), before)


def test_names_and_shapes_that_differ_are_listed_before_anything_changes(model: Any, packed: Path) -> None:
    other = Model().half()
    other.extra = torch.nn.Linear(3, 3)
    other.first.up = torch.nn.Linear(DEPTH, ROWS + 1).half()
    del other.scale
    before = {k: v.clone() for k, v in other.state_dict().items()}
    with pytest.raises(sf.errors.UsageError) as raised:
        st.load_into(other, packed)
    text = str(raised.value)
    assert str(packed) in text
    assert "the checkpoint has tensors that the model lacks: scale" in text
    assert "the model has tensors that the checkpoint lacks: extra.bias, extra.weight" in text
    assert "first.up.weight ([96, 128], the model has [97, 128])" in text
    assert "first.up.bias ([96], the model has [97])" in text
    assert all(torch.equal(v, before[k]) for k, v in other.state_dict().items())
    other = Model()
    other.first.up = torch.nn.Bilinear(2, 3, 4)
    with pytest.raises(
        sf.errors.UsageError, match=r"first\.up\.weight \(the weight of no linear layer, and two-four in"
    ):
        st.load_into(other, packed)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_integers_for_a_parameter_that_requires_a_gradient(device: str, tmp_path: Path) -> None:
    """It takes them in their dtype, without a gradient, and is the same parameter."""
    layers = {"0.weight": sf.convert(np.eye(64, dtype=np.float32), "csr"), "0.bias": torch.zeros(64)}
    codes = torch.arange(64 * 64).remainder(100).to(torch.int8).view(64, 64)
    sf.save(tmp_path / "w.safetensors", layers | {"1.weight": codes, "1.bias": torch.ones(64)})
    with torch.device(device):
        m = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    weight = m[1].weight
    assert set(st.load_into(m, tmp_path / "w.safetensors")) == {"0"}
    assert (m[1].weight is weight) == (device == "cpu")
    assert isinstance(m[1].weight, torch.nn.Parameter)
    assert m[1].weight.dtype is torch.int8
    assert torch.equal(m[1].weight, codes)
    assert [name for name, p in m.named_parameters() if p.requires_grad] == ["0.bias", "1.bias"]


def test_a_model_that_is_itself_a_linear_layer_stays_as_it_is(tmp_path: Path) -> None:
    """A sparse layer cannot take its place; its bias comes before the weight in the file."""
    weight = sf.convert(np.eye(64, dtype=np.float32), "csr")
    sf.save(tmp_path / "w.safetensors", {"bias": torch.ones(64), "weight": weight})
    m = torch.nn.Linear(64, 64)
    before = {name: t.clone() for name, t in m.state_dict().items()}
    with pytest.raises(sf.errors.UsageError, match="the model itself is a linear layer"):
        st.load_into(m, tmp_path / "w.safetensors")
    assert all(torch.equal(t, before[name]) for name, t in m.state_dict().items())


def test_a_dense_weight_for_a_sparse_layer_is_refused(model: Any, tmp_path: Path) -> None:
    state = {k: v for k, v in model.state_dict().items() if not k.startswith("again")}
    sf.save_dense(tmp_path / "model.safetensors", state)
    st.sparsify(model, RULES[0])
    with pytest.raises(sf.errors.UsageError, match=r"first\.up\.weight \(dense in the checkpoint, sparse in the model"):
        st.load_into(model, tmp_path / "model.safetensors")


def test_a_stack_of_expert_weights_becomes_dense(tmp_path: Path) -> None:
    """No layer multiplies with a stack."""

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = torch.nn.Parameter(torch.zeros(3, 32, 64))
            self.q = torch.nn.Linear(64, 64, bias=False)

    x = np.zeros((3, 32, 64), np.float32)
    x[:, ::2, ::4] = np.arange(3 * 16 * 16).reshape(3, 16, 16)
    q = sf.convert(np.eye(64, dtype=np.float32), "csr")
    sf.save(tmp_path / "w.safetensors", {"gate_up_proj": sf.stack(x, "two-four"), "q.weight": q})
    model = Experts()
    assert set(st.load_into(model, tmp_path / "w.safetensors")) == {"q"}
    assert torch.equal(model.gate_up_proj.detach(), torch.from_numpy(x))
    with sf.open(tmp_path / "w.safetensors", framework="pt") as checkpoint:
        assert isinstance(checkpoint["gate_up_proj"], sf.Stack)
