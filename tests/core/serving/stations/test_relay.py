"""A relay stands in for a call: it carries every attribute that affects the answer."""

import pytest

from xlaserve.serving.call import Call
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.stations.relay import Relay

CARRIED = (
    *("model", "version", "id", "headers", "peer", "principal", "parent", "client", "sight"),
    *("found", "instance", "inputs", "parameters", "tensor_parameters", "rows", "key", "chosen"),
    *("is_volatile", "read_from", "started_ns", "submitted_ns"),
)
"""Attributes that a relay copies from its call."""
OWN = {
    **dict.fromkeys(
        ("admission", "has_begun", "is_found", "has_ended", "is_cancelled", "holds_anything"),
        "it passes no gate of its own, and has a life of its own",
    ),
    **dict.fromkeys(("outcome", "notifies_later"), "what becomes of its own answer"),
    **dict.fromkeys(
        ("api", "method", "operation", "protocol", "record", "opened_ns", "tokens"),
        "told of the call of the client, which waits",
    ),
    **dict.fromkeys(("deadline", "on_writable", "carries_calls"), "of the call that waits"),
    **dict.fromkeys(("shaping", "typed", "takes_many", "wants_whole"), "done for the call itself"),
    **dict.fromkeys(
        ("executed", "kept", "nested", "on_begun", "place", "turn", "is_apart", "is_counted"),
        "told or made while it is executed",
    ),
    **dict.fromkeys(("companions", "uses"), "those of its own execution"),
    "is_counted_elsewhere": "its execution is counted here",
    "resident": "its answer is for several, on the host",
}
"""Attributes that it does not copy, and why."""


def _attributes() -> set[str]:
    found: set[str] = set()
    for kind in (Call, InferCall):
        found |= kind.__annotations__.keys() | vars(kind).keys()
    return {
        name
        for name in found
        if not name.startswith("_")
        and not callable(getattr(InferCall, name, None))
        and not isinstance(vars(Call).get(name), property)
        and not isinstance(vars(InferCall).get(name), property)
    }


def test_every_property_of_a_call_is_carried_or_said_not_to_be() -> None:
    assert _attributes() == {*CARRIED, *OWN}


@pytest.mark.parametrize("name", CARRIED)
def test_a_relay_has_what_its_call_has(name: str) -> None:
    call = InferCall()
    for each in CARRIED:
        setattr(call, each, f"{each} of the call")

    relay = Relay(call, None, lambda relay, outcome: None)  # type: ignore[arg-type]

    assert getattr(relay, name) == f"{name} of the call"
