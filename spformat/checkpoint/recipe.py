"""What to do with which tensor: an ordered list of rules; the last one that matches a name decides."""

from __future__ import annotations

import fnmatch
import numbers
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..arrays.dtypes import VALUE_TYPES
from ..errors import ContainerError, UsageError
from ..formats import parse_spec
from .fastest import Fastest, is_fastest

AUTO = "auto"
KEEP = "keep"
"""Targets that are no format ids. "auto": the smallest exact format. "keep": leave the tensor as it is. A third one,
"fastest", is ``fastest.Fastest`` as text."""
ERROR = "error"
"""As ``Recipe.misfit``: a tensor that its target cannot hold ends the run."""


def matcher(pattern: str) -> re.Pattern[str]:
    """ "re:<regex>" (searched anywhere) or a shell pattern over the whole name; UsageError when malformed.

    Both are for ``search``.
    """
    if not isinstance(pattern, str):
        raise UsageError(f"pattern: expected a text, got {pattern!r:.80}")
    try:
        if pattern.startswith("re:"):
            return re.compile(pattern[3:])
        # ``translate`` marks the end of the name only.
        return re.compile(rf"\A{fnmatch.translate(pattern)}")
    except re.error as e:
        raise UsageError(f"pattern {pattern!r}: {e}") from e


def require_match(flag: str, pattern: str, names: list[str]) -> None:
    """UsageError unless a pattern matches one of the names."""
    if not any(map(matcher(pattern).search, names)):
        around, fix = f"*{pattern}*", ""
        if not pattern:
            fix = "; an empty pattern is that of an empty name, and '*' matches all names"
        elif not pattern.startswith("re:") and any(map(matcher(around).search, names)):
            literally = any(pattern in name for name in names)
            part = pattern if re.fullmatch(r"[\w.-]*", pattern) else re.escape(pattern)  # a lone "[" is no expression
            fix = f"; a pattern is of the whole name: {around!r}" + (f", or 're:{part}'" if literally else "")
        some = f" ({', '.join(names[:3])}, ..)" if names else ""
        raise UsageError(f"{flag} {pattern!r} matches none of {len(names)} tensors{some}{fix}")


def included(names: Iterable[str], include: Sequence[str] | None) -> list[str]:
    """The names that the --include patterns select, or all names without a pattern.

    Raises UsageError for a pattern that selects none.
    """
    names = list(names)
    for pattern in include or ():
        require_match("--include", pattern, names)
    patterns = [matcher(p) for p in include or ()]
    return [n for n in names if not patterns or any(p.search(n) for p in patterns)]


def check_target(target: str) -> str:
    """``target``, without blanks around it, if it is "auto", "keep", "fastest" or a format with legal params; else
    UsageError."""
    if not isinstance(target, str):
        raise UsageError(f"target: expected a text like 'auto', 'csr' or 'bsr:32x32', got {target!r:.80}")
    target = target.strip().removesuffix(":")  # a format with no params
    if is_fastest(target):
        Fastest.parse(target)
    elif target not in (AUTO, KEEP):
        fmt, params = parse_spec(target)
        fmt.require_converter(**params)
        fmt.resolve_params(params)
    return target


def needs_counts(target: str) -> bool:
    """Whether only the nonzeros of a tensor tell which format the target means: "auto" and "fastest"."""
    return target == AUTO or is_fastest(target)


@dataclass(frozen=True)
class Rule:
    """Tensors whose name matches ``pattern`` become ``target``."""

    pattern: str
    target: str

    def __post_init__(self) -> None:
        matcher(self.pattern)
        object.__setattr__(self, "target", check_target(self.target))

    @classmethod
    def parse(cls, text: str) -> Rule:
        """A rule from "PATTERN=FORMAT:params". The pattern may contain "=", too.

        Raises UsageError if no "=" splits the text into a pattern and a legal target.
        """
        # Params also contain "=" ("bsr:blocksize=16x16"), so the first "=" that leaves a legal target separates them.
        error: UsageError | None = None
        for i in (i for i, ch in enumerate(text) if ch == "="):
            try:
                return cls(text[:i], text[i + 1 :])
            except UsageError as e:
                error = error or e
        raise error or UsageError(f"rule {text!r}: expected PATTERN=FORMAT, e.g. 're:.*mlp.*=two-four'")


def _several(name: str, given: Any, kind: type = str) -> tuple[Any, ...]:
    """Patterns or rules as a tuple, one by itself too; UsageError for anything else."""
    listed = (given,) if isinstance(given, (str, kind)) else tuple(given) if isinstance(given, (list, tuple)) else None
    if listed is None or not all(isinstance(x, (str, kind)) for x in listed):
        what = "texts 'PATTERN=FORMAT' or Rule objects" if kind is Rule else "patterns of names"
        raise UsageError(f"{name}: expected a list of {what}, got {given!r:.80}")
    return listed


