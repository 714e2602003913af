"""The difference between two versions of the policy, as bytes.

A small optimizer step leaves most bfloat16 weights as they were and changes the lowest bits of the others, so the XOR
of the bytes is nearly all zero and compresses to a few percent. The bytes of equal significance are laid side by side
first, which saves another tenth. XOR is exact: base and difference give the new bytes, not nearly.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

# Higher levels save less than a hundredth and take longer.
_ZSTD = pa.Codec("zstd", compression_level=1)


def encode(new: Bytes, base: Bytes, itemsize: int) -> Bytes | None:
    """What turns `base` into `new`, both flat bytes of values of `itemsize` bytes; None when they are equal."""
    if new.shape != base.shape:
        raise ValueError(f"a difference needs two tensors of one size, not {new.size} and {base.size} bytes")
    difference = new ^ base
    if not difference.any():
        return None
    planes = np.ascontiguousarray(difference.reshape(-1, itemsize).T)
    return np.frombuffer(_ZSTD.compress(planes, asbytes=True), np.uint8)


def decode(difference: Bytes, base: Bytes, itemsize: int) -> Bytes:
    """The inverse of `encode`. Raise ValueError when the difference does not belong to a tensor of this size."""
    try:
        raw = _ZSTD.decompress(difference, decompressed_size=base.size, asbytes=True)
    except OSError as error:
        raise ValueError(f"the difference is not one of {base.size} bytes: {error}") from error
    if len(raw) != base.size:
        raise ValueError(f"the difference has {len(raw)} bytes for a tensor of {base.size}")
    planes = np.frombuffer(raw, np.uint8).reshape(itemsize, -1)
    return planes.T.reshape(-1) ^ base
