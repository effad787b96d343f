"""Advice for unknown paths that belong to another server's API or another listener."""

import re
from collections.abc import Mapping
from types import MappingProxyType

_OTHERS: Mapping[str, str] = MappingProxyType(
    {
        r"/v1/models/([^/:]+)(?:/versions/([^/:]+))?:(?:predict|classify|regress)": (
            "TensorFlow Serving's API is not supported: send a V2 request to /v2/models/{0}/infer"
        ),
        r"(?:/openai)?/v1/responses/[^/]+(?:/[^/]+)?": (
            "responses are not stored: send the items in the 'input' of a POST to /v1/responses"
        ),
        r"/predictions/([^/]+)(?:/[^/]+)?": (
            "TorchServe's API is not supported: send a V2 request to /v2/models/{0}/infer"
        ),
        r"/api/(?:generate|chat|tags)": (
            "Ollama's API is not supported: use OpenAI's at /v1/chat/completions"
        ),
    }
)
"""Advice by a pattern of the whole path; its groups are format arguments."""
_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {r"/metrics": "metrics are served at the setting metrics_endpoint"}
)
"""Advice for paths that this listener does not serve but another listener may."""


def hint(path: str, *, is_there: bool) -> str:
    """Return the advice for a path, after a semicolon, or an empty string.

    `is_there` is True if the path exists but does not support the method.
    """
    rows = _OTHERS if is_there else {**_OTHERS, **_ELSEWHERE}
    for pattern, advice in rows.items():
        if match := re.fullmatch(pattern, path[:200]):
            return f"; {advice.format(*match.groups())}"
    return ""
