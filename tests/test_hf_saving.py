"""Hugging Face transformers: what save_pretrained writes of a state dict that the caller gives, and of configs."""

from __future__ import annotations

import gc
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from hf_installed import hf, torch
from hf_llama import llama, load, logits, sparse_layers

import spformat as sf
import spformat.torch as st


def sparse(**settings: Any) -> Any:
    model = llama(**settings)
    hf.sparsify(model, "re:proj.weight$=bitmask", prune=True, sparsity=0.5)
    return model


# ------------------------------------------------------------------ a given state dict


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_given_state_dict_is_what_is_written(tied: bool, fused: bool, tmp_path: Path) -> None:
    model = sparse(tie_word_embeddings=tied)
    expected = logits(model)
    if fused:
        st.fuse_projections(model)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    with torch.no_grad():
        model.model.norm.weight.fill_(2)
        for layer in sparse_layers(model).values():
            if layer.has_buffers:
                layer.weight_data.mul_(2)
    model.save_pretrained(tmp_path / "given", state_dict=state)
    assert torch.equal(logits(load(tmp_path / "given")), expected)
    hf.save_pretrained(model, tmp_path / "own", state_dict=model.state_dict())
    model.save_pretrained(tmp_path / "plain")
    for file in (tmp_path / "plain").iterdir():
        assert file.read_bytes() == (tmp_path / "own" / file.name).read_bytes()


def test_a_given_state_dict_in_another_dtype(tmp_path: Path) -> None:
    model = sparse()
    state = {name: t.bfloat16() if t.is_floating_point() else t for name, t in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=state)
    again = load(tmp_path, dtype="bfloat16").state_dict()
    assert again.keys() == state.keys()
    assert all(torch.equal(t, state[name]) for name, t in again.items())


def test_a_state_dict_without_some_tensors_is_refused(tmp_path: Path) -> None:
    model = sparse()
    state = model.state_dict()
    lacking = {name: t for name, t in state.items() if name != "model.layers.0.mlp.up_proj.weight_data"}
    with pytest.raises(sf.errors.UsageError, match=r"state_dict: .*lacks model\.layers\.0\.mlp\.up_proj\.weight_data"):
        model.save_pretrained(tmp_path / "x", state_dict=lacking)
    wrapped = {f"module.{name}": t for name, t in state.items()}
    with pytest.raises(sf.errors.UsageError, match=r"state_dict: .*lacks lm_head\.weight and \d+ more"):
        model.save_pretrained(tmp_path / "x", state_dict=wrapped)
    state["model.layers.0.mlp.up_proj.weight_data"] = state["model.layers.0.mlp.up_proj.weight_data"][1:]
    with pytest.raises(sf.errors.SpformatError, match=r"model\.layers\.0\.mlp\.up_proj\.weight"):
        model.save_pretrained(tmp_path / "x", state_dict=state)
    assert not list(tmp_path.glob("x/*.safetensors"))


def test_a_given_state_dict_of_a_dense_model_goes_to_transformers(tmp_path: Path) -> None:
    model = sparse().dequantize()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    expected = logits(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    hf.save_pretrained(model, tmp_path, state_dict=state)
    assert torch.equal(logits(load(tmp_path)), expected)


def test_accelerate_saves_as_its_documentation_says(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(sparse())
    accelerator.unwrap_model(model).save_pretrained(
        tmp_path, is_main_process=accelerator.is_main_process, save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model), distributed_checkpoint=False,
    )  # fmt: skip
    assert torch.equal(logits(load(tmp_path)), logits(model))


# ------------------------------------------------------------------ models that are not plain ones of transformers


def test_code_of_a_model_of_its_own_goes_into_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modeling_tiny.py").write_text(
        "import torch\nfrom transformers import PreTrainedModel, PretrainedConfig\n"
        "class Config(PretrainedConfig):\n    model_type = 'tiny'\n"
        "class Tiny(PreTrainedModel):\n    config_class = Config\n"
        "    def __init__(self, config):\n        super().__init__(config)\n"
        "        self.up = torch.nn.Linear(32, 32)\n        self.post_init()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    tiny = importlib.import_module("modeling_tiny")
    tiny.Config.register_for_auto_class()
    tiny.Tiny.register_for_auto_class("AutoModel")
    model = tiny.Tiny(tiny.Config())
    hf.sparsify(model, "up.weight=csr")
    model.save_pretrained(tmp_path / "packed")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert config["auto_map"] == {"AutoConfig": "modeling_tiny.Config", "AutoModel": "modeling_tiny.Tiny"}
    assert (tmp_path / "packed" / "modeling_tiny.py").read_text() == (tmp_path / "modeling_tiny.py").read_text()


def test_a_model_of_fsdp_is_saved_from_the_state_dict_that_is_gathered(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = sparse()
    expected = logits(model)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh)
        with pytest.raises(
            sf.errors.UsageError, match=r"is divided between processes: give state_dict=, as .*get_state_"
        ):
            model.save_pretrained(tmp_path / "packed")
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        model.save_pretrained(tmp_path / "packed", state_dict=state)
    finally:
        model = part = state = None
        gc.collect()
        torch.distributed.destroy_process_group()
    assert torch.equal(logits(load(tmp_path / "packed")), expected)
    assert json.loads((tmp_path / "packed" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


# ------------------------------------------------------------------ what cannot be saved


def test_configs_that_are_refused_leave_the_folder_as_it_was(tmp_path: Path) -> None:
    sparse().save_pretrained(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def is_refused(model: Any, error: type[Exception], text: str) -> None:
        model.config.use_cache = False
        with pytest.raises(error, match=text):
            model.save_pretrained(tmp_path)
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before

    model = sparse()
    model.generation_config.temperature = 0.5  # without do_sample
    is_refused(model, ValueError, "GenerationConfig is invalid")
    model = sparse()
    model.config.note = object()
    is_refused(model, TypeError, "not JSON serializable")
    model = sparse()
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    is_refused(model, sf.errors.UsageError, "the model is quantized by 'gptq', too.*del model.config")


def test_a_layer_whose_arrays_are_damaged_is_named(tmp_path: Path) -> None:
    model = sparse()
    model.model.layers[1].mlp.up_proj.weight_data[0] = 0
    with pytest.raises(
        sf.errors.PatternError, match=r"^tensor 'model\.layers\.1\.mlp\.up_proj\.weight': bitmask: data"
    ):
        model.save_pretrained(tmp_path)


def test_a_size_of_shards_that_is_no_whole_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sf.errors.UsageError, match=r"max_shard_size: expected bytes as an int or a text .*got 1\.5"):
        sparse().save_pretrained(tmp_path / "x", max_shard_size=1.5)


def test_without_overwrite_an_earlier_model_stays_as_it_is(tmp_path: Path) -> None:
    model = sparse()
    model.save_pretrained(tmp_path / "packed")
    llama().save_pretrained(tmp_path / "dense")
    model.config.use_cache = False
    for folder in (tmp_path / "packed", tmp_path / "dense"):
        before = {file.name: file.read_bytes() for file in folder.iterdir()}
        with pytest.raises(sf.errors.OutputError, match=r"already; use overwrite=True"):
            model.save_pretrained(folder, overwrite=False)
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
