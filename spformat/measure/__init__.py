"""Measuring products: contenders, clocks and tuning."""
