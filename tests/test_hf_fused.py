"""Models of transformers with fused projections: the same logits and tokens, saved under the same names, with LoRA."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hf_installed import hf, torch, transformers

import spformat as sf
import spformat.torch as st

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2"]


def sparse(family: str = "Llama", target: str = "bitmask") -> Any:
    """A small model with random weights, in which all projections are sparse."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    hf.sparsify(
        model, f"re:layers.*proj.weight$={target}", prune=True, **({} if "two" in target else {"sparsity": 0.5})
    )
    return model


def ids(rows: int = 2, length: int = 7) -> Any:
    return torch.randint(0, 128, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_tokens_are_the_same(family: str) -> None:
    model = sparse(family, "two-four" if family == "Qwen2" else "bitmask")
    fused = copy.deepcopy(model)
    assert len(st.fuse_projections(fused)) == 4
    with torch.no_grad():
        # A product of more rows may add in another order; the compiled loops of a CPU do not.
        torch.testing.assert_close(fused(ids()).logits, model(ids()).logits, rtol=1e-5, atol=1e-5)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(fused.generate(ids(), **options), model.generate(ids(), **options))
    assert list(fused.state_dict()) == list(model.state_dict())


def test_a_fused_model_is_saved_under_the_names_of_its_layers(tmp_path: Path) -> None:
    model = sparse()
    model.save_pretrained(tmp_path / "before")
    st.fuse_projections(model, "re:mlp$")
    model.save_pretrained(tmp_path / "after")
    names = sorted(p.name for p in (tmp_path / "before").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "after").iterdir())
    for name in names:
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "after")
    with torch.no_grad():
        assert torch.equal(again(ids()).logits, model(ids()).logits)
    assert len(st.fuse_projections(again)) == 4


def test_saving_takes_no_state_dict_of_computed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sparse()
    st.fuse_projections(model)
    monkeypatch.setattr(st.Projection, "_tensors", lambda self: pytest.fail("all weights at once"))
    model.save_pretrained(tmp_path)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft calls it
def test_adapters_on_fused_projections_train() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    gradients = []
    for fuse in (False, True):
        model = sparse()
        if fuse:
            st.fuse_projections(model)
        torch.manual_seed(3)
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], r=4, init_lora_weights=False)
        adapted = peft.get_peft_model(model, hf.with_sparse_layers(config)).train()
        adapted(ids(), labels=ids()).loss.backward()
        gradients.append({n: p.grad for n, p in adapted.named_parameters() if p.requires_grad and "lora_" in n})
    assert len(gradients[0]) == 2 * 2 * 3
    assert list(gradients[0]) == list(gradients[1])
    for name, g in gradients[0].items():
        assert g.abs().max() > 0
        torch.testing.assert_close(gradients[1][name], g, rtol=1e-4, atol=1e-4 * float(g.abs().max()))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft calls it
def test_an_adapter_on_the_fused_weight_is_refused() -> None:
    """Projections read it without calling the module that PEFT would put around it."""
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    model = sparse()
    st.fuse_projections(model)
    config = peft.LoraConfig(target_modules=r".*(q_proj|v_proj)", r=4)  # fused_q_proj_k_proj_v_proj, too
    with pytest.raises(sf.errors.UsageError, match=r"fused weight of several layers.*would change nothing"):
        peft.get_peft_model(model, hf.with_sparse_layers(config))


def test_dequantized() -> None:
    model = sparse()
    with torch.no_grad():
        want = model(ids()).logits
    st.fuse_projections(model)
    st.densify(model)
    assert not any("fused" in name for name, _ in model.named_modules())
    with torch.no_grad():
        torch.testing.assert_close(model(ids()).logits, want, rtol=1e-4, atol=1e-4)
