"""Advice for requests whose path is one of another server's API, or is served elsewhere."""

import re
from collections.abc import Mapping
from types import MappingProxyType

_OTHERS: Mapping[str, str] = MappingProxyType(
    {
        r"/v1/models/([^/:]+)(?:/versions/([^/:]+))?:(?:predict|classify|regress)": (
            "TensorFlow Serving's API is not served: send a request of V2 to /v2/models/{0}/infer"
        ),
        r"(?:/openai)?/v1/responses/[^/]+(?:/[^/]+)?": (
            "no response is stored: send its items in the 'input' of a POST to /v1/responses"
        ),
        r"/predictions/([^/]+)(?:/[^/]+)?": (
            "TorchServe's API is not served: send a request of V2 to /v2/models/{0}/infer"
        ),
        r"/api/(?:generate|chat|tags)": (
            "Ollama's API is not served: OpenAI's is, at /v1/chat/completions"
        ),
    }
)
"""Advice by the whole path; what the pattern holds in parentheses stands in it by number."""
_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {r"/metrics": "the setting metrics_endpoint says where metrics are"}
)
"""The same for paths that this listener does not serve, and another one may."""


def hint(path: str, *, is_there: bool) -> str:
    """Return the advice for a path, behind a semicolon, or empty.

    `is_there` is whether the path is served, and it was the method that is not.
    """
    rows = _OTHERS if is_there else {**_OTHERS, **_ELSEWHERE}
    for pattern, advice in rows.items():
        if match := re.fullmatch(pattern, path[:200]):
            return f"; {advice.format(*match.groups())}"
    return ""
