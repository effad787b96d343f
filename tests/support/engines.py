"""The HTTP/2 engine that a run of the tests is about: `XLASERVE_HTTP2_ENGINE`, else the default."""

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest

from xlaserve.settings import Settings

_NAME = "http2_engine"
_SETTING = {field.name: field.default for field in fields(Settings)}

ENGINE = os.environ.get("XLASERVE_HTTP2_ENGINE") or str(_SETTING.get(_NAME, "h2"))
"""`own`, or `h2`, which is grpclib's."""

ENGINE_SETTING: Mapping[str, Any] = {_NAME: ENGINE} if _NAME in _SETTING else {}
"""For servers in the process of the tests; others read the environment."""

own_engine_only = pytest.mark.skipif(
    ENGINE != "own", reason="the h2 engine answers this as h2 and grpclib do"
)
"""For what an engine of our own promises, and grpclib's does not."""
