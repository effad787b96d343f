"""S2: the cost of images that would decode to huge sizes, and of truncated ones."""

import io
import struct
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import psutil
from PIL import Image
from support.resident import Resident

from acceptance.figures import MIB, Outcome
from xlaserve.serving.inputs.image_files import ImageLimits, open_image
from xlaserve.tensors import TensorDataError

_MOST_MIB = 64
_MOST_SECONDS = 1.0
_PNG = b"\x89PNG\r\n\x1a\n"


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, raw: bytes, *others: bytes) -> bytes:
    """Encode an 8-bit greyscale PNG; `raw` may hold too few pixels."""
    size = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return _PNG + size + b"".join(others) + _chunk(b"IDAT", zlib.compress(raw, 9))


def jpeg(side: int = 512) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (512, 512, 3)).astype(np.uint8)
    written, times = io.BytesIO(), side // 512
    Image.fromarray(np.tile(noise, (times, times, 1))).save(written, "JPEG", progressive=True)
    return written.getvalue()


def hostile() -> Mapping[str, bytes]:
    """Return images that the decoder must refuse."""
    whole = jpeg()
    scan = whole[whole.rindex(b"\xff\xda") : -2]
    return {
        "PNG that says 65 535 x 65 535": png(65_535, 65_535, bytes(MIB)),
        "PNG of one pixel more than there may be": png(4096, 4097, bytes(MIB)),
        "PNG that is cut off": png(2000, 2000, bytes(2000 * 1000)),
        "JPEG cut in half": whole[: len(whole) // 2],
        "the largest JPEG, cut": jpeg(4096)[:-2000],
        "JPEG cut behind its header": whole[:200],
        "JPEG of 100 000 scans": whole[:-2] + scan[:20] * 100_000 + b"\xff\xd9",
        "JPEG that says 65 500 x 65 500": _resized(whole),
        "33 MiB of nothing": _PNG + bytes(33 * MIB),
    }


def _resized(image: bytes) -> bytes:
    at = image.index(b"\xff\xc2") + 5
    return image[:at] + struct.pack(">HH", 65_500, 65_500) + image[at + 4 :]


def judge(images: Mapping[str, bytes], decode: Callable[[bytes], object]) -> Outcome:
    """Decode images, and judge whether they were refused and at what cost."""
    outcome, process = Outcome(), Resident(psutil.Process())
    for name, data in images.items():
        before, began = process.resident_bytes(), time.thread_time()
        process.forget_peak()
        try:
            decode(data)
        except TensorDataError as error:
            outcome.add(f"{name}, {len(data)} octets", f"refused: {error}", "refused", holds=True)
        else:
            outcome.add(f"{name}, {len(data)} octets", "decoded", "refused", holds=False)
        seconds = time.thread_time() - began
        grown = (process.peak_bytes() - before) / MIB
        outcome.at_most(f"{name}, memory", round(grown, 1), _MOST_MIB, " MiB")
        outcome.at_most(f"{name}, CPU", round(seconds, 3), _MOST_SECONDS, " s")
    return outcome


def huge(folder: Path) -> Outcome:
    """Decode hostile images with the server's default settings."""
    return judge(hostile(), _decode)


def _decode(data: bytes) -> object:
    picture = open_image(data, ImageLimits())
    return picture.decode("RGB", picture.width, picture.height)
