"""Products captured in a CUDA graph, for the tests on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np


def assert_captured(cp: Any, plan: Any, B: Any, out: Any, wanted: Any, captures: int = 1) -> None:
    """A plan that ran once on a stream is captured there; each replay of the graph overwrites ``out`` with ``wanted``.

    The stream is non-blocking and the default one is not waited for during the capture: a launch on another stream than
    the current one would make the capture fail. A second capture takes the call that the plan keeps.
    """
    cp.cuda.get_current_stream().synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        plan(B, out=out)
        stream.synchronize()
        for _ in range(captures):
            stream.begin_capture()
            plan(B, out=out)
            graph = stream.end_capture()
            for _ in range(2):
                out.fill(float("nan"))
                graph.launch(stream)
                stream.synchronize()
                np.testing.assert_array_equal(out.get().astype(np.float64), wanted)
