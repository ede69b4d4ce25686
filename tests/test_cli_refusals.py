"""What commands refuse: the message names file and tensor, and what it advises works when it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from catalogue import command

import spformat as sf


def test_a_refusal_to_prune_names_file_and_tensor(tmp_path: Path) -> None:
    x = np.ones((64, 64), np.float32)
    x[0, 1] = np.nan
    sf.save_dense(tmp_path / "m.safetensors", {"w": x})
    for to in ("two-four", "auto", "dense"):
        for verb in (["plan"], ["convert", tmp_path / "out"]):
            flags = ("--to", to, "--prune", "magnitude", "--sparsity", "0.5", "--json")
            r = command(verb[0], tmp_path / "m.safetensors", *verb[1:], *flags)
            error = json.loads(r.err)
            assert (r.code, error["path"], error["tensor"]) == (3, str(tmp_path / "m.safetensors"), "w"), (to, verb)
