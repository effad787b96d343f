"""Advice for paths of other servers, and for moved ones."""

import re
from collections.abc import Mapping
from types import MappingProxyType

_OTHERS: Mapping[str, str] = MappingProxyType(
    {
        r"/v1/models/([^/:]+)(?:/versions/([^/:]+))?:(?:predict|classify|regress)": (
            "TensorFlow Serving's API is not served: send a request of V2 to /v2/models/{0}/infer"
        ),
        r"/predictions/([^/]+)(?:/[^/]+)?": (
            "TorchServe's API is not served: send a request of V2 to /v2/models/{0}/infer"
        ),
        r"/metrics": "the setting metrics_endpoint says where metrics are",
        r"/api/(?:generate|chat|tags)": (
            "Ollama's API is not served: OpenAI's is, at /v1/chat/completions"
        ),
    }
)
"""Advice by pattern of the whole path, with its groups by number."""


def hint(path: str) -> str:
    """Return the advice for an unknown path, after a semicolon; empty without one."""
    for pattern, advice in _OTHERS.items():
        if match := re.fullmatch(pattern, path[:200]):
            return f"; {advice.format(*match.groups())}"
    return ""
