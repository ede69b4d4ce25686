"""Make a device's context current in a thread in which nothing has used CUDA's runtime yet.

Calls of the driver (a launch, the address of a tensor map) need a current context; those of the runtime set one. A
thread may run a plan that another one prepared, and then its first call is one of the driver.
"""

from __future__ import annotations

NO_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT: of a call of the driver in a thread that has no current context."""


def made_current() -> bool:
    """Make the context of the thread's device current; False if one was current already, so that another try would fail
    again."""
    from cupy.cuda import runtime
    from cupy_backends.cuda.api import driver

    if driver.ctxGetCurrent():
        return False
    runtime.setDevice(runtime.getDevice())
    return bool(driver.ctxGetCurrent())
