"""Tables of OpenAI's request fields that are ignored or refused."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

COMPLETION_HINTS = ("user",)
EMBEDDING_HINTS = ("user",)
CHAT_HINTS = (
    *("user", "store", "metadata", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "prediction"),
)
"""Ignored fields for operators and caches: any value is accepted."""

RESPONSE_HINTS = (
    *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    "prompt_cache_options",
)

COMPLETION_REFUSED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {"best_of": (1,), "suffix": ("",)}
)
CHAT_REFUSED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "service_tier": ("auto", "default"),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
)
MESSAGE_REFUSED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "refusal": ("",),
    }
)
RESPONSE_REFUSED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "truncation": ("disabled",),
    }
)
"""Unsupported fields, with the neutral values that are accepted besides null."""

_ALL_ITEMS = "responses are not stored: send the earlier items in 'input'"
INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "background": "responses are not stored",
        "conversation": _ALL_ITEMS,
        "previous_response_id": _ALL_ITEMS,
        "prompt": "prompts are not stored: send the text in 'instructions' and 'input'",
        "store": "responses are not stored: send the response's items in the next 'input'",
        "truncation": "input is not truncated: leave out items until the rest fits",
    }
)
"""Alternatives to unsupported fields, for error messages."""
