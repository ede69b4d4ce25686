"""Matrices in the format dense in packed folders, which transformers loads as plain tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
from hf_installed import hf, torch, transformers
from hf_llama import PROJECTIONS, llama, load, logits, packed_beside, sparse_layers

import spformat as sf
from spformat.checkpoint import Recipe, Rule, convert_checkpoint


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "dense"
    llama().save_pretrained(folder)
    return packed_beside(folder)


MATRICES = {"layers": PROJECTIONS, "all": "re:.*"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pattern", MATRICES.values(), ids=MATRICES)
def test_matrices_that_are_smallest_dense_are_loaded(pattern: str, tied: bool, tmp_path: Path) -> None:
    """``auto`` stores them in the format dense, whose array has another name in the file than a plain tensor."""
    model = llama(tie_word_embeddings=tied)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[:, ::2] = 0
    model.save_pretrained(tmp_path / "dense")
    convert_checkpoint(
        tmp_path / "dense", tmp_path / "packed", Recipe("keep", (Rule(pattern, "auto"),)), layout="transformers"
    )
    again, info = load(tmp_path / "packed", output_loading_info=True)
    assert not any(info.values()), info
    assert list(sparse_layers(again)) == ["model.layers.0.mlp.up_proj"]
    assert torch.allclose(logits(again), logits(model), atol=1e-6)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again")), logits(again))
    part = transformers.AutoModel.from_pretrained(tmp_path / "packed")
    assert torch.equal(part.embed_tokens.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize("share", [0, 0.75])
def test_layers_that_auto_leaves_dense_go_round(share: float, tmp_path: Path) -> None:
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[: round(share * 64)] = 0
    hf.sparsify(model, f"{PROJECTIONS}=auto")
    assert {m.description.format == "dense" for m in sparse_layers(model).values()} == {True, share == 0}
    model.save_pretrained(tmp_path / "packed")
    again, info = load(tmp_path / "packed", output_loading_info=True)
    assert not any(info.values()), info
    assert len(sparse_layers(again)) == (share > 0)
    assert torch.allclose(logits(again), logits(model), atol=1e-6)
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again")), logits(again))


def test_what_a_model_lacks_is_reported_of_a_folder_of_dense_matrices(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "dense")
    convert_checkpoint(tmp_path / "dense", tmp_path / "packed", "auto", layout="transformers")
    _, info = transformers.AutoModel.from_pretrained(tmp_path / "packed", output_loading_info=True)
    assert info["unexpected_keys"] == {"lm_head.weight"}


def test_a_dense_matrix_that_transformers_does_not_ask_for_is_an_error(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a release that has no such names: it would leave the weight to random numbers."""
    recipe_of_dense = Recipe("keep", (Rule("re:gate_proj.weight$", "dense"),))
    convert_checkpoint(packed, tmp_path / "packed", recipe_of_dense, layout="transformers")
    monkeypatch.setattr(hf.SpformatQuantizer, "get_weight_conversions", lambda self: [])
    with pytest.raises(sf.errors.UsageError, match=r"layers\.0\.mlp\.gate_proj\.weight.*format dense"):
        load(tmp_path / "packed")
