"""The comparison with peers, as far as it needs neither the kit nor the peers."""

import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from comparison import page
from comparison.beside import percentiles
from comparison.charts import bar_chart
from comparison.contenders import (
    OURS,
    Contender,
    Contenders,
    Variant,
    free_port,
    parse_variant,
)
from comparison.interleaving import Rounds, interleave, summary
from comparison.kit import Kit, Repetition
from comparison.paced import LARGE
from comparison.results import Results
from comparison.rows import (
    BEST,
    ECHO,
    P50,
    RATE,
    ROWS,
    SECONDS,
    Target,
    with_load,
    with_one_process,
)
from comparison.verdicts import verdicts

TOOLS = Path(__file__).resolve().parents[2] / "tools"
PAGE = TOOLS.parent / "docs" / "measurements" / "performance.md"
ROW = {row.name: row for row in ROWS}


def clean(rps: float) -> Repetition:
    return {"rps": rps, "other_cpu": 0.01}


DISTURBED: Repetition = {"rps": 1.0, "other_cpu": 0.5}
FAILED: Repetition = {"error": "no"}


def test_contenders_are_measured_by_turns_until_each_has_enough() -> None:
    order: list[str] = []
    answers = {"a": iter([clean(1), clean(3), clean(2)]), "b": iter([DISTURBED, *[clean(5)] * 3])}
    found = interleave(
        {"a": lambda: next(answers["a"]), "b": lambda: next(answers["b"])},
        Rounds(3, 6),
        lambda name, _: order.append(name),
    )

    assert list("abababb") == order
    assert (2, 3) == (found["a"]["rps"], found["a"]["clean"])
    assert (5, 3, 4) == (
        found["b"]["rps"],
        found["b"]["clean"],
        len(found["b"]["repetitions"]),
    )


def test_disturbed_repetitions_have_to_do_where_there_are_no_others() -> None:
    found = interleave({"a": lambda: DISTURBED}, Rounds(3, 4), lambda name, one: None)

    assert (1.0, 0, 4) == (found["a"]["rps"], found["a"]["clean"], len(found["a"]["repetitions"]))


def test_a_contender_that_fails_is_given_up_and_said_to_have_failed() -> None:
    found = interleave({"a": lambda: FAILED}, Rounds(3, 6), lambda name, one: None)

    assert ("no", 2) == (found["a"]["error"], len(found["a"]["repetitions"]))
    assert "rps" not in found["a"]


@pytest.mark.parametrize(
    ("target", "ours", "theirs", "ratio", "met"),
    [
        (Target("p", RATE, 12), 1200, 100, 12, True),
        (Target("p", RATE, 12), 1199, 100, 11.99, False),
        (Target("p", P50, 0.5), 1, 2, 0.5, True),
        (Target("p", P50, 0.5), 1.1, 2, 0.55, False),
        (Target("p", SECONDS, 4), 0.1, 0.4, 4, True),
        (Target("p", SECONDS, 4), 0.2, 0.4, 2, False),
        (Target(ECHO, SECONDS, 2.2), 0.22, 0.1, 2.2, True),
        (Target(ECHO, SECONDS, 2.2), 0.3, 0.1, 3, False),
    ],
)
def test_a_target_is_met_on_one_side_of_its_factor(
    target: Target, ours: float, theirs: float, ratio: float, met: bool
) -> None:
    assert pytest.approx(ratio) == target.ratio(ours, theirs)
    assert met is target.is_met(round(target.ratio(ours, theirs), 9))


def test_the_best_peer_is_the_fastest_of_those_that_took_part() -> None:
    numbers = {OURS: {"rps": 10.0}, "triton": {"rps": 4.0}, "kserve": {"rps": 5.0}}
    (found,) = verdicts(ROW["binary"], numbers, ["triton", "kserve"], 0)

    assert (BEST, "kserve", 2.0, True) == (
        found.target.against,
        found.against,
        found.ratio,
        found.is_met,
    )


