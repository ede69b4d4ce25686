"""Which sources begin before the launch before them is over, also where a header and a base class say so for several."""

from __future__ import annotations

import re
from pathlib import Path

from spformat.backends.cuda.runtime import jit

HEADER, LAUNCHER = jit.INCLUDE / "spformat" / "record_products.cuh", jit.HERE / "runtime" / "record_products.py"
"""What kernels with records share: the call that waits, and the launch."""
CALL = "  wait_for_launch_before();\n"


def waiting_kernels(source: Path) -> int:
    """How many kernels of a .cu file wait for the launch before."""
    text = source.read_text()
    of_header = HEADER.read_text().count(CALL)
    assert of_header == 1
    return text.count(CALL) + text.count(" multiply_records<")


def says_that_it_waits(launcher: Path) -> bool:
    """Whether a launcher's kernels are launched early."""
    text = launcher.read_text() if launcher.exists() else ""
    assert "waits=True" in LAUNCHER.read_text()
    return bool(re.search(r"waits=(True|tile\.early|early)\b", text)) or "(RecordProducts)" in text
