"""What is not there is refused by name wherever an operator runs: in graphs, traces, compiled functions, inside of vmap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'spformat[torch]'")

from torch.autograd import forward_ad  # noqa: E402
from torch_layers import DEPTH, ROWS, layer, tokens, weights  # noqa: E402

import spformat as sf  # noqa: E402
import spformat.torch as st  # noqa: E402
from spformat.checkpoint import Rule  # noqa: E402
from spformat.errors import UsageError  # noqa: E402

OPS = torch.ops.spformat
pytestmark = pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated

M = layer("csr", "float32", with_bias=False)
BIASED = layer("csr", "float32").requires_grad_(True)
BIASED.weight_data.requires_grad_(False)
X, T = tokens(3, dtype="float32"), tokens(3, dtype="float32", seed=6)
NAME = r"spformat::(linear|spmm)(_backward)? has reverse-mode gradients only"


def operator(x: Any) -> Any:
    return OPS.linear(x, M._tensors(), None, M.description.text, False)


def spmm(x: Any) -> Any:
    return OPS.spmm(M._tensors(), x.mT, M.description.text, False).mT


CALLS: dict[str, Any] = {
    "layer": lambda: M,
    "layer with a bias": lambda: BIASED,
    "operator": lambda: operator,
    "spmm": lambda: spmm,
    "st.linear": lambda: lambda x: st.linear(x, M.matrix),
    "st.spmm": lambda: lambda x: st.spmm(M.matrix, x.mT).mT,
    "exported": lambda: torch.export.export(M, (X,)).module(),
    "symbolic": lambda: torch.fx.symbolic_trace(torch.nn.Sequential(M)),
    "compiled": lambda: torch.compile(M, backend="aot_eager"),
}


def dual(f: Any) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(X, T))).tangent


TRANSFORMED: dict[str, Any] = {
    "jvp": lambda f: torch.func.jvp(f, (X,), (T,)),
    "jacfwd": lambda f: torch.func.jacfwd(f)(X),
    "dual": dual,
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(X),
    "vjp": lambda f: torch.func.vjp(f, X)[1](T[:, :ROWS]),
    "jvp of vmap": lambda f: torch.func.jvp(torch.vmap(f), (X[None],), (T[None],)),
    "grad of vmap": lambda f: torch.func.grad(lambda x: torch.vmap(f)(x).sum())(X[None]),
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(lambda x: f(x).sum()))(X[None]),
    "vmap of jvp": lambda f: torch.vmap(lambda x, t: torch.func.jvp(f, (x,), (t,)))(X[None], T[None]),
}


@pytest.mark.parametrize("how", TRANSFORMED)
@pytest.mark.parametrize("call", CALLS)
def test_transformations_are_refused_by_name(call: str, how: str) -> None:
    torch._dynamo.reset()
    f = CALLS[call]()
    if call == "exported" and ("vmap" in how or how == "jacfwd"):
        pytest.skip("its batch is that of the example")
    with pytest.raises(UsageError, match=NAME):
        TRANSFORMED[how](f)


@pytest.mark.parametrize("how", ["jvp", "dual", "grad"])
def test_in_a_trace(how: str) -> None:
    with pytest.raises(RuntimeError, match=NAME):  # torch puts the traceback of the trace around it
        TRANSFORMED[how](torch.jit.trace(M, X))


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("how", ["jvp", "jacfwd", "grad"])
def test_in_a_compiled_function(how: str, backend: str, fullgraph: bool) -> None:
    torch._dynamo.reset()
    transformed = {
        "jvp": lambda x, t: torch.func.jvp(M, (x,), (t,)),
        "jacfwd": lambda x, t: torch.func.jacfwd(M)(x),
        "grad": lambda x, t: torch.func.grad(lambda z: M(z).sum())(x),
    }[how]
    with pytest.raises((UsageError, RuntimeError), match=NAME):  # torch puts an error of its own around it, mostly
        torch.compile(transformed, backend=backend, fullgraph=fullgraph)(X, T)


def test_the_tangent_of_a_gradient_is_refused() -> None:
    for f in (M, spmm):
        x = X.clone().requires_grad_()
        y = f(x)
        with forward_ad.dual_level(), pytest.raises(UsageError, match=NAME):
            torch.autograd.grad(y, x, forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y)))


def test_what_is_not_transformed_passes() -> None:
    """A tangent or a gradient elsewhere is none of the operator's; and an ordinary gradient flows around it."""
    want, w = M(X), torch.from_numpy(weights("float32"))
    y, tangent = torch.func.jvp(lambda x: x.sum() + M(X), (X,), (T,))
    assert torch.equal(y, X.sum() + want)
    assert torch.equal(tangent, T.sum().expand(3, ROWS))
    assert torch.equal(torch.func.grad(lambda x: x.sum() * M(X).sum())(X), want.sum().expand(3, DEPTH))
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(torch.func.grad(lambda s: (s * M(x)).sum())(torch.ones(())), x)
    assert torch.equal(gradient, w.sum(0).expand(3, DEPTH))
    A = layer("two-four", "float32").matrix  # whose tensors are first asked for inside of the transformation
    torch.func.grad(lambda s: (s * st.linear(X, A)).sum())(torch.ones(()))
    assert torch.equal(st.linear(X, A), X @ w.T)
    with forward_ad.dual_level():
        x = X.clone().requires_grad_()
        M(x).sum().backward()
    assert torch.equal(x.grad, w.sum(0).expand(3, DEPTH))


