"""Tables of OpenAI's fields that are ignored or refused."""

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
"""Unsupported fields, with the neutral values that are accepted besides null."""
