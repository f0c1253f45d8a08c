"""The cost model of the timeline: what a multiprocessor takes for what."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Costs:
    """Latencies in cycles, rates per cycle, of one multiprocessor.

    They are meant to rank designs: how many stages, one accumulator or two. Sources:

    - [L] Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking" (2024);
    - [N] NVIDIA's H100 and B200 data sheets;
    - [M] measured by this project on an H200 (docs/hopper.md).
    """

    instruction: float = 2.0
    """Of a warp from one instruction to the next: half of the 4 cycles of integer and float32 operations [L], since
    about two are independent. A scheduler issues one instruction a cycle, for a quarter of the warps."""
    shared_load: float = 29.0
    """Shared memory [L]."""
    global_load: float = 480.0
    """Global memory that is not in L2 [L]."""
    shuffle: float = 23.0
    """As shared memory without its bank access; an estimate."""
    barrier: float = 20.0
    """From the last arrival to the first instruction behind a wait; an estimate."""
    tma_latency: float = 650.0
    """Of a bulk copy from global memory, beside its bytes: that of a global load and the unit's own; [L] has 170 more
    cycles for it."""
    store_latency: float = 100.0
    """Until a bulk copy to global memory has begun to read shared memory; an estimate."""
    memory_bytes: float = 19.1
    """The share of one of 132 multiprocessors in 4.43 TB/s [M] at 1.755 GHz."""
    l2_bytes: float = 38.2
    """The same for what a load has brought before: about twice as fast, an estimate."""
    shared_bytes: float = 128.0
    """What shared memory gives in a cycle: 32 banks of 4 bytes."""
    wgmma_products: float = 2048.0
    """Multiply-adds of 16-bit numbers: 989 TFLOP/s of 132 multiprocessors at 1.83 GHz [N]."""
    tcgen05_products: float = 4096.0
    """Multiply-adds of 16-bit numbers: 2.25 PFLOP/s of 148 multiprocessors at 1.85 GHz [N]."""
