"""Most bytes that ``from_pretrained`` of a packed folder allocates: those that stay, and the largest tensor once more."""

from __future__ import annotations

import gc
import itertools
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spformat.checkpoint import Recipe, Rule, convert_checkpoint

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'spformat[torch]'")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported
transformers = pytest.importorskip(
    "transformers", minversion="5", reason="transformers >= 5 is not installed: pip install 'spformat[hf]'"
)
pytest.importorskip("spformat.hf")

from torch.profiler import ProfilerActivity, profile  # noqa: E402

from spformat.hf.quantizer import SpformatQuantizer  # noqa: E402
from spformat.torch import SparseLinear  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # of torch 2.11

SLACK = 512 << 10
"""Bytes of Python's objects: names, headers, modules."""


def peak_bytes(work: Callable[[], Any], mapped: int) -> int:
    """Most bytes that numpy and Python, and at another moment perhaps torch, had allocated on the host during ``work``.

    mapped: bytes of the file that torch reports as allocated when it maps it, and tensors lie in.
    """
    gc.collect()  # models of before, whose end would count against what is allocated here
    tracemalloc.start()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            work()
        _, others = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()) if abs(e.nbytes()) != mapped]
    return others + max(itertools.accumulate(changes, initial=0))


def file_bytes(folder: Path) -> int:
    """Bytes of the only file of weights."""
    (file,) = folder.glob("*.safetensors")
    return file.stat().st_size


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama model of 18 MB: most of it is sparse, and its largest tensor is a dense embedding."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 1000}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**sizes | heads | {"tie_word_embeddings": False})
    root = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(root / "dense")
    return root


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def converted(folder: Path, target: str) -> tuple[Path, int, int]:
    """A packed folder, the bytes of its sparse layers, and of its file."""
    sparsity = None if target == "two-four" else 0.7
    recipe = Recipe("keep", (Rule("re:proj.weight$", target),), prune="magnitude", sparsity=sparsity)
    if not (folder / target).exists():
        convert_checkpoint(folder / "dense", folder / target, recipe, layout="transformers")
    layers = [m for m in load(folder / target).modules() if isinstance(m, SparseLinear)]  # compiles, too
    return folder / target, sum(layer.nbytes for layer in layers), file_bytes(folder / target)


@pytest.mark.parametrize("target", ["two-four", "bitmask", "csr"])
def test_loading_allocates_the_packed_bytes_and_one_tensor_more(folder: Path, target: str) -> None:
    packed, sparse, mapped = converted(folder, target)
    largest = 4 * 256 * 1000
    assert 2 * largest < sparse < mapped
    peak = peak_bytes(lambda: load(packed), mapped)
    assert sparse < peak <= sparse + largest + SLACK, f"{peak:,} bytes for layers of {sparse:,}"


def test_places_for_all_layers_would_be_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers allocates what it does not load: all sparse layers, if their buffers kept their sizes."""
    packed, sparse, mapped = converted(folder, "two-four")
    monkeypatch.setattr(SpformatQuantizer, "_forget_sizes", lambda self: None)
    assert peak_bytes(lambda: load(packed), mapped) > 2 * sparse


def test_a_computed_device_map_counts_the_sparse_layers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" has the sizes of the layers while it divides the model, and they are forgotten afterwards."""
    packed, sparse, mapped = converted(folder, "two-four")
    seen = []
    forget = SpformatQuantizer._forget_sizes

    def noted(self: Any) -> None:
        seen.append(sum(layer.nbytes for layer in self._sized))
        forget(self)

    monkeypatch.setattr(SpformatQuantizer, "_forget_sizes", noted)
    model = load(packed, device_map="auto")
    assert seen == [sparse]
    assert sum(m.nbytes for m in model.modules() if isinstance(m, SparseLinear)) == sparse
    peak = peak_bytes(lambda: load(packed, device_map="auto"), mapped)
    assert peak < 1.5 * sparse
