"""Compiled loops of the converters (numba); the numpy code of each format stays the reference."""
