"""Triton's protocol restrictions: which groups need a header, and their syntax."""

import pytest

from xlaserve.errors import InvalidSettings
from xlaserve.errors.access import Restricted
from xlaserve.serving.access.restrictions import Restrictions
from xlaserve.serving.call import Api, Call, Operation, Peer


def is_refused(
    restrictions: Restrictions,
    operation: Operation,
    headers: dict[str, str],
    *,
    listener: str = "http_endpoint",
    api: Api | None = None,
) -> bool:
    call = Call()
    call.operation, call.api, call.headers, call.peer = operation, api, headers, Peer(listener)
    try:
        restrictions.check(call)
    except Restricted:
        return True
    return False


def of(*http: str, grpc: tuple[str, ...] = ()) -> Restrictions:
    found = Restrictions.of(grpc, http)
    assert found is not None
    return found


def test_without_any_there_are_none() -> None:
    assert Restrictions.of((), ()) is None


def test_a_group_needs_the_header_with_the_value() -> None:
    made = of("model-repository,health:Admin-Key=a=b")

    assert is_refused(made, Operation.MANAGE, {})
    assert is_refused(made, Operation.MANAGE, {"admin-key": "a"})
    assert is_refused(made, Operation.MANAGE, {"admin-key": "a=b, a=b"})
    assert is_refused(made, Operation.MANAGE, {"admin-key": "ä"})
    assert not is_refused(made, Operation.MANAGE, {"admin-key": "a=b"})
    assert is_refused(made, Operation.HEALTH, {})
    assert not is_refused(made, Operation.INFER, {})


def test_each_protocol_has_its_own() -> None:
    made = of("inference:key=h", grpc=("health:key=g",))

    assert is_refused(made, Operation.INFER, {})
    assert not is_refused(made, Operation.INFER, {}, listener="grpc_endpoint")
    assert is_refused(made, Operation.HEALTH, {"key": "g"}, listener="grpc_data_endpoint")
    header = {"triton-grpc-protocol-key": "g"}
    assert not is_refused(made, Operation.HEALTH, header, listener="grpc_endpoint")


@pytest.mark.parametrize("operation", [Operation.RUNTIME, Operation.MANAGE])
def test_no_other_way_leads_past_a_restriction(operation: Operation) -> None:
    """Mesh and SageMaker requests load models too."""
    assert is_refused(of("model-repository:k=v"), operation, {})


@pytest.mark.parametrize(
    "operation", [Operation.INFER, Operation.SERVICE, Operation.PAGE, Operation.READINESS]
)
def test_what_does_the_same_is_in_the_group(operation: Operation) -> None:
    assert is_refused(of("inference,metadata,health:k=v"), operation, {})


def test_a_group_of_its_own_counts_before_that_of_the_operation() -> None:
    made = of("trace:k=v")

    assert is_refused(made, Operation.MANAGE, {}, api=Api.TRACE)
    assert not is_refused(made, Operation.MANAGE, {}, api=Api.LOGGING)
    assert not is_refused(made, Operation.MANAGE, {})


def test_an_environment_variable_is_cut_at_its_commas() -> None:
    made = of("health", "trace:k=v", "logging:l=w")

    assert is_refused(made, Operation.HEALTH, {})
    assert is_refused(made, Operation.MANAGE, {}, api=Api.TRACE)
    assert is_refused(made, Operation.MANAGE, {"k": "v"}, api=Api.LOGGING)


WRONG = {
    "health": "expected groups:key=value, got 'health'",
    "health:key": "expected groups:key=value, got 'health:key'",
    "health:key=": "expected groups:key=value, got 'health:key'",
    "health:=v": "expected groups:key=value, got 'health:'",
    "health:a b=secret": "expected groups:key=value, got 'health:a b'",
    ":k=v": "expected one of health, metadata",
    "metrics:k=v": "expected one of health, metadata, inference, shared-memory",
    "health,health:k=v": "expected each group once, got 'health'",
}


@pytest.mark.parametrize(("text", "expected"), WRONG.items(), ids=list(WRONG))
def test_a_mistake_is_named_and_no_secret(text: str, expected: str) -> None:
    for setting, given in (("http_restricted_api", ((), (text,))),):
        with pytest.raises(InvalidSettings) as refused:
            Restrictions.of(*given)
        assert f"setting {setting}: {expected}" in str(refused.value)
        assert "secret" not in str(refused.value)
