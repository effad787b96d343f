"""The HTTP/2 engine under test: `XLASERVE_HTTP2_ENGINE`, or our own by default."""

import os

import pytest

from xlaserve.settings.choices import Http2Engine

ENGINE = Http2Engine(os.environ.get("XLASERVE_HTTP2_ENGINE", Http2Engine.OWN))
"""Engine for servers in the test process; other processes read the environment variable."""

own_engine_only = pytest.mark.skipif(
    ENGINE is not Http2Engine.OWN, reason="grpclib over h2 answers this as it does"
)
"""Skips tests of guarantees that only our own engine gives."""
