"""Pythons of their own: for programs in which the stand-in takes CuPy's place, or whose kernels have a planted defect."""

from __future__ import annotations

import os
import subprocess
import sys


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A Python of its own, which sees what this one does."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | variables
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=env)


def printed(program: str) -> str:
    """What a program printed that ended well, and whose kernels compiled: other kernels show nothing of a defect."""
    done = python("-c", program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "error:" not in done.stdout, done.stdout
    return done.stdout
