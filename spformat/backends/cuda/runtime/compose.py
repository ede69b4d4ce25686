"""Several products on a device as one plan: their launches follow one another and add to C."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....products.plan import Plan, nothing
from ....products.problem import Problem
from .device_plan import device_plan
from .epilogue import launches_of, with_epilogue
from .launch import Call, Operands


def sum_of_plans(name: str, plans: Sequence[Plan], p: Problem) -> Plan:
    """A plan for ``p`` that adds up the results of several plans. All but the first have an epilogue and add to C.

    If their results are wider than C, they are summed in a workspace and rounded once.
    """
    prepared = [launches_of(plan) for plan in plans]

    def prepare(o: Operands) -> Sequence[Call]:
        calls = [*prepared[0](o)]
        for add in prepared[1:]:
            calls += add(o._replace(alpha=1.0, beta=1.0, bias=0))
        return calls

    texts = " + ".join(f"{plan.kernel} {plan.tile}".strip() for plan in plans)
    parts = [plan.reads or nothing for plan in plans]

    def reads() -> tuple[tuple[int, int], ...]:
        return tuple(r for part in parts for r in part())

    wide = p.changed(out_dtype=plans[0].problem.out_dtype, epilogue=False)
    total = device_plan(name, wide, prepare, texts, sum(plan.workspace for plan in plans), reads)
    if wide.out_dtype == p.out_dtype:
        return total
    rounded = with_epilogue(total, p, "sums")
    return replace(rounded, tile=texts)
