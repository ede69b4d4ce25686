"""Hugging Face transformers: packed folders through from_pretrained, generate, save_pretrained."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hf_installed import hf, torch, transformers
from hf_llama import ids, llama, load, logits, packed_beside, recipe, sparse_layers

import spformat as sf
import spformat.torch
from spformat.checkpoint import convert_checkpoint
from spformat.checkpoint.layouts import GUARD, PACKED_INDEX
from spformat.torch import SparseLinear

FORMATS = {
    "csr": "float32", "bitmask": "float32", "bsr:blocksize=16x16": "float32", "vector-nm:n=2,m=4,vector_length=8": "float32",
    "two-four": "bfloat16",
}  # fmt: skip
"""Format -> dtype of the model."""


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "dense"
    llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def packed(dense: Path) -> Path:
    return packed_beside(dense)


@pytest.fixture(scope="module")
def masked(packed: Path) -> Any:
    """The dense model with the weights that the packed folder stores."""
    convert_checkpoint(packed, packed.parent / "masked", "dense")
    return transformers.AutoModelForCausalLM.from_pretrained(packed.parent / "masked")


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What transformers logs as warnings."""
    import logging

    texts: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    handler, log = Keep(logging.WARNING), logging.getLogger("transformers")
    log.addHandler(handler)
    yield texts
    log.removeHandler(handler)


# ------------------------------------------------------------------ loading


@pytest.mark.parametrize("target", FORMATS)
def test_from_pretrained_gives_the_logits_of_the_masked_model(target: str, tmp_path: Path) -> None:
    llama(FORMATS[target]).save_pretrained(tmp_path / "dense")
    convert_checkpoint(tmp_path / "dense", tmp_path / "packed", recipe(target), layout="transformers")
    convert_checkpoint(tmp_path / "packed", tmp_path / "masked", "dense")
    model, info = load(tmp_path / "packed", output_loading_info=True)
    expected = load(tmp_path / "masked")
    layers = sparse_layers(model)
    assert len(layers) == 14
    assert {layer.description.format for layer in layers.values()} == {target.partition(":")[0]}
    assert not any(info.values()), info
    for name, layer in layers.items():
        assert torch.equal(layer.weight, expected.get_submodule(name).weight), name
    bound = 2e-6 if FORMATS[target] == "float32" else 2e-2
    assert (logits(model) - logits(expected)).abs().max() <= bound * logits(expected).abs().max()


def test_generation_is_that_of_the_masked_model(packed: Path, masked: Any, warnings: list[str]) -> None:
    model = load(packed)
    assert warnings == []
    inputs = {"input_ids": ids(), "attention_mask": torch.ones(2, 17, dtype=torch.int64)}
    options = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False, "pad_token_id": 0}
    tokens = model.generate(**inputs, **options)
    assert tokens.shape == (2, 81)
    assert torch.equal(tokens, masked.generate(**inputs, **options))


def test_dtype_and_device_map_are_those_asked_for(packed: Path) -> None:
    model = load(packed, dtype=torch.bfloat16, device_map="cpu")
    assert {layer.dtype for layer in sparse_layers(model).values()} == {torch.bfloat16}
    for layer in sparse_layers(model).values():
        layer.matrix.validate()
    assert logits(model).isfinite().all()


