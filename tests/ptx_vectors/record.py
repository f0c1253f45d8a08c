"""Runs every probe on the GPU of this machine and keeps what came out: `python -m ptx_vectors.record [FILE]` in tests/.

A process runs probes until one fails or hangs; the next probe gets a new process.
"""

from __future__ import annotations

import datetime
import multiprocessing
import multiprocessing.connection
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ptx_vectors import recording
from ptx_vectors.catalogue import programs

SECONDS = 30
"""After which a probe counts as hanging; the first one of a process compiles nothing but opens the GPU."""


def _work(connection: multiprocessing.connection.Connection) -> None:
    """Runs the programs whose names come in, until one fails."""
    from ptx_vectors.driver import CudaError, Driver, RefusedError  # noqa: PLC0415

    try:
        driver = Driver()
        connection.send((driver.gpu, driver.cuda_version))
        while (name := connection.recv()) is not None:
            results, remarks = driver.run(programs()[name])
            connection.send((results, remarks))
    except RefusedError as error:
        connection.send(error)
    except (CudaError, OSError) as error:
        connection.send(str(error))


class _Worker:
    """A process with a context of its own."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.opened = self._receive()

    def _receive(self) -> Any:
        if not self._connection.poll(SECONDS):
            return f"no answer within {SECONDS} s"
        try:
            return self._connection.recv()
        except EOFError:
            return "the process died"

    def run(self, name: str) -> Any:
        """(results, remarks), or what went wrong; then the worker must not be used again."""
        self._connection.send(name)
        return self._receive()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join(SECONDS)


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def _judge(name: str, results: dict[int, np.ndarray]) -> str:
    """Whether the results are those that the manuals let expect."""
    program = programs()[name]
    notes = []
    for i, expected in program.expected.items():
        got = results[i].view(np.uint8).reshape(-1)
        wrong = int(np.count_nonzero(got != np.ascontiguousarray(expected).view(np.uint8).reshape(-1)))
        notes.append("as expected" if not wrong else f"UNEXPECTED: {wrong} of {got.size} bytes of argument {i}")
    return "; ".join(notes)


def main() -> None:
    """Runs everything, prints a table, writes the file."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else recording.PATH
    results: dict[str, dict[int, np.ndarray]] = {}
    refused: dict[str, str] = {}
    failed, worker, machine = 0, None, {}
    for name, program in programs().items():
        if worker is None:
            worker = _Worker()
            if isinstance(worker.opened, str):
                raise SystemExit(f"no GPU: {worker.opened}")
            machine = {"gpu": worker.opened[0], "cuda": worker.opened[1], "driver": _driver_version()}
        answer = worker.run(name)
        if isinstance(answer, str | Exception):
            worker.close()
            worker = None
            if isinstance(answer, str):
                failed += 1
                note = f"FAILED: {answer}"
            else:
                refused[name] = str(answer)
                note = f"refused: {answer}"
        else:
            results[name], remarks = answer
            note = "; ".join([*filter(None, [_judge(name, results[name])]), *remarks])
        print(f"{name:48} {program.digest()}  {note}", flush=True)
    if worker is not None:
        worker.close()
    machine["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    digests = {name: programs()[name].digest() for name in (*results, *refused)}
    recording.Recording(results, refused, digests, machine).save(path)
    counts = f"{len(results)} programs recorded, {len(refused)} refused, {failed} failed"
    print(f"{counts}; {path.stat().st_size} bytes in {path}; {machine}")


if __name__ == "__main__":
    main()
