"""A defect that is planted in the sources of kernels, to see that a test finds it. For a process of its own."""

from __future__ import annotations

from collections.abc import Callable

from spformat.backends.cuda.runtime import jit


def plant(old: str, new: str, source: str = "", header: str | tuple[str, ...] = ()) -> list[bool]:
    """From now on ``new`` stands for ``old`` in every source that is loaded; returns, load by load, whether it did.

    source: AssertionError where this one is loaded and does not have ``old``. header: one of ours
    ("spformat/name.cuh"), or several, the including one first, whose text is put in place of its #include first, so that
    it is changed, too.
    """
    right, replaced = jit.source_text, []
    headers = tuple(filter(None, (header,) if isinstance(header, str) else header))

    def wrong(name: str) -> str:
        text = right(name)
        for each in headers:
            text = text.replace(f'#include "{each}"', (jit.INCLUDE / each).read_text().replace("#pragma once", ""))
        replaced.append(old in text)
        assert source != name or replaced[-1], f"{source} has no {old!r}"
        return text.replace(old, new)

    jit.source_text = wrong  # type: ignore[assignment]
    return replaced


def three_runs(equal: Callable[[], bool], planted: list[bool], **options: object) -> None:
    """Print what three runs give whose threads take turns in other orders: equal, DIFFERENT or an error.

    equal: whether the result is right; an AssertionError says that it is not. planted: what ``plant`` returned.
    options: of the emulated launches, beside ``seed`` and ``shuffle_threads``.
    """
    from . import stand_in

    for seed in range(3):
        stand_in.OPTIONS.update(seed=seed, shuffle_threads=True, **options)
        try:
            print("equal" if equal() else "DIFFERENT")
        except AssertionError as e:
            print("DIFFERENT", e)
        except (Exception, SystemExit) as e:
            print(e)
    assert any(planted), "no source has what is to be replaced"
