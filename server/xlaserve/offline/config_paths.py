"""Flattens configurations to paths with values, to compare them."""

from collections.abc import Iterator, Mapping

from betterproto import Casing

from xlaserve.model_config.config import ModelConfig
from xlaserve.model_config.schema import given_of

_NAMES = ("name", "model_name", "key")
"""Members that name an element of a list, so that it is found wherever it stands."""


def config_paths(config: ModelConfig) -> Mapping[str, str]:
    """Return every field that was written, as `dynamic_batching.max_queue_delay_microseconds`.

    Elements of lists that have names are known by them, `input['x'].dims`, others by their place.
    Fields that were given their default are there, since that may differ from saying nothing.
    """
    message = config.message
    if message is None:
        return {}
    said: dict[str, object] = message.to_dict(casing=Casing.SNAKE)  # type: ignore[arg-type]  # a function
    found = dict(_walk("", said))
    for name in sorted(given_of(message)):
        if name not in said:
            found[name] = _shown(getattr(message, name))
    return found


def _walk(path: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, member in value.items():
            yield from _walk(f"{path}.{key}" if path else str(key), member)
    elif isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        keys = [_key(one) for one in value]
        # A name that comes twice tells nothing apart.
        is_named = all(keys) and len(set(keys)) == len(keys)
        for place, one in enumerate(value):
            yield from _walk(f"{path}['{keys[place]}']" if is_named else f"{path}[{place}]", one)
        if is_named:
            yield f"{path} (order)", ", ".join(keys)
    else:
        yield path, _shown(value)


def _key(element: Mapping[str, object]) -> str:
    return next((str(element[name]) for name in _NAMES if element.get(name)), "")


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return str(value)
