"""The pass that adds a bias after a product, without a GPU: what is launched, and where the product is before it."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stand_in_world import Step, World

import spformat as sf
from spformat.backends.cuda.runtime import compose, epilogue
from spformat.backends.cuda.runtime.scratch import Scratch
from spformat.dispatch import plans
from spformat.products.kernel import Kernel, spmm_of
from spformat.products.plan import Plan
from spformat.products.problem import COL, ROW, Problem


@pytest.fixture
def passes(world: World, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The instances of the epilogue that were asked for; launches of them go to ``world``."""
    asked: list[Any] = []

    def launch(instance: str, sm: int, device_id: int) -> Any:
        asked.append(instance)
        return SimpleNamespace(bind=lambda grid, stream, *tail: Step(world, ("epilogue", grid, tail), stream))

    monkeypatch.setattr(epilogue, "_launch", launch)
    return asked


@pytest.mark.parametrize("layout", [ROW, COL])
def test_a_bias_is_added_by_launches_that_are_kept(world: World, passes: list[Any], layout: str) -> None:
    inner = world.plan(calls=2, out_layout=layout)
    problem = replace(inner.problem, epilogue=True)
    plan = epilogue.with_epilogue(inner, problem)
    other = epilogue.with_epilogue(world.plan(out_layout=layout), problem)
    order = "C" if layout == ROW else "F"
    B, out, bias = world.array(3, 5), world.array(4, 5, order=order), world.array(4)
    rounds = 4
    for _ in range(rounds):
        assert plan.run(B, out, 2.0, 1.0, bias) is out
    lines, along = (4, 5) if layout == ROW else (5, 4)
    (o,) = world.prepared
    at = o.c
    assert at not in (out.ctypes.data, B.ctypes.data)
    assert (o.b, o.n, o.ldb, o.ldc, o.bias, o.alpha, o.beta) == (B.ctypes.data, 5, 5, 8, 0, 1.0, 0.0)
    last = ("epilogue", (1, 1, 1), (at, 8, out.ctypes.data, along, lines, along, bias.ctypes.data, 2.0, 1.0))
    assert world.calls == [(o, 0), (o, 1), last] * rounds
    wide = out.ctypes.data % 16 == 0 and along == 4
    assert passes == [
        f"epilogue<float, float, {layout == COL}, {wide}>".replace("True", "true").replace("False", "false")
    ]
    other.run(B, out, 1.0, 0.0, None)
    assert world.prepared[-1].c == at  # both work on one stream, in turn
    C = plan.run(B, None, 1.0, 0.0, bias)
    assert C.shape == (4, 5)
    with pytest.raises(ValueError, match="bias: expected shape"):
        plan.run(B, out, 1.0, 0.0, world.array(5))
    with pytest.raises(ValueError, match="out: expected shape"):
        plan.run(B, world.array(5, 5), 1.0, 0.0, bias)


def test_a_contiguous_vector_is_one_line_in_both_layouts(world: World, passes: list[Any]) -> None:
    """The product before the last pass is contiguous too: rows of one element, eight apart, would be written singly."""
    inner = world.plan()
    plan = epilogue.with_epilogue(inner, replace(inner.problem, epilogue=True))
    out, bias = world.array(4, 1), world.array(4)
    plan.run(world.array(3, 1), out, 2.0, 1.0, bias)
    (o,) = world.prepared
    assert (o.n, o.ldc) == (1, 1)
    assert world.calls[-1] == ("epilogue", (1, 1, 1), (o.c, 8, out.ctypes.data, 1, 1, 4, bias.ctypes.data, 2.0, 1.0))
    assert passes[-1].startswith("epilogue<float, float, true")
    apart = world.array(4, 3)[:, :1]
    plan.run(world.array(3, 1), apart, 1.0, 0.0, None)
    assert (world.prepared[-1].ldc, world.calls[-1][2][3:6]) == (8, (3, 4, 1))


