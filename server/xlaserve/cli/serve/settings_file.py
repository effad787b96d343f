"""A settings file in TOML: `name = value` for each name in docs/settings.md."""

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xlaserve.errors import InvalidSettings
from xlaserve.settings import Settings
from xlaserve.settings.description import SettingDescription, describe_settings
from xlaserve.settings.reading import successor


def read_file(path: Path) -> dict[str, Any]:
    """Return the settings in a file, in the form of command-line values.

    Raises InvalidSettings if the file is not TOML, has an unknown key (the error suggests the
    closest setting), or has an invalid value.
    """
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise InvalidSettings("--config", "a file", f"{path}: {error.strerror}") from error
    except ValueError as error:  # includes bytes that are not UTF-8
        raise InvalidSettings("--config", f"TOML ({error})", str(path)) from error
    known = {row.name: row for row in describe_settings()}
    return {name: _value(path, known, name, value) for name, value in table.items()}


def merged(
    path: Path | None, flags: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> Settings:
    """Merge the settings; flags override the environment, which overrides the file.

    Raises InvalidSettings.
    """
    environ = os.environ if environment is None else environment
    return Settings.read(environ, **{**_below(environ, path), **flags})


def _below(environment: Mapping[str, str], path: Path | None) -> dict[str, Any]:
    """Return the file's settings that no environment variable overrides."""
    if path is None:
        return {}
    variables = {row.name: row.variable for row in describe_settings()}
    return {
        name: value for name, value in read_file(path).items() if variables[name] not in environment
    }


def _value(path: Path, known: Mapping[str, SettingDescription], name: str, value: object) -> Any:
    setting = f"'{name}' in {path}"
    if name not in known:
        if took_place := successor(name.replace("-", "_")):
            raise InvalidSettings(setting, took_place, value)
        near = difflib.get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.7)
        expected = "the name of a setting" + (f", such as '{near[0]}'" if near else "")
        raise InvalidSettings(setting, expected, value)
    if isinstance(value, list):
        if not known[name].many:
            raise InvalidSettings(setting, "one value", value)
        return [_text(setting, each) for each in value]
    return _text(setting, value)


def _text(setting: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise InvalidSettings(setting, "a string, a number, a boolean, or a list of them", value)
