"""The states of a device that times are taken in, on a pretended card whose clock falls while it is busy."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_ggemm import device_state, device_time
from jax_ggemm.device_state import Queue, State

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

pytestmark = pytest.mark.once

HOST = 5e-5
"""Seconds to enqueue a run."""

WAKE = 2e-4
"""Seconds after the end of a run at which a host that waits for it goes on."""

THROTTLED = 1.25
"""Times the time of a run, after 0.1 s without a pause of more than 1 ms."""


class Card:
    """A card, and the clock of its host, in the place of the module `time`."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now = seconds, 0.0
        self.busy_since = 0.0
        self.runs: list[tuple[float, float]] = [(0.0, 0.0)]

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def start(self, calls: int = 1) -> float:
        self.now += HOST
        free = self.runs[-1][1]
        begin = max(self.now, free)
        if begin - free > 1e-3:
            self.busy_since = begin
        factor = THROTTLED if begin - self.busy_since > 0.1 else 1.0
        self.runs.append((begin, begin + calls * self.seconds * factor))
        return self.runs[-1][1]

    def wait(self, end: float) -> None:
        if end > self.now:
            self.now = end + WAKE

    def pauses(self) -> list[float]:
        """Before each run, from the third on: the first two are an estimate."""
        return [later[0] - earlier[1] for earlier, later in zip(self.runs[2:], self.runs[3:], strict=False)]


@pytest.fixture
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card(request.param)
    monkeypatch.setattr(device_state, "time", card)
    return card


LENGTHS = pytest.mark.parametrize("card", [1.5e-4, 1e-3, 2.8e-3, 2e-2, 0.2], indirect=True)


@LENGTHS
def test_a_steady_device_has_no_pause_and_is_at_its_limit(card: Card) -> None:
    taken = device_state.time_calls(Queue(card.start, card.wait), 4, State.STEADY)
    assert taken.seconds == pytest.approx(card.seconds * THROTTLED / 4, rel=0.02)
    assert taken.spread < 0.02
    assert max(card.pauses()[1:]) == 0
    assert taken.samples == 9
    busy = card.runs[-1][1] - card.runs[3][0]
    assert busy >= 0.4 + 9 * 20e-3


@LENGTHS
def test_a_rested_device_has_a_pause_before_each_sample_and_none_within(card: Card) -> None:
    taken = device_state.time_calls(Queue(card.start, card.wait), 4, State.RESTED)
    assert taken.samples == 5
    long = [pause for pause in card.pauses() if pause > 0]
    assert len(long) == 5
    assert min(long) >= 0.3
    if card.seconds >= 1e-3:  # one that does not count, two that do, one behind them
        assert len(card.runs) == 1 + 2 + 5 * 4
    if card.seconds < 2e-2:  # three runs of it are over before the clock falls
        assert taken.seconds == pytest.approx(card.seconds / 4, rel=1e-6 if card.seconds > 1e-3 else 0.15)


@pytest.mark.parametrize("card", [2.0], indirect=True)
def test_a_slow_program_gets_three_samples(card: Card) -> None:
    for state in State:
        assert device_state.time_calls(Queue(card.start, card.wait), 1, state, budget=1.0).samples == 3


def test_how_many_calls_a_program_makes() -> None:
    assert [device_state.calls_of(seconds) for seconds in (1e-5, 7e-4, 1e-3, 2.9e-3, 3.1e-3, 7e-3, 1.0)] == [
        8, 8, 6, 3, 2, 1, 1
    ]  # fmt: skip


@pytest.mark.parametrize("card", [4e-4], indirect=True)
@pytest.mark.parametrize("state", State)
def test_the_time_of_a_function_is_that_of_one_call(card: Card, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def queue(program: Any, operands: Any) -> Queue:
        calls = len(program(*operands))
        asked.append(calls)
        return Queue(lambda: card.start(calls), card.wait)

    monkeypatch.setattr(device_time, "_queue", queue)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    taken = device_time.measure(lambda x: x + 1, jnp.ones(4), state=state)
    assert taken.seconds == pytest.approx(4e-4 * (THROTTLED if state is State.STEADY else 1))
    assert asked == [1, 8]
    device_time.measure(lambda x: x + 1, jnp.ones(4), state=state, calls=4)
    assert asked[2:] == [1, 4]
    monkeypatch.setattr(device_time, "_MOST_BYTES", 40)
    device_time.measure(lambda x: x + 1, jnp.ones(4), state=state)  # results of 16 bytes
    assert asked[4:] == [1, 2]
    card.seconds = 1e-2
    device_time.measure(lambda x: x + 1, jnp.ones(4), state=state)
    assert asked[6:] == [1]  # a long call is a program of its own


def test_a_cpu_is_in_no_state() -> None:
    assert device_time.state_here(State.RESTED) is None
    assert device_time.measure(jnp.sin, jnp.ones(4)).samples == 9


@pytest.mark.parametrize("card", [4e-4], indirect=True)
@pytest.mark.parametrize("state", State)
def test_peers_are_timed_in_the_same_way(card: Card, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    """`benchmarks/torch_products.py` with what it takes of torch, on the pretended card."""
    captured: list[Any] = []

    class Graph:
        def replay(self) -> None:
            card.start(len(captured))

    class Event:
        def record(self) -> None:
            self.end = card.runs[-1][1]

        def synchronize(self) -> None:
            card.wait(self.end)

    @contextlib.contextmanager
    def capture(graph: Graph) -> Any:
        captured.append(graph)
        yield
        captured.remove(graph)

    cuda = types.SimpleNamespace(Event=Event, CUDAGraph=Graph, graph=capture, synchronize=lambda: None)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda, bfloat16=None))
    monkeypatch.delitem(sys.modules, "torch_products", raising=False)
    torch_products = importlib.import_module("torch_products")
    monkeypatch.delitem(sys.modules, "torch_products")

    def function(*operands: Any) -> None:
        assert operands == ("an operand",)
        if captured and isinstance(captured[0], Graph):
            captured.append("a call")
        else:
            card.start()

    taken = torch_products.measure(function, ("an operand",), state)
    assert captured == ["a call"] * 8
    assert taken.seconds == pytest.approx(4e-4 * (THROTTLED if state is State.STEADY else 1))
