"""Hugging Face transformers: packed folders of several architectures, and adapters that are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hf_installed import hf, torch, transformers

import spformat as sf
import spformat.torch as st
from spformat.checkpoint import Recipe, Rule, convert_checkpoint
from spformat.torch import SparseLinear

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 128,
    "max_position_embeddings": 32,
}  # fmt: skip
IDS = {"input_ids": torch.arange(18).view(2, 9)}


def clip() -> tuple[Any, dict[str, Any]]:
    vision = {k: v for k, v in SIZES.items() if "embeddings" not in k and "vocab" not in k}
    config = transformers.CLIPConfig(
        text_config=SIZES, vision_config=vision | {"image_size": 32, "patch_size": 8}, projection_dim=32
    )
    return transformers.CLIPModel(config), IDS | {"pixel_values": torch.ones(2, 3, 32, 32)}


def t5() -> tuple[Any, dict[str, Any]]:
    config = transformers.T5Config(d_model=64, d_ff=128, d_kv=16, num_layers=1, num_heads=4, vocab_size=128)
    return transformers.T5ForConditionalGeneration(config), IDS | {"decoder_input_ids": IDS["input_ids"]}


def mixtral() -> tuple[Any, dict[str, Any]]:
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=2)
    return transformers.MixtralForCausalLM(config), IDS


def qwen2() -> tuple[Any, dict[str, Any]]:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, num_key_value_heads=2)), IDS


def opt() -> tuple[Any, dict[str, Any]]:
    sizes = {k: v for k, v in SIZES.items() if k != "intermediate_size"} | {"ffn_dim": 128, "word_embed_proj_dim": 64}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**sizes)), IDS


def bert() -> tuple[Any, dict[str, Any]]:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)), IDS


LINEAR_LAYERS = {
    clip: r"re:(_proj|fc1|fc2)\.weight$",  # a block draws random numbers for the weights of its layers ..
    t5: r"re:(\.[qkvo]|wi|wo)\.weight$",  # .. here, too, and it looks at their dtype
    mixtral: r"re:self_attn.*_proj\.weight$",  # transformers joins the weights of experts while loading
    qwen2: r"re:_proj\.weight$",
    opt: r"re:(_proj|fc1|fc2)\.weight$",
    bert: r"re:(query|key|value|layer.*dense)\.weight$",
}


@pytest.mark.parametrize("build", LINEAR_LAYERS)
def test_results_are_those_of_the_masked_model(build: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = build()
    model.save_pretrained(tmp_path / "dense")
    recipe = Recipe("keep", (Rule(LINEAR_LAYERS[build], "bitmask"),), prune="magnitude", sparsity=0.5)
    convert_checkpoint(tmp_path / "dense", tmp_path / "packed", recipe, layout="transformers")
    convert_checkpoint(tmp_path / "packed", tmp_path / "masked", "dense")
    model, info = type(model).from_pretrained(tmp_path / "packed", output_loading_info=True)
    expected = type(model).from_pretrained(tmp_path / "masked")
    assert not any(info.values()), info
    layers = {name: m for name, m in model.named_modules() if isinstance(m, SparseLinear)}
    assert len(layers) >= 4
    assert {type(layer) for layer in layers.values()} == {SparseLinear}
    for name, layer in layers.items():
        assert torch.equal(layer.weight, expected.get_submodule(name).weight), name
    with torch.no_grad():
        y, wanted = model(**inputs)[0], expected(**inputs)[0]
        assert (y - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        model.save_pretrained(tmp_path / "again")
        assert torch.equal(type(model).from_pretrained(tmp_path / "again")(**inputs)[0], y)


def test_transposed_weights_are_refused_by_name(tmp_path: Path) -> None:
    """The layers of GPT-2 multiply by W and not by W^T, so that a square weight would fit and be wrong."""
    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=128, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "dense")
    recipe = Recipe("keep", (Rule("re:attn.c_proj.weight$", "bitmask"),), prune="magnitude", sparsity=0.5)
    convert_checkpoint(tmp_path / "dense", tmp_path / "packed", recipe, layout="transformers")
    with pytest.raises(sf.errors.UsageError, match=r"attn\.c_proj\.weight.*no linear layer"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    with pytest.raises(sf.errors.UsageError, match=r"expected a torch\.nn\.Linear, got Conv1D"):
        SparseLinear.from_linear(model.transformer.h[0].attn.c_proj, "csr")


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=128, n_positions=32, pad_token_id=0)
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("auto", ["AutoModel", "AutoModelForSequenceClassification"])
def test_a_model_without_the_only_sparse_layer_is_loaded_as_a_dense_one(auto: str, tmp_path: Path) -> None:
    """All that it needs is in the folder, dense: the other layers of GPT-2 cannot be sparse."""
    whole = gpt2()
    hf.sparsify(whole, "lm_head.weight=csr", prune=True, sparsity=0.5)
    whole.save_pretrained(tmp_path / "packed")
    model, info = getattr(transformers, auto).from_pretrained(tmp_path / "packed", output_loading_info=True)
    new = {"score.weight"} if "Classification" in auto else set()
    assert info == {"missing_keys": new, "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}
    with torch.no_grad():
        expected = whole.transformer(**IDS).last_hidden_state
        assert torch.equal(getattr(model, "transformer", model)(**IDS).last_hidden_state, expected)
    assert not getattr(model, "is_quantized", False)
    model.save_pretrained(tmp_path / "dense")
    again, info = type(model).from_pretrained(tmp_path / "dense", output_loading_info=True)
    assert (tmp_path / "dense" / "model.safetensors").exists()
    assert not any(info.values()), info
    with torch.no_grad():
        assert torch.equal(again(**IDS)[0], model(**IDS)[0])


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    """Only the head has a name that the model knows, and all the rest would be random."""
    model = qwen2()[0]
    hf.sparsify(model, "re:_proj=csr", prune=True, sparsity=0.5)
    model.save_pretrained(tmp_path / "packed")
    config = gpt2().config
    config.quantization_config = {"quant_method": "spformat"}
    config.transformers_weights = "spformat.safetensors.index.json"
    with pytest.raises(sf.errors.UsageError, match="dense ones are 1 of the 17 tensors of the model"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed", config=config)
    model.dequantize().save_pretrained(tmp_path / "dense")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "dense")
    config.quantization_config = {"quant_method": "spformat"}
    with pytest.raises(sf.errors.UsageError, match="no tensor of the checkpoint is sparse"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", config=config)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_layers_that_stay_in_float32_do_so_when_they_are_sparse(dtype: Any, tmp_path: Path) -> None:
    """transformers keeps the output layer of T5's blocks in float32 when the model is loaded in float16."""
    torch.manual_seed(0)
    model = t5()[0]
    hf.sparsify(model, r"re:(wo|wi|\.q)\.weight$=csr", prune=True, sparsity=0.5)
    model.save_pretrained(tmp_path / "packed")
    model = type(model).from_pretrained(tmp_path / "packed", dtype=dtype)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, SparseLinear)}
    assert len(layers) == 2 + 2 + 3
    expected = copy.deepcopy(model).dequantize()
    expected.save_pretrained(tmp_path / "dense")
    expected = type(model).from_pretrained(tmp_path / "dense", dtype=dtype)
    for name, layer in layers.items():
        kept = dtype is torch.float16 and name.endswith(".wo")
        assert layer.dtype is (torch.float32 if kept else dtype), name
        assert expected.get_submodule(name).weight.dtype is layer.dtype
        assert torch.equal(expected.get_submodule(name).weight, layer.weight)
    assert model(**IDS, decoder_input_ids=IDS["input_ids"])[0].isfinite().all()


