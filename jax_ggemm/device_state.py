"""Times programs on a device that is in a state with a name: ours, and those of peers, in the same one.

An H200 that multiplies without a pause is at its power limit after a fraction of a second, and then at 1180 to 1480 MHz
in the place of 1980: a time says little without how busy the device was before it. Nothing here depends on JAX: what
can be enqueued and waited for can be timed.

Times are taken on the host, from the end of one run to the end of a later one, with the runs in between enqueued
before: what the host takes to launch and to wait is not in it, as long as the device does not catch up with the host.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

CALLS = 8
"""Of a function within one program, at most."""

_PROGRAM = 6e-3
"""Seconds that a program takes, or less with `CALLS` calls: what a rested device does is then as long for all."""

_WARM = 0.4
"""Seconds that a steady device runs the program before the first sample."""

_SAMPLE = 20e-3
"""Seconds of a sample of a steady device, or more."""

_AHEAD = 1e-3
"""Seconds of work, or more, that the device has before it while the host waits."""

_REST = 0.3
"""Seconds that a rested device does nothing before each sample."""


class State(enum.StrEnum):
    """What a device did before it is timed.

    STEADY: it ran the same program without a pause for 0.4 s, and goes on between samples: training sees this.
    RESTED: it did nothing for 0.3 s, then ran the program once; the next two runs are the sample. A program of less
      than 1 ms runs as many times more as makes it 1 ms.
    """

    STEADY = "steady"
    RESTED = "rested"


@dataclasses.dataclass(frozen=True)
class Queue:
    """One program on a device that runs what it is given in order.

    Attributes:
      start: enqueues a run of the program, without waiting; returns what `wait` takes.
      wait: returns when that run has ended.
    """

    start: Callable[[], Any]
    wait: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """A time on the device.

    Attributes:
      seconds: the median.
      spread: (largest - smallest) / median of the samples.
      samples: how many.
    """

    seconds: float
    spread: float
    samples: int

    @property
    def microseconds(self) -> float:
        """The median."""
        return self.seconds * 1e6


def estimate(queue: Queue) -> float:
    """Seconds of a run that the host waits for, the host's part included; the first run, which sets up, aside."""
    _alone(queue)
    return _alone(queue)


def calls_of(seconds: float) -> int:
    """How many calls to make in a program: `CALLS`, or fewer where those would take longer than 6 ms.

    Args:
      seconds: of one call, from `estimate`.
    """
    return max(1, min(CALLS, math.ceil(_PROGRAM / seconds)))


def time_calls(queue: Queue, calls: int, state: State, budget: float = 10.0) -> DeviceTime:
    """The device's time of one call.

    Args:
      queue: of a program that makes so many calls, one after the other.
      calls: in one run of the program.
      state: that the device is brought into.
      budget: seconds after which no further sample is taken, beyond the third.

    Returns:
      The time: of 9 samples of a steady device, of 5 of a rested one.
    """
    expected = estimate(queue)
    match state:
        case State.STEADY:
            samples = _steady(queue, expected, budget)
        case State.RESTED:
            samples = _samples(lambda: _rested(queue, expected), 5, budget)
    return _summary([sample / calls for sample in samples])


def time_alone(queue: Queue, budget: float = 10.0) -> DeviceTime:
    """The time of runs that the host waits for one by one, the host's part included, in no state of its own."""
    _alone(queue)
    return _summary(_samples(lambda: _alone(queue), 9, budget))


def _alone(queue: Queue) -> float:
    start = time.perf_counter()
    queue.wait(queue.start())
    return time.perf_counter() - start


class _Stream:
    """Runs of a program without a pause: some are enqueued behind the one that the host waits for."""

    def __init__(self, queue: Queue, expected: float) -> None:
        self.ahead = max(1, math.ceil(_AHEAD / expected))
        self._queue = queue
        self._pending = collections.deque(queue.start() for _ in range(self.ahead))

    def end_after(self, runs: int) -> float:
        """Waits for so many runs more; the time at which the last of them ended."""
        for _ in range(runs):
            self._pending.append(self._queue.start())
            self._queue.wait(self._pending.popleft())
        return time.perf_counter()

    def stop(self) -> None:
        """Waits for what is enqueued."""
        while self._pending:
            self._queue.wait(self._pending.popleft())


def _steady(queue: Queue, expected: float, budget: float) -> list[float]:
    """Seconds of a run, by sample."""
    started, warm_runs = time.perf_counter(), 0
    stream = _Stream(queue, expected)
    end = started
    while end - started < _WARM:
        end, warm_runs = stream.end_after(1), warm_runs + 1
    runs = math.ceil(_SAMPLE * warm_runs / (end - started))

    def sample() -> float:
        nonlocal end
        start, end = end, stream.end_after(runs)
        return (end - start) / runs

    taken = _samples(sample, 9, budget)
    stream.stop()
    return taken


def _rested(queue: Queue, expected: float) -> float:
    """Seconds of a run, from one sample. What is ahead at its beginning does not count: by then the host waits."""
    time.sleep(_REST)
    stream = _Stream(queue, expected)
    runs = 2 * stream.ahead
    start = stream.end_after(stream.ahead)
    taken = (stream.end_after(runs) - start) / runs
    stream.stop()
    return taken


def _samples(sample: Callable[[], float], count: int, budget: float) -> list[float]:
    taken: list[float] = []
    start = time.perf_counter()
    while len(taken) < count and (len(taken) < 3 or time.perf_counter() - start < budget):
        taken.append(sample())
    return taken


def _summary(seconds: list[float]) -> DeviceTime:
    median = statistics.median(seconds)
    return DeviceTime(median, (max(seconds) - min(seconds)) / median if median > 0 else 0.0, len(seconds))
