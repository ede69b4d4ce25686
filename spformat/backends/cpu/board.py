"""The board of a team of threads: int64 words through which they and the caller of a product agree (``team_loops``).

Words that several threads write lie in lines of the cache of their own.
"""

from __future__ import annotations

MOST = 64
"""Most threads that share a product."""
PIECES = 4
"""Pieces of work per thread."""
SPIN_NS = 100_000
"""How long a thread waits for the next product before it sleeps: about as long as it takes to wake up."""

WORDS = 8
"""Words of a line of the cache."""
OPEN, INSIDE, SPIN, CALLER, FUNCTION, DATA, COUNT, THREADS = 0, WORDS, *range(2 * WORDS, 2 * WORDS + 6)
"""Words of the board. The number of the product that is open; threads that look at it; nanoseconds; the core on which

the caller runs; how a piece is computed; pieces; threads that may take some."""
TAKEN = 3 * WORDS
"""For each piece, the last product in which it was taken."""
STATES = TAKEN + MOST * PIECES
"""For each thread, in a line of its own: ASLEEP, AWAKE or WOKEN, and a POSIX semaphore, which is zero at first."""
ASLEEP, AWAKE, WOKEN = 0, 1, 2
CORES = 1024
"""Bits of a set of cores of the C library."""