@dataclass(frozen=True)
class Recipe:
    """How a checkpoint is converted. Values are lost only with ``prune``, which is off by default."""

    to: str = AUTO
    rules: tuple[Rule, ...] = ()
    """Rules, or their texts, "PATTERN=FORMAT:params"."""
    include: tuple[str, ...] = ()
    """Patterns, or one as it is; so is ``exclude``."""
    exclude: tuple[str, ...] = ()
    prune: str = ""
    """"" or "magnitude": zero the smallest values so that the target fits (or ``sparsity`` is reached)."""
    sparsity: float | None = None
    nonfinite: str = "refuse"
    """With prune, NaN and infinities: "refuse" the tensor, or "keep" them as if they were the largest values."""
    misfit: str = "error"
    """What to do with a tensor its target cannot hold exactly: end the run with an "error", "keep" the tensor as it is,
    or convert it to another target, named here ("bitmask", "auto", ..)."""

    def __post_init__(self) -> None:
        fields = {"to": check_target(self.to), "rules": _several("rules", self.rules, Rule)}
        fields["rules"] = tuple(Rule.parse(r) if isinstance(r, str) else r for r in fields["rules"])
        fields |= {name: _several(name, getattr(self, name)) for name in ("include", "exclude")}
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        for pattern in (*self.include, *self.exclude):
            matcher(pattern)
        if self.prune not in ("", "magnitude"):
            raise UsageError(f"prune: expected 'magnitude', got {self.prune!r}")
        if self.sparsity is not None and not (isinstance(self.sparsity, numbers.Real) and 0 <= self.sparsity < 1):
            raise UsageError(f"sparsity: expected a share in [0, 1), got {self.sparsity!r:.80}")
        if self.prune:
            self._require_pruning()
        if self.sparsity is not None and not self.prune:
            raise UsageError("sparsity: expected prune='magnitude' (--prune magnitude) with it; nothing else prunes")
        if self.nonfinite not in ("refuse", "keep"):
            raise UsageError(f"nonfinite: expected 'refuse' or 'keep', got {self.nonfinite!r}")
        if self.nonfinite != "refuse" and not self.prune:
            raise UsageError("nonfinite: expected prune='magnitude' (--prune magnitude) with it; nothing else prunes")
        if self.misfit not in (ERROR, KEEP):
            try:
                object.__setattr__(self, "misfit", check_target(self.misfit))
            except UsageError as e:
                e.message = f"misfit: expected 'error', 'keep' or a format, got {self.misfit!r}: {e.message}"
                raise
            if self.prune:
                raise UsageError(f"misfit: expected 'error' or 'keep' beside prune, got {self.misfit!r}")

    def _require_pruning(self) -> None:
        """UsageError if none of the targets prunes anything."""
        targets = [t for t in (self.to, *(rule.target for rule in self.rules)) if t != KEEP]
        if not targets:
            raise UsageError("prune: every tensor is kept, and so none is pruned: name a target with --to or --rule")
        if self.sparsity is None and all(map(needs_counts, targets)):
            share = "the share of values to zero, as some format holds every matrix"
            raise UsageError(f"--prune magnitude to {targets[0].partition(':')[0]} needs --sparsity, {share}")

    def without_misfit(self) -> Recipe:
        """The recipe for a tensor that already goes to the other target, which has to hold it."""
        return replace(self, misfit=ERROR)

    @classmethod
    def from_json(cls, tree: Any, path: str = "") -> Recipe:
        """The recipe in a journal, which ``dataclasses.asdict`` turned into JSON; ContainerError if it is malformed."""
        try:
            fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in tree.items()}
            return cls(**fields | {"rules": tuple(Rule(**r) for r in tree["rules"])})
        except (AttributeError, KeyError, TypeError, UsageError) as e:
            raise ContainerError(f"the journal holds no recipe: {e}", path=path) from e

    def target_of(self, name: str, shape: Sequence[int], dtype: str, stacked: bool = False) -> tuple[str, str]:
        """(target, why) of one tensor: "keep" with a reason, or a format text with the rule that chose it.

        stacked: the tensor is stored as a ``Stack``. A plain tensor of three dimensions counts as one where
        ``looks_stacked`` says so, or a rule names it.
        """
        if len(shape) != 2 and (len(shape) != 3 or not shape[0]):
            return KEEP, f"{len(shape)}-D: only matrices are converted"
        if dtype not in VALUE_TYPES:
            return KEEP, f"dtype {dtype} is not a value type"
        if self.include and not any(matcher(p).search(name) for p in self.include):
            return KEEP, "not included"
        excluded = next((p for p in self.exclude if matcher(p).search(name)), None)
        if excluded is not None:
            return KEEP, f"excluded by {excluded}"
        target, why = self.to, "default"
        for rule in self.rules:
            if matcher(rule.pattern).search(name):
                target, why = rule.target, f"rule {rule.pattern}"
        if len(shape) == 3 and why == "default" and not stacked and not looks_stacked(shape):
            return KEEP, "3-D: a --rule that names it converts its matrices"
        return target, why


LEAST_STACKED = 32
"""Rows and columns from which the slices of a tensor of three dimensions are taken for weight matrices. The kernels of
convolutions and position embeddings [1, tokens, width] have three dimensions, too."""


def looks_stacked(shape: Sequence[int]) -> bool:
    """Whether a plain tensor of this shape is taken for a stack of two weight matrices or more: [E, M, K]."""
    return len(shape) == 3 and shape[0] >= 2 and min(shape[1:]) >= LEAST_STACKED


def writes_dense(recipe: Recipe) -> bool:
    """Whether the output is an ordinary checkpoint: everything goes to dense."""
    return recipe.to == "dense" and not recipe.rules
