"""Products of torch tensors: a gradient is never dropped silently; on a device, torch's stream, allocator and graphs."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import spformat as sf
from spformat.arrays import torch_tensors

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'spformat[torch]'")

ROWS, DEPTH, TOKENS = 96, 128, 24


PARAMS = {
    "vector-nm": {"n": 2, "m": 4, "vector_length": 32},
    "bsr": {"blocksize": (16, 16)},
    "dbsr": {"blocksize": (16, 16)},
}


def weights() -> np.ndarray[Any, Any]:
    """Small integers that every format holds: two of four columns, in every vector of 32 rows the same ones."""
    rng = np.random.default_rng(3)
    keep = rng.permuted(np.tile([1, 1, 0, 0], (ROWS // 32, DEPTH // 4, 1)), axis=2).reshape(ROWS // 32, DEPTH)
    values = rng.integers(1, 4, (ROWS, DEPTH)) * rng.choice([-1, 1], (ROWS, DEPTH))
    return np.asarray(values * keep.repeat(32, 0), np.float16)


def test_operands_on_several_devices_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    a, x = sf.convert(np.eye(3, dtype=np.float32), "csr"), torch.ones(3, 2)
    with pytest.raises(
        sf.errors.UsageError, match=r"^bias is on meta, B on cpu; nothing is copied .* use bias\.to\(B\.device\)"
    ):
        sf.spmm(a, x, bias=torch.ones(3, device="meta"))
    with pytest.raises(sf.errors.UsageError, match=r"^out is on meta, x on cpu; .*use out\.to\(x\.device\)"):
        sf.linear(x.T, a, out=torch.ones(2, 3, device="meta"))
    monkeypatch.setattr(sf.CSR, "device", "cuda:0")
    with pytest.raises(sf.errors.UsageError, match=r"^A is on cuda:0, B on cpu; .*use B\.cuda\(\), or A\.to\('cpu'\)"):
        sf.spmm(a, x)
    with pytest.raises(sf.errors.UsageError, match=r"^W is on cuda:0, x on cpu; .*use x\.cuda\(\), or W\.to\('cpu'\)"):
        sf.linear(x.T, a)


@pytest.mark.parametrize("linear", [False, True])
def test_torch_counts_what_a_product_writes(linear: bool) -> None:
    """Otherwise autograd would use the new contents for a gradient that needs the old ones."""
    a, x = sf.convert(np.eye(3, dtype=np.float32), "csr"), torch.full((3, 3), 5.0)
    out, factor = torch.ones(3, 3), torch.ones(3, 3, requires_grad=True)
    y = (factor * out[:, 1:2]).sum()
    sf.linear(x, a, out=out) if linear else sf.spmm(a, x, out=out)
    assert torch.equal(out, x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    with torch.inference_mode():
        uncounted = torch.ones(3, 3)
        sf.linear(x, a, out=uncounted) if linear else sf.spmm(a, x, out=uncounted)
        assert torch.equal(uncounted, x)


def test_memory_with_other_signs_than_its_tensor_is_not_shared() -> None:
    """An array would have the signs of the memory. No GPU is needed: what CuPy gets is an address."""
    imaginary = torch.complex(torch.zeros(2), torch.ones(2)).conj()
    for t in (imaginary, imaginary.imag, torch._neg_view(torch.ones(2, dtype=torch.bfloat16))):
        for share in (torch_tensors.torch_to_array, lambda t: torch_tensors._device_array(t, lambda *at: at)):
            with pytest.raises(sf.errors.UsageError, match=r"(?i)its memory cannot be shared .* use tensor\.resolve_"):
                share(t)


def test_leading_dimensions_that_are_not_one() -> None:
    x = torch.arange(2 * 5 * 4.0).reshape(2, 5, 4)
    for t, shared in ((x, True), (x[:, -1:], True), (x[:, :3], False), (x[:0], True), (x[..., :0], True)):
        got = torch_tensors.mergeable(t)
        assert torch.equal(got, t)
        assert got.shape == t.shape
        assert not t.numel() or (got.data_ptr() == t.data_ptr()) == shared
        got.view(got.shape[0] * got.shape[1], got.shape[2])  # raises where that needs a copy


def test_on_a_device_they_are_made_one_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy stands in for CuPy."""
    a, seen = sf.convert(np.eye(4, dtype=np.float32), "csr"), []
    monkeypatch.setattr(sf.CSR, "device", "cuda:0")

    def array(t: Any) -> Any:
        x = t.as_subclass(torch.Tensor).numpy()
        seen.append(np.shares_memory(x, x.reshape(-1, 4)))
        return x

    monkeypatch.setattr("spformat.dispatch.api.TorchStream", lambda t: contextlib.nullcontext(array))
    x = torch.ones(2, 5, 4)[:, :3].as_subclass(OnDevice)
    with pytest.raises(sf.errors.UsageError, match="A is on cuda:0, B on cpu"):  # as far as it goes without one
        sf.linear(x, a)
    assert seen == [True, True]


class OnDevice(torch.Tensor):  # type: ignore[name-defined, misc]
    """A tensor that says it is on a device."""

    is_cuda = True


