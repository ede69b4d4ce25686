"""How often torch.compile compiles sparse layers while the number of rows changes: once if it is told before that the
number may be any, and otherwise as often as it compiles dense layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'spformat[torch]'")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch_layers import DEPTH, PARAMS, ROWS, layer, tokens  # noqa: E402

import spformat.torch as st  # noqa: E402


class Joined(torch.nn.Module):  # type: ignore[misc]
    """Two layers of one input, which ``fuse_projections`` joins."""

    def __init__(self, fmt: str) -> None:
        super().__init__()
        self.gate, self.up = layer(fmt), layer(fmt, seed=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.gate(x)) * self.up(x)


def between() -> Any:
    """A dense layer from the width of results back to that of inputs, whose sums are exact."""
    linear = torch.nn.Linear(ROWS, DEPTH, bias=False).half().requires_grad_(False)
    linear.weight.copy_(torch.randint(-1, 2, linear.weight.shape, generator=torch.Generator().manual_seed(2)) / 64)
    return linear


def sparse(*formats: str) -> Any:
    """A sparse layer of each format, with dense ones and activations between them."""
    modules: list[Any] = []
    for fmt in formats:
        modules += [layer(fmt), torch.nn.ReLU(), between()]
    return torch.nn.Sequential(*modules)


def dense(*formats: str) -> Any:
    """The same model with dense layers in the places of the sparse ones."""
    model = sparse(*formats)
    for i, m in enumerate(model):
        if isinstance(m, st.SparseLinear):
            model[i] = torch.nn.Linear(DEPTH, ROWS).half().requires_grad_(False)
    return model


def compiles(model: Any, sizes: Iterable[int], told: str = "", **options: Any) -> list[int]:
    """How often the model has been compiled after each number of rows; results are compared with those of the model.

    told: what torch learns before the first call: "any", that the number of rows may be any; "dynamic", that it changes.
    """
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter, **options)
    counts: list[int] = []
    for n in sizes:
        x = tokens(n)
        want = model(x)
        if told and not counts:
            mark = {"any": torch._dynamo.decorators.mark_unbacked, "dynamic": torch._dynamo.mark_dynamic}[told]
            mark(x, 0)
        torch.testing.assert_close(compiled(x), want)
        counts.append(counter.frame_count)
    torch._dynamo.reset()
    return counts


@pytest.mark.parametrize("first", [1, 16])
def test_one_graph_serves_1_to_64_rows_in_all_formats(first: int) -> None:
    """Only the first call, which compiles, is told that the number of rows may be any."""
    assert compiles(sparse(*PARAMS), [first, *range(1, 65)], "any") == [1] * 65


@pytest.mark.parametrize("first", [1, 16])
def test_one_graph_serves_1_to_64_rows_of_joined_layers(first: int) -> None:
    model = torch.nn.Sequential(Joined("two-four"), between(), Joined("bitmask"))
    assert len(st.fuse_projections(model)) == 2
    assert compiles(model, [first, *range(1, 65)], "any") == [1] * 65


@pytest.mark.parametrize(
    ("told", "options", "counts"),
    [
        ("", {}, [1, 2, 3, 3, 3, 3]),  # 64 as it is, 1 on its own, then all others
        ("", {"dynamic": True}, [1, 2, 2, 2, 2, 2]),  # all others, and 1 on its own
        ("dynamic", {}, [1, 2, 2, 2, 2, 2]),
    ],
    ids=["told nothing", "dynamic=True", "mark_dynamic"],
)
def test_sparse_layers_compile_as_often_as_dense_ones(told: str, options: dict[str, bool], counts: list[int]) -> None:
    """The counts are torch's own; sparse layers add none."""
    sizes, formats = (64, 1, 16, 2, 3, 33), tuple(PARAMS)
    assert compiles(sparse(*formats), sizes, told, **options) == compiles(dense(*formats), sizes, told, **options)
    assert compiles(sparse(*formats), sizes, told, **options) == counts
