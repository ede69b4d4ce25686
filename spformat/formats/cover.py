"""Cover rules: which values of a matrix a part of a sum takes.

    bsr:blocksize=32x32,density>=0.5     a format, its params, and conditions
    csr:row_length>=64                   whole rows
    two-four                             two of every four columns: the format chooses by itself

A rule is given what the rules before it have left, as an ordered CSR without zeros. Its conditions on rows and columns
come first. Of what they leave, the format takes the values that the other conditions allow (``Format.covered``): so in
every stored block the density is at least what the rule says. The last rule of a sum takes all that is left.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ..arrays.library import Array, namespace
from ..arrays.segments import counts_of
from ..errors import StructureError, UsageError
from .base import Format
from .csr import CSR
from .hooks import COLUMN_DEGREE, LINES, ROW_LENGTH, Condition

_CONDITION = re.compile(r"([^<>=]*)(>=|<=|=>|=<|==|!=|<|>)(.*)")


@dataclass(frozen=True)
class CoverRule:
    """One part of a sum: a format with params as they were given, and the conditions on what it takes."""

    format: type[Format]
    params: dict[str, Any]
    conditions: tuple[Condition, ...] = ()

    @property
    def text(self) -> str:
        """The text that is read back."""
        values = ("x".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in self.params.values())
        items = [f"{k}={v}" for k, v in zip(self.params, values, strict=True)]
        items += map(str, self.conditions)
        return f"{self.format.name}:{','.join(items)}" if items else self.format.name

    def resolved(self, *, last: bool) -> CoverRule:
        """The rule with all params that do not depend on the matrix, and its usual conditions.

        last: it is the last rule of a sum. Raises UsageError for a param or condition that the format does not have, a
        rule that would leave nothing to the rules after it, and conditions of the last rule.
        """
        self.format.require_converter()
        params = self.format.resolve_params(self.params)
        if last:
            if self.conditions:
                raise UsageError(
                    f"{self.format.name}: the last part takes all that the others leave: expected no condition, got "
                    f"{self.conditions[0]}"
                )
            return CoverRule(self.format, params)
        rule = CoverRule(self.format, params, self.all_conditions(params))
        if not rule.conditions and not self.format.selective:
            has = " or ".join(m.name for m in (*LINES, *self.format.measures))
            raise UsageError(
                f"{self.format.name}: it would take every value and leave none to the parts after it: expected a "
                f"condition on {has}, as in {self.format.name}:{ROW_LENGTH.name}>=64"
            )
        return rule

    def all_conditions(self, params: dict[str, Any]) -> tuple[Condition, ...]:
        """The given conditions, and the usual ones on what no given one is about."""
        given = {c.measure for c in self.conditions}
        return self.conditions + tuple(c for c in self.format.usual_conditions(params) if c.measure not in given)

    def split(self, a: CSR) -> tuple[Format, CSR]:
        """(what the rule takes of an ordered CSR without zeros, in its format; the rest)."""
        params = self.format.resolve_params(self.params, a)
        conditions = self.all_conditions(params)
        on_lines = [c for c in conditions if c.measure in (ROW_LENGTH.name, COLUMN_DEGREE.name)]
        own = tuple(c for c in conditions if c not in on_lines)
        taken = _in_lines(a, on_lines)
        inside = a.only(taken) if on_lines else a
        covered = self.format.covered(inside, params, own)
        if on_lines:
            taken[namespace(a.data).flatnonzero(taken)] = covered  # synchronize!
        else:
            taken = covered
        return self.converted(inside.only(covered), params), a.only(~taken)

    def converted(self, a: CSR, params: dict[str, Any] | None = None) -> Format:
        """An ordered CSR as a whole in the format of the rule."""
        return self.format.from_csr(a, **(self.params if params is None else params))


def _in_lines(a: CSR, conditions: list[Condition]) -> Array:
    """bool[nnz]: whether the row and the column of each item meet the conditions on them."""
    xp = namespace(a.data)
    met = xp.ones(a.nnz, bool)
    for condition in conditions:
        if condition.measure == ROW_LENGTH.name:
            met &= condition.holds(a.indptr[1:] - a.indptr[:-1])[a.rows()]
        else:
            met &= condition.holds(counts_of(a.indices, a.shape[1]))[a.indices]
    return met


def decomposed(a: CSR, rules: tuple[CoverRule, ...]) -> tuple[Format, ...]:
    """A part for each rule, the last with what the others leave. Every nonzero of ``a`` is in exactly one of them."""
    rest, parts = a.without_zeros(), []
    for i, rule in enumerate(rules):
        try:
            if i < len(rules) - 1:
                part, rest = rule.split(rest)
            else:
                part = rule.converted(rest)
        except StructureError as e:
            e.message = f"sum: part {i}: {e.message}"
            raise
        parts.append(part)
    return tuple(parts)


def parse_items(fmt: type[Format], rest: str, text: str) -> CoverRule:
    """The rule of a format and the items after its colon: ``name=value``, ``measure>=bound``, ``measure<=bound``.

    One value alone is that of the only parameter of a format. text: the whole, for messages.
    """
    where = f"format {text!r:.200}"
    params: dict[str, Any] = {}
    conditions: list[Condition] = []
    only = [d.name for d in fmt.declared_params()]
    for item in filter(None, rest.split(",")):
        match = _CONDITION.fullmatch(item.strip())
        if match:
            name, operator, bound = (g.strip() for g in match.groups())
            conditions.append(_condition(fmt, name, operator, bound, where))
            if any(c.key == conditions[-1].key for c in conditions[:-1]):
                raise UsageError(f"{where}: {conditions[-1].measure} is bounded twice with {conditions[-1].operator}")
            continue
        key, equals, value = item.partition("=")
        if not equals and len(only) == 1:
            key, equals, value = only[0], "=", item
        if not equals or not value:
            raise UsageError(f"{where}: expected name=value after ':', got {item!r:.80}")
        key = key.strip().replace("-", "_")
        if key not in only and any(m.name == key for m in (*fmt.measures, *LINES)):
            raise UsageError(f"{where}: expected a condition with >= or <=, got {item.strip()}")
        if key in params:
            raise UsageError(f"{where}: {key} is given twice, as {params[key]} and {value.strip()}")
        params[key] = value.strip()
    return CoverRule(fmt, params, tuple(conditions))


def _condition(fmt: type[Format], name: str, operator: str, bound: str, where: str) -> Condition:
    if operator not in (">=", "<="):
        raise UsageError(f"{where}: expected a condition with >= or <=, got {name}{operator}{bound}")
    name = name.replace("-", "_")
    measure = next((m for m in (*fmt.measures, *LINES) if m.name == name), None)
    if measure is None:
        known = ", ".join(f"{m.name} ({m.doc})" for m in (*fmt.measures, *LINES))
        raise UsageError(f"{where}: unknown condition {name!r:.80}; {fmt.name} has {known}")
    try:
        return Condition(name, operator, measure.bound(bound))
    except UsageError as e:
        raise UsageError(f"{where}: {e.message}", value=bound) from None