def test_the_model_without_its_head_loads(packed: Path, masked: Any) -> None:
    base = transformers.AutoModel.from_pretrained(packed)
    with torch.no_grad():
        got, expected = base(ids()).last_hidden_state, masked.model(ids()).last_hidden_state
    assert len(sparse_layers(base)) == 14
    assert torch.allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_tied_heads_stay_tied(tmp_path: Path) -> None:
    llama(tie_word_embeddings=True).save_pretrained(tmp_path / "dense")
    convert_checkpoint(tmp_path / "dense", tmp_path / "packed", recipe(), layout="transformers")
    model = load(tmp_path / "packed")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "again")
    assert "lm_head.weight" not in tensors_of(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again")), logits(model))


def test_a_sparse_head_is_not_tied_any_more(tmp_path: Path) -> None:
    """What sparsify makes of a tied head has a weight of its own, which is saved and loaded beside the embedding."""
    model = llama(tie_word_embeddings=True)
    embedding = model.model.embed_tokens.weight.detach().clone()
    hf.sparsify(model, "lm_head.weight=bitmask", prune=True, sparsity=0.5)
    model.save_pretrained(tmp_path / "sp")
    again = load(tmp_path / "sp")
    assert isinstance(again.lm_head, SparseLinear)
    assert torch.equal(again.model.embed_tokens.weight, embedding)
    assert torch.equal(logits(again), logits(model))
    config = json.loads((tmp_path / "sp" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    (tmp_path / "sp" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert torch.equal(logits(load(tmp_path / "sp")), logits(model))


def test_contents_are_checked_while_loading(packed: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(packed, tmp_path / "damaged")
    (shard,) = (tmp_path / "damaged").glob("*.safetensors")
    with sf.safe_open(shard) as f:
        name = next(n for n in f if f.info(n).format)
        begin = f.ranges(name)[0][0]
    data = bytearray(shard.read_bytes())
    data[begin] ^= 1
    shard.write_bytes(data)
    with pytest.raises(sf.errors.IntegrityError, match=name.replace(".", r"\.")):
        load(tmp_path / "damaged")


def test_a_sparse_embedding_is_refused_by_name(dense: Path, tmp_path: Path) -> None:
    convert_checkpoint(dense, tmp_path / "packed", recipe(pattern="re:embed"), layout="transformers")
    with pytest.raises(sf.errors.UsageError, match=r"embed_tokens\.weight.*--exclude"):
        load(tmp_path / "packed")


def test_a_config_of_another_shape_is_refused_by_name(packed: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(packed, intermediate_size=96)
    with pytest.raises(sf.errors.UsageError, match=r"mlp\.\w+\.weight.*expected shape .*96"):
        load(packed, config=config)


def test_disk_is_refused(packed: Path) -> None:
    with pytest.raises(sf.errors.UsageError, match="disk"):
        load(packed, device_map={"": "disk"}, offload_folder="x")


def test_a_pipeline_generates(dense: Path, packed: Path, tmp_path: Path) -> None:
    """The call that the README shows; the tokenizer is a side file of the checkpoint."""
    import shutil

    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(128)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    shutil.copytree(dense, tmp_path / "dense")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w1")
    fast.save_pretrained(tmp_path / "dense")
    convert_checkpoint(tmp_path / "dense", tmp_path / "packed", recipe(), layout="transformers")
    generate = transformers.pipeline("text-generation", str(tmp_path / "packed"))
    assert len(sparse_layers(generate.model)) == 14
    (result,) = generate("w5 w6 w7", max_new_tokens=8, min_new_tokens=8, do_sample=False)
    expected = load(packed).generate(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=8, min_new_tokens=8,
                                     do_sample=False, pad_token_id=1)  # fmt: skip
    assert result["generated_text"].replace("w", " w").split() == [f"w{i}" for i in expected[0].tolist()]


# ------------------------------------------------------------------ without the import


@pytest.mark.parametrize("layout", ["transformers", "neutral"])
def test_transformers_alone_does_not_load_a_packed_folder(layout: str, dense: Path, tmp_path: Path) -> None:
    """It must not return a model with random weights. Its error names what is missing."""
    convert_checkpoint(dense, tmp_path / "packed", recipe(), layout=layout)
    code = f"import transformers; transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path / 'packed')!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert (GUARD if layout == "transformers" else "model.safetensors") in last, done.stderr[-500:]


# ------------------------------------------------------------------ saving


def test_save_pretrained_writes_a_packed_folder_back(packed: Path, tmp_path: Path) -> None:
    model = load(packed)
    model.save_pretrained(tmp_path / "again", max_shard_size=40_000)
    names = sorted(p.name for p in (tmp_path / "again").glob("*.safetensors"))
    assert len(names) > 2
    assert names[0] == f"spformat-00001-of-{len(names):05}.safetensors"
    index = json.loads((tmp_path / "again" / PACKED_INDEX).read_text())
    assert set(index["weight_map"].values()) == set(names)
    before, after = tensors_of(packed), tensors_of(tmp_path / "again")
    assert before.keys() == after.keys()
    for name, x in before.items():
        assert type(x) is type(after[name])
        y = after[name]
        assert (x == y).all() if not isinstance(x, sf.Format) else x.params() == y.params() and same(x, y), name
    assert torch.equal(logits(load(tmp_path / "again")), logits(model))
    model.save_pretrained(tmp_path / "again")  # replaces, as that of transformers does
    assert [p.name for p in (tmp_path / "again").glob("*.safetensors")] == ["spformat-00001-of-00001.safetensors"]
    assert torch.equal(logits(load(tmp_path / "again")), logits(model))


def tensors_of(folder: Path) -> dict[str, Any]:
    return {name: x for path in sorted(folder.glob("*.safetensors")) for name, x in sf.load(path).items()}


def same(x: Any, y: Any) -> bool:
    return all((a == y.all_arrays()[name]).all() for name, a in x.all_arrays().items())


def test_saved_folders_are_ordinary_packed_folders(packed: Path, tmp_path: Path) -> None:
    from spformat.checkpoint.check import Checks, validate_checkpoint
    from spformat.checkpoint.diff import diff_checkpoints

    load(packed).save_pretrained(tmp_path / "again")
    results = list(validate_checkpoint(tmp_path / "again", Checks(checksums=True)))
    assert [r for r in results if r.error] == []
    assert len(results) == 21 + 1
    assert [name for name, difference in diff_checkpoints(packed, tmp_path / "again") if difference] == []
    convert_checkpoint(tmp_path / "again", tmp_path / "dense", "dense")
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert "quantization_config" not in config
    assert "transformers_weights" not in config
    assert torch.equal(load(tmp_path / "dense").lm_head.weight, load(packed).lm_head.weight)


def test_a_model_that_was_changed_without_this_package_is_not_saved_as_noise(dense: Path, tmp_path: Path) -> None:
    """transformers would write arrays that it does not read again, and draw random numbers for the weights."""
    model = load(dense)
    spformat.torch.sparsify(model, "re:up_proj=bitmask", prune=True, sparsity=0.5)
    for m in (model, model.model, copy.deepcopy(model)):
        with pytest.raises(sf.errors.UsageError, match=r"spformat\.hf\.save_pretrained\(model, folder\)"):
            m.save_pretrained(tmp_path / "noise")
    hf.save_pretrained(model, tmp_path / "packed")
    assert torch.equal(logits(load(tmp_path / "packed")), logits(model))
    spformat.torch.densify(model)
    model.save_pretrained(tmp_path / "dense")
    assert torch.allclose(logits(load(tmp_path / "dense")), logits(model))


def test_sizes_of_shards_are_given_as_transformers_takes_them(packed: Path, tmp_path: Path) -> None:
    model = load(packed)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("spformat-*.safetensors"))) > 1
    assert torch.equal(logits(load(tmp_path)), logits(model))
    for wrong in ("large", 0, -1, "0GB"):
        with pytest.raises(sf.errors.UsageError, match=rf"max_shard_size: expected bytes .* got {wrong!r}"):
            model.save_pretrained(tmp_path, max_shard_size=wrong)


def test_options_that_would_be_lost_are_refused(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(sf.errors.UsageError, match="variant"):
        load(packed).save_pretrained(tmp_path / "x", variant="fp16")
    with pytest.raises(sf.errors.UsageError, match="push_to_hub"):
        load(packed).save_pretrained(tmp_path / "x", push_to_hub=True)
    assert not (tmp_path / "x").exists()


def test_a_file_where_the_folder_belongs_is_refused(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "again").write_text("mine")
    with pytest.raises(sf.errors.OutputError, match="again: cannot create the folder"):
        load(packed).save_pretrained(tmp_path / "again")
    assert (tmp_path / "again").read_text() == "mine"


def test_a_dtype_that_a_format_lacks_is_refused_by_the_name_of_the_weight(dense: Path, tmp_path: Path) -> None:
    convert_checkpoint(dense, tmp_path / "packed", recipe("two-four"), layout="transformers")
    with pytest.raises(sf.errors.StructureError, match=r"tensor 'model\.layers\.0\..*weight': .*dtype float64"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype="float64")


def test_a_model_that_is_wrapped_is_saved_under_its_own_names(packed: Path, tmp_path: Path) -> None:
    """The names of its layers in a wrapper are others, under which nothing would load."""
    model = load(packed)
    hf.save_pretrained(torch.compile(model, backend="eager"), tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again")), logits(model))
    with pytest.raises(sf.errors.UsageError, match=r"expected a model of transformers, got torch\..*DataParallel"):
        hf.save_pretrained(torch.nn.DataParallel(model), tmp_path / "wrapped")
    assert not (tmp_path / "wrapped").exists()


def test_copies_of_a_model_save_themselves(packed: Path, tmp_path: Path) -> None:
    model = load(packed)
    for i, other in enumerate([copy.deepcopy(model), pickle.loads(pickle.dumps(model))]):
        with torch.no_grad():
            other.model.norm.weight.fill_(2)
        other.save_pretrained(tmp_path / str(i))
        assert (load(tmp_path / str(i)).model.norm.weight == 2).all()


def test_a_dense_model_becomes_sparse_while_loading(dense: Path, packed: Path, tmp_path: Path) -> None:
    config = hf.SpformatConfig("re:proj=bitmask", prune=True, sparsity=0.5)
    model = load(dense, quantization_config=config)
    assert torch.equal(logits(model), logits(load(packed)))
    model.save_pretrained(tmp_path / "packed")
    assert torch.equal(logits(load(tmp_path / "packed")), logits(model))
    with pytest.raises(sf.errors.UsageError, match="rules"):
        load(dense, quantization_config=hf.SpformatConfig())


def test_sparsify_in_memory_saves_a_packed_folder(dense: Path, tmp_path: Path) -> None:
    model = load(dense)
    assert len(hf.sparsify(model, "re:proj=csr", prune=True, sparsity=0.5)) == 14
    model.save_pretrained(tmp_path / "packed")
    again = load(tmp_path / "packed")
    assert {layer.description.format for layer in sparse_layers(again).values()} == {"csr"}
    assert torch.equal(logits(again), logits(model))


def test_dequantize_gives_a_model_that_transformers_saves(packed: Path, masked: Any, tmp_path: Path) -> None:
    model = load(packed).dequantize()
    assert sparse_layers(model) == {}
    model.save_pretrained(tmp_path / "dense")
    assert (tmp_path / "dense" / "model.safetensors").exists()
    assert torch.equal(logits(load(tmp_path / "dense")), logits(masked))
