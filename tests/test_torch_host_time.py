"""The short way of a product on a device: which calls take it, and what it hands to the launches. Without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import spformat as sf

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'spformat[torch]'")

from torch_layers import DEPTH, ROWS, bias, dense, layer, tokens, weights  # noqa: E402

from spformat.backends.cuda.runtime.addresses import PERIOD  # noqa: E402
from spformat.torch import weights as products  # noqa: E402


class Device:
    """Plans that only write down their operands, on a stream and a device that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream, self.repeatable, self.moves = 7, True, True
        self.plans: list[dict[str, Any]] = []
        self.prepared: list[Any] = []
        self.launched: list[Any] = []
        monkeypatch.setattr(products, "current_stream", lambda device: self.stream)
        monkeypatch.setattr(
            products.torch.cuda, "device_count", lambda: 1
        )  # where there are several, one must be current
        monkeypatch.setattr(products.api, "plan", self.plan)

    def plan(self, A: Any, n: int, **kinds: Any) -> Any:
        self.plans.append({"A": A, "n": n, **kinds})
        return SimpleNamespace(ready=self.ready)

    def ready(self, operands: Any) -> Any:
        self.prepared.append(operands)

        def moving(addresses: tuple[int, int, int]) -> None:
            b, c, bias_at = addresses
            self.launched.append(operands._replace(b=b, c=c, bias=bias_at))

        return lambda: self.launched.append(operands), self.repeatable, moving if self.moves else None


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def on_device(m: Any) -> Any:
    """A layer that takes itself to be on the device that the tensors of a CPU are on."""
    m._validated()._on_device = True
    return m


def test_operands_are_addresses_extents_and_the_stream(device: Device) -> None:
    m, x, b = on_device(layer()), tokens(2, 3), bias()
    m.bias.data = b
    y = m(x)
    assert y.shape == (2, 3, ROWS)
    assert y.dtype is torch.float16
    (o,) = device.launched
    assert o == (x.data_ptr(), y.data_ptr(), 6, DEPTH, ROWS, 7, b.data_ptr(), 1.0, 0.0)
    (made,) = device.plans
    assert made.pop("A") is m.matrix
    assert made == {
        "n": 6, "b_dtype": "float16", "b_layout": "col", "out_dtype": "float16", "out_layout": "col", "epilogue": True,
    }  # fmt: skip


def test_one_row_is_a_column_that_lies_densely(device: Device) -> None:
    m, x = on_device(layer(with_bias=False)), tokens(1)
    y = m(x)
    assert device.launched == [(x.data_ptr(), y.data_ptr(), 1, 1, 1, 7, 0, 1.0, 0.0)]
    assert (device.plans[0]["b_layout"], device.plans[0]["epilogue"]) == ("row", False)


