"""Weights loaded with one request for a whole stage: boxes wider than the 128 bytes of a swizzled row.

The inner axis of a swizzled box is at most 128 bytes. These boxes have one more axis, which counts such segments along
a row of the weights, so that one request reads several neighbouring ones:

* weights that are contiguous along the contraction (dX; or forward, of transposed weights): the segments of the
  neighbouring tiles of the contraction that a stage holds, 256 bytes of each row for two;
* weights (k, n), contiguous along n (forward, and dW): the segments of all columns of the tile, 256 bytes of each row
  for 128 columns of 16 bits, and 512 for 256. The rows are those of all tiles of the contraction in the stage.

Such a box must not reach past the end of a row, where the next one begins: it would not be filled with zeros. There,
the plain boxes are loaded, one per segment.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute.nvgpu import cpasync

from jax_ggemm.kernel import operands
from jax_ggemm.kernel.config_sm100 import ATOM_COLUMNS, Sm100Config
from jax_ggemm.kernel.schedule import WorkTile


@dataclasses.dataclass(frozen=True)
class WideBoxes:
    """How one block's part of a stage is made of boxes."""

    along_k: bool
    """The weights are contiguous along the contraction."""
    segment: int
    """Elements in 128 bytes."""
    columns: int
    """Of a box: what the block holds for one instruction."""
    rows: int
    """Of the contraction in a stage."""
    atoms: int
    """Boxes in a stage."""
    stages: int

    @staticmethod
    def of(config: Sm100Config, along_k: bool, tile_k: int) -> WideBoxes | None:
        """The boxes, or None where plain ones are as good."""
        atoms = max(config.tile_n // ATOM_COLUMNS, 1)
        columns = config.tile_n // atoms // config.blocks
        if not config.wide_boxes or (along_k and (config.weight_k_tiles == 1 or atoms > 1)):
            return None
        rows = tile_k * config.weight_k_tiles
        return WideBoxes(along_k, tile_k, columns, rows, atoms, config.weight_stages)

    @property
    def box(self) -> tuple[int, int, int]:
        """(elements of a segment, segments, rows or columns of the weights)."""
        if self.along_k:
            return self.segment, self.rows // self.segment, self.columns
        return self.segment, self.columns // self.segment, self.rows

    def smem(self) -> cute.Layout:
        """(element, segment, row; box; stage) of the stages."""
        element, _, others = self.box
        size = self.rows * self.columns
        return cute.make_layout(
            (*self.box, self.atoms, self.stages), stride=(1, element * others, element, size, size * self.atoms)
        )

    def tensor_map(self, view: cute.Tensor, swizzle: Any, op: Any, kind: Any) -> Any:
        """A tensor map of the weights, and the (element, segment, row, ...) view of them.

        Args:
          view: of the weights as (n, contracted, ...).
          swizzle: of the stages.
          op: the copy.
          kind: what the TMA unit takes the elements for.
        """
        contiguous = 1 if self.along_k else 0
        shape = (self.segment, cutlass.max(view.shape[contiguous] // self.segment, 1), view.shape[1 - contiguous])
        stride = (1, self.segment, view.stride[1 - contiguous])
        segmented = cute.make_tensor(
            view.iterator, cute.make_layout((*shape, *view.shape[2:]), stride=(*stride, *view.stride[2:]))
        )
        layout = cute.make_composed_layout(swizzle, 0, cute.select(self.smem(), mode=[0, 1, 2]))
        return cpasync.make_tiled_tma_atom(op, segmented, layout, self.box, internal_type=kind)

    def parts(self, operand: tuple, tile: WorkTile, ragged_rows: bool, rank: Int32) -> list[Any]:
        """For each box of a stage: (shared memory by stage, global memory by stage of the contraction)."""
        tma, tensor, stages = operand
        parts = []
        for atom in range(self.atoms):
            column = tile.column + atom * ATOM_COLUMNS + rank * self.columns
            if self.along_k:
                view = cute.domain_offset((0, 0, column), tensor[None, None, None, tile.b_row])
                tiles = cute.flat_divide(view, self.box)[None, None, None, 0, None, 0]
            else:
                segment = column // self.segment
                if ragged_rows:
                    view = cute.domain_offset((0, segment, 0), tensor[None, None, None, tile.b_row])
                else:
                    view = operands.rows_of_segmented_group(tensor, segment, tile.b_row, tile.depth)
                tiles = cute.flat_divide(view, self.box)[None, None, None, 0, 0, None]
            smem = stages[None, None, None, atom, None]
            parts.append(
                cpasync.tma_partition(
                    tma, 0, cute.make_layout(1), cute.group_modes(smem, 0, 3), cute.group_modes(tiles, 0, 3)
                )
            )
        return parts

    def fits(self, tile: WorkTile, rank: Int32, stage: Int32, contiguous: Int32) -> Boolean:
        """Whether the boxes of a stage of the contraction end within rows of so many elements."""
        if self.along_k:
            return (stage + 1) * self.rows <= contiguous
        last = tile.column + (self.atoms - 1) * ATOM_COLUMNS + rank * self.columns
        return last + self.columns <= contiguous
