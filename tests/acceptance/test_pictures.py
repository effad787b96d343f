"""S2 findings: images decoded although they should be refused, and the cost of refusals."""

import time
from collections.abc import Callable

import numpy as np
import pytest

from acceptance import pictures
from acceptance.figures import MIB
from xlaserve.tensors import TensorDataError


def refuse(data: bytes) -> None:
    raise TensorDataError("an image", "none")


def refuse_with_memory(data: bytes) -> None:
    held = np.ones(128 * MIB, np.uint8)
    raise TensorDataError("an image", str(held.size))


def refuse_late(data: bytes) -> None:
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    refuse(data)


@pytest.mark.parametrize(
    ("decode", "failing"),
    [
        (refuse, []),
        (len, ["one, 3 octets"]),
        (refuse_with_memory, ["one, memory"]),
        (refuse_late, ["one, CPU"]),
    ],
)
def test_a_refusal_is_judged_by_what_it_costs(
    monkeypatch: pytest.MonkeyPatch, decode: Callable[[bytes], object], failing: list[str]
) -> None:
    # Less time than it takes to allocate an image, including its page faults.
    monkeypatch.setattr(pictures, "_MOST_SECONDS", 0.04 if decode is refuse_late else 10)

    assert failing == pictures.judge({"one": b"png"}, decode).failing
