"""Hugging Face transformers: the models inside a model with sparse layers."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hf_installed import hf, torch, transformers

import spformat as sf
import spformat.torch as st
from spformat.checkpoint.layouts import GUARD
from spformat.torch import SparseLinear

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128,
    "max_position_embeddings": 32,
}  # fmt: skip
IDS = torch.arange(18).view(2, 9)


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)).eval()


def encoder_decoder() -> Any:
    one = transformers.BertConfig(**SIZES)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(one, transformers.BertConfig(**SIZES))
    return transformers.EncoderDecoderModel(config).eval()


def llava() -> Any:
    vision = {k: v for k, v in SIZES.items() if "embeddings" not in k and "vocab" not in k}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision, image_size=16, patch_size=8),
        text_config=transformers.LlamaConfig(**SIZES), image_token_index=127,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config).eval()


def sparsified(model: Any, rule: str) -> Any:
    hf.sparsify(model, rule, prune=True, sparsity=0.5)
    return model


def loaded(model: Any, rule: str, folder: Path) -> Any:
    """The model that from_pretrained makes of a packed folder."""
    sparsified(model, rule).save_pretrained(folder)
    return type(model).from_pretrained(folder)


def output(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=IDS)[0]


def count(model: Any) -> int:
    return sum(isinstance(m, SparseLinear) for m in model.modules())


PARTS = {
    "the config of its own": (encoder_decoder, "encoder", "re:query=csr"),
    "a language model": (llava, "model.language_model", "re:language_model.*_proj.weight=csr"),
    "the config of the whole": (llama, "model", "re:_proj=csr"),
}


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize(("build", "name", "rule"), PARTS.values(), ids=PARTS)
def test_a_part_of_a_model_saves_itself(build: Any, name: str, rule: str, in_memory: bool, tmp_path: Path) -> None:
    """transformers would write arrays that it does not read again, and draw random numbers for the weights."""
    model = sparsified(build(), rule) if in_memory else loaded(build(), rule, tmp_path / "whole")
    part = model.get_submodule(name)
    part.save_pretrained(tmp_path / "part")
    again, info = transformers.AutoModel.from_pretrained(tmp_path / "part", output_loading_info=True)
    assert not any(info.values()), info
    assert count(again) == count(part) > 0
    assert torch.equal(output(again), output(part))
    model.save_pretrained(tmp_path / "again")  # as before
    whole = type(model).from_pretrained(tmp_path / "again")
    assert count(whole) == count(model)
    assert torch.equal(output(whole.get_submodule(name)), output(part))


def test_transformers_alone_does_not_load_a_part(tmp_path: Path) -> None:
    loaded(llama(), "re:_proj=csr", tmp_path / "whole").model.save_pretrained(tmp_path / "part")
    code = f"import transformers; transformers.AutoModel.from_pretrained({str(tmp_path / 'part')!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 1
    assert GUARD in done.stderr.strip().splitlines()[-1], done.stderr[-500:]


@pytest.mark.parametrize(("build", "name", "rule"), [(encoder_decoder, "encoder", "re:decoder.*query=csr"),
                                              (llama, "model", "lm_head.weight=csr")])  # fmt: skip
def test_a_part_without_sparse_layers_is_saved_as_a_dense_model(
    build: Any, name: str, rule: str, tmp_path: Path
) -> None:
    model = loaded(build(), rule, tmp_path / "whole")
    model.get_submodule(name).save_pretrained(tmp_path / "part")
    assert (tmp_path / "part" / "model.safetensors").exists()
    assert "quantization_config" not in json.loads((tmp_path / "part" / "config.json").read_text())
    again = transformers.AutoModel.from_pretrained(tmp_path / "part")
    assert torch.equal(output(again), output(model.get_submodule(name)))
    assert model.config.quantization_config.quant_method == "spformat"


def test_parts_of_copies_save_themselves(tmp_path: Path) -> None:
    model = loaded(llama(), "re:_proj=csr", tmp_path / "whole")
    for i, other in enumerate([copy.deepcopy(model), pickle.loads(pickle.dumps(model))]):
        with torch.no_grad():
            other.model.norm.weight.fill_(2)
        other.model.save_pretrained(tmp_path / str(i))
        assert (transformers.AutoModel.from_pretrained(tmp_path / str(i)).norm.weight == 2).all()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", ["a part alone", "a layer by hand"])
def test_a_model_that_does_not_know_of_its_sparse_layers_is_not_saved_as_noise(
    how: str, fused: bool, tmp_path: Path
) -> None:
    """transformers would write arrays that it does not read again, and draw random numbers for the weights."""
    model = llama()
    if how == "a part alone":
        hf.sparsify(model.model, "re:[qkv]_proj=csr")
    else:
        attention = model.model.layers[0].self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(attention, name, SparseLinear.from_linear(getattr(attention, name), "csr"))
    if fused:
        st.fuse_projections(model)
    with pytest.raises(
        sf.errors.UsageError, match=r"import spformat\.hf, and call spformat\.hf\.save_pretrained\(model"
    ):
        model.save_pretrained(tmp_path / "whole")
    assert not list(tmp_path.glob("whole/*.safetensors"))
    hf.save_pretrained(model, tmp_path / "whole")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert count(again) == (6 if how == "a part alone" else 3)
    assert torch.allclose(output(again), output(model), atol=1e-5)
    st.densify(model)
    model.save_pretrained(tmp_path / "dense")
    assert torch.equal(output(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense")), output(model))
