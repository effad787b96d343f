"""Human-readable sizes: three digits at most, and never in powers of ten."""

import pytest

from xlaserve.cli.sizes import format_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (1023, "0.999 KiB"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (999 * 1024, "999 KiB"),
        (1000 * 1024, "0.977 MiB"),
        (1 << 20, "1 MiB"),
        (80 << 30, "80 GiB"),
        (900 << 40, "900 TiB"),
    ],
)
def test_a_size_has_three_digits_and_a_unit(count: int, text: str) -> None:
    assert format_bytes(count) == text
