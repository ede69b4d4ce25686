"""Every word of 2:4 metadata beside every state of its values: for each group one nibble is legal."""

from __future__ import annotations

import numpy as np
import pytest

from spformat.errors import PatternError
from spformat.formats import TwoFour

HALF = np.float16

LEGAL = {0x4: (0, 1), 0x8: (0, 2), 0x9: (1, 2), 0xC: (0, 3), 0xD: (1, 3), 0xE: (2, 3)}
"""Nibble -> the positions of its two values."""
NIBBLES = {(): 0x4, (0,): 0x4, (1,): 0x4, (2,): 0x8, (3,): 0xC,
           (0, 1): 0x4, (0, 2): 0x8, (0, 3): 0xC, (1, 2): 0x9, (1, 3): 0xD, (2, 3): 0xE}  # fmt: skip
"""Positions of the nonzeros of a group -> its one legal nibble; a free slot takes the lowest position left."""


@pytest.mark.parametrize("group", range(4))
@pytest.mark.parametrize("order", ["logical", "ldmatrix"])
def test_every_nibble_with_every_pair_of_values(cut: int, order: str, group: int) -> None:
    """The only nibble of a group is that of its nonzeros' positions: all 16 x 4 states, in each place of a word."""
    f = TwoFour.from_dense(np.zeros((4, 64), HALF), meta_order=order)
    words = f.arrays()["meta"].copy()
    place = int(
        np.flatnonzero(
            TwoFour.from_dense(np.eye(4, 64, 3, dtype=HALF)[[0]], meta_order=order).arrays()["meta"] != 0x4444
        )[0]
    )
    for nibble in range(16):
        meta = words.copy()
        meta[place] = (int(words[place]) & ~(0xF << 4 * group)) | nibble << 4 * group
        for held in range(4):
            data = f.values.copy()
            data[0, 2 * group : 2 * group + 2] = [held & 1, held >> 1]
            x = np.zeros((4, 64), HALF)
            sound = nibble in LEGAL
            if sound:
                kept = tuple(p for slot, p in enumerate(LEGAL[nibble]) if held >> slot & 1)
                sound = NIBBLES[kept] == nibble
                for p in kept:
                    x[0, 4 * group + p] = 1
            g = f.with_arrays(meta=meta, data=data)
            if sound:
                np.testing.assert_array_equal(g.validate().to_dense(), x)
                continue
            with pytest.raises(PatternError) as caught:
                g.validate()
            assert (caught.value.index, caught.value.value) == ((0, group), nibble)
            if nibble in LEGAL:
                assert f"expected nibble 0x{NIBBLES[kept]:X} for the values it holds, got 0x{nibble:X}" in str(
                    caught.value
                )


@pytest.mark.parametrize("groups", [(0, 3), (1, 2), (0, 1)])
def test_groups_of_a_word_are_judged_each_by_its_own_values(groups: tuple[int, int]) -> None:
    f = TwoFour.from_dense(np.zeros((4, 64), HALF), meta_order="logical")
    words, states = f.arrays()["meta"].copy(), [(nibble, held) for nibble in LEGAL for held in range(4)]
    for first in states:
        for second in states:
            word, data = 0x4444, f.values.copy()
            sound = True
            for g, (nibble, held) in zip(groups, (first, second), strict=True):
                word = word & ~(0xF << 4 * g) | nibble << 4 * g
                data[0, 2 * g : 2 * g + 2] = [held & 1, held >> 1]
                sound &= NIBBLES[tuple(p for slot, p in enumerate(LEGAL[nibble]) if held >> slot & 1)] == nibble
            words[0] = word
            matrix = f.with_arrays(meta=words.copy(), data=data)
            if sound:
                matrix.validate()
            else:
                with pytest.raises(PatternError):
                    matrix.validate()


def test_a_matrix_of_which_every_word_is_wrong() -> None:
    f = TwoFour.from_dense(np.zeros((32, 64), HALF))
    with pytest.raises(PatternError, match=r"expected nibble 0x4 for the values it holds, got 0x8 \(512 such\)"):
        f.with_arrays(meta=np.full_like(f.arrays()["meta"], 0x8888)).validate()
