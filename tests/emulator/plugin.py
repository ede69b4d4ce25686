"""``PYTHONPATH=tests python -m pytest -p emulator.plugin -m gpu FILE``: tests for a GPU on the emulated one."""

from .stand_in import install

install()
