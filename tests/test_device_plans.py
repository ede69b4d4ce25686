"""Device plans, tested without a GPU: which operands they refuse, and which they recognize."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stand_in_world import Step, World

from spformat.backends import vendor
from spformat.backends.cuda.runtime.device_plan import REMEMBERED, device_plan
from spformat.backends.cuda.runtime.launch import Operands
from spformat.backends.cuda.runtime.scratch import Scratch
from spformat.errors import DeviceError
from spformat.products.plan import Plan
from spformat.products.problem import COL


def known(world: World, plan: Plan, B: Any, out: Any) -> bool:
    """Run the plan; returns whether it used launches that it had kept."""
    prepared, calls_before = len(world.prepared), len(world.calls)
    assert plan.run(B, out) is out
    assert len(world.calls) == calls_before + 1
    assert world.calls[-1][0][:2] == (B.ctypes.data, out.ctypes.data)
    return len(world.prepared) == prepared


def test_operands_seen_before_are_prepared_once(world: World) -> None:
    plan, B, out = world.plan(), world.array(3, 5), world.array(4, 5)
    assert not known(world, plan, B, out)
    assert known(world, plan, B, out)
    assert known(world, plan, B[:], out[:])  # other objects, the same memory
    assert {o for o, _ in world.calls} == {Operands(B.ctypes.data, out.ctypes.data, 5, 5, 5, 7)}


def test_whatever_the_checks_depend_on_makes_operands_new(world: World) -> None:
    plan, B, out = world.plan(), world.array(3, 10), world.array(4, 10)
    assert not known(world, plan, B[:, :5], out[:, :5])
    wide, narrow, other = (B[:, :6], out[:, :6]), (B[:, :4], out[:, :4]), (B[:, 1:6], out[:, 1:6])
    closer = B.reshape(-1)[:15].reshape(3, 5)  # the same address, shape and dtype, other strides
    tight = out.reshape(-1)[:20].reshape(4, 5)
    for b, c in (wide, narrow, other, (closer, out[:, :5]), (B[:, :5], out[:, 5:]), (B[:, :5], tight)):
        assert not known(world, plan, b, c)
        assert known(world, plan, b, c)
        assert known(world, plan, B[:, :5], out[:, :5])
    calls_before = len(world.calls)
    refused = [
        (B[:, :5].view("int32"), out[:, :5], TypeError, "B: this plan takes float32, got int32"),
        (B[:, :5], out[:, :5].view("int32"), TypeError, "out: this plan writes float32, got int32"),
        (B[:, :5], out[:3, :5], ValueError, "out: expected shape"),
        (B[:2, :5], out[:, :5], ValueError, "B: expected shape"),
        (B.reshape(-1)[:15].reshape(3, 5, order="F"), out[:, :5], ValueError, "B: expected row-major"),
        (B[::-1, :5], out[:, :5], ValueError, "B: leading dimension -40 bytes"),
        (B[:, :5], out[::-1, :5], ValueError, "out: leading dimension -40 bytes"),
    ]
    for b, c, error, text in refused:
        with pytest.raises(error, match=text):
            plan.run(b, c)
    assert len(world.calls) == calls_before
    world.stream = 8
    assert not known(world, plan, B[:, :5], out[:, :5])
    assert world.calls[-1][0].stream == 8
    assert known(world, plan, B[:, :5], out[:, :5])


def test_the_same_objects_are_known_until_they_change_their_shape_or_go(world: World) -> None:
    plan, B, out = world.plan(), world.array(3, 5), world.array(4, 5)
    for i in range(4):
        assert known(world, plan, B, out) == (i > 0)
    world.stream = 9
    assert [known(world, plan, B, out) for _ in range(3)] == [False, True, True]
    assert world.calls[-1][0].stream == 9
    world.stream = 7
    assert [known(world, plan, B, out) for _ in range(3)] == [True] * 3
    assert world.calls[-1][0].stream == 7
    B.shape = (5, 3)
    with pytest.raises(ValueError, match="B: expected shape"):
        plan.run(B, out)
    B.shape = (3, 5)
    out.shape = (2, 10)
    with pytest.raises(ValueError, match="out: expected shape"):
        plan.run(B, out)
    out.shape = (4, 5)
    assert known(world, plan, B, out)
    gone = weakref.ref(out)
    del out
    gc.collect()
    assert gone() is None, "a plan keeps operands alive"
    with pytest.raises(TypeError, match="expected a CuPy array"):
        plan.run(B, [])
    other = world.array(4, 5)
    assert known(world, plan, B, other) is (other.ctypes.data == world.calls[0][0].c)
    outs, inputs = [world.array(4, 5) for _ in range(2)], [B, world.array(3, 5)]
    for _ in range(3):
        for b in inputs:
            for c in (*outs, outs[1]):
                plan.run(b, c)
                assert world.calls[-1][0][:2] == (b.ctypes.data, c.ctypes.data)


def test_on_another_device_a_plan_goes_to_its_own_and_to_the_stream_there(world: World) -> None:
    B, out, streams = world.array(3, 5), world.array(4, 5), {0: 7, 1: 9, 2: 7}
    world.cupy.cuda.get_current_stream = lambda: SimpleNamespace(ptr=streams[world.device])
    plan = world.plan()
    for device in (0, 1, 2, 1):
        world.device = device
        plan.run(B, out)
        assert world.device == device
    assert [o.stream for o, _ in world.calls] == [7] * 4
    assert set(world.devices) == {0}
    assert len(world.prepared) == 1
    assert plan.run(B, None).shape == (4, 5)
    assert world.calls[-1][0].stream == 7
    added = world.plan(epilogue=True)
    for _ in range(2):
        added.run(B, out, 2.0, 1.0, None)
        assert world.calls[-1][0][-2:] == (2.0, 1.0)


def test_refused_operands_are_not_remembered(world: World) -> None:
    B = world.array(3, 5)
    wrong = [world.array(4, 6), world.array(5, 5), world.array(4, 5, dtype="float64"), world.array(4, 5, order="F")]
    joint, owned = world.array(7, 5), world.array(14, 5)

    def reads() -> tuple[tuple[int, int], ...]:
        return ((owned[5].ctypes.data, owned[7].ctypes.data),)

    plan = world.plan(reads=reads)
    assert plan.reads is reads
    for _ in range(3):
        for out in wrong:
            with pytest.raises((ValueError, TypeError)):
                plan.run(B, out)
        with pytest.raises(ValueError, match="overlaps B"):
            plan.run(joint[:3], joint[2:6])
        for into in (owned[4:8], owned[2:6], owned[6:10]):
            with pytest.raises(ValueError, match="overlaps the arrays of A"):
                plan.run(B, into)
        with pytest.raises(TypeError, match=r"B: expected a CuPy array on cuda:0, got list; move it with cupy.asarray"):
            plan.run([[1.0] * 5] * 3, None)
        with pytest.raises(TypeError, match="B: expected a CuPy array on cuda:0, got ndarray"):
            plan.run(np.zeros((3, 5), "float32"), world.array(4, 5))
        with pytest.raises(TypeError, match="out: expected a CuPy array on cuda:0, got ndarray"):
            plan.run(B, np.zeros((4, 5), "float32"))
    assert not world.calls
    assert known(world, plan, joint[:3], joint[3:]) is known(world, plan, B, world.array(4, 5)) is False  # they touch


def test_overlaps_of_columns_are_seen_to_the_last_line(world: World) -> None:
    plan, flat = world.plan(b_layout=COL, out_layout=COL), world.array(40)

    def at(start: int, rows: int) -> Any:
        return flat[start : start + 5 * rows].reshape(rows, 5, order="F")

    for b, c in ((0, 14), (19, 0)):  # B has 15 elements, out 20
        with pytest.raises(ValueError, match="overlaps B"):
            plan.run(at(b, 3), at(c, 4))
    for b, c in ((0, 15), (20, 0)):
        plan.run(at(b, 3), at(c, 4))
    assert len(world.calls) == 2


def test_a_plan_forgets_rather_than_grow(world: World) -> None:
    plan, B = world.plan(), world.array(3, 5)
    outs = [world.array(4, 5) for _ in range(REMEMBERED + 3)]
    for out in outs:
        assert not known(world, plan, B, out)
    assert all(known(world, plan, B, out) for out in outs[-3:])
    assert not known(world, plan, B, outs[0])


def test_columns_between_those_of_out_are_no_overlap(world: World) -> None:
    """B and out as two parts of the columns of one buffer."""
    buffer, lines = world.array(4, 12), world.array(5, 8)
    plan = world.plan()
    plan.run(buffer[:3, :5], buffer[:, 6:11])
    plan.run(buffer[1:, 7:], buffer[:, 2:7])
    for b, out in ((buffer[:3, :5], buffer[:, 4:9]), (buffer[1:, 7:], buffer[:, 3:8]), (buffer[:3, :5], buffer[:, :5])):
        with pytest.raises(ValueError, match="out overlaps B"):
            plan.run(b, out)
    world.plan(b_layout=COL, out_layout=COL).run(lines[:, :3].T, lines[:, 3:7].T)
    assert len(world.calls) == 3


def test_a_bias_is_an_array_beside_out_on_its_elements(world: World) -> None:
    """Blocks that start late would add what earlier ones have written."""
    plan, B, joint = world.plan(epilogue=True), world.array(3, 5), world.array(32)
    out = joint[:20].reshape(4, 5)
    for bias in (joint[:4], joint[16:20], joint[19:23]):
        with pytest.raises(ValueError, match="out overlaps the bias"):
            plan.run(B, out, 1.0, 0.0, bias)
    with pytest.raises(ValueError, match="out overlaps the bias"):
        plan.run(B, joint[3:23].reshape(4, 5), 1.0, 0.0, joint[:4])
    plan.run(B, out, 1.0, 0.0, joint[20:24])
    odd = joint.view(np.uint8)[81:97].view(np.float32)
    with pytest.raises(ValueError, match="bias: pointer is not aligned to its 4-byte elements"):
        plan.run(B, out, 1.0, 0.0, odd)
    with pytest.raises(TypeError, match="bias: expected a CuPy array on cuda:0, got ndarray; move it"):
        plan.run(B, out, 1.0, 0.0, np.zeros(4, np.float32))
    assert len(world.calls) == 1


def test_an_epilogue_is_part_of_what_is_remembered(world: World) -> None:
    plan, B, out, bias = world.plan(epilogue=True), world.array(3, 5), world.array(4, 5), world.array(4)
    other = world.array(4)
    # -0.0 == 0.0, but they differ: launches for them are prepared at every call
    calls = [(1.0, 0.0, bias), (2.0, 0.0, bias), (1.0, 1.0, bias), (1.0, 0.0, other), (1.0, 0.0, None),
             (0.0, 0.0, bias), (-0.0, 0.0, bias)]  # fmt: skip
    for _ in range(3):
        for alpha, beta, vector in calls:
            plan.run(B, out, alpha, beta, vector)
            o = world.calls[-1][0]
            assert (str(o.alpha), o.beta) == (str(alpha), beta)
            assert o.bias == (0 if vector is None else vector.ctypes.data)
    assert len(world.prepared) == 5 + 3 * 2
    with pytest.raises(ValueError, match="bias"):
        plan.run(B, out, 1.0, 0.0, world.array(3))
    with pytest.raises(ValueError, match="beta"):
        plan.run(B, None, 1.0, 1.0, bias)
    with pytest.raises(ValueError, match="bias: expected consecutive values"):
        plan.run(B, out, 1.0, 0.0, world.array(8)[::2])
    with pytest.raises(ValueError, match="bias is on cuda:1, the matrix on cuda:0"):
        plan.run(B, out, 1.0, 0.0, world.array(4, device=1))


def test_calls_of_one_product_stay_together(world: World) -> None:
    plan, B = world.plan(calls=3), world.array(3, 5)
    outs = [world.array(4, 5) for _ in range(4)]
    before, interval = len(outs) * 200, sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def work(out: Any) -> None:
        for _ in range(200):
            plan.run(B, out)

    try:
        threads = [threading.Thread(target=work, args=(out,)) for out in outs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(world.calls) == 3 * before
    for i in range(0, len(world.calls), 3):
        group = world.calls[i : i + 3]
        assert [step for _, step in group] == [0, 1, 2]
        assert len({o for o, _ in group}) == 1


def test_a_captured_stream_takes_up_the_launches(world: World) -> None:
    plan, B, out = world.plan(calls=2), world.array(3, 5), world.array(4, 5)
    for _ in range(4):
        plan.run(B, out)
    world.graphs[world.stream] = []
    plan.run(B, out)
    assert [step for _, step in world.graphs.pop(world.stream)] == [0, 1]
    plan.run(B, out)
    assert [step for _, step in world.calls] == [0, 1] * 5
    world.stream = 0  # the default stream, which cannot be captured
    world.cupy.cuda.runtime.streamIsCapturing = lambda _: pytest.fail("asked of the default stream")
    for _ in range(4):
        plan.run(B, out)
    assert [step for _, step in world.calls] == [0, 1] * 9


def test_a_graph_has_memory_of_its_own_also_where_the_operands_are_known(world: World) -> None:
    """It may run on another stream while this one goes on, with the same plan or with others that share the memory."""
    held = Scratch(shared="product")
    used: list[int] = []

    def prepare(o: Operands) -> Any:
        at = held.buffer(o.stream, 1000)
        return [Step(world, at, o.stream), Step(world, at, o.stream)]

    p = world.plan().problem
    plan, B, out = device_plan("cuda.test", p, prepare), world.array(3, 5), world.array(4, 5)
    for _ in range(4):
        plan.run(B, out)
    for _ in range(2):
        world.graphs[world.stream] = []
        plan.run(B, out)
        used += world.graphs.pop(world.stream)
    plan.run(B, out)
    assert len(set(world.calls)) == 1
    assert used == [used[0]] * 2 + [used[2]] * 2
    assert len({*used, *world.calls}) == 3
    world.graphs[world.stream] = []
    plan.run(B, world.array(4, 5))  # met first inside a graph: prepared once
    assert len(set(world.graphs.pop(world.stream))) == 1
    assert len(held._recorded) == 3


def test_what_is_prepared_for_a_graph_is_not_remembered(world: World) -> None:
    plan, B, out = world.plan(), world.array(3, 5), world.array(4, 5)
    world.graphs[world.stream] = []
    for _ in range(3):
        plan.run(B, out)
    assert len(world.prepared) == 3
    assert len(world.graphs.pop(world.stream)) == 3
    for _ in range(3):
        plan.run(B, out)
    assert len(world.prepared) == 4


def test_a_library_that_refuses_while_a_stream_is_captured() -> None:
    def launch(o: Any) -> None:
        raise NotImplementedError("calling cuSPARSE API during stream capture is currently unsupported")

    (call,) = vendor._once(launch)(Operands(1, 2, 3, 4, 5, 6))
    with pytest.raises(DeviceError, match=r"during stream capture.*a graph captures backend 'cuda'"):
        call()
