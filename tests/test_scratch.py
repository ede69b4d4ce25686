"""Memory between launches, without a GPU: who shares it, and who must not."""

from __future__ import annotations

import ctypes
import gc
import itertools
import threading
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stand_in_world import World

from spformat.backends.cuda.runtime.scratch import RELAXED, Counters, Scratch, Words, Workspace, new_arrays


def test_zeros_made_while_a_stream_is_captured_belong_to_that_graph(world: World) -> None:
    """They are cleared only when the graph runs: a call outside of it would start from undefined counts."""
    world.cupy.zeros = lambda n, dtype: world.array(n, dtype="uint8")
    zeros, plain = Scratch(zeros=True), Scratch()
    world.graphs[7] = []
    first, second, kept = zeros.buffer(7, 100), zeros.buffer(7, 100), plain.buffer(7, 100)
    assert first != second
    world.graphs.clear()
    assert zeros.buffer(7, 100) not in (first, second)
    assert zeros.buffer(7, 100) == zeros.buffer(7, 128) != zeros.buffer(7, 129)
    assert plain.buffer(7, 128) == kept
    world.graphs[7] = []
    assert zeros.buffer(7, 100) == zeros.buffer(7, 128)  # there already: zeros between calls


def test_shared_memory_is_that_of_a_stream_and_of_no_graph(world: World) -> None:
    first, second, own = Scratch(shared="product"), Scratch(shared="product"), Scratch()
    at = int(first.buffer(7, 1000))  # the number alone, which keeps nothing
    assert at == second.buffer(7, 1024) == first.buffer(7, 513)
    assert len({at, first.buffer(7, 1025), first.buffer(8, 1000), own.buffer(7, 1000)}) == 4
    world.device = 1
    assert Scratch(shared="product").buffer(7, 1000) != at
    world.device = 0
    world.graphs[7] = []
    recorded = [first.buffer(7, 1000), second.buffer(7, 1000), first.buffer(7, 1000)]
    assert len({at, *recorded}) == 4
    world.graphs.clear()
    assert first.buffer(7, 1000) == at
    del first
    assert second.buffer(7, 1000) == at == Scratch(shared="product").buffer(7, 1000)
    buffers = [b for b in Scratch._shared_buffers.values() if b.array.data.ptr == at]
    del buffers[0].array  # a buffer without owner is freed
    buffers.clear()
    second._buffers.clear()
    gc.collect()
    assert not [key for key in Scratch._shared_buffers if key[:3] == (0, 7, 10)]


def test_zeros_are_shared_among_those_who_leave_zeros(world: World) -> None:
    world.cupy.zeros = lambda n, dtype: world.array(n, dtype="uint8")
    plain, zeros, more = (
        Scratch(shared="product"),
        Scratch(zeros=True, shared="product"),
        Scratch(zeros=True, shared="product"),
    )
    assert plain.buffer(7, 100) != zeros.buffer(7, 100) == more.buffer(7, 100)


