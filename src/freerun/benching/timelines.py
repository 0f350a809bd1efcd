"""Who was busy and who waited, as a small picture that suits light and dark pages."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from freerun.core import Array
from freerun.telemetry.timeline import STATE_NAMES, Recording

COLORS = {
    "busy": (46, 158, 107, 1.0),
    "waiting-for-slot": (224, 135, 43, 0.45),
    "waiting-for-weights": (75, 130, 224, 0.45),
    "waiting-for-data": (140, 153, 173, 0.35),
    "waiting-for-others": (165, 102, 201, 0.45),
    "restarting": (216, 57, 79, 1.0),
    "parked": (140, 153, 173, 0.1),
}
"""Who waits is pale on any ground: a picture should show at a glance where work was done."""
NUM_CELLS = 480
CELL_SECONDS = 0.01


def picture(recording: Recording, start: float, stop: float) -> bytes:
    """A PNG with a row per track, the learner and its stages first; nothing where nothing is known."""
    cells = recording.grid(CELL_SECONDS).cells(start, stop, NUM_CELLS)
    order = sorted(range(len(recording.tracks)), key=lambda track: recording.tracks[track].startswith("worker"))
    return png(mixed(cells[order]))


def mixed(cells: Array) -> Array:
    """[row, cell, state] in seconds to [row, cell, 4] in red, green, blue and opacity, each state by its share."""
    palette = np.array([COLORS[name] for name in STATE_NAMES])
    whole = cells.sum(axis=2, keepdims=True)
    shares = np.maximum(cells, 0.0) / np.maximum(whole, 1e-9)
    opacity = shares @ palette[:, 3]
    color = (shares * palette[:, 3]) @ palette[:, :3] / np.maximum(opacity, 1e-9)[..., None]
    pixels = np.concatenate([color, 255 * opacity[..., None]], axis=2)
    return np.where(whole > 0, pixels, 0.0).clip(0, 255).round().astype(np.uint8)


def png(pixels: Array) -> bytes:
    """[height, width, 4] as a file."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0),
        b"IDAT": zlib.compress(rows, 9),
        b"IEND": b"",
    }
    chunks = (
        struct.pack(">I", len(part)) + name + part + struct.pack(">I", zlib.crc32(name + part))
        for name, part in parts.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
