"""Pictures as text that an HTML page can hold."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np


def png(pixels: np.ndarray) -> bytes:
    """A picture as a PNG file.

    Args:
        pixels: (height, width) for grey or (height, width, 3) for colours, of the type uint8.

    Raises:
        ValueError: for another shape or type.
    """
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] != 3):
        raise ValueError(f"no picture: {pixels.dtype} of shape {pixels.shape}")
    height, width = pixels.shape[:2]
    # Each row begins with the number of its filter; 0 is none.
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], 1)
    header = struct.pack(">2I5B", width, height, 8, 0 if pixels.ndim == 2 else 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def data_uri(content: bytes, kind: str = "image/png") -> str:
    """The address under which a page shows a picture that is in the address itself."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def as_image(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """Inputs of a network as a picture: (height, width) or (height, width, 3); None if they are none.

    Pictures are inputs of shape (1 or 3, height, width), (height, width, 1 or 3) or (height, width), and vectors whose
    size is that of a square picture of at least 8 × 8 in grey or in three colours.

    Args:
        values: the inputs, flat.
        shape: the shape of one input.
    """
    inner = tuple(extent for extent in shape if extent != 1)
    if len(inner) == 1:
        for channels in (1, 3):
            side = round((inner[0] / channels) ** 0.5)
            if side >= 8 and side * side * channels == inner[0]:
                return as_image(values, (channels, side, side))
        return None
    if len(inner) == 2 and min(inner) >= 4:
        return values.reshape(inner)
    if len(inner) == 3 and inner[0] == 3:
        return values.reshape(inner).transpose(1, 2, 0)
    if len(inner) == 3 and inner[2] == 3:
        return values.reshape(inner)
    return None


def shades(image: np.ndarray, low: float, high: float) -> np.ndarray:
    """A picture as bytes: ``low`` becomes 0, ``high`` 255, and what is beyond is cut off."""
    scaled = (image - low) / (high - low if high > low else 1.0)
    return np.asarray(np.rint(255 * scaled.clip(0, 1)), np.uint8)
