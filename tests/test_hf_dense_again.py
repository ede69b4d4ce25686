"""Hugging Face transformers: models whose sparse layers became dense again."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hf_installed import hf, torch, transformers

import spformat as sf
import spformat.torch as st
from spformat.torch import SparseLinear

RULE = "re:_proj=csr"


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=32)
    return transformers.LlamaForCausalLM(config).eval()


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def in_memory(tmp_path: Path) -> Any:
    model = llama()
    hf.sparsify(model, RULE, prune=True, sparsity=0.5)
    return model


def from_folder(tmp_path: Path) -> Any:
    in_memory(tmp_path).save_pretrained(tmp_path / "packed")
    return load(tmp_path / "packed")


def while_loading(tmp_path: Path) -> Any:
    llama().save_pretrained(tmp_path / "source")
    return load(tmp_path / "source", quantization_config=hf.SpformatConfig(RULE, prune=True, sparsity=0.5))


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.arange(18).view(2, 9)).logits


def count(model: Any) -> int:
    return sum(isinstance(m, SparseLinear) for m in model.modules())


def is_dense_folder(folder: Path) -> bool:
    config = json.loads((folder / "config.json").read_text())
    return (folder / "model.safetensors").exists() and "quantization_config" not in config


@pytest.mark.parametrize("way", ["densify", "dequantize"])
@pytest.mark.parametrize("build", [in_memory, from_folder, while_loading])
def test_transformers_saves_it_as_a_model_that_never_was_sparse(build: Any, way: str, tmp_path: Path) -> None:
    model = build(tmp_path)
    if way == "densify":
        assert len(st.densify(model)) == 14
    else:
        assert model.dequantize() is model
    assert count(model) == 0
    for part, name in ((model, "whole"), (model.model, "part")):
        assert not {"save_pretrained", "dequantize", "hf_quantizer"} & vars(part).keys()
        part.save_pretrained(tmp_path / name)
        assert is_dense_folder(tmp_path / name)
    again = load(tmp_path / "whole")
    assert torch.equal(logits(again), logits(model))
    copy.deepcopy(model).half()  # which transformers refuses if it takes a model for a quantized one
    hf.sparsify(model, RULE)
    model.save_pretrained(tmp_path / "sparse")
    assert count(load(tmp_path / "sparse")) == 14
    assert torch.allclose(logits(load(tmp_path / "sparse")), logits(again), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("build", [in_memory, from_folder])
def test_a_model_whose_layers_were_made_dense_one_by_one_is_saved_as_a_dense_model(build: Any, tmp_path: Path) -> None:
    """Nobody tells the model then."""
    model = build(tmp_path)
    st.densify(model.model.layers)
    assert count(model) == 0
    for i, save in enumerate([model.save_pretrained, lambda folder: hf.save_pretrained(model, folder)]):
        save(tmp_path / str(i))
        assert is_dense_folder(tmp_path / str(i))
        assert torch.equal(logits(load(tmp_path / str(i))), logits(model))
    model.save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    assert len(list((tmp_path / "parts").glob("model-*.safetensors"))) > 1
    with pytest.raises(sf.errors.OutputError, match="overwrite=True"):
        model.save_pretrained(tmp_path / "parts", overwrite=False)
    model.save_pretrained(tmp_path / "of another process", is_main_process=False)
    assert not list((tmp_path / "of another process").glob("*.safetensors"))


def test_dequantize_changes_no_dtype_unless_asked(tmp_path: Path) -> None:
    """transformers keeps rotary frequencies in float32 in a model of 16 bits; casting them changes what it computes."""
    from_folder(tmp_path)
    model = load(tmp_path / "packed", dtype=torch.bfloat16)
    dtypes = {name: b.dtype for name, b in model.named_buffers() if "inv_freq" in name}
    assert set(dtypes.values()) == {torch.float32}
    model.dequantize()
    assert {name: b.dtype for name, b in model.named_buffers()} == dtypes
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    model.save_pretrained(tmp_path / "dense")
    assert torch.equal(logits(load(tmp_path / "dense", dtype=torch.bfloat16)), logits(model))
    model = load(tmp_path / "packed", dtype=torch.bfloat16).dequantize(torch.float32)
    assert {t.dtype for t in model.state_dict().values()} == {torch.float32}


def test_dequantize_casts_values_that_no_dense_layer_multiplies(tmp_path: Path) -> None:
    model = llama()
    up = model.model.layers[0].mlp.up_proj
    up.weight.data = torch.randint(-3, 4, up.weight.shape).float()
    expected = logits(model)
    model.model.layers[0].mlp.up_proj = SparseLinear(sf.convert(up.weight.detach().to(torch.int8), "csr"))
    hf.save_pretrained(model, tmp_path / "packed")
    model = load(tmp_path / "packed")
    assert model.model.layers[0].mlp.up_proj.dtype is torch.int8
    assert torch.equal(logits(model.dequantize()), expected)


@pytest.mark.parametrize("shard", ["5GB", "40KB"])
def test_a_dense_model_over_a_packed_folder_is_not_read_as_the_packed_one(shard: str, tmp_path: Path) -> None:
    """transformers leaves the packed files, with the weights of before, and writes a config.json of the dense ones."""
    model = from_folder(tmp_path).dequantize()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    model.save_pretrained(tmp_path / "packed", max_shard_size=shard)
    assert torch.equal(logits(load(tmp_path / "packed")), logits(model))
    for read in (sf.open, lambda folder: st.load_into(llama(), folder)):
        with pytest.raises(sf.errors.ContainerError, match=r"two models: config\.json is that of model\.safetensors"):
            read(tmp_path / "packed")
    hf.sparsify(model, RULE)
    model.save_pretrained(tmp_path / "packed")
    assert torch.equal(logits(load(tmp_path / "packed")), logits(model))
    st.load_into(again := llama(), tmp_path / "packed")
    assert torch.equal(logits(again), logits(model))
