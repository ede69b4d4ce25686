"""``PYTHONPATH=tests python -m fuzz [campaign] [options]``; without a campaign all of them run at their full size."""

from __future__ import annotations

import importlib
import subprocess
import sys

CAMPAIGNS = ("substitutions", "mutants", "syscalls", "kills", "headers", "bombs", "readers", "interrupts")

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in (*CAMPAIGNS, "refusals", "score"):
        if sys.argv[1] == "headers" and "--blind" not in sys.argv:
            importlib.import_module("fuzz.guided")  # instruments spformat as it is imported
        sys.exit(importlib.import_module(f"fuzz.{sys.argv[1]}").main(sys.argv[2:]))
    if sys.argv[1:]:
        sys.exit(f"usage: python -m fuzz [{' | '.join(CAMPAIGNS)}] [--help]")
    sys.exit(max(subprocess.run([sys.executable, "-m", "fuzz", name]).returncode for name in CAMPAIGNS))
