"""What can be left out of a kernel without a fault, and is there all the same: nothing has to find it."""

from __future__ import annotations

NO_FAULTS = (
    (
        "dynamic: the wait for room in the ring before asking for a tile",
        "Whoever writes the tile waits for the same phase. Asking earlier gives the same results; it only binds a tile "
        "to a block that has no room for it yet. Without either wait it is a fault: `room_not_waited_for`.",
    ),
    (
        "dynamic: the proxy fence behind a block's last answer",
        "Nothing comes after it. Otherwise PTX wants a fence between reading an answer, which is of the generic proxy, "
        "and the next one, which the asynchronous proxy writes to the same place. A kernel asks at two places; "
        "dropping the fence past the last tile is a fault where a block asks there twice, as it does in the beds "
        "that try it.",
    ),
    (
        "dynamic: an answer's predicate where the answer names a cluster",
        "The number of an answer that names none is undefined, so that the predicate is needed wherever that one "
        "comes: at one of the same two places. With one cluster without work and two blocks, it comes at both in any "
        "order.",
    ),
    (
        "dynamic: that a block expects its answer before the other block of its pair asks",
        "Bytes may come before they are expected, as long as the arrival of the phase is outstanding.",
    ),
    (
        "dynamic: asking on, past the last tile",
        "Clusters that nobody takes start, find no work and end.",
    ),
    (
        "Hopper's pairs: that blocks meet at the end",
        "The load warp waits for every release of its stages by both blocks, a sender of sums for every grant, and a "
        "receiver for every piece: nothing is on its way to the shared memory of a block that has ended. Without these "
        "waits, too, it is a fault: `leaves_before_the_last_releases_came`.",
    ),
    (
        "Hopper's pairs: the load warp's waits at its end",
        "The blocks meet behind them.",
    ),
    (
        "Hopper's pairs: that tiles of 64 rows or fewer are multiplied by columns",
        "The products of a whole tile give the same results, in more time.",
    ),
    (
        "staged: that the lanes of a warp meet behind `wait_group.read`",
        "A store that a whole warp executes is one store, for which each lane waits (measured on an H200). By the "
        "manual it is one of each lane, so that the meeting stays.",
    ),
)
"""(What, why)."""