def tied() -> tuple[Any, dict[str, Any]]:
    config = transformers.Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True)
    return transformers.Qwen2ForCausalLM(config), IDS


TIED = {bert: "cls.predictions.decoder", t5: "lm_head", tied: "lm_head"}


@pytest.mark.parametrize("of", ["spformat.hf", "from_pretrained", "spformat.torch"])
@pytest.mark.parametrize("build", TIED)
def test_a_sparse_head_is_not_tied_again(build: Any, of: str, tmp_path: Path) -> None:
    """BERT ties a bias, too, and T5 its embeddings, so that transformers looks again at what is tied."""
    torch.manual_seed(0)
    (model, inputs), head = build(), TIED[build]
    sparsify = st.sparsify if of == "spformat.torch" else hf.sparsify
    sparsify(model, f"{head}.weight=bitmask", prune=True, sparsity=0.5)
    if of == "from_pretrained":
        model.save_pretrained(tmp_path / "packed")
        model = type(model).from_pretrained(tmp_path / "packed")
    with torch.no_grad():
        y = model.eval()(**inputs)[0]
        model.tie_weights()
        model.resize_token_embeddings(SIZES["vocab_size"])
        assert torch.equal(model(**inputs)[0], y)
    assert type(model.get_submodule(head)) is SparseLinear
    if build is bert:
        assert model.cls.predictions.decoder.bias is model.cls.predictions.bias
    if build is t5:
        assert model.encoder.embed_tokens.weight is model.shared.weight
    hf.save_pretrained(model, tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(type(model).from_pretrained(tmp_path / "again").eval()(**inputs)[0], y)


# ------------------------------------------------------------------ adapters


@pytest.mark.parametrize("initial", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"])
def test_adapters_that_would_change_the_weight_are_refused(initial: str) -> None:
    """PEFT takes their first product off the weight, and a sparse layer's dense weight is a copy."""
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    config = peft.LoraConfig(target_modules=["q_proj"])
    config.init_lora_weights = initial
    with pytest.raises(sf.errors.UsageError, match=f"init_lora_weights='{initial}'"):
        hf.with_sparse_layers(config)


def test_all_linear_is_refused() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    with pytest.raises(sf.errors.UsageError, match="all-linear"):
        hf.with_sparse_layers(peft.LoraConfig(target_modules="all-linear"))


@pytest.mark.parametrize("kind", ["IA3Config", "LoHaConfig", "PromptTuningConfig", "VeraConfig"])
def test_adapters_of_another_kind_are_refused(kind: str) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    with pytest.raises(sf.errors.UsageError, match=f"expected a peft.LoraConfig, got {kind}"):
        hf.with_sparse_layers(getattr(peft, kind)())


@pytest.fixture
def adapted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model with sparse layers and an adapter on one of them."""
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    # transformers asks for a newer release than pip may have installed
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda **_: None)
    model = qwen2()[0]
    hf.sparsify(model, "re:_proj=csr", prune=True, sparsity=0.5)
    model.add_adapter(hf.with_sparse_layers(peft.LoraConfig(target_modules=["q_proj"])))
    return model


def test_adapters_are_saved_by_the_main_process_alone(adapted: Any, tmp_path: Path) -> None:
    adapted.save_pretrained(tmp_path / "other", is_main_process=False)
    assert not list((tmp_path / "other").glob("*"))
    adapted.save_pretrained(tmp_path / "main")
    names = {p.name for p in (tmp_path / "main").iterdir()}
    assert names >= {"adapter_model.safetensors", "adapter_config.json"}
    assert not any(name.startswith(("spformat", "model")) for name in names)
    adapted.save_pretrained(tmp_path / "shards", max_shard_size=600)
    assert len(list((tmp_path / "shards").glob("adapter_model-*.safetensors"))) > 1
    with pytest.raises(sf.errors.OutputError, match="overwrite=True"):
        adapted.save_pretrained(tmp_path / "main", overwrite=False)


def test_the_model_below_adapters_is_not_saved_as_noise(adapted: Any, tmp_path: Path) -> None:
    """Its layers have other names there, under which nothing loads."""
    with pytest.raises(sf.errors.UsageError, match=r"layers\.0\.self_attn\.q_proj has an adapter"):
        adapted.model.save_pretrained(tmp_path / "part")
    assert not (tmp_path / "part").exists()


MODULES_TO_SAVE = {"a sparse layer": ["o_proj"], "its parent": ["norm", "layers.0.mlp"]}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft calls it
@pytest.mark.parametrize("names", MODULES_TO_SAVE.values(), ids=MODULES_TO_SAVE)
def test_sparse_layers_are_not_trained_as_a_whole(names: list[str]) -> None:
    """PEFT would train a copy of each module, and a sparse weight does not train."""
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    model = qwen2()[0]
    hf.sparsify(model, "re:_proj=csr", prune=True, sparsity=0.5)
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=names)
    with pytest.raises(sf.errors.UsageError, match=rf"modules_to_save: .*{names[-1]}.*sparse"):
        hf.with_sparse_layers(config, model)
    config.modules_to_save = ["lm_head", "norm"]
    adapted = peft.get_peft_model(model, hf.with_sparse_layers(config, model))
    assert adapted.base_model.model.lm_head.modules_to_save.default.weight.requires_grad
