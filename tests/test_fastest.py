"""The target "fastest" and the command ``recommend``: a format by expected time, for the tensors of a checkpoint."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalogue import command
from test_recommend import half, normal, power_law
from test_structure import same

import spformat as sf
from spformat.arrays.dtypes import value_type
from spformat.checkpoint import fastest
from spformat.checkpoint.fastest import Fastest
from spformat.dispatch.recommend import Recommendations
from spformat.errors import IntegrityError, UsageError
from spformat.formats import parse_spec, spec_text
from spformat.preprocess import masks
from spformat.preprocess.coordinates import structure_of
from spformat.preprocess.structure import analyse


def test_the_text_of_the_target() -> None:
    assert str(fastest.Fastest.parse("fastest:n=16+1,objective=bytes")) == (
        "fastest:n=16+1,device=H200,objective=bytes,b_layout=row"
    )
    assert fastest.with_options("fastest:n=1", "16", "A100") == "fastest:n=1,device=A100,objective=time,b_layout=row"
    assert fastest.with_options("csr", "16", "A100") == "csr"
    for wrong in ("n=a", "n=0", "n=", "m=4", "n=1,n=2", "device=H300", "objective=x", "b_layout=strided"):
        with pytest.raises(UsageError):
            sf.checkpoint.Rule.parse(f"*=fastest:{wrong}")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    x = normal(256, 512)
    tensors: dict[str, Any] = {"bias": np.ones(4, np.float32)}
    for i in range(2):
        tensors[f"layers.{i}.up.weight"] = masks.apply(x, masks.magnitude_nm(x, 2, 4))
        tensors[f"layers.{i}.down.weight"] = half(2048, 2048)
    sf.save_dense(tmp_path / "m.safetensors", tensors)
    return tmp_path / "m.safetensors"


def test_a_large_tensor_is_counted_in_chunks_of_rows(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = tmp_path / "packed.safetensors"
    sf.save(packed, {"w": sf.convert(half(2048, 2048), "dense")})
    monkeypatch.setattr(fastest, "CHUNK_BYTES", 1 << 20)
    for path, name in ((model, "layers.0.down.weight"), (packed, "w")):
        with sf.safe_open(path) as f, monkeypatch.context() as patch:
            patch.setattr(type(f), "array", lambda *_: pytest.fail("read as a whole"))
            patch.setattr(type(f), "read", lambda *_: pytest.fail("read as a whole"))
            same(structure_of(fastest.matrix_in(f, f.info(name))), analyse(half(2048, 2048)))
    raw = bytearray(packed.read_bytes())
    raw[-100] ^= 1
    packed.write_bytes(raw)
    with sf.safe_open(packed) as f, pytest.raises(IntegrityError, match="crc32"):
        structure_of(fastest.matrix_in(f, f.info("w")))


def test_the_command_as_typed(model: Path, tmp_path: Path) -> None:
    got = json.loads(command("recommend", model, "-n", "16,64", "--device", "H200", "--json").out)
    by_name = {t["name"]: Recommendations.from_json(t) for t in got["tensors"]}
    assert sorted(by_name) == [f"layers.{i}.{x}.weight" for i in range(2) for x in ("down", "up")]
    assert by_name["layers.1.down.weight"] == sf.recommend(half(2048, 2048), [16, 64])
    text = command("recommend", model, "-n", "16,64").out
    assert all(part in text for part in ("layers.0-1.up.weight x 2:", "1. two-four: ", "stay dense"))
    assert text.count("    4. ") == 0 < command("recommend", model, "--long").out.count("    4. ")
    resident = command("recommend", model, "-n", "1", "--objective", "resident", "--device", "sm_80").out
    assert "on A100, the fewest bytes with workspaces first" in resident
    first = {name: r[0].format for name, r in by_name.items()}
    planned = json.loads(command("plan", model, "--to", "fastest", "-n", "16,64", "--json").out)
    assert {t["name"]: t["target"] for t in planned["tensors"] if t["name"] != "bias"} == first
    done = command("convert", model, tmp_path / "out", "--to", "fastest", "-n", "16,64", "--device", "H200")
    assert done.code == 0, done.err
    manifest = json.loads((tmp_path / "out" / "spformat.json").read_text())
    recorded = {name: manifest["tensors"][name]["format"] for name in first}
    assert recorded == {name: text.partition(":")[0] for name, text in first.items()}
    assert manifest["recipe"]["to"] == "fastest:n=16+64,device=H200,objective=time,b_layout=row"
    rule = "*up*=fastest:n=1"
    one = command("convert", model, tmp_path / "one.safetensors", "--to", "keep", "--rule", rule, "--gpu", "A100")
    assert one.code == 0, one.err
    assert sf.load(tmp_path / "one.safetensors")["layers.0.up.weight"].name == "two-four"


def test_the_next_command_asks_the_same(model: Path) -> None:
    for device in ("H200", "cpu"):
        asked = ["-n", "8", "--b-layout", "col", "--include", "*.up.*", "--device", device]
        answer = command("recommend", model, *asked)
        hint = shlex.split(next(line for line in answer.err.splitlines() if line.startswith("hint: spformat plan")))
        recommended = json.loads(command("recommend", model, *asked, "--json").out)["tensors"]
        planned = json.loads(command(*hint[2:], "--json").out)["tensors"]
        first = {t["name"]: t["recommendations"][0]["format"] for t in recommended}
        assert {t["name"]: t["target"] for t in planned if t["target"] != "keep"} == first
        assert "fastest:b_layout=col" in hint
    explained = command("explain", model, "-n", "8", "--b-layout", "col", "--include", "*.up.*", "--gpu", "H100")
    asked_again = "-n 8 --device H100 --b-layout col --include '*.up.*'"
    assert f"hint: spformat recommend {model} {asked_again}\n" in explained.err
    for asked, asked_again in (
        ("--gpu sm_80 --max-workspace 0", "--device sm_80 --max-workspace 0"), ("--gpu cpu", "--device cpu"),
    ):  # fmt: skip
        explained = command("explain", model, "-n", "8", *asked.split())
        assert f"hint: spformat recommend {model} -n 8 {asked_again}\n" in explained.err
    for option in (["--b-layout", "strided"], ["--dtype", "float16"], ["--max-workspace", "0"]):
        assert "hint" not in command("recommend", model, *option).err, option  # no target is for it


def test_the_conversion_after_a_plan_chooses_for_the_same_device(model: Path, tmp_path: Path) -> None:
    """--device of plan is the device that multiplies, that of convert the one that converts."""
    for given in (["--device", "cpu"], ["--device=cpu"]):
        answer = command("plan", model, "--to", "fastest", "-n", "8", *given)
        hint = shlex.split(next(line for line in answer.err.splitlines() if line.startswith("hint: spformat convert")))
        planned = json.loads(command("plan", model, "--to", "fastest", "-n", "8", *given, "--json").out)["tensors"]
        hint[4] = str(tmp_path / "out.safetensors")
        converted = json.loads(command(*hint[2:], "--force", "--json").out)["tensors"]
        assert {t["name"]: t["target"] for t in converted} == {t["name"]: t["target"] for t in planned}
        assert "cpu" in " ".join(hint)


def test_a_graph_file_as_typed(tmp_path: Path) -> None:
    import scipy.sparse as sp

    path = tmp_path / "g.npz"
    sp.save_npz(path, power_law(3000, 9000).to_scipy())
    best = json.loads(command("recommend", path, "-n", "32", "--json").out)["tensors"][0]["recommendations"][0]
    done = command("convert", path, tmp_path / "g.safetensors", "--to", "fastest", "-n", "32", "--device", "H200")
    assert done.code == 0, done.err
    name = best["format"].partition(":")[0]
    assert next(iter(sf.load(tmp_path / "g.safetensors").values())).name == name
    # a sparse input of a checkpoint is resolved without making it dense
    packed = command("convert", tmp_path / "g.safetensors", tmp_path / "again", "--to", "fastest", "-n", "32")
    assert packed.code == 0, packed.err


def test_a_matrix_file_as_output(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    chosen = ("--include", "layers.0.up.weight")
    done = command("convert", model, out, *chosen, "--to", "fastest", "-n", "32")
    assert (done.code, "a .npz file holds csr, csc, coo or bsr, not two-four" in done.err) == (2, True), done.err
    for option in (["-n", "32"], ["--gpu", "A100"], ["--device", "A100"]):
        refused = command("convert", model, out, *chosen, "--to", "csr", *option)
        assert (refused.code, out.exists()) == (2, False), option
    sf.save(tmp_path / "g.safetensors", {"g": power_law(3000, 9000)})
    done = command("convert", tmp_path / "g.safetensors", out, "--to", "fastest", "-n", "32")
    assert done.code == 0, done.err
    assert sf.open(out)["out"] == power_law(3000, 9000)


def whole(text: str) -> str:
    """A format text with all its params."""
    fmt, params = parse_spec(text)
    return spec_text(fmt, fmt.resolve_params(params))


@pytest.mark.parametrize("shape", [(64, 64), (2, 64, 64)])
@pytest.mark.parametrize("objective", ["time", "bytes", "resident"])
def test_what_no_kernel_multiplies_is_refused(tmp_path: Path, shape: tuple[int, ...], objective: str) -> None:
    x = np.zeros(shape, value_type("float8_e4m3fn").numpy)
    x[..., 3] = 1
    sf.save_dense(tmp_path / "m.safetensors", {"w": x})
    asked = ["--to", "keep", "--rule", f"w=fastest:objective={objective}"]
    for verb in (["plan"], ["convert", tmp_path / "out"]):
        answer = command(verb[0], tmp_path / "m.safetensors", *verb[1:], *asked)
        assert (answer.code, "no kernel takes products" in answer.out + answer.err) == (3, True), verb
    answer = command("recommend", tmp_path / "m.safetensors", "--objective", objective)
    assert (answer.code, "hint" in answer.err) == (0, False)  # the plan would be refused


def test_the_matrices_of_a_stack_get_the_format_with_the_least_sum(tmp_path: Path) -> None:
    x = normal(128, 256)
    pruned = masks.apply(x, masks.magnitude_nm(x, 2, 4))
    for name, matrices in (("same", (pruned, pruned)), ("mixed", (pruned, half(128, 256), pruned))):
        path = tmp_path / f"{name}.safetensors"
        sf.save_dense(path, {"w": np.stack(matrices)})
        tensors = json.loads(command("recommend", path, "-n", "16", "--json").out)["tensors"]
        assert [t["name"] for t in tensors] == [f"w.{e}" for e in range(len(matrices))]
        ranked = [{whole(r.format): r.total_us for r in Recommendations.from_json(t)} for t in tensors]
        common = set.intersection(*map(set, ranked))
        best = min(sum(r[text] for r in ranked) for text in common)
        (planned,) = json.loads(command("plan", path, "--to", "fastest", "-n", "16", "--json").out)["tensors"]
        assert sum(r[planned["target"]] for r in ranked) == pytest.approx(best)
        assert planned["target"].startswith("two-four") == (name == "same")
        out = tmp_path / f"{name}-out.safetensors"
        assert command("convert", path, out, "--to", "fastest", "-n", "16").code == 0
        w = sf.load(out)["w"]
        assert {m.name for m in w} == {planned["target"].partition(":")[0]}
        np.testing.assert_array_equal(w.to_dense(), np.stack(matrices))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["plan", "-n", "16"], "-n is for the target fastest (--to fastest), and no tensor has it"),
        (["plan", "--to", "fastest", "-n", "a"], "expected numbers of columns like 16,2048, got 'a'"),
        (["recommend", "-n", "0"], "expected numbers of columns like 16,2048, got '0'"),
        (["recommend", "--objective", "speed"], "expected one of time, bytes, resident"),
        (["recommend", "--device", "H300"], "got 'H300'"),
        (["plan", "--to", "fastest:device=RTX4090"], "or an architecture like sm_89, got 'RTX4090'; --gpu also takes"),
        (["plan", "--to", "fastest:device=sm_9"], "got 'sm_9'"),
    ],
)
def test_commands_that_are_refused(model: Path, args: list[str], message: str) -> None:
    r = command(args[0], model, *args[1:])
    assert r.code == 2, r.out
    assert message in re.sub(r"[\s│]+", " ", r.err)


@pytest.mark.parametrize("gpu", ["RTX4090", "A10", "L40S", "B200", "sm_90", "H100 PCIe", "sm_120", "cpu"])
def test_the_hint_of_recommend_works_for_every_board(tmp_path: Path, gpu: str) -> None:
    sf.save_dense(tmp_path / "m.safetensors", {"w": power_law(512, 1500).to_dense()})
    r = command("recommend", tmp_path / "m.safetensors", "-n", "16", "--device", gpu)
    assert r.code == 0, r.err
    hint = shlex.split(next(line for line in r.err.split("\n") if line.startswith("hint: ")))
    planned = command(*hint[2:], "--json")
    assert (planned.code, planned.err) == (0, "")
    ranked = command("recommend", tmp_path / "m.safetensors", "-n", "16", "--device", gpu, "--json")
    assert (ranked.code, ranked.err) == (0, "")
    first = json.loads(ranked.out)["tensors"][0]["recommendations"][0]
    assert whole(json.loads(planned.out)["tensors"][0]["target"]) == whole(first["format"])
    out = tmp_path / "out"
    done = command("convert", tmp_path / "m.safetensors", out, "--to", "fastest", "-n", "16", "--gpu", gpu, "--json")
    assert (done.code, done.err) == (0, "")
    stated = Fastest.parse(json.loads((out / "spformat.json").read_text())["recipe"]["to"])
    assert stated.recommend(power_law(512, 1500).to_dense())[0].format == first["format"]


def test_errors_for_a_board_are_one_json_document(model: Path) -> None:
    r = command("plan", model, "--to", "csr", "--rule", "nothing=fastest", "--gpu", "RTX4090", "--json")
    assert (r.code, json.loads(r.err)["exit_code"]) == (2, 2)


def no_products(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> Path:
    """A model with a matrix, or stack, ``b.weight`` of a value type that no kernel multiplies."""
    values = np.random.default_rng(0).integers(0, 2, shape)
    tensors: dict[str, Any] = {
        "a.weight": np.eye(64, dtype=np.float16),
        "b.weight": values.astype(value_type(dtype).numpy),
    }
    sf.save_dense(tmp_path / "m.safetensors", tensors)
    return tmp_path / "m.safetensors"


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("shape", [(64, 64), (4, 64, 64)], ids=str)
def test_a_matrix_that_no_kernel_multiplies_is_a_misfit(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    path, why = no_products(tmp_path, dtype, shape), f"no kernel takes products with values of dtype {dtype}"
    for misfit, target in (("keep", "keep"), ("bitmask", "bitmask"), ("auto", "bitmask")):
        out = tmp_path / misfit
        planned = command("plan", path, "--to", "fastest", "--misfit", misfit, "--json")
        done = command("convert", path, out, "--to", "fastest", "--misfit", misfit, "--json")
        assert (planned.code, done.code) == (0, 0), planned.err + done.err
        for answer in (planned, done):
            b = {t["name"]: t for t in json.loads(answer.out)["tensors"]}["b.weight"]
            assert b["target"] == target
            assert why in b["why"]
        with sf.safe_open(out / "spformat-00001-of-00001.safetensors") as f, sf.safe_open(path) as source:
            got = f.read("b.weight")
            dense = got.to_dense() if target != "keep" else got
            np.testing.assert_array_equal(dense.view(np.uint8), source.array("b.weight").view(np.uint8))
    planned = command("plan", path, "--to", "fastest", "--json")
    assert planned.code == 3
    assert why in {t["name"]: t for t in json.loads(planned.out)["tensors"]}["b.weight"]["error"]
    for misfit in ("error", "fastest:n=1"):
        refused = command("convert", path, tmp_path / "out", "--to", "fastest", "--misfit", misfit, "--json")
        error = json.loads(refused.err)
        assert (refused.code, error["exit_code"]) == (3, 3)
        assert (error["path"], error["tensor"]) == (str(path), "b.weight")
        assert why in error["message"]