def on_boundary(t: Any, shift: int = 0) -> Any:
    """A copy that starts ``shift`` elements behind a boundary of ``PERIOD`` bytes."""
    room = torch.empty(t.numel() + PERIOD + shift, dtype=t.dtype)
    start = -room.data_ptr() // t.element_size() % (PERIOD // t.element_size()) + shift
    return room[start : start + t.numel()].view(t.shape).copy_(t)


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tensors that layers return, in turn."""
    taken: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *_, **__: taken.pop(0))
    return taken


def test_other_memory_of_the_same_alignment_is_not_prepared_again(device: Device, results: list[Any]) -> None:
    m, kept = on_device(layer()), []
    for b in (bias(), bias()):
        m.bias = torch.nn.Parameter(on_boundary(b), requires_grad=False)
        for x in (tokens(4), tokens(4)):
            x, y = on_boundary(x), on_boundary(torch.empty(4, ROWS, dtype=torch.float16))
            kept.append((x, y, m.bias))
            results.append(y)
            assert m(x) is y
            o = device.launched[-1]
            assert o == (x.data_ptr(), y.data_ptr(), 4, DEPTH, ROWS, 7, m.bias.data_ptr(), 1.0, 0.0)
    assert (len(device.plans), len(device.prepared), len(device.launched)) == (1, 1, 4)
    assert len({o[:2] for o in device.launched}) == 4


@pytest.mark.parametrize("which", ["x", "y", "bias", "stream"])
def test_other_alignments_and_streams_are_prepared_anew(device: Device, results: list[Any], which: str) -> None:
    m = on_device(layer())
    shifts = dict.fromkeys(("x", "y", "bias"), 0)
    for turn in range(4):
        if which == "stream":
            device.stream = 7 + turn % 2
        else:
            shifts[which] = 4 * (turn % 2)
        x = on_boundary(tokens(4), shifts["x"])
        results.append(on_boundary(torch.empty(4, ROWS, dtype=torch.float16), shifts["y"]))
        m.bias = torch.nn.Parameter(on_boundary(bias(), shifts["bias"]), requires_grad=False)
        y = m(x)
        o = device.launched[-1]
        assert (o.b, o.c, o.bias, o.stream) == (x.data_ptr(), y.data_ptr(), m.bias.data_ptr(), device.stream)
        assert len(device.prepared) == min(turn + 1, 2)


def test_other_shapes_are_prepared_anew(device: Device) -> None:
    m = on_device(layer())
    for n in (4, 5, 4):
        m(on_boundary(tokens(n)))
        assert device.launched[-1].n == n
    assert len(device.plans) == 2


def test_launches_that_cannot_be_moved_are_kept_for_their_memory(device: Device) -> None:
    device.moves = False
    m, x = on_device(layer()), tokens(4)
    kept = [m(x) for _ in range(3)]  # three results at once: three places
    assert len(device.prepared) == 3
    assert len(device.plans) == 1
    product = next(iter(m._weight._products.values()))
    for at in [y.data_ptr() for y in kept]:
        key = (x.data_ptr(), at, m.bias.data_ptr(), 7)
        product._calls[key]()
    assert device.launched[3:] == device.launched[:3]
    device.stream = 8
    m(x)
    assert device.launched[-1].stream == 8


def test_what_is_prepared_for_a_graph_is_not_kept(device: Device) -> None:
    m, x = on_device(layer()), tokens(4)
    device.repeatable = False
    m(x)
    device.repeatable, device.stream = True, products.PER_THREAD
    m(x)
    assert [(p._calls, p._moving) for p in m._weight._products.values()] == [({}, {})]


def test_caches_are_bounded(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SHAPES", 3)
    monkeypatch.setattr(products, "OPERANDS", 3)
    device.moves = False
    m = on_device(layer())
    kept = [m(tokens(n)) for n in range(1, 8)]
    assert 1 <= len(m._weight._products) <= 3
    x = tokens(9)
    kept += [m(x) for _ in range(8)]
    product = list(m._weight._products.values())[-1]
    assert 1 <= len(product._calls) <= 3
    device.moves = True
    for device.stream in range(20, 28):
        kept.append(m(x))
    assert 1 <= len(product._moving) <= 3
    assert len(device.launched) == len(kept)


@pytest.mark.parametrize(
    "x",
    [tokens(4)[::2], tokens(4)[:0], tokens(4, 2)[:, 1], tokens(4).t().contiguous().t()],
    ids=["every second row", "no row", "one of two", "column-major"],
)
def test_other_layouts_go_the_long_way(device: Device, x: Any) -> None:
    assert torch.equal(on_device(layer())(x), dense(x, weights(), bias()))
    assert device.launched == []


def test_gradients_are_recorded_around_the_short_way(device: Device) -> None:
    m = on_device(layer())
    for x in (tokens(4).requires_grad_(), torch.nn.Parameter(tokens(4))):
        device.launched.clear()
        y = m(x)
        (o,) = device.launched
        assert (o.b, o.c, o.n) == (x.data_ptr(), y.data_ptr(), 4)
        dy = torch.ones_like(y)
        y.backward(dy)
        back = device.launched[1]
        assert (back.b, back.n, back.ldb, back.ldc, back.bias) == (dy.data_ptr(), 4, ROWS, DEPTH, 0)
        assert x.grad.shape == x.shape
    assert device.plans[1]["A"].matrix is m.matrix


def test_a_tensor_that_is_negated_when_read_is_resolved_first(device: Device) -> None:
    """Its memory holds the other signs."""
    m, x = on_device(layer()), tokens(4)
    y = m(torch._neg_view(x))
    (o,) = device.launched
    assert o.b != x.data_ptr()
    assert o.c == y.data_ptr()
    m.bias = torch.nn.Parameter(torch._neg_view(bias()), requires_grad=False)
    assert torch.equal(m(tokens(4)), dense(tokens(4), weights(), -bias()))
    assert len(device.launched) == 1


def test_modes_and_transformations_go_through_the_operator() -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    m, x = layer(), tokens(4)
    assert m._is_ordinary(x, m.bias)

    class Function(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    for mode, operator in ((Function, torch.ops.spformat.linear), (Dispatch, torch.ops.spformat.linear.default)):
        seen: list[Any] = []
        with mode():
            assert torch.equal(m(x), dense(x, weights(), bias()))
        assert operator in seen
    m.bias.requires_grad_()
    assert not m._is_ordinary(x, m.bias)
    with torch.no_grad():
        assert m._is_ordinary(x, m.bias)
        with torch.autocast("cpu"):
            assert not m._is_ordinary(x, m.bias)
    assert not m._is_ordinary(x.to("meta"), None)
    assert not m._is_ordinary(x.to_sparse(), None)


def test_a_bias_that_does_not_fit_is_refused(device: Device) -> None:
    m, x = on_device(layer()), tokens(3)
    m(x)
    launched = len(device.launched)
    for wrong, error in ((bias("float32"), TypeError), (bias()[:-1], ValueError), (bias()[:, None], ValueError)):
        m.bias = torch.nn.Parameter(wrong, requires_grad=False)
        with pytest.raises(error, match="bias"):
            m(x)
    assert len(device.launched) == launched


def test_a_block_that_names_a_backend_plans_anew(device: Device) -> None:
    m, x = on_device(layer()), tokens(3)
    m(x)
    with sf.use_backend("cpu"):
        m(x), m(x)
    assert len(device.plans) == 2
    m(x)
    assert len(device.plans) == 2


def test_a_plan_that_takes_only_arrays_goes_the_long_way(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    m, x = on_device(layer()), tokens(3)
    monkeypatch.setattr(products.api, "plan", lambda *_, **__: SimpleNamespace(ready=None))
    assert torch.equal(m(x), dense(x, weights(), bias()))
