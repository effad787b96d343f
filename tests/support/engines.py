"""The HTTP/2 engine that a run of the tests is about: `XLASERVE_HTTP2_ENGINE`, else our own."""

import os

import pytest

from xlaserve.settings.choices import Http2Engine

ENGINE = Http2Engine(os.environ.get("XLASERVE_HTTP2_ENGINE", Http2Engine.OWN))
"""For servers in the process of the tests; others read the environment."""

own_engine_only = pytest.mark.skipif(
    ENGINE is not Http2Engine.OWN, reason="grpclib over h2 answers this as it does"
)
"""For what an engine of our own promises, and grpclib's does not."""
