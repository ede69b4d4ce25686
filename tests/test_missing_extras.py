"""Packages of extras that are not installed: what their users read."""

from __future__ import annotations

import pytest
from emulator.process import python


@pytest.mark.parametrize(
    ("package", "missing", "text"),
    [
        ("spformat.torch", "torch", "spformat.torch needs torch: pip install 'spformat[torch]'"),
        ("spformat.hf", "torch", "spformat.hf needs torch: pip install 'spformat[hf]'"),
    ],
)
def test_an_import_names_the_extra(package: str, missing: str, text: str) -> None:
    done = python("-c", f"import sys; sys.modules['{missing}'] = None; import {package}")
    assert done.returncode == 1
    assert f"ModuleNotFoundError: {text}" in done.stderr.splitlines()