def test_who_did_not_take_part_is_no_target_and_who_failed_is_not_measured() -> None:
    numbers = {OURS: {"rps": 10.0}, "floor": summary([FAILED])}
    found = verdicts(ROW["identity"], numbers, ["floor"], 0)

    assert [("floor", None, None)] == [(one.against, one.ratio, one.is_met) for one in found]


def test_headers_that_vary_are_compared_with_equal_ones_of_the_same_server() -> None:
    def numbers(us: float) -> dict[str, float]:
        return {"cpu_us": us}

    found = verdicts(
        ROW["headers"],
        {
            OURS: numbers(25),
            f"{OURS}, equal headers": numbers(20),
            "floor": numbers(90),
            "floor, equal headers": numbers(89),
        },
        ["floor"],
        0,
    )

    assert [("equal headers", "processor time", 1.25, True)] == [
        (one.against, one.measure, one.ratio, one.is_met) for one in found
    ]


def test_a_load_is_compared_with_the_other_load_of_the_same_server() -> None:
    numbers = {OURS: {"rps": 4.0}, with_load(OURS, "4x16"): {"rps": 10.0}, "triton": {"rps": 1.0}}
    (found,) = verdicts(ROW["thousand"], numbers, ["triton"], 0)

    assert ("4x16", 0.4, False) == (found.against, found.ratio, found.is_met)


def test_workers_are_compared_with_one_process_on_the_same_cores() -> None:
    numbers = {OURS: {"rps": 14.0}, with_one_process(OURS): {"rps": 10.0}}
    (found,) = verdicts(ROW["workers-identity"], numbers, [], 0)

    assert ("one process", 1.4, True) == (found.against, found.ratio, found.is_met)


def test_workers_have_the_cores_of_the_client_too(tmp_path: Path) -> None:
    """A single process in that comparison has them too; other contenders have one core."""
    contenders = Contenders(Kit(tmp_path, tmp_path, "0", "1"), tmp_path, tmp_path)
    contenders.add_variant(Variant(OURS))
    for count in (1, 2):
        contenders.add_processes(Variant(OURS, ("--a",)), count)
    commands = [one.command for one in contenders._all.values()]

    assert ["0", "0,1", "0,1"] == [command[2] for command in commands]
    assert [["--a", "--processes", "1"], ["--a", "--processes", "2"]] == [
        command[-3:] for command in commands[1:]
    ]


def test_a_latency_may_be_asked_for_in_milliseconds() -> None:
    (found,) = verdicts(ROW["open"], {OURS: {"p50": 0.4}}, [], 0)

    assert (0.4, True) == (found.ratio, found.is_met)


def test_latencies_count_only_where_all_requests_were_answered() -> None:
    times = [number / 1000 for number in range(1, 101)]

    assert pytest.approx(50.5) == percentiles(times, 100, 2)["p50"]
    assert 50 == percentiles(times, 100, 2)["rps"]
    assert "99 of 100" in percentiles(times[1:], 100, 2)["error"]


def test_every_large_load_has_a_row() -> None:
    assert set(LARGE) < {row.paced.beside for row in ROWS if row.paced is not None}


def test_only_what_is_between_the_markers_is_replaced() -> None:
    begin, end = "<!-- a: written by tools/compare.py -->", "<!-- end of a -->"

    assert f"x\n{begin}\n\nnew \\1\n\n{end}\ny" == page.with_section(
        f"x\n{begin}\nold\n{end}\ny", "a", "new \\1"
    )
    with pytest.raises(ValueError, match="each once"):
        page.with_section("x", "a", "new")


