"""Content negotiation by the Accept header (RFC 9110, section 12.5.1)."""

from collections.abc import Iterator, Sequence

from xlaserve.net.bounded_cache import remembered

ANY = "*/*"
MOST_CHARACTERS = 1024
"""Longer headers are parsed again for each request instead of being cached."""
MOST_KNOWN = 256
"""Maximum number of cached headers."""


@remembered(MOST_CHARACTERS, MOST_KNOWN)  # clients send the same header with every request
def preferred(accept: str, offers: tuple[str, ...]) -> str | None:
    """Return the offer with the highest weight, the first one on a tie; None if none is acceptable.

    The most specific range that matches an offer decides its weight; a weight of 0 excludes it.
    Parameters other than `q` are ignored.
    """
    ranges = list(_ranges(accept))
    best = max(offers, key=lambda offer: _weight_of(offer, ranges), default=None)
    return best if best is not None and _weight_of(best, ranges) > 0 else None


def _ranges(accept: str) -> Iterator[tuple[str, float]]:
    for item in accept.lower().split(","):
        media_range, *parameters = (part.strip() for part in item.split(";"))
        yield media_range, next(filter(None, map(_quality, parameters)), (1.0,))[0]


def _quality(parameter: str) -> tuple[float] | None:
    name, _, value = parameter.partition("=")
    if name.strip() != "q":
        return None
    try:
        return (float(value),)
    except ValueError:
        return (0.0,)


def _weight_of(offer: str, ranges: Sequence[tuple[str, float]]) -> float:
    for pattern in (offer, offer.partition("/")[0] + "/*", ANY):
        weights = [weight for media_range, weight in ranges if media_range == pattern]
        if weights:
            return max(weights)
    return 0.0