@pytest.mark.parametrize("linear", [False, True])
def test_an_operand_of_no_value_type_is_named_on_a_device_too(linear: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    a = sf.convert(np.eye(3, dtype=np.float32), "csr")
    monkeypatch.setattr(sf.CSR, "device", "cuda:0")
    shared = contextlib.nullcontext(lambda t: t.as_subclass(torch.Tensor).numpy())
    monkeypatch.setattr("spformat.dispatch.api.TorchStream", lambda t: shared)
    x = torch.ones(3, 3, dtype=torch.int64).as_subclass(OnDevice)
    name = "x" if linear else "B"
    with pytest.raises(sf.errors.ArrayError, match=rf"^{name}: dtype int64 is not .*as by {name}\.astype"):
        sf.linear(x, a) if linear else sf.spmm(a, x)


class Stream:
    """A stream of CuPy that records what it waits for."""

    def __init__(self, ptr: int, log: list[Any], capturing: bool = False) -> None:
        self.ptr, self.log, self.capturing = ptr, log, capturing

    def is_capturing(self) -> bool:
        return self.capturing

    def record(self) -> int:
        return self.ptr

    def wait_event(self, event: int) -> None:
        self.log.append((self.ptr, "after", event))

    def __enter__(self) -> None:
        self.log.append(("on", self.ptr))

    def __exit__(self, *_: object) -> None:
        self.log.append(("off", self.ptr))


@pytest.mark.parametrize(
    ("theirs", "capturing", "seen"),
    [
        (0, False, [("on", 0), ("off", 0)]),
        (5, False, [(5, "after", 0), ("on", 5), ("off", 5)]),
        (5, True, [("on", 5), ("off", 5)]),
    ],
)
def test_whose_stream_waits(theirs: int, capturing: bool, seen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: the calls that CuPy gets."""
    log: list[Any] = []
    cuda = SimpleNamespace(
        get_current_stream=lambda: Stream(0, log),
        Stream=SimpleNamespace(from_external=lambda t: Stream(t.__cuda_stream__()[1], log, capturing)),
        Device=lambda device: Stream(-device, log),
        runtime=SimpleNamespace(getDevice=lambda: 0),
    )
    monkeypatch.setattr(torch_tensors, "_cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(torch_tensors, "_stream", torch_tensors._stream.__wrapped__)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=theirs + device))
    with torch_tensors.TorchStream(SimpleNamespace(is_cuda=True, get_device=lambda: 0)):
        assert log[-1] == ("on", theirs)
    assert log == seen
    log.clear()
    with torch_tensors.TorchStream(SimpleNamespace(is_cuda=True, get_device=lambda: 1)):
        assert log[0] == ("on", -1)
        assert log[-1] == ("on", theirs + 1)
    assert log[-1] == ("off", -1)
    monkeypatch.delattr(torch.cuda, "current_stream")
    with pytest.raises(AttributeError), torch_tensors.TorchStream(SimpleNamespace(is_cuda=True, get_device=lambda: 1)):
        pass
    assert log[-2:] == [("on", -1), ("off", -1)]


# ------------------------------------------------------------------ on a GPU


def on_device(x: np.ndarray[Any, Any]) -> Any:
    return torch.from_numpy(x).cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", [f.name for f in sf.FORMATS])
def test_work_goes_to_the_current_stream_of_torch(fmt: str) -> None:
    """CuPy's own stream is busy with something else; what reads the result is queued at once."""
    from spformat.backends.cuda.runtime.hold import hold

    rng = np.random.default_rng(4)
    w, first, then = weights(), *(rng.integers(-3, 4, (2, DEPTH, TOKENS)).astype(np.float16))
    W, wanted = sf.convert(w, fmt, **PARAMS.get(fmt, {})).to("cuda"), on_device(w @ then)
    B, C = on_device(first), torch.full((ROWS, TOKENS), torch.nan, dtype=torch.float16, device="cuda")
    sf.spmm(W, B, out=torch.empty_like(C)), sf.spmm(W, B)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        hold(50_000)
        B.copy_(on_device(then))
        sf.spmm(W, B, out=C)
        written, made = C.clone(), sf.spmm(W, B)
        row = sf.linear(B.T.contiguous(), W)
        torch.cuda.current_stream().synchronize()
        assert torch.equal(written, wanted)
        assert torch.equal(made, wanted)
        assert torch.equal(row, wanted.T)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fmt", [f.name for f in sf.FORMATS])
def test_a_graph_of_torch(fmt: str, bias: bool) -> None:
    """Captured in torch's way, which forbids allocations that the driver sees, and replayed with other values."""
    rng = np.random.default_rng(5)
    w = weights()
    W, b = sf.convert(w, fmt, **PARAMS.get(fmt, {})).to("cuda"), on_device(rng.integers(-9, 9, ROWS).astype(np.float16))
    x = torch.zeros((TOKENS, DEPTH), dtype=torch.float16, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            sf.linear(x, W, b if bias else None)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sf.linear(x, W, b if bias else None)
        z = sf.linear(x, W, b if bias else None)
    for seed in (6, 7):
        values = on_device(np.random.default_rng(seed).integers(-3, 4, (TOKENS, DEPTH)).astype(np.float16))
        x.copy_(values)
        y.fill_(torch.nan), z.fill_(torch.nan)
        graph.replay()
        wanted = torch.nn.functional.linear(values.float(), on_device(w).float(), b.float() if bias else None).half()
        assert torch.equal(y, wanted)
        assert torch.equal(z, wanted)
