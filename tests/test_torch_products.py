"""Products of a matrix and a tensor as users write them, not layers: what compilers, traces, exports and vmap make of them."""

from __future__ import annotations

from typing import Any

import pytest

import spformat as sf

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'spformat[torch]'")

from torch_layers import ROWS, bias, matrix, tokens  # noqa: E402

import spformat.torch as st  # noqa: E402
from spformat.arrays import torch_tensors  # noqa: E402

PRODUCTS = {
    "linear": lambda a: lambda x: sf.linear(x, a),
    "spmm": lambda a: lambda x: sf.spmm(a, x.mT),
    "@": lambda a: lambda x: a @ x.mT,
    "from the left": lambda a: lambda x: x @ a.T,
    "epilogue": lambda a: lambda x: sf.linear(x, a, bias("float32"), alpha=2.0),
    "torch.linear": lambda a: lambda x: st.linear(x, a),
    "torch.spmm": lambda a: lambda x: st.spmm(a, x.mT),
}
"""How a user multiplies a matrix and a tensor."""


def assert_same_when_compiled(f: Any, backend: str) -> None:
    """For several numbers of rows, so that the compiler sees the number change."""
    compiled = torch.compile(f, backend=backend)
    with torch.no_grad():
        for n in (3, 20, 1):
            x = tokens(n, dtype="float32")
            assert torch.equal(compiled(x), f(x))


@pytest.mark.filterwarnings("ignore")  # of torch's compilers
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_compilers_leave_products_of_matrices_alone(name: str, backend: str) -> None:
    torch._dynamo.reset()
    product = PRODUCTS[name](matrix("csr", "float32"))

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(product(x + 1)) - 1

    assert_same_when_compiled(f, backend)


@pytest.mark.filterwarnings("ignore")  # of torch's compilers
@pytest.mark.parametrize("name", ["linear", "spmm", "@", "from the left"])
def test_compilers_leave_products_of_numpy_arrays_alone(name: str) -> None:
    """torch.compile takes numpy arrays for tensors of its graph, too."""
    torch._dynamo.reset()
    product = PRODUCTS[name](matrix("csr", "float32"))

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(product((x + 1).numpy())) - 1

    assert_same_when_compiled(f, "eager")


@pytest.mark.filterwarnings("ignore")  # of torch's compilers
@pytest.mark.parametrize("name", ["linear", "spmm", "torch.linear", "torch.spmm"])
def test_a_full_graph_is_for_layers_and_the_error_says_so(name: str) -> None:
    torch._dynamo.reset()
    torch_tensors._untraced.clear()  # as in a process that multiplies for the first time
    compiled = torch.compile(PRODUCTS[name](matrix("csr", "float32")), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"spformat\.torch\.SparseLinear"):
        compiled(tokens(3, dtype="float32"))


@pytest.mark.filterwarnings("ignore")  # torch.jit.trace is deprecated
@pytest.mark.parametrize("name", PRODUCTS)
def test_traces_do_not_freeze_a_product(name: str) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    product, x = PRODUCTS[name](matrix("csr", "float32")), tokens(3, dtype="float32")
    for recorder, record in (("torch.jit.trace", torch.jit.trace), ("make_fx", lambda f, x: make_fx(f)(*x))):
        with torch.no_grad():
            if name.startswith("torch."):
                assert torch.equal(record(product, (x,))(2 * x), product(2 * x))
                continue
            with pytest.raises(sf.errors.UsageError, match=rf"{recorder} would record .* use spformat\.torch"):
                record(product, (x,))
    assert product(x).shape.numel() == 3 * ROWS  # and afterwards it multiplies as before


@pytest.mark.parametrize("name", ["linear", "spmm", "@"])
def test_an_export_does_not_freeze_a_product(name: str) -> None:
    product = PRODUCTS[name](matrix("csr", "float32"))

    class Model(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return product(x) + 1

    with pytest.raises(sf.errors.UsageError, match=r"torch\.export or make_fx would record"):
        torch.export.export(Model(), (tokens(3, dtype="float32"),))


@pytest.mark.parametrize("name", PRODUCTS)
def test_tensors_without_memory(name: str) -> None:
    from torch._subclasses import FakeTensor, FakeTensorMode

    product = PRODUCTS[name](matrix("csr", "float32"))
    x = tokens(3, dtype="float32")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        if name.startswith("torch."):
            assert product(mode.from_tensor(x)).shape.numel() == 3 * ROWS
        else:
            with pytest.raises(sf.errors.UsageError, match=r"the operators of spformat\.torch"):
                product(mode.from_tensor(x))
    if name.startswith("torch."):
        assert not isinstance(product(x), FakeTensor)  # what the matrix keeps for torch is real
        return
    with pytest.raises(sf.errors.UsageError, match=r"the operators of spformat\.torch"):
        torch.vmap(product)(x[None])
