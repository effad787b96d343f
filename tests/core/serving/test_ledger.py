"""The memory ledger: consistent sums, fair shares, and a queue that always advances."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from xlaserve.net.ledger import Account, Kind, Ledger, Wait

LIMIT = 6400
counts = st.integers(0, LIMIT)
kinds = st.sampled_from(Kind)


def nothing() -> None:
    """Do nothing when memory becomes available."""


class Charges(RuleBasedStateMachine):
    """Connections that open, reserve, wait, release and close, in any order."""

    accounts: Bundle[Account] = Bundle("accounts")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(LIMIT)
        self.held: dict[Account, dict[Kind, int]] = {}
        self.waits: list[Wait] = []
        self.forced = 0
        """Bytes received without a reservation: they may exceed the limit."""

    @rule(target=accounts)
    def open(self) -> Account:
        account = self.ledger.open()
        self.held[account] = dict.fromkeys(Kind, 0)
        return account

    @rule(account=accounts, count=counts, kind=kinds)
    def hold(self, account: Account, count: int, kind: Kind) -> None:
        account.hold(count, kind)
        self.held[account][kind] += count
        self.forced += count

    @rule(account=accounts, count=counts, kind=kinds)
    def reserve(self, account: Account, count: int, kind: Kind) -> None:
        refused = self.ledger.refused
        if account.reserve(count, kind):
            self.held[account][kind] += count
            assert self.ledger.held <= LIMIT
        else:
            assert refused + 1 == self.ledger.refused

    @rule(account=accounts, count=counts)
    def wait(self, account: Account, count: int) -> None:
        def granted() -> None:
            self.held[account][Kind.REQUESTS] += count
            assert self.ledger.held <= LIMIT

        wait = account.wait(count, granted)
        if wait is not None:
            self.waits.append(wait)
            self.ledger.relieve()

    @rule(number=st.integers(0, 50))
    def stop_waiting(self, number: int) -> None:
        if self.waits:
            self.waits.pop(number % len(self.waits)).cancel()

    @rule(account=accounts, kind=kinds, part=st.floats(0, 1))
    def release(self, account: Account, kind: Kind, part: float) -> None:
        count = int(self.held[account][kind] * part)
        self.held[account][kind] -= count
        account.release(count, kind)

    @rule(account=accounts, kind=kinds)
    def release_all(self, account: Account, kind: Kind) -> None:
        self.held[account][kind] = 0
        account.release_all(kind)

    @rule(account=consumes(accounts), late=st.booleans())
    def close(self, account: Account, late: bool) -> None:
        """Close the account; its pending request is cancelled, as its transport does."""
        for wait in self.waits:
            if wait.account is account:
                wait.cancel()
        left = self.held.pop(account)
        account.close()
        if late:
            for kind in Kind:
                account.release(left[kind], kind)
            assert 0 == account.held == account.ledger.held

    @invariant()
    def sums_agree(self) -> None:
        for account, held in self.held.items():
            assert sum(held.values()) == account.held
            assert held == {kind: account.held_for(kind) for kind in Kind}
        for kind in Kind:
            expected = sum(held[kind] for held in self.held.values())
            assert expected == self.ledger.held_for(kind) >= 0
        assert sum(account.held for account in self.held) == self.ledger.held

    @invariant()
    def there_is_pressure_above_the_watermark(self) -> None:
        if self.ledger.held > self.ledger.high or self.ledger.waiting:
            assert self.ledger.is_pressed

    def teardown(self) -> None:
        for wait in self.waits:
            wait.cancel()
        for account in self.held:
            account.close()
        self.ledger.relieve()
        assert 0 == self.ledger.held == self.ledger.waiting == self.ledger._waiting_bytes
        assert not self.ledger.is_pressed
        assert all(self.ledger.held_for(kind) == 0 for kind in Kind)


TestCharges = Charges.TestCase


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(LIMIT)


def most(account: Account) -> int:
    """Take all that an account is granted, and return the number of bytes."""
    got = next(count for count in range(LIMIT, -1, -1) if account.admits(count))
    account.hold(got)
    return got


def test_one_alone_gets_three_quarters(ledger: Ledger) -> None:
    assert LIMIT * 3 // 4 == most(ledger.open())


def test_the_larger_a_holder_is_the_earlier_it_is_refused(ledger: Ledger) -> None:
    large, middle, small = ledger.open(), ledger.open(), ledger.open()
    large.hold(3200)
    middle.hold(1900)

    assert [False, False, True] == [a.admits(200) for a in (large, middle, small)]


@given(st.integers(1, 60))
def test_something_is_left_for_one_more(holders: int) -> None:
    """However many holders have taken their maximum, a known part of the limit remains."""
    ledger = Ledger(1 << 20)
    for _ in range(holders):
        account = ledger.open()
        left = ledger.limit - ledger.held
        account.hold(min(left * left // ledger.limit, ledger.most))

    assert ledger.open().admits(ledger.limit // (holders + 8) ** 2)


def test_equals_get_about_the_same(ledger: Ledger) -> None:
    """Once each account has released its bytes and asks again."""
    accounts = [ledger.open() for _ in range(8)]
    for _ in range(60):
        for account in accounts:
            account.release(account.held)
            most(account)
    held = [account.held for account in accounts]

    assert max(held) < 1.1 * min(held)
    assert sum(held) > 0.6 * LIMIT


def waiting(account: Account, count: int, log: list[str], name: str) -> Wait:
    wait = account.wait(count, lambda: log.append(name))
    assert wait is not None
    return wait


def test_who_waits_is_served_in_order_as_memory_is_released(ledger: Ledger) -> None:
    holder, one, two, served = ledger.open(), ledger.open(), ledger.open(), list[str]()
    holder.hold(4800)
    waiting(one, 3000, served, "one")
    waiting(two, 2000, served, "two")
    assert [] == served

    holder.release(3800)
    assert ["one"] == served
    assert (3000, 0) == (one.held, two.held)
    one.release(3000)
    assert ["one", "two"] == served
    assert 2 == ledger.waited


def test_what_is_large_does_not_pass_those_who_wait(ledger: Ledger) -> None:
    holder, waits, other = ledger.open(), ledger.open(), ledger.open()
    holder.hold(3200)
    waiting(waits, 4000, [], "")

    assert not other.reserve(LIMIT // 64 + 1)
    assert other.reserve(LIMIT // 64)


def test_the_next_is_served_when_the_first_waits_no_longer(ledger: Ledger) -> None:
    holder, one, two, served = ledger.open(), ledger.open(), ledger.open(), list[str]()
    holder.hold(3200)
    first = waiting(one, 4800, served, "one")
    waiting(two, 1000, served, "two")
    first.cancel()

    assert ["two"] == served
    first.cancel()
    assert 0 == ledger.waiting


def test_more_than_anybody_gets_is_refused_at_once(ledger: Ledger) -> None:
    assert ledger.open().wait(LIMIT * 3 // 4 + 1, nothing) is None
    assert 1 == ledger.refused


def test_who_holds_much_may_not_wait(ledger: Ledger) -> None:
    """Otherwise waiting accounts could hold the memory that they wait for."""
    account = ledger.open()
    account.hold(LIMIT // 8 + 1)

    assert account.wait(1, nothing) is None


@given(st.lists(st.integers(0, LIMIT // 8), min_size=1, max_size=20), st.integers(1, LIMIT))
def test_those_who_wait_never_wait_for_one_another(ahead: list[int], count: int) -> None:
    """Once all others have released their memory, every waiting account is served."""
    ledger = Ledger(LIMIT)
    holder = ledger.open()
    holder.hold(LIMIT)
    served = list[Account]()
    refused = []
    waits = []
    for held in ahead:
        account = ledger.open()
        account.hold(held, Kind.AHEAD)
        if account.wait(count, partial(served.append, account)) is None:
            refused.append(account)
        else:
            waits.append(account)
    for account in (holder, *refused):
        account.close()
    for number in range(len(waits)):
        assert number < len(served)
        served[number].close()

    assert waits == served


def test_pressure_begins_high_and_ends_low(ledger: Ledger) -> None:
    account, begun = ledger.open(), list[int]()
    ledger.on_pressure(lambda: begun.append(ledger.held))
    account.hold(4800)
    assert not ledger.is_pressed
    account.hold(1)
    account.hold(1)
    account.release(1000)
    assert ledger.is_pressed

    account.release(602)
    assert not ledger.is_pressed
    assert [4801] == begun
    assert 1 == ledger.pressures


def test_each_reader_has_the_peak_since_it_last_asked(ledger: Ledger) -> None:
    often, once = ledger.watch(), ledger.watch()
    account = ledger.open()
    account.reserve(1000)
    account.release(500)
    account.reserve(100)

    assert (1000, 600) == (often.take(), often.take())
    assert 1000 == once.take()
