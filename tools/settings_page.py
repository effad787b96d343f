"""Write docs/settings.md from the settings themselves, or prove that it is fresh (`--check`)."""

import argparse
import itertools
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
_TABLE = """
| flag | variable | default | what it is |
|---|---|---|---|
"""


def page() -> str:
    """Return the whole page."""
    groups = itertools.groupby(describe_settings(), key=lambda setting: setting.group)
    return _INTRODUCTION + "".join(_table(name, rows) for name, rows in groups)


def _table(name: str, rows: Iterable[SettingDescription]) -> str:
    heading = f"\n## {name}\n" if name else ""
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
