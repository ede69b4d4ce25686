"""Where the command begins. Ctrl-C while its modules are being imported ends it as later, with exit code 130."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Import the command, and run it."""
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from .main import main as run

    signal.signal(signal.SIGINT, before)
    run()
