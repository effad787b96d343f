"""Request rates and concurrency limits of principals, with a fake clock."""

import pytest
from support.clock import HandClock

from xlaserve.errors.access import QuotaExceeded
from xlaserve.serving.access.principal import Principal
from xlaserve.serving.access.quotas import Quotas
from xlaserve.serving.access.rules import Quota
from xlaserve.serving.call import Call

A, B, C = (Principal(name) for name in "ABC")


def passes(quotas: Quotas, principal: Principal, quota: Quota) -> Call | None:
    call = Call()
    try:
        quotas.admit(call, principal, quota)
    except QuotaExceeded:
        return None
    return call


def test_a_rate_lets_so_many_pass_and_fills_up_again() -> None:
    clock = HandClock()
    quotas = Quotas(10, clock)
    quota = Quota(requests_per_second=2, burst=3)

    assert 3 == sum(passes(quotas, A, quota) is not None for _ in range(5))
    clock.now += 0.5
    assert 1 == sum(passes(quotas, A, quota) is not None for _ in range(5))
    clock.now += 1000
    assert 3 == sum(passes(quotas, A, quota) is not None for _ in range(5))
    assert passes(quotas, B, quota) is not None


def test_a_refusal_says_when_to_come_again() -> None:
    clock = HandClock()
    quotas = Quotas(10, clock)
    quota = Quota(requests_per_second=0.25)
    passes(quotas, A, quota)
    clock.now += 1

    with pytest.raises(QuotaExceeded) as refused:
        quotas.admit(Call(), A, quota)
    assert 3.0 == refused.value.retry_seconds


def test_requests_in_flight_count_until_they_end() -> None:
    quotas = Quotas(10, HandClock())
    quota = Quota(concurrent_requests=2)
    first = passes(quotas, A, quota)
    second = passes(quotas, A, quota)

    assert first is not None
    assert second is not None
    assert passes(quotas, A, quota) is None
    assert passes(quotas, B, quota) is not None
    first.cancel()
    assert passes(quotas, A, quota) is not None
    assert passes(quotas, A, quota) is None


def test_a_request_that_is_refused_for_its_rate_counts_as_none_in_flight() -> None:
    clock = HandClock()
    quotas = Quotas(10, clock)
    quota = Quota(requests_per_second=1, concurrent_requests=2)
    passes(quotas, A, quota)
    for _ in range(5):
        passes(quotas, A, quota)
    clock.now += 1

    assert passes(quotas, A, quota) is not None


def test_who_asked_longest_ago_is_evicted() -> None:
    quotas = Quotas(2, HandClock())
    quota = Quota(requests_per_second=1)
    for principal in (A, B, A, C):
        passes(quotas, principal, quota)

    assert 2 == len(quotas)
    assert passes(quotas, A, quota) is None
    assert passes(quotas, B, quota) is not None


def test_who_has_requests_in_flight_is_kept_and_others_are_refused() -> None:
    """If its row were evicted, a caller could start as many requests again."""
    quotas = Quotas(2, HandClock())
    quota = Quota(concurrent_requests=1)
    calls = [passes(quotas, principal, quota) for principal in (A, B)]
    assert passes(quotas, C, quota) is None

    assert calls[0] is not None
    calls[0].cancel()
    assert passes(quotas, C, quota) is not None
    assert passes(quotas, B, quota) is None
    assert 2 == len(quotas)
