"""The emulator against a GPU: small PTX programs and whole kernels, bit for bit.

`ptx_vectors/record.py` and `ptx_vectors/record_kernels.py` say how the answers were recorded.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from ptx_vectors import recording, replay
from ptx_vectors.catalogue import programs

pytestmark = pytest.mark.emulator

_recording = functools.cache(recording.load)


def _words(array: np.ndarray) -> np.ndarray:
    """An array's bytes, in elements of its size."""
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.itemsize}")


def test_the_recording_is_of_these_programs() -> None:
    recorded = _recording()
    assert {name: program.digest() for name, program in programs().items()} == recorded.digests
    assert recorded.results.keys() | recorded.refused.keys() == programs().keys()


@pytest.mark.parametrize("name", sorted(programs().keys() - _recording().refused.keys()))
def test_a_program_does_what_it_did_on_a_gpu(name: str) -> None:
    results, report = replay.run(programs()[name])
    assert not report.faults, report.faults[0]
    for argument, expected in _recording().results[name].items():
        np.testing.assert_array_equal(_words(results[argument]), _words(expected))


@pytest.mark.parametrize("name", sorted(_recording().refused))
def test_a_program_that_a_gpu_stopped_has_a_fault(name: str) -> None:
    _, report = replay.run(programs()[name])
    assert {fault.kind for fault in report.faults} & {"misaligned", "out-of-bounds"}
