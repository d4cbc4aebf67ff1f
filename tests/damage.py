"""Damage to files, as a bad disk does it."""

from __future__ import annotations

import struct
from pathlib import Path
from zipfile import ZipFile


def flip_a_bit(path: Path) -> None:
    """Changes one bit in the middle of the largest part of a file that torch.save wrote."""
    content = bytearray(path.read_bytes())
    with ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda part: part.file_size)
    name, extra = struct.unpack_from("<HH", content, largest.header_offset + 26)
    content[largest.header_offset + 30 + name + extra + largest.file_size // 2] ^= 1
    path.write_bytes(content)
