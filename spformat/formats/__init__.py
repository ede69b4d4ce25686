"""The registry of formats, one line for each. Code that works with all formats takes them from here."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable
from typing import Any, TypeVar

from ..errors import UsageError
from . import edges
from .array_methods import frozen
from .base import Format
from .bitmask import Bitmask
from .bsr import BSR
from .coo import COO
from .cover import CoverRule, parse_items
from .csc import CSC
from .csr import CSR
from .dbsr import DBSR
from .dense import Dense
from .ell_buckets import ELLBuckets
from .sr_bcrs import SRBCRS
from .stack import Stack
from .sum import Sum
from .two_four import TwoFour
from .vector_nm import VectorNM

__all__ = [
    "BSR", "COMPOSED", "COO", "CSC", "CSR", "DBSR", "FORMATS", "SRBCRS", "Bitmask", "Dense", "ELLBuckets", "Format",
    "Stack", "Sum", "TwoFour", "VectorNM", "by_name", "composed", "parse_spec", "register", "registered", "spec_text",
    "unregister",
]  # fmt: skip

FORMATS: tuple[type[Format], ...] = (
    Dense,
    CSR,
    ELLBuckets,
    BSR,
    DBSR,
    SRBCRS,
    VectorNM,
    TwoFour,
    Bitmask,
    CSC,
    COO,
)
"""The formats into which matrices are converted."""

COMPOSED: tuple[type[Format], ...] = (Sum, Stack)
"""The composed formats, whose parts are matrices of other formats."""


def _host_edges() -> tuple[edges.Edge, ...]:
    from .fast.edges import EDGES

    return EDGES


edges.provide("cpu", _host_edges)

_by_name: dict[str, type[Format]] = {f.name: frozen(f) for f in (*FORMATS, *COMPOSED)}
_ALSO_CALLED = {"n:m": VectorNM.name, "ell": ELLBuckets.name, "24": TwoFour.name, "2_4": TwoFour.name}
"""Common other name of a format -> its id, for hints."""

F = TypeVar("F", bound=type[Format])


def register(fmt: F) -> F:
    """Add a format (usable as a class decorator); its ``name`` must be free."""
    if not (isinstance(fmt, type) and issubclass(fmt, Format) and hasattr(fmt, "name")):
        raise UsageError(f"register: expected a class derived from Format, with a name, got {fmt!r:.80}")
    if _by_name.setdefault(fmt.name, frozen(fmt)) is not fmt:
        raise UsageError(f"a format called {fmt.name!r} is already registered")
    _forget()
    return fmt


def unregister(name: str) -> None:
    """Remove a registered format; UsageError for a built-in one."""
    if name in {f.name for f in (*FORMATS, *COMPOSED)}:
        raise UsageError(f"{name!r} is built in")
    _by_name.pop(name, None)
    _forget()


def _forget() -> None:
    registered.cache_clear()
    composed.cache_clear()
    _rule_of.cache_clear()
    usual_target.cache_clear()


@functools.cache
def registered() -> tuple[type[Format], ...]:
    """All formats into which matrices are converted, built-in ones first."""
    return tuple(f for f in _by_name.values() if not f.declared_parts())


@functools.cache
def composed() -> tuple[type[Format], ...]:
    """All composed formats, built-in ones first."""
    return tuple(f for f in _by_name.values() if f.declared_parts())


def by_name(name: str) -> type[Format]:
    """The class of a format id; UsageError suggests the nearest."""
    if not isinstance(name, str):
        raise UsageError(f"expected the name of a format, as 'csr', got {name!r:.80}", value=name)
    fmt = _by_name.get(name)
    if fmt is None:
        near = difflib.get_close_matches(name.lower(), ["auto", "fastest", *_ALSO_CALLED, *_by_name], 1)
        hint = f"; did you mean {_ALSO_CALLED.get(near[0], near[0])!r}?" if near else ""
        if name == "auto":
            hint = "; convert(x, 'auto') chooses the smallest, as convert_checkpoint and the command do"
        if name == "fastest":
            hint = "; recommend(x, n=[16])[0].format names the fastest, `spformat convert --to fastest` takes it"
        raise UsageError(f"unknown format {name!r:.80}{hint} (known: auto, {', '.join(f.name for f in registered())})")
    return fmt


def parse_spec(text: str) -> tuple[type[Format], dict[str, Any]]:
    """ "bsr:blocksize=64x64", "2:4" or "vector-nm:n=2,m=4" -> (class, params as text); UsageError when malformed.

    "bsr:32x32,density>=0.5+csr" -> (Sum, {"rules": one text for each part}); ``resolve_params`` reads these.
    """
    if "+" in text:
        return Sum, {"rules": tuple(part.strip() for part in text.split("+"))}
    rule = parse_rule(text)
    if rule.conditions:
        raise UsageError(
            f"format {text!r:.200}: a condition says which values a part of a sum takes: name the part that takes the "
            f"others, too, as in '{text:.100}+csr'"
        )
    return rule.format, dict(rule.params)


def format_texts(argument: str, texts: Any) -> list[str]:
    """Several format texts as a list; UsageError, which names the argument, for anything else."""
    listed = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, str) else [texts]
    if isinstance(texts, str) or not all(isinstance(text, str) for text in listed):
        raise UsageError(
            f"{argument}: expected several format texts, as {argument}=['bsr:blocksize=64x64'], got {texts!r:.80}"
        )
    return listed


@functools.lru_cache(maxsize=256)
def usual_target(text: str) -> tuple[type[Format], dict[str, Any]] | None:
    """``parse_spec`` with resolved params, which must not be changed; None for a format that has a ``from_dense`` of
    its own, or conditions for its params. A conversion of a small matrix waits for this longer than for a kernel."""
    fmt, given = parse_spec(text)
    own = (getattr(fmt, name).__func__ is not getattr(Format, name).__func__ for name in _OVERRIDABLE)
    return None if any(own) else (fmt, fmt.resolve_params(given))


_OVERRIDABLE = ("from_dense", "require_converter")


def parse_rule(text: str) -> CoverRule:
    """One part of a sum, "bsr:32x32,density>=0.5"; UsageError when malformed."""
    return _rule_of(str(text))


@functools.lru_cache(maxsize=256)
def _rule_of(text: str) -> CoverRule:
    if text == "2:4" or text.startswith("2:4:"):
        text = TwoFour.name + text[3:]
    name, _, rest = text.partition(":")
    fmt = by_name(text if text in _ALSO_CALLED else name.strip())
    return parse_items(fmt, rest, text)


Sum.parse_rule = staticmethod(parse_rule)


def spec_text(fmt: type[Format], params: dict[str, Any]) -> str:
    """The text ``parse_spec`` reads back."""
    if fmt is Sum and params:
        return "+".join(params["rules"])
    return CoverRule(fmt, params).text
