"""What the shell offers for TAB: formats, targets, kernels, as they are registered."""

from __future__ import annotations

from collections.abc import Callable

TARGETS = {
    "auto": "the smallest exact format of each matrix",
    "fastest": "the format that expects the least time",
    "keep": "as it is",
}
MISFITS = {"error": "end the run", "keep": "leave the tensor as it is"}


def formats(incomplete: str) -> list[str]:
    """Names of formats."""
    from spformat.formats import registered

    return [f.name for f in registered() if f.name.startswith(incomplete)]


def targets(incomplete: str) -> list[str]:
    """What --to takes: formats, auto, fastest and keep."""
    return [*formats(incomplete), *(t for t in TARGETS if t.startswith(incomplete))]


def one_format(incomplete: str) -> list[str]:
    """What --to of bench takes: formats and auto."""
    return [*formats(incomplete), *(["auto"] if "auto".startswith(incomplete) else [])]


def misfits(incomplete: str) -> list[str]:
    """What --misfit takes."""
    return [*targets(incomplete), *(t for t in MISFITS if t not in TARGETS and t.startswith(incomplete))]


def rules(incomplete: str) -> list[str]:
    """The target of a rule, after its last "="; the pattern is the user's."""
    pattern, equals, target = incomplete.rpartition("=")
    return [f"{pattern}={name}" for name in targets(target)] if equals else []


def dtypes(incomplete: str) -> list[str]:
    """Value types."""
    from spformat.arrays.dtypes import VALUE_TYPES

    return [name for name in VALUE_TYPES if name.startswith(incomplete)]


def backends(incomplete: str) -> list[str]:
    """Names of backends."""
    from spformat import backends

    return [name for name in backends.names() if name.startswith(incomplete)]


def kernels(incomplete: str) -> list[str]:
    """Names of backends and of their kernels; those of a plug-in that does not load are left out."""
    from spformat import backends as known

    names = backends(incomplete)
    for name in known.names():
        try:
            names += [k.name for k in known.get(name).kernels() if k.name.startswith(incomplete)]
        except (ImportError, AttributeError):
            continue
    return names


def one_of(*values: str) -> Callable[[str], list[str]]:
    """A choice among these."""

    def chosen(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return chosen
