"""The grouped products on Blackwell, where the tiles of a cluster share their rows of lhs: TMA multicast.

A cluster has two tiles side by side along n, each of one block or of a pair. What a block holds of a tile of lhs, one
block of the other tile holds too. Each loads one half of it for both; weights are each one's own:

    block of tile 0    lhs, first half   --+--> its stage
                                           +--> the same stage of the block of tile 1
    block of tile 1    lhs, second half  --+--> its stage
                                           +--> the same stage of the block of tile 0

A stage is full when both halves and its own weights have come. It is empty when the products of both tiles have read
it, for the next load goes to both: their commits arrive in every block of the cluster. Both tiles are of one group and
of the same rows, so that they have as many tiles of the contraction, or none. Where n has an odd number of tiles, the
last one has a neighbour past the last column, whose weights are zeros, and which writes nothing.
"""

from __future__ import annotations

from typing import Any

from cutlass import Int16, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from jax_ggemm.kernel.config_sm100 import Eviction
from jax_ggemm.kernel.loads_sm100 import Loads
from jax_ggemm.kernel.sm100 import GroupedGemmSm100


class MulticastGemmSm100(GroupedGemmSm100):
    """The kernel of one `KernelSpec` whose configuration has `multicast`."""

    def _loads(self) -> Loads:
        return SharedLoads(self.spec, self.tile_k, self.wide_boxes)

    def _maps(self, views: tuple, layouts: tuple, load: Any, tiled_mma: cute.TiledMma, kind: Any) -> tuple:
        make_a, make_b = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B
        to_all = cpasync.CopyBulkTensorTileG2SMulticastOp(self.group)
        cluster = (self.blocks, 1, self.config.multicast, 1)
        return (
            make_a(to_all, views[0], layouts[0], self.tile, tiled_mma, cluster, internal_type=kind),
            make_b(load, views[1], layouts[1], self.weight_tile, tiled_mma, internal_type=kind),
        )


class SharedLoads(Loads):
    """Loads the tiles of one block, and its part of lhs to every block that holds the same rows."""

    def _partition_lhs(self, tma: cute.CopyAtom, smem: cute.Tensor, tiles: cute.Tensor) -> Any:
        part = cute.arch.block_idx()[0] % self.config.cluster_blocks // self.blocks
        return cpasync.tma_partition(
            tma,
            part,
            cute.make_layout(self.config.multicast),
            cute.group_modes(smem, 0, 3),
            cute.group_modes(tiles, 0, 3),
        )

    def _load_lhs(self, tma: cute.CopyAtom, tiles: tuple, k_tile: Int32, to: tuple) -> None:
        sharers = sum(2 ** (i * self.blocks) for i in range(self.config.multicast))
        cute.copy(
            tma,
            tiles[1][None, k_tile],
            tiles[0][None, to[0]],
            tma_bar_ptr=to[1],
            mcast_mask=Int16(sharers << cute.arch.block_idx()[0] % self.blocks),
            cache_policy=Int64(Eviction.NORMAL.value),
        )
