"""LoRA of PEFT on sparse layers."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hf_installed import hf, torch
from hf_llama import ids, llama, load, logits, packed_beside, sparse_layers

import spformat as sf
import spformat.torch


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "dense"
    llama().save_pretrained(folder)
    return packed_beside(folder)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft calls it
def test_lora_trains_beside_sparse_weights(packed: Path, tmp_path: Path) -> None:
    """The gradients are those of the same adapter on the masked dense model; the sparse weights do not change."""
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")

    def adapted(model: Any) -> Any:
        torch.manual_seed(3)
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], r=4, init_lora_weights=False)
        return peft.get_peft_model(model, hf.with_sparse_layers(config)).train()

    sparse, dense = adapted(load(packed)), adapted(load(packed).dequantize())
    before = {name: layer.weight for name, layer in sparse_layers(sparse).items()}
    gradients = []
    for model in (sparse, dense):
        model(ids(), labels=ids()).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert len(gradients[0]) == 2 * 2 * 3
    for name, g in gradients[0].items():
        expected = gradients[1][name]
        assert expected.abs().max() > 0
        assert torch.allclose(g, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())), name
    optimizer = torch.optim.SGD([p for p in sparse.parameters() if p.requires_grad], lr=0.5)
    loss = sparse(ids(), labels=ids()).loss
    optimizer.step()
    assert sparse(ids(), labels=ids()).loss < loss
    assert all(torch.equal(layer.weight, before[name]) for name, layer in sparse_layers(sparse).items())
    with pytest.raises(sf.errors.UsageError, match="dequantize"):
        sparse.merge_adapter()
    sparse.eval().save_pretrained(tmp_path / "adapter")
    config = hf.with_sparse_layers(peft.PeftConfig.from_pretrained(tmp_path / "adapter"))
    again = peft.PeftModel.from_pretrained(load(packed), tmp_path / "adapter", config=config)
    assert torch.equal(logits(again), logits(sparse))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft calls it
@pytest.mark.parametrize("how", ["dequantize", "densify"])
def test_adapters_are_merged_after_the_layers_below_became_dense(how: str, packed: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
    model = peft.get_peft_model(load(packed), hf.with_sparse_layers(config)).eval()
    expected = logits(model)
    with pytest.raises(sf.errors.UsageError, match="dequantize"):
        model.merge_and_unload()
    if how == "dequantize":
        model.base_model.model.dequantize()
    else:
        spformat.torch.densify(model)
    model.add_adapter("another", hf.with_sparse_layers(peft.LoraConfig(target_modules=["q_proj"], r=4)))
    model.delete_adapter("another")
    merged = model.merge_and_unload()
    assert torch.allclose(logits(merged), expected, atol=1e-5)
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(load(tmp_path / "merged")), logits(merged))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft calls it
def test_a_model_with_adapters_is_pickled(packed: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    config = peft.LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights=False)
    model = peft.get_peft_model(load(packed), hf.with_sparse_layers(config)).eval()
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(logits(again), logits(model))
    again.add_adapter("another", hf.with_sparse_layers(peft.LoraConfig(target_modules=["q_proj"], r=4)))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft calls it
def test_a_layer_below_an_adapter_of_peft_does_not_become_sparse() -> None:
    """Its merge() adds to ``weight``, a new tensor at every access: the adapter was lost without a word."""
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    rule = "re:self_attn.*weight$=csr"
    with pytest.raises(
        sf.errors.UsageError, match=r"q_proj\.base_layer\.weight': .*adapter of PEFT.*with_sparse_layers"
    ):
        spformat.torch.sparsify(model, rule)
    assert not sparse_layers(model)
    assert spformat.torch.sparsify(model, r"re:k_proj.weight$=csr")
    sparse = llama()
    hf.sparsify(sparse, "re:q_proj.weight$=csr")
    config = hf.with_sparse_layers(peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    again = peft.get_peft_model(sparse, config)
    spformat.torch.densify(again)
    assert spformat.torch.sparsify(again, "re:q_proj.base_layer.weight$=csr")  # the adapter knows sparse layers
    with pytest.raises(sf.errors.UsageError, match="not merged"):
        again.merge_adapter()
