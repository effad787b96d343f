"""The server settings of a container in a manifest."""

from collections.abc import Mapping
from typing import Any

from xlaserve.errors import InvalidSettings
from xlaserve.settings import Settings
from xlaserve.settings.description import describe_settings


def container_settings(container: Mapping[str, Any]) -> Settings:
    """Parse a container's arguments and environment as the server does.

    Raises InvalidSettings where the server would.
    """
    command, repository, *words = container["args"]
    assert "serve" == command
    rows = {f"--{row.name.replace('_', '-')}": row for row in describe_settings()}
    given: dict[str, object] = {"repository": repository}
    while words:
        flag = words.pop(0)
        if flag not in rows:
            raise InvalidSettings(flag, "the flag of a setting", flag)
        row = rows[flag]
        value = "true" if row.switch else words.pop(0)
        given[row.name] = [value] if row.many else value
    environment = {row["name"]: row.get("value", "1") for row in container["env"]}
    return Settings.read(environment, **given)