def test_operands_of_other_kinds_are_named() -> None:
    A, w = M.matrix, torch.from_numpy(weights("float32"))
    for wrong in (w, w.numpy(), None):
        with pytest.raises(UsageError, match=r"^W: expected a matrix of spformat, got .*use spformat.convert\(W"):
            st.linear(X, wrong)
        with pytest.raises(UsageError, match=r"^A: expected a matrix of spformat"):
            st.spmm(wrong, X.mT)
    for other in (X.numpy(), X.tolist()):
        with pytest.raises(TypeError, match=r"^x: expected a torch tensor, got .*spformat.linear"):
            st.linear(other, A)
        with pytest.raises(TypeError, match=r"^B: expected a torch tensor"):
            st.spmm(A.T, other)


def test_a_stack_is_no_weight(tmp_path: Path) -> None:
    stack = sf.stack([M.matrix, M.matrix])
    for take in (lambda: st.SparseLinear(stack), lambda: st.linear(X, stack)):
        with pytest.raises(UsageError, match="expected a matrix, got a stack of 2 matrices"):
            take()
    sf.save(tmp_path / "experts.safetensors", {"w": stack})
    with sf.safe_open(tmp_path / "experts.safetensors") as f, pytest.raises(UsageError, match="'w': expected a matrix"):
        st.SparseLinear.from_record(f.info("w"))


def test_what_is_no_tensor_is_refused_by_a_layer() -> None:
    for other in (X.numpy(), X.tolist(), None):
        with pytest.raises(TypeError, match=r"^x: expected a torch tensor, got \S+$"):
            M(other)
    for other in (X.to_sparse(), X.to_sparse_csr()):
        with pytest.raises(
            UsageError, match=r"^x: expected a dense tensor, got torch\.sparse_\w+: give x\.to_dense\(\)"
        ):
            M(other)
        with pytest.raises(UsageError, match=r"^x: expected a dense tensor"):
            st.linear(other, M.matrix)
        with pytest.raises(
            UsageError, match=r"^B: expected a dense tensor, got torch\.sparse_\w+: give B\.to_dense\(\)"
        ):
            st.spmm(M.matrix, other.mT)
    for bias in (torch.zeros(ROWS).numpy(), [0.0] * ROWS):
        with pytest.raises(TypeError, match=r"^bias: expected a torch tensor, got \S+$"):
            st.linear(X, M.matrix, bias)


