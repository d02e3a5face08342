"""``tvmpaged env``."""

from collections.abc import Iterator
from typing import Any

from tvmpaged.cli.console import JsonFlag, print_json, print_table

EXAMPLE = "tvmpaged env --json > env.json"


def run(json: JsonFlag = False) -> None:
    """Print everything a bug report needs; logins, keys and tokens are cut."""
    from tvmpaged.env import SCHEMA_VERSION, collect

    report = collect()
    if json:
        print_json(report, SCHEMA_VERSION)
    else:
        print_table(("what", "value"), list(_rows(report)))


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for section, content in report.items():
        if isinstance(content, dict):
            yield from ((f"{section}: {name}", _text(value)) for name, value in content.items())
        else:
            for entry in content or ["none"]:
                yield section, _text(entry)


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {entry}" for name, entry in value.items())
    if isinstance(value, list):
        return " ".join(str(entry) for entry in value)
    return "-" if value is None else str(value)
