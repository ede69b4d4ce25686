"""C++ names of the types of arrays, for the names of kernels."""

from __future__ import annotations

from ....arrays.library import Array

WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}
"""Bytes of a value -> the unsigned word that its bits are moved in."""
INDEX = {4: "int", 8: "long long"}
"""Bytes of an index -> its type."""


def word_type(a: Array) -> str:
    """The word that holds one value of ``a``."""
    return WORDS[a.dtype.itemsize]


def index_type(a: Array) -> str:
    """The type of the indices in ``a``."""
    return INDEX[a.dtype.itemsize]