def test_a_whole_page_is_written_and_written_again(tmp_path: Path) -> None:
    copy = tmp_path / "performance.md"
    copy.write_text(PAGE.read_text())
    big = {"seconds": 0.1, "peak_bytes": 2e8, "clean": 3, "repetitions": []}
    rate = {"rps": 1000.0, "p50": 1.0, "p99": 2.0, "clean": 3, "repetitions": []}
    results = Results(
        {"processor": "one"},
        100_000_000,
        [OURS, "floor"],
        {"big": {OURS: big, ECHO: big}, "identity": {OURS: rate, "floor": summary([FAILED])}},
    )
    file = tmp_path / "results.json"
    results.write(file)
    page.write(Results.read(file), copy)
    once = copy.read_text()
    page.write(results, copy)

    assert once == copy.read_text()
    assert "| raw echo | time | at most 2.2x | 1.00x | met |" in once
    assert "| message | peak memory | at most 2.3x | 2.00x | met |" in once
    assert "100 ms, 1.00 GB/s one way, 200 MB above idle" in once
    assert "| floor | requests/s | at least 12x | not measured |  |" in once
    assert "failed: no" in once
    assert {"performance-big.svg", "performance-identity.svg"} == {
        path.name for path in (tmp_path / "img").iterdir()
    }


def test_a_bar_chart_has_a_bar_for_each_and_the_longest_for_the_largest() -> None:
    root = ET.fromstring(bar_chart("t", "requests/s", {OURS: 50, "a": 100, "b": 0.1}, OURS))
    bars = [
        (float(one.attrib["width"]), one.attrib["class"])
        for one in root.findall("{http://www.w3.org/2000/svg}rect")
        if "bar" in one.attrib["class"]
    ]

    assert ["a bar", "e bar", "e bar"] == [kind for _, kind in bars]
    assert bars[1][0] == 2 * bars[0][0] == max(width for width, _ in bars)


def test_a_variant_is_a_name_and_flags() -> None:
    assert Variant("x y", ("--a", "b c")) == parse_variant("x y=--a 'b c'")
    assert Variant("x") == parse_variant("x")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--bench-kit", "/nowhere"), "/nowhere: no bench kit there. It is not part of this"),
        (("--rows", "identity,none"), "'none' is none of big, identity"),
        (("--report", "--work", "/nowhere"), "nothing was measured yet"),
    ],
)
def test_what_is_missing_is_said(arguments: tuple[str, ...], text: str) -> None:
    ran = subprocess.run(
        [sys.executable, TOOLS / "compare.py", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode in (1, 2)
    assert text in ran.stderr
    assert "Traceback" not in ran.stderr


def contender(command: list[str], log: Path) -> Contender:
    return Contender("one", command, dict(os.environ), free_port(), free_port(), log)


def test_a_server_that_ends_while_it_starts_is_said(tmp_path: Path) -> None:
    one = contender(["false"], tmp_path / "log")
    one.start()
    with pytest.raises(SystemExit, match="one ended, see .*log"):
        one.wait()
    one.stop()


def test_a_server_that_died_is_started_again_and_all_it_started_ends(tmp_path: Path) -> None:
    """The pipe reaches its end when no process holds it open."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    one = contender(["sh", "-c", f"(sleep 600 > {pipe}) & wait"], tmp_path / "log")
    one.start()
    first = one.pid
    one.start()
    assert (first, 0) == (one.pid, one.deaths)

    os.killpg(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    one.start()
    with pipe.open("rb") as held:
        assert (True, 1) == (first != one.pid, one.deaths)
        one.stop()

        assert b"" == held.read()


def test_the_raw_echo_gives_all_bytes_back() -> None:
    port, size = str(free_port()), "3000000"
    tool = [sys.executable, str(TOOLS / "raw_echo.py")]
    with subprocess.Popen([*tool, "serve", port, size], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        ran = subprocess.run(
            [*tool, "measure", port, size, "2"], capture_output=True, text=True, check=False
        )
        server.kill()

    assert (0, "") == (ran.returncode, ran.stderr)
    assert 2 == len(ran.stdout.split(","))
