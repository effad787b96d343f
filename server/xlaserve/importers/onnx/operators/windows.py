"""Sliding windows of convolution and pooling: strides, dilations and padding."""

from collections.abc import Sequence
from dataclasses import dataclass

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import Node


@dataclass(frozen=True, slots=True)
class Window:
    """A sliding window, with one entry per spatial dimension."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    """Padding before and after each dimension."""

    @property
    def extents(self) -> tuple[int, ...]:
        """Return the sizes of the window including dilation."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilations, strict=True))


def window_of(node: Node, sizes: Sequence[int], kernel: Sequence[int]) -> Window:
    """Read the window of a node for an image of these sizes; raises InvalidModel."""
    rank = len(sizes)
    strides = node.integers("strides", (1,) * rank)
    dilations = node.integers("dilations", (1,) * rank)
    pads = node.integers("pads", (0,) * 2 * rank)
    if len(kernel) != rank or {len(strides), len(dilations), len(pads) / 2} != {rank}:
        raise InvalidModel(
            f"expected a kernel, strides and dilations of {rank} numbers, and pads of {2 * rank},"
            f" since its input has {rank} spatial dimensions"
        )
    plain = Window(tuple(kernel), strides, dilations, tuple(zip(pads, pads[rank:], strict=False)))
    automatic = node.text("auto_pad", "NOTSET")
    if automatic not in _AUTOMATIC:
        raise InvalidModel(f"auto_pad: expected {', '.join(_AUTOMATIC)}, got {automatic}")
    more_at_end = _AUTOMATIC[automatic]
    if more_at_end is None:
        none = ((0, 0),) * rank
        return plain if automatic == "NOTSET" else Window(plain.kernel, strides, dilations, none)
    same = tuple(
        halves(same_padding(size, extent, stride), more_behind=more_at_end)
        for size, extent, stride in zip(sizes, plain.extents, strides, strict=True)
    )
    return Window(plain.kernel, strides, dilations, same)


_AUTOMATIC = {"NOTSET": None, "VALID": None, "SAME_UPPER": True, "SAME_LOWER": False}
"""Values of auto_pad; for SAME, whether the extra row of odd padding is at the end."""


def same_padding(size: int, extent: int, stride: int) -> int:
    """Return the total padding for SAME, which places a window at every stride."""
    outputs = -(-size // stride)
    return max((outputs - 1) * stride + extent - size, 0)


def halves(total: int, *, more_behind: bool) -> tuple[int, int]:
    """Split padding into front and back; `more_behind` puts an odd row at the back."""
    small, large = total // 2, total - total // 2
    return (small, large) if more_behind else (large, small)


def rounded_up(window: Window, sizes: Sequence[int]) -> Window:
    """Extend the padding so that the last, incomplete window fits (`ceil_mode`).

    A window that would begin beyond the image and its front padding is dropped.
    """
    pads = []
    for size, extent, stride, (low, high) in zip(
        sizes, window.extents, window.strides, window.pads, strict=True
    ):
        last = -(-(size + low + high - extent) // stride) * stride
        if last >= size + low:
            last -= stride
        pads.append((low, high + max(last + extent - (size + low + high), 0)))
    return Window(window.kernel, window.strides, window.dilations, tuple(pads))