@pytest.fixture
def pinned(world: World, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """No pinned words are left from before; the sizes that are allocated."""
    sizes: list[int] = []

    def alloc(nbytes: int) -> Any:
        sizes.append(nbytes)
        kind = type("Pinned", (ctypes.Array,), {
            "_type_": ctypes.c_ubyte, "_length_": nbytes, "ptr": property(lambda s: ctypes.addressof(s)),
        })  # fmt: skip
        return kind()

    monkeypatch.setattr(Words, "_free", defaultdict(list))
    world.cupy.cuda.alloc_pinned_memory = alloc
    return sizes


def test_pinned_words_are_taken_by_one_and_come_back(pinned: list[int]) -> None:
    taken = [Words.taken() for _ in range(100)]
    places = sorted(w.address for w in taken)
    assert min(b - a for a, b in itertools.pairwise(places)) >= 8 * Words.FEW
    assert len(pinned) == 2
    for w in taken:
        w.words[:] = range(len(w.words))
    assert all(list(w.words) == list(range(Words.FEW)) for w in taken)
    taken[7].give_back()
    assert Words.taken() is taken[7]
    assert len(pinned) == 2
    large = Words.taken(100)
    assert (len(large.words), pinned[2]) == (128, 1024)
    large.give_back()
    assert Words.taken(65) is large
    assert len(Words.taken(64).words) == 64


@pytest.mark.usefixtures("pinned")
def test_counters_keep_their_words_until_the_device_is_done(world: World) -> None:
    waited: list[str] = []
    world.cupy.cuda.get_current_stream = lambda: SimpleNamespace(ptr=7, synchronize=lambda: waited.append("stream"))
    first, unread = Counters(), Counters()
    words = first._words
    assert words is not None
    words.words[:2] = [3, 2**64 - 1]
    assert first.get() == first.get() == (3, 2**64 - 1)
    assert waited == ["stream"]  # once
    again = Counters()
    assert again.address == first.address != unread.address
    assert again.get() == (0, 0)
    address = unread.address
    del unread  # an error: a kernel may still write there
    assert address not in {Words.taken().address for _ in range(200)}


def test_a_workspace_is_one_allocation_in_pieces(world: World) -> None:
    allocated: list[int] = []

    def alloc(nbytes: int) -> Any:
        allocated.append(nbytes)
        return SimpleNamespace(ptr=4096)

    world.cupy.cuda.alloc = alloc
    assert Workspace(1, 256, 0, 257, 8).places == [4096, 4352, 4608, 4608, 5120]
    assert allocated == [256 + 256 + 512 + 256]


def test_small_arrays_of_a_matrix_are_one_allocation(world: World) -> None:
    """Each starts on a boundary, behind the one before it; large ones have memory of their own."""
    allocated: list[int] = []

    class At(int):
        def __add__(self, n: int) -> At:
            return At(int(self) + n)

    world.cupy.cuda.alloc = lambda nbytes: allocated.append(nbytes) or At(4096)
    world.cupy.ndarray = lambda shape, dtype, memory: (shape, dtype, int(memory))
    world.cupy.empty = lambda shape, dtype: (shape, dtype)
    i4, f2 = np.dtype(np.int32), np.dtype(np.float16)
    got = new_arrays(((3, 43), f2), ((0,), i4), ((64,), i4), ((1,), f2))
    assert got == [((3, 43), f2, 4096), ((0,), i4, 4608), ((64,), i4, 4608), ((1,), f2, 4864)]
    assert allocated == [512 + 256 + 256]
    assert new_arrays(((512, 512), i4), ((1,), f2)) == [((512, 512), i4), ((1,), f2)]
    assert len(allocated) == 1


def test_words_that_are_stored_once_are_read_without_a_wait(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as all of them are there. The driver is asked where they do not come: it knows why."""
    waited: list[str] = []
    buffers: list[Any] = []

    def pinned(nbytes: int) -> Any:
        buffers.append(ctypes.create_string_buffer(nbytes))
        return SimpleNamespace(ptr=ctypes.addressof(buffers[-1]))

    monkeypatch.setattr(Words, "_free", defaultdict(list))
    world.cupy.cuda.alloc_pinned_memory = pinned
    stream = SimpleNamespace(synchronize=lambda: waited.append("stream"))
    world.cupy.cuda.get_current_stream = lambda: stream
    both = Counters(stored=2)
    words = (ctypes.c_uint64 * 2).from_address(both.address)
    words[0], words[1] = 5, 0
    assert both.get() == (5, 0)
    assert not waited
    one = Counters(stored=1)
    assert one.address == both.address
    words[0] = 7
    assert one.get() == (7, 0)
    assert not waited
    late = Counters(stored=2)
    words[0] = 3  # the second one comes while the driver waits
    stream.synchronize = lambda: (waited.append("stream"), words.__setitem__(1, 4))
    assert late.get() == (3, 4)
    assert waited == ["stream"]
    added = Counters()
    words[0] = 9
    assert added.get() == (9, 4)
    assert waited == ["stream", "stream"]


def test_threads_on_one_stream_get_one_buffer(world: World) -> None:
    """Two buffers would be fatal: launches are kept with the address of the one that is freed."""
    scratch, found = Scratch(), []

    def slow(n: int, dtype: str) -> Any:
        time.sleep(0.01)
        return world.array(n, dtype="uint8")

    world.cupy.empty = slow
    threads = [threading.Thread(target=lambda: found.append(scratch.buffer(7, 100))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1


def test_memory_is_taken_while_a_capture_forbids_it(world: World) -> None:
    """A thread that captures as torch does may not allocate memory outside of the relaxed capture mode."""
    seen, empty = [], world.cupy.empty
    world.cupy.empty = lambda *a: (seen.append(world.mode), empty(*a))[1]
    Scratch().buffer(7, 100)
    assert (seen, world.mode) == ([RELAXED], 0)
    world.cupy.empty = None
    with pytest.raises(TypeError):
        Scratch().buffer(7, 100)
    assert world.mode == 0


def test_the_stream_of_a_thread_is_another_in_each(world: World) -> None:
    scratch, found = Scratch(), {}
    world.stream = per_thread = 2  # cudaStreamPerThread
    plan, B, out = world.plan(), world.array(3, 5), world.array(4, 5)

    def work(name: str) -> None:
        found[name] = scratch.buffer(per_thread, 100)
        assert found[name] == scratch.buffer(per_thread, 100)
        for _ in range(3):
            plan.run(B, out)

    work("main")
    thread = threading.Thread(target=work, args=("other",))
    thread.start()
    thread.join()
    assert found["main"] != found["other"]
    assert [o.stream for o in world.prepared] == [per_thread] * 2
    assert len(world.calls) == 6
