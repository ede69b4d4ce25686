"""Long runs against hostile input and crashes: ``PYTHONPATH=tests python -m fuzz`` (``make fuzz``) runs them all.

Each module here is one campaign with a ``main``; the ``test_*.py`` beside them run a slice of each with every test
run. What was found and counted: docs/decisions/0015-fuzzing.md.
"""
