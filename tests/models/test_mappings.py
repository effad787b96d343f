"""Counts memory mappings, using files that imitate Linux's."""

from pathlib import Path

import pytest

from xlaserve.errors import OutOfMappings
from xlaserve.runtime.programs.mappings import UNLIMITED, Mappings


class System:
    """A process whose number of mappings the test sets."""

    def __init__(self, root: Path, allowed: str = "1000") -> None:
        self.maps, self.limit = root / "maps", root / "max_map_count"
        self.limit.write_text(allowed)
        self.use(100)

    def use(self, lines: int) -> None:
        self.maps.write_text("7f00-7f01 r--p 0 0:0 0 [anon]\n" * lines)

    def mappings(self, limit: int = 0) -> Mappings:
        return Mappings(limit, self.maps, self.limit)


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def test_the_limit_is_a_part_of_what_the_system_allows(system: System) -> None:
    mappings = system.mappings()

    assert (800, 100, 1000) == (mappings.limit, mappings.used, mappings.system_limit)
    assert 150 == system.mappings(150).limit


def test_programs_that_would_exceed_the_limit_are_refused(system: System) -> None:
    """The error names the numbers and the sysctl; programs are admitted again later."""
    mappings = system.mappings()
    system.use(750)
    mappings.admit("m")
    system.use(790)
    with pytest.raises(OutOfMappings, match=r"790 of 800 are in use .*1000, sysctl vm.max_map_c"):
        mappings.admit("m")
    system.use(300)
    mappings.admit("m")

    assert 300 == mappings.used


def test_all_programs_of_a_load_are_asked_for_at_once(system: System) -> None:
    mappings = system.mappings()
    system.use(600)

    with pytest.raises(OutOfMappings, match="about 240 memory mappings"):
        mappings.admit("m", 6)
    mappings.admit("m", 2)


def test_what_a_program_takes_is_learnt(system: System) -> None:
    """Near the limit they are counted before each program; 70 per program were observed."""
    mappings = system.mappings()
    system.use(200)
    mappings.admit("m")
    system.use(270)
    mappings.admit("m")
    system.use(340)

    with pytest.raises(OutOfMappings, match="about 490 memory mappings"):
        mappings.admit("m", 7)


def test_mappings_are_not_counted_for_each_program_while_there_are_few(tmp_path: Path) -> None:
    system = System(tmp_path, "1000000")
    mappings = system.mappings()
    system.use(200)
    for _ in range(16):
        mappings.admit("m")
    counted = mappings.used
    mappings.admit("m")

    assert (100, 200) == (counted, mappings.used)


def test_a_guess_refuses_nothing(system: System) -> None:
    """Only an actual count can refuse a program."""
    mappings = system.mappings()
    for _ in range(100):
        mappings.admit("m")

    assert 100 == mappings.used


def test_a_system_without_mappings_refuses_nothing(tmp_path: Path) -> None:
    mappings = Mappings(1, tmp_path / "maps", tmp_path / "max_map_count")
    mappings.admit("m", 1000)

    assert not mappings.is_counted
    assert 0 == mappings.count()
    assert not UNLIMITED.is_counted


def test_the_mappings_of_this_process_are_counted() -> None:
    mappings = Mappings()

    assert mappings.is_counted
    assert 100 < mappings.used < mappings.limit
