"""Quotas that several processes count in one shared table, with a fake clock."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from xlaserve.errors.access import QuotaExceeded
from xlaserve.serving.access.principal import Principal
from xlaserve.serving.access.quota_table import QuotaTable
from xlaserve.serving.access.rules import Quota
from xlaserve.serving.access.shared_quotas import SharedQuotas
from xlaserve.serving.call import Call

A, B = Principal("A"), Principal("B")
SECOND_NS = 1_000_000_000
HOLD = """
import fcntl, sys
fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


class Clock:
    """A clock in nanoseconds that the test sets."""

    def __init__(self) -> None:
        self.now = 7 * SECOND_NS

    def __call__(self) -> int:
        return self.now


class Pair:
    """Two processes sharing a quota table."""

    def __init__(self, max_principals: int = 8) -> None:
        self.clock = Clock()
        self.table = QuotaTable.create(2, max_principals)
        copy = QuotaTable(os.dup(self.table.descriptor), 2, max_principals)
        self.both = [SharedQuotas(t, p, self.clock) for p, t in enumerate((self.table, copy))]
        self.descriptors = (self.table.descriptor, copy.descriptor)

    def passes(self, process: int, principal: Principal, quota: Quota) -> Call | None:
        call = Call()
        try:
            self.both[process].admit(call, principal, quota)
        except QuotaExceeded:
            return None
        return call

    def passed(self, count: int, principal: Principal, quota: Quota) -> int:
        """Send `count` requests, alternating between the processes; return how many pass."""
        return sum(self.passes(n % 2, principal, quota) is not None for n in range(count))


@pytest.fixture(name="pair")
def _pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    for descriptor in pair.descriptors:
        os.close(descriptor)


def test_a_rate_is_of_all_processes(pair: Pair) -> None:
    quota = Quota(requests_per_second=2, burst=3)

    assert 3 == pair.passed(8, A, quota)
    pair.clock.now += SECOND_NS // 2
    assert 1 == pair.passed(4, A, quota)
    pair.clock.now += 1000 * SECOND_NS
    assert 3 == pair.passed(8, A, quota)
    assert pair.passes(1, B, quota) is not None


def test_a_refusal_says_when_to_come_again(pair: Pair) -> None:
    quota = Quota(requests_per_second=0.25)
    pair.passes(0, A, quota)
    pair.clock.now += SECOND_NS

    with pytest.raises(QuotaExceeded) as refused:
        pair.both[1].admit(Call(), A, quota)
    assert 3.0 == refused.value.retry_seconds


def test_a_rate_of_nearly_nothing_is_counted(pair: Pair) -> None:
    """The time of its next request exceeds a 64-bit word."""
    quota = Quota(requests_per_second=1e-12, burst=2)

    assert 2 == pair.passed(8, A, quota)


def test_requests_in_flight_are_of_all_processes(pair: Pair) -> None:
    quota = Quota(concurrent_requests=2)
    calls = [pair.passes(process, A, quota) for process in (0, 1)]

    assert 0 == pair.passed(4, A, quota)
    assert calls[1] is not None
    calls[1].cancel()
    assert 1 == pair.passed(4, A, quota)


def test_a_request_that_is_refused_for_its_rate_counts_as_none_in_flight(pair: Pair) -> None:
    quota = Quota(requests_per_second=1, concurrent_requests=2)
    pair.passed(6, A, quota)
    pair.clock.now += SECOND_NS

    assert 1 == pair.passed(6, A, quota)


def test_what_a_process_had_in_flight_ends_with_it(pair: Pair) -> None:
    """Requests of other processes and the tokens already spent stay counted."""
    quota = Quota(concurrent_requests=3)
    for process in (0, 1, 1):
        pair.passes(process, A, quota)
    pair.passes(1, B, Quota(requests_per_second=1))
    pair.table.clear(1)

    assert 2 == pair.passed(4, A, quota)
    assert 0 == pair.passed(2, B, Quota(requests_per_second=1))


def test_who_has_requests_in_flight_is_kept_and_others_are_refused(pair: Pair) -> None:
    """All rows are in one set here; if a row were evicted, its caller could start as many again."""
    quota = Quota(concurrent_requests=1)
    names = [Principal(f"caller {number}") for number in range(17)]
    calls = [pair.passes(number % 2, name, quota) for number, name in enumerate(names)]
    assert calls[-1] is None

    assert calls[3] is not None
    calls[3].cancel()
    assert pair.passes(0, names[-1], quota) is not None
    assert 0 == sum(pair.passed(2, name, quota) for n, name in enumerate(names) if n != 3)


def test_who_asked_longest_ago_is_evicted(pair: Pair) -> None:
    quota = Quota(requests_per_second=1e-3)
    names = [Principal(f"caller {number}") for number in range(17)]
    for name in [*names[:16], names[0], names[16]]:
        pair.clock.now += 1
        pair.passes(0, name, quota)

    assert pair.passes(1, names[0], quota) is None
    assert pair.passes(1, names[1], quota) is not None


def test_a_process_that_is_stopped_while_it_counts_blocks_nobody(pair: Pair) -> None:
    """Other processes refuse requests until it continues or dies."""
    descriptor = pair.table.descriptor
    holder = subprocess.Popen(
        [sys.executable, "-S", "-c", HOLD, str(descriptor)],
        pass_fds=[descriptor],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(QuotaExceeded, match="another server process"):
            pair.both[0].admit(Call(), A, Quota(concurrent_requests=1))
        holder.kill()
        holder.wait()

        assert pair.passes(0, A, Quota(concurrent_requests=1)) is not None
