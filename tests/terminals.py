"""A terminal for tests: a command whose output goes to a pseudo-terminal of so many columns."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

COMMAND = [sys.executable, "-c", "from spformat_cli.main import main; main()"]
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def terminal(*args: Any, columns: int = 80, stderr: bool = False, **env: str) -> tuple[int, list[str]]:
    """(exit code, lines on the screen) of ``spformat ARGS``; with ``stderr``, what the command prints there, too."""
    return screen([*COMMAND, *map(str, args)], columns, stderr, **env)


def screen(
    command: list[str], columns: int = 80, stderr: bool = False, cwd: Path | None = None, **env: str
) -> tuple[int, list[str]]:
    """(exit code, lines on the screen) of any command."""
    master, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    known = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")}
    run = subprocess.Popen(
        command, cwd=cwd,
        stdin=side, stdout=side, stderr=side if stderr else subprocess.DEVNULL, env={**known, "TERM": "xterm", **env},
    )  # fmt: skip
    os.close(side)
    raw = b""
    while True:
        try:
            piece = os.read(master, 1 << 16)
        except OSError:  # the last process that wrote to it has ended
            break
        if not piece:
            break
        raw += piece
    os.close(master)
    code = run.wait(timeout=120)
    text = _ESCAPES.sub("", raw.decode()).replace("\r\n", "\n")
    return code, [line.rpartition("\r")[2].rstrip() for line in text.rstrip("\n").split("\n")]


def llama_291(folder: Path, layers: int = 32) -> Path:
    """A checkpoint with the 291 names of a Llama of 32 layers, and tiny matrices: 2:4 but for embedding and head."""
    rng = np.random.default_rng(0)

    def matrix(rows: int, cols: int, sparse: bool = True) -> np.ndarray[Any, Any]:
        x = rng.uniform(1, 2, (rows, cols)).astype(np.float32)
        order = np.argsort(rng.random((rows, cols // 4, 4)), axis=-1)
        return (x * (order < 2).reshape(rows, cols) if sparse else x).astype(ml_dtypes.bfloat16)

    hidden, middle, ones = 32, 64, np.ones(32, ml_dtypes.bfloat16)
    tensors = {"model.embed_tokens.weight": matrix(96, hidden, False), "lm_head.weight": matrix(96, hidden, False)}
    tensors["model.norm.weight"] = ones
    for i in range(layers):
        layer = f"model.layers.{i}"
        tensors |= {f"{layer}.self_attn.{p}_proj.weight": matrix(hidden, hidden) for p in "qkvo"}
        tensors |= {f"{layer}.mlp.{p}_proj.weight": matrix(middle, hidden) for p in ("gate", "up")}
        tensors[f"{layer}.mlp.down_proj.weight"] = matrix(hidden, middle)
        tensors |= {f"{layer}.{norm}_layernorm.weight": ones for norm in ("input", "post_attention")}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
