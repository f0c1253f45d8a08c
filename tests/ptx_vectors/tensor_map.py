"""The first 64 bytes of a CUtensorMap, as cuTensorMapEncodeTiled of driver 580 writes them.

The layout was read from the driver's own encodings, field by field; `record.py` compares the two for every map.
"""

from __future__ import annotations

import numpy as np

from ptx_vectors.program import TensorMap

FORMATS = {"u8": 0, "u16": 1, "u32": 2, "s32": 3, "f16": 6, "f32": 7, "bf16": 10}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


def encode(tensor_map: TensorMap, address: int) -> bytes:
    """Encodes a tensor map.

    Args:
      tensor_map: which.
      address: of its buffer, a multiple of 16.

    Returns:
      128 bytes, the second half zero.
    """
    extents = [e - 1 for e in tensor_map.extents] + [0] * (5 - len(tensor_map.extents))
    strides = [s >> 4 for s in tensor_map.strides] + [0] * (4 - len(tensor_map.strides))
    box = [b - 1 for b in tensor_map.box] + [0] * (5 - len(tensor_map.box))
    attributes = (
        (len(tensor_map.extents) - 1) << 4
        | FORMATS[tensor_map.element] << 7
        | _SWIZZLES[tensor_map.swizzle] << 13
        | int(tensor_map.fill_nan) << 15
    )
    high = sum((s >> 32 & 0xF) << 4 * i for i, s in enumerate(strides))
    strides = [s & 0xFFFFFFFF for s in strides]
    words = [
        address & ((1 << 57) - 1),
        attributes | strides[0] << 32,
        strides[1] | strides[2] << 32,
        strides[3] | high << 32,
        extents[0] | extents[1] << 32,
        extents[2] | extents[3] << 32,
        extents[4] | box[0] << 56,
        box[1] | box[2] << 8 | box[3] << 16 | box[4] << 24,
    ]
    return np.array(words, np.uint64).tobytes() + bytes(64)
