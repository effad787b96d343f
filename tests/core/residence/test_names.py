"""Validation of names that become part of a path."""

import pytest

from xlaserve.errors import InvalidName
from xlaserve.residence.repository.names import check_name, check_version, is_version

LEADING_OUT = [
    "..",
    ".",
    "../etc",
    "a/../b",
    "model/..",
    "model/",
    "/etc/passwd",
    " ..",
    ".. ",
    "..\\",
    "a\\b",
    "",
    " ",
    "\t",
    "a\0b",
    "a\nb",
    "\x1b[31m",
    "%2e%2e%2f",
    "%2E%2E",
    "%252e%252e%252f",
    "\uff0e\uff0e",  # full-width dots: NFKC makes them two dots
    "\u2025",  # two dot leader
    "a\uff0fb",  # full-width solidus
    "x" * 256,
    "\u00e9" * 128,
]


@pytest.mark.parametrize("name", LEADING_OUT)
def test_a_name_that_could_lead_out_of_its_directory_is_refused(name: str) -> None:
    with pytest.raises(InvalidName, match="model name"):
        check_name("model name", name)


@pytest.mark.parametrize("name", ["...", "a..1", "mnist", "a b", "模型", "50%", "x" * 255, "-rf"])
def test_a_name_that_stays_in_its_directory_is_kept(name: str) -> None:
    assert name == check_name("model name", name)


@pytest.mark.parametrize("text", ["0", "-1", "01", "1.0", "", "one", "²", "1 ", "9" * 5000])
def test_a_version_is_a_positive_number(text: str) -> None:
    assert not is_version(text)


def test_a_version_is_read() -> None:
    assert 12 == check_version("12")
