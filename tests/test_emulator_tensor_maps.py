"""The PTX emulator judges tensor maps that a kernel writes: wrong programs, right twins."""

from __future__ import annotations

import numpy as np
import pytest
from emulated_programs import HEAD, only
from ptx_emulator import Launch, Memory, emulate
from ptx_emulator.memory import empty
from ptx_vectors.program import Buffer, TensorMap
from ptx_vectors.tensor_map import encode

pytestmark = pytest.mark.emulator

_HEAD = HEAD.replace(".param .u64 y)", ".param .u64 y, .param .align 64 .b8 map[128])")
_INIT = "mbarrier.init.shared.b64 [%r2+2048], 1; fence.mbarrier_init.release.cluster;"
_LOAD = (
    only(
        f"{_INIT} mov.u32 %r30, 0; mbarrier.arrive.expect_tx.shared.b64 _, [%r2+2048], 256;"
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
        " [%r2], [%rd2, {%r30, %r30}], [%r2+2048];"
    )
    + "bar.warp.sync -1; W: mbarrier.try_wait.parity.shared.b64 %p7, [%r2+2048], 0; @!%p7 bra W;"
)
_RELEASE = "fence.proxy.tensormap::generic.release.gpu;"
_ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%rd2], 128;"


def _written_by(lane: int) -> str:
    """The map of the parameters goes to y."""
    words = "".join(f"ld.param.b64 %rd9, [map+{8 * i}]; st.global.b64 [%rd2+{8 * i}], %rd9;" for i in range(16))
    return only(words + _RELEASE, lane)


def _kinds(body: str, threads: int = 32) -> list[set[str]]:
    x, y = empty((256,), np.dtype(np.uint32)), empty((256,), np.dtype(np.uint32))
    x[:] = np.arange(256)
    encoded = encode(TensorMap(Buffer(x), "u32", (8, 16), (32,), (8, 8), 0), x.ctypes.data)
    found = []
    for seed in range(8):
        memory = Memory()
        memory.add("x", x)
        memory.add("y", y, writable=True, initialised=False)
        params = [x.ctypes.data, y.ctypes.data, bytes(encoded)]
        launch = Launch(block=(threads, 1, 1), shared_bytes=4096, params=params)
        report = emulate(_HEAD.format(target="sm_90a", body=body), launch, memory, seed=seed, raises=False)
        found.append({fault.kind for fault in report.faults})
    return found


@pytest.mark.parametrize("threads", [32, 64])
def test_a_map_that_the_kernel_writes(threads: int) -> None:
    sync = "bar.sync 0;"
    rest = f"setp.gt.u32 %p2, %r1, 31; @%p2 bra END; {_LOAD} END:"
    written = _written_by(threads - 1)
    assert not any(_kinds(written + sync + _ACQUIRE + rest, threads))
    assert _kinds(written + sync + rest, threads) == [{"race"}] * 8
    for kinds in _kinds(written + _ACQUIRE + rest, threads):
        assert kinds
        assert kinds <= {"race", "uninitialised"}


def test_a_map_that_nothing_wrote() -> None:
    assert _kinds(_ACQUIRE + _LOAD) == [{"uninitialised"}] * 8
