"""Write docs/settings.md from the settings, or prove that it is up to date (`--check`)."""

import argparse
import itertools
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from xlaserve.settings.description import SettingDescription, describe_settings

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
_INTRODUCTION = """# Settings

Every setting is a flag of `xlaserve serve` and an environment variable; a flag beats the variable,
which beats the default. A flag that may be repeated is separated by commas in its variable.
This page is made by `tools/settings_page.py`.
"""
_COMMON = (
    *("http_endpoint", "grpc_endpoint", "host", "model_control_mode", "load_model", "readiness"),
    *("device", "capacity_bytes", "evict", "compilation_cache_directory", "load_threads"),
    *("max_requests_per_model", "max_held_bytes", "max_message_bytes", "grace_seconds"),
    *("access_rules", "tls_certificate", "tls_key", "log_level", "access_log"),
)
"""Settings that most servers need, in the order of a first deployment."""
_TABLE = """
| flag | variable | default | what it is |
|---|---|---|---|
"""


def page() -> str:
    """Return the whole page."""
    settings = describe_settings()
    by_name = {setting.name: setting for setting in settings}
    groups = itertools.groupby(settings, key=lambda setting: setting.group)
    common = "\n## The twenty common ones\n\n| flag | default | group |\n|---|---|---|\n" + "".join(
        map(_common_row, (by_name[name] for name in _COMMON))
    )
    return _INTRODUCTION + common + "".join(_table(name, rows) for name, rows in groups)


def _common_row(setting: SettingDescription) -> str:
    default = f"`{setting.default}`" if setting.default else ""
    anchor = re.sub(r"[^a-z0-9 _-]", "", setting.group.lower()).replace(" ", "-")
    return f"| `--{setting.name.replace('_', '-')}` | {default} | [{setting.group}](#{anchor}) |\n"


def _table(name: str, rows: Iterable[SettingDescription]) -> str:
    heading = f"\n## {name or 'The repository'}\n"
    return heading + _TABLE + "".join(map(_row, rows))


def _row(setting: SettingDescription) -> str:
    flag = "REPOSITORY" if setting.name == "repository" else f"--{setting.name.replace('_', '-')}"
    default = f"`{setting.default}`" if setting.default else ""
    text = setting.text.replace("|", "\\|").replace("<", "&lt;")
    return f"| `{flag}` | `{setting.variable}` | {default} | {text} |\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if not fresh")
    if not parser.parse_args().check:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page())
        return 0
    if PAGE.read_text() == page():
        print("docs/settings.md is fresh")
        return 0
    print("docs/settings.md is stale: run tools/settings_page.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
