"""``PYTHONPATH=tests python -m pytest -p emulator.plugin -m gpu FILE``: tests for a GPU on the emulated one.

``SPFORMAT_EMULATOR_SM=80`` makes it one of that architecture; the default is 90.
"""

import os

from .stand_in import install

install(int(os.environ.get("SPFORMAT_EMULATOR_SM", "90")))
