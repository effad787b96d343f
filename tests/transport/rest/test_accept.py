"""The Accept header against what is on offer."""

import pytest

from xlaserve.http.accept import preferred

OFFERS = ("application/json", "text/csv", "application/x-npy")


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("text/csv", "text/csv"),
        ("TEXT/CSV", "text/csv"),
        ("text/csv;charset=utf-8", "text/csv"),
        ("*/*", "application/json"),
        ("text/*", "text/csv"),
        ("application/*", "application/json"),
        ("text/csv;q=0.5, application/x-npy", "application/x-npy"),
        ("text/csv; q=0.5 , application/x-npy;q=0.4", "text/csv"),
        ("text/csv, application/json", "application/json"),
        ("*/*;q=0.1, text/csv", "text/csv"),
        ("*/*, application/json;q=0", "text/csv"),
        ("application/*;q=0, */*", "text/csv"),
        ("application/json;q=0", None),
        ("text/csv;q=none", None),
        ("text/html", None),
        ("", None),
        (",;q,;;", None),
    ],
)
def test_the_offer_of_the_highest_weight_is_preferred(accept: str, expected: str | None) -> None:
    """RFC 9110, 12.5.1: the most specific range decides; ties are broken by the server's order."""
    assert expected == preferred(accept, OFFERS)