def test_the_product_is_wider_than_c(world: World, passes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for C[4, 5] in float32 with lines of 8, though C itself is in float16; wide stores only on a boundary."""
    asked: list[int] = []
    buffer = Scratch.buffer
    monkeypatch.setattr(Scratch, "buffer", lambda self, stream, n: (asked.append(n), buffer(self, stream, n))[1])
    inner = world.plan()
    plan = epilogue.with_epilogue(inner, inner.problem.changed(out_dtype="float16", epilogue=True))
    room = world.array(128, dtype="float16")
    start = -room.ctypes.data // 2 % 8  # elements before the first 16-byte boundary
    for shift in (0, 1):
        out = room[start + shift :][:32].reshape(4, 8)[:, :5]
        assert plan.run(world.array(3, 5), out, 1.0, 0.0, None) is out
    assert asked == [4 * 8 * 4] * 2
    assert passes == ["epilogue<float, __half, false, true>", "epilogue<float, __half, false, false>"]


def test_a_plan_of_arrays_alone_gets_arrays(world: World, passes: list[Any]) -> None:
    """A plug-in's: no launches to keep."""
    seen: list[Any] = []
    world.cupy.cuda.UnownedMemory = lambda at, nbytes, owner, device_id: (at, nbytes, device_id)
    world.cupy.cuda.MemoryPointer = lambda room, offset: room
    p = world.plan(b_layout=COL).problem
    B, out = world.array(3, 5, order="F"), world.array(4, 5)
    product = Plan("plugin.x", p, lambda b, c: seen.append((b, c)))
    plan = epilogue.with_epilogue(product, p.changed(epilogue=True))
    world.cupy.ndarray = lambda shape, dtype, memory, strides: (shape, str(dtype), memory, strides)
    for _ in range(4):
        plan.run(B, out, 1.0, 0.0, None)
    (b, c) = seen[0]
    assert b == ((3, 5), "float32", (B.ctypes.data, 4 * 15, 0), (4, 12))
    assert c[0] == (4, 5)
    assert c[2][1:] == (4 * 8 * 4, 0)
    assert c[3] == (32, 4)
    assert len(seen) == 4


def test_a_plan_of_several_launches_may_be_one_call_of_another(world: World, passes: list[Any]) -> None:
    """A plug-in's plan may run ours, which takes the lock of its launches while the outer one holds it."""
    inner = world.plan(calls=2)
    p = replace(inner.problem, epilogue=True)
    outer = epilogue.with_epilogue(Plan("plugin.x", inner.problem, lambda b, c: inner.run(B, out)), p)
    B, out, other = world.array(3, 5), world.array(4, 5), world.array(4, 5)
    world.cupy.cuda.UnownedMemory = lambda *_: None
    world.cupy.cuda.MemoryPointer = lambda *_: None
    world.cupy.ndarray = lambda *_: None

    def work() -> None:
        for _ in range(4):
            outer.run(B, other, 1.0, 0.0, None)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "the plans wait for each other"
    assert [what[-1] for what in world.calls if what[0] != "epilogue"] == [0, 1] * 4
    assert len(world.calls) == 3 * 4


def test_an_epilogue_inside_another_has_memory_of_its_own(world: World, passes: list[Any]) -> None:
    """The second part of a sum multiplies into memory of its own: the sums so far lie in that of the outer epilogue."""
    inner = world.plan()
    adding = epilogue.with_epilogue(inner, replace(inner.problem, epilogue=True), "product at depth 1")
    total = compose.sum_of_plans("composed.test", [inner, adding], inner.problem)
    outer = epilogue.with_epilogue(total, replace(inner.problem, epilogue=True))
    outer.run(world.array(3, 5), world.array(4, 5), 2.0, 1.0, None)
    sums, product = (o.c for o in world.prepared)
    assert abs(sums - product) >= 4 * 8 * 4


def test_plans_that_run_inside_one_another_get_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum, a part of it, and a transposed copy inside that part may each need an epilogue in a pass of its own."""
    purposes: list[str] = []
    a = sf.convert(np.eye(4, dtype=np.float32), "csr")
    p = Problem.product("csr", (), 4, 4, 3, 4, "float32", "float32", "float32", epilogue=True)

    class Nested(Kernel):
        name, takes, epilogue = "test.nested", spmm_of("csr"), False

        def __init__(self, levels: int) -> None:
            self.levels = levels

        def _plan(self, a: Any, p: Problem) -> Plan:
            for level in range(self.levels):
                plans.plan_with(Nested(level), a, replace(p, epilogue=True))
            return Plan(self.name, p, lambda B, out: out)

    def with_epilogue(plan: Plan, _p: Problem, purpose: str) -> Plan:
        purposes.append(purpose)
        return plan

    monkeypatch.setattr(plans, "_with_epilogue", with_epilogue)
    plans.plan_with(Nested(2), a, p)
    inner, middle_of_last, last, outer = purposes
    assert len({middle_of_last, last, outer}) == 3
    assert inner == last  # one after the other
    purposes.clear()
    plans.plan_with(Nested(0), a, p)
    assert purposes == [outer]
