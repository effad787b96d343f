"""Attacks fail: the server survives, its memory stays bounded, and others are served.

Latencies and CPU time are printed, not asserted: machines are shared.
"""

import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from support.engines import own_engine_only
from support.floods import ATTACKS, CLOSED, OPEN, Attacker, ask_for_answers, outcomes
from support.frames import Setting
from support.victim import WIDE_BYTES, Target, Victim, export_models, target

from xlaserve.concurrency.host import AHEAD
from xlaserve.process.allocator import KEPT_BYTES, arenas

pytestmark = [own_engine_only, pytest.mark.slow]

MAX_CONNECTIONS = 500
PREFACE_SECONDS = 3
MESSAGE_BYTES = 16 << 20
HELD_BYTES = 40 << 20
EXECUTE_THREADS = 2
OUTPUTS_BYTES = EXECUTE_THREADS * (1 + AHEAD) * WIDE_BYTES
"""Output bytes not on the ledger: being computed, or completed and waiting for the loop."""
PROCESSES = (1, 2)
GROWTH_BYTES = {
    count: HELD_BYTES + OUTPUTS_BYTES + count * arenas() * KEPT_BYTES for count in PROCESSES
}
"""Allowed growth: ledgers, data not yet on them, and memory kept by allocators. The limits cover
all processes, each of which has its share.
"""
SILENT = 2000
ROUNDS = 5
ANSWERS = 100
"""The budget holds a seventh of them; the others are refused."""
RETURN_SECONDS = 5


@pytest.fixture(scope="module", params=PROCESSES, ids="{}-processes".format)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    """A server whose budgets a short attack can nearly exhaust."""
    folder = tmp_path_factory.mktemp("floods")
    export_models(folder / "models")
    flags = {
        "--max-connections": MAX_CONNECTIONS,
        "--preface-seconds": PREFACE_SECONDS,
        "--max-message-bytes": MESSAGE_BYTES,
        "--max-held-bytes": HELD_BYTES,
        "--max-requests-per-model": 100_000,
        "--execute-threads": EXECUTE_THREADS,
    }
    if request.param > 1:
        flags["--processes"] = request.param
    given = [text for flag, value in flags.items() for text in (flag, str(value))]
    with target(folder, *given) as running:
        with Victim(running.url):
            time.sleep(0.5)  # every path has run once and allocated its memory
        yield running


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_borne(server: Target, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    attack = ATTACKS[name]
    before, cpu = server.resident_bytes(), server.cpu_seconds()
    server.forget_peak()
    began = time.monotonic()
    with Victim(server.url) as victim:
        became = attack.run(server.url)
    growth = server.peak_bytes() - before
    with capsys.disabled():
        print(
            f"\n{name}: {', '.join(sorted(became))}; {time.monotonic() - began:.1f} s,"
            f" peak {growth / 1e6:+.0f} MB, after {(server.resident_bytes() - before) / 1e6:+.0f}"
            f" MB, CPU {server.cpu_seconds() - cpu:.2f} s, victim {victim.worst_seconds * 1e3:.0f}"
            f" ms in {victim.calls} calls",
            end=" ",
        )

    assert all(one.is_running() for one in server.all)
    assert victim.calls > 0
    assert [] == victim.errors
    assert became
    assert became <= attack.outcomes
    assert growth < _most_growth(server)


def _most_growth(server: Target) -> int:
    return GROWTH_BYTES[max(1, len(server.workers))]


def test_clients_that_say_nothing_are_dropped(server: Target) -> None:
    """Connections over the limit are closed immediately, others after preface_seconds."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < SILENT + 200:
        pytest.skip(f"ulimit -n allows fewer than {SILENT} connections")
    before = server.resident_bytes()
    server.forget_peak()
    with ExitStack() as stack:
        with Victim(server.url) as victim:
            silent = [Attacker(server.url, greets=False) for _ in range(SILENT)]
            for attacker in silent:
                stack.callback(attacker.close)
            end = time.monotonic() + 20 * PREFACE_SECONDS
            while not all(attacker.ended for attacker in silent) and time.monotonic() < end:
                for attacker in silent:
                    attacker.look()
        growth = server.peak_bytes() - before
        with Victim(server.url) as newcomer:
            time.sleep(0.1)
        codes = {attacker.goaway or CLOSED for attacker in silent}
    print(f"{SILENT} silent connections: {codes}, {growth / SILENT / 1e3:.1f} KB each")

    assert all(attacker.ended for attacker in silent)
    assert {"ENHANCE_YOUR_CALM", "SETTINGS_TIMEOUT"} == codes
    assert [] == victim.errors + newcomer.errors
    assert growth < _most_growth(server)


def test_answers_that_nobody_takes_are_forgotten_with_their_client(server: Target) -> None:
    """The memory is freed without a garbage collection."""
    before = server.resident_bytes()
    for _ in range(ROUNDS):
        attacker = Attacker(server.url, (Setting.INITIAL_WINDOW_SIZE, 0))
        attacker.send(ask_for_answers(ANSWERS))
        assert {OPEN} == outcomes(attacker)
        attacker.close()
    end = time.monotonic() + RETURN_SECONDS
    while server.resident_bytes() - before > _most_growth(server) and time.monotonic() < end:
        time.sleep(0.1)
    growth = server.resident_bytes() - before
    print(f"after {ROUNDS * ANSWERS} answers that were not taken: {growth / 1e6:+.0f} MB")

    assert growth < _most_growth(server)
