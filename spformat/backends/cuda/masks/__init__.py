"""Magnitude masks on the device."""