def test_what_is_no_format_is_refused() -> None:
    linear = torch.nn.Linear(32, 32)
    for wrong in (None, 5, sf.CSR):
        with pytest.raises(UsageError, match=r"target: expected a text like 'auto', 'csr' or 'bsr:32x32', got "):
            st.SparseLinear.from_linear(linear, wrong)
        with pytest.raises(UsageError, match=r"target: expected a text like 'auto', 'csr' or 'bsr:32x32', got "):
            Rule("re:proj", wrong)
    with pytest.raises(UsageError, match="pattern: expected a text, got None"):
        Rule(None, "csr")


def test_a_bias_of_another_dtype_than_the_result_says_which_operand_to_cast() -> None:
    m, x = layer("csr", "float16"), X[:2]
    text = r"x: expected dtype float16, as W and bias have, got float32: use x\.to\(torch\.float16\), or a layer in float32"
    for f in (m, lambda x: st.linear(x, m.matrix, m.bias)):
        with pytest.raises(TypeError, match=text):
            f(x)
    with pytest.raises(RuntimeError, match=text):
        torch.compile(m, backend="eager")(x)
    with pytest.raises(RuntimeError, match=text):
        m.to("meta")(x.to("meta"))
    with pytest.raises(
        TypeError, match="bias: expected dtype float32, that of y for W in float32 and x in float32, got float16"
    ):
        st.linear(X, M.matrix, torch.zeros(ROWS).half())
    with pytest.raises(
        TypeError, match="bias: expected dtype float32, that of y for W in float16 and x in float32, got float64"
    ):
        st.linear(X, layer("csr", "float16").matrix, torch.zeros(ROWS).double())


def test_a_rule_that_matches_other_parameters_names_one_and_its_layer() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(8, 32), torch.nn.Linear(32, 32), torch.nn.MultiheadAttention(32, 4))
    for rule, name, kind in (
        ("re:^0=csr", "0.weight", "Embedding"),
        ("1.bias=csr", "1.bias", "Linear"),
        ("re:out_proj.weight=csr", "2.out_proj.weight", "NonDynamicallyQuantizableLinear"),
    ):
        text = rf"; {name} is a parameter of {kind}, and only weights of torch\.nn\.Linear layers.* become sparse$"
        with pytest.raises(UsageError, match=text):
            st.sparsify(model, rule)
    st.sparsify(model, "1.weight=csr")
    with pytest.raises(UsageError, match=r"matches none of 0 tensors; 1\.weight is sparse already"):
        st.sparsify(model, "1.weight=bitmask")
    with pytest.raises(UsageError, match=r"rule 'nothing' matches none of 0 tensors$"):
        st.sparsify(model, "nothing=csr")


def test_a_dense_weight_is_not_assigned() -> None:
    m = layer("csr", "float32")
    for weight in (torch.nn.Parameter(m.weight), m.weight):
        with pytest.raises(UsageError, match=r"weight of a sparse layer is not assigned: .*fill\(matrix\).*densify"):
            m.weight = weight
    with pytest.raises(UsageError, match=r"weight of a sparse layer is not assigned"):
        torch.nn.utils.prune.l1_unstructured(m, "weight", 0.5)
    m.bias = torch.nn.Parameter(torch.zeros(ROWS))
    assert torch.equal(m(X), X @ m.weight.T)


def test_what_is_no_module_is_refused() -> None:
    state = torch.nn.Linear(32, 32).state_dict()
    calls: list[Any] = [
        lambda x: st.sparsify(x, "*=csr"), st.densify, st.freeze, st.fuse_projections,
        lambda x: st.load_into(x, torch.nn.Linear(32, 32)),
    ]  # fmt: skip
    for call in calls:
        for other, got in (
            (state, "collections.OrderedDict"),
            (None, "builtins.NoneType"),
            ("./model", "builtins.str"),
        ):
            with pytest.raises(UsageError, match=rf"^model: expected a torch\.nn\.Module, got {got}$"):
                call(other)
