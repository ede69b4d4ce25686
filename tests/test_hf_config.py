"""The quantization_config of models with sparse weights: settings that are given, written, read and copied."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hf_installed import hf, torch, transformers
from hf_llama import llama, load, logits, packed_beside, sparse_layers

import spformat as sf
from spformat.checkpoint import Rule

SETTINGS: dict[str, Any] = {"rules": ["re:proj=bitmask"], "prune": True, "sparsity": 0.5}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "dense"
    llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def packed(dense: Path) -> Path:
    return packed_beside(dense)


def test_settings_go_round_as_a_dict_and_as_json() -> None:
    config = hf.SpformatConfig("re:proj=bitmask", prune=True, sparsity=0.5)
    assert config.to_dict() == {"quant_method": "spformat"} | SETTINGS
    for again in (
        hf.SpformatConfig.from_dict(config.to_dict()),
        hf.SpformatConfig(**json.loads(config.to_json_string())),
    ):
        assert vars(again) == vars(config)
    assert "re:proj=bitmask" in repr(config)
    assert hf.SpformatConfig().to_dict() == {"quant_method": "spformat"}


def test_rules_may_be_objects() -> None:
    for rules in (Rule("re:proj", "bitmask"), [Rule("re:proj", "bitmask")]):
        assert hf.SpformatConfig(rules, prune=True, sparsity=0.5).to_dict() == {"quant_method": "spformat"} | SETTINGS


def test_settings_that_are_none_are_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(sf.errors.UsageError, match="rules: expected texts"):
        hf.SpformatConfig(5)
    with pytest.raises(sf.errors.UsageError, match="unknown format 'cssr'"):
        hf.SpformatConfig("re:proj=cssr")
    with pytest.raises(sf.errors.UsageError, match="sparsity"):
        hf.SpformatConfig("re:proj=csr", prune=True, sparsity="0.5")
    with pytest.raises(sf.errors.UsageError, match="expected rules, prune, sparsity"):
        hf.SpformatConfig(rule="re:proj=csr")


def test_what_is_saved_is_a_packed_folder_and_its_config_has_no_rules(dense: Path, tmp_path: Path) -> None:
    model = load(dense, quantization_config=hf.SpformatConfig(**SETTINGS))
    assert model.config.quantization_config.to_dict() == {"quant_method": "spformat"} | SETTINGS
    assert copy.deepcopy(model.config).quantization_config.rules == SETTINGS["rules"]
    for folder in ("first", "second"):
        model.save_pretrained(tmp_path / folder)
        settings = json.loads((tmp_path / folder / "config.json").read_text())["quantization_config"]
        assert settings == {"quant_method": "spformat"}
        model = load(tmp_path / folder)
        assert model.config.quantization_config.to_dict() == settings
    assert len(sparse_layers(model)) == 14


@pytest.mark.filterwarnings("ignore:You passed .quantization_config.:UserWarning")
def test_rules_for_a_packed_folder_are_refused(packed: Path) -> None:
    for settings in (SETTINGS, {"rules": "re:proj=csr"}):
        with pytest.raises(sf.errors.UsageError, match=r"quantization_config: .*packed already.* rules"):
            load(packed, quantization_config=hf.SpformatConfig(**settings))
    assert len(sparse_layers(load(packed, quantization_config=hf.SpformatConfig()))) == 14


def test_the_config_of_a_loaded_model_loads_the_folder_again(packed: Path) -> None:
    model = load(packed)
    again = load(packed, config=model.config)
    assert torch.equal(logits(again), logits(model))


def test_a_config_that_was_changed_and_saved_alone_loads(packed: Path, tmp_path: Path) -> None:
    shutil.copytree(packed, tmp_path / "packed")
    config = transformers.AutoConfig.from_pretrained(packed)
    config.use_cache = False
    config.save_pretrained(tmp_path / "packed")
    model = load(tmp_path / "packed")
    assert not model.config.use_cache
    model.config.save_pretrained(tmp_path / "packed")
    assert torch.equal(logits(load(tmp_path / "packed")), logits(load(packed)))
    assert torch.equal(logits(load(tmp_path, subfolder="packed")), logits(load(packed)))


def test_another_number_of_labels_is_refused_with_what_to_do(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=64, **sizes))
    hf.sparsify(model, "re:weight$=csr")
    model.save_pretrained(tmp_path)
    text = r"'classifier\.weight': expected shape \[5, 32\], .*got \[2, 32\]: .*--exclude.*ignore_mismatched_sizes"
    with pytest.raises(sf.errors.UsageError, match=text):
        transformers.AutoModelForSequenceClassification.from_pretrained(
            tmp_path, num_labels=5, ignore_mismatched_sizes=True
        )


def test_a_loaded_model_is_cast_by_half_and_float(packed: Path, tmp_path: Path) -> None:
    """transformers refuses both for quantized models, whose values no dtype describes; those of sparse weights do."""
    model = load(packed)
    expected = logits(model)
    half = copy.deepcopy(model).half()
    assert {t.dtype for t in half.state_dict().values() if t.is_floating_point()} == {torch.float16}
    assert model.dtype is torch.float32
    half.save_pretrained(tmp_path / "half")
    assert load(tmp_path / "half").dtype is torch.float16
    assert half.float().dtype is torch.float32
    assert torch.allclose(logits(half), expected, atol=1e-2)
    dense = model.dequantize()
    assert not {"half", "float", "dequantize", "save_pretrained"} & vars(dense).keys()
    assert dense.half().dtype is torch.float16
