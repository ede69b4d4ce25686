"""Sparse layers in torch's data parallelism, on one process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'spformat[torch]'")

from torch_layers import DEPTH, ROWS, layer, tokens  # noqa: E402


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A process group. What a test has made of it is freed first: torch can wait forever when it frees a group last."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    gc.collect()
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_data_parallel_keeps_the_buffers_in_step() -> None:
    """DDP broadcasts every buffer before a product, which gloo and NCCL do for few dtypes."""
    m = torch.nn.Sequential(*(layer(fmt) for fmt in ("two-four", "vector-nm")), torch.nn.Linear(ROWS, 2).half())
    m = torch.nn.Sequential(m[0], torch.nn.Linear(ROWS, DEPTH).half(), *m[1:])
    parallel = torch.nn.parallel.DistributedDataParallel(m)
    parallel(tokens(2)).sum().backward()
    assert m[1].weight.grad is not None


@pytest.mark.usefixtures("one_process")
def test_fully_sharded_parameters_beside_sparse_weights() -> None:
    """FSDP frees a gathered bias after each product by resizing its memory."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    m = torch.nn.Sequential(layer("csr", "float32"), torch.nn.Linear(ROWS, DEPTH), layer("two-four", "float32"))
    m.requires_grad_(True)
    x = tokens(2, dtype="float32")
    expected = m(x)
    mesh = init_device_mesh("cpu", (1,))
    for part in (*m, m):
        fully_shard(part, mesh=mesh)
    for _ in range(2):
        y = m(x)
        y.sum().backward()
    assert torch.equal(y, expected)
    assert m[0].bias.grad.full_tensor().any()


def test_memory_of_operands_keeps_its_abilities() -> None:
    m = layer("csr", "float32")
    m(tokens(2, dtype="float32"))
    assert m.bias.untyped_storage().resizable()
