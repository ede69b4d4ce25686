"""Files and tensors of other projects, read with full validation: nothing of theirs is trusted."""

MATRIX_SUFFIXES = (".smtx", ".mtx", ".npz")
"""Endings of files with one matrix."""
