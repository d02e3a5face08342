"""Tables of results: on terminals of any width, and elsewhere."""

import re
import sys

import pytest

from tvmpaged.cli.console import print_table

pytestmark = pytest.mark.runtime

SPEC = "decode-q.bfloat16-kv.bfloat16-o.bfloat16-d128-v128-b16-g4-HND-n1"
COLUMNS = ("spec", "winner", "median us", "default us", "speed-up", "rate", "of roof")
ROW = (SPEC, "tuned", 1344, 1574, "1.17", "25.0 GB/s", "-")


def on_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stdout, as the test sees it, be a terminal."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))


def printed(capsys: pytest.CaptureFixture[str], title: str = "") -> list[str]:
    print_table(COLUMNS, [ROW, ROW], title)
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()


@pytest.mark.parametrize("width", [40, 70, 80, 100, 120, 160, 240])
def test_no_width_cuts_or_shreds_a_cell(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_terminal(width, monkeypatch)
    lines = printed(capsys)
    text = "\n".join(lines)
    for cell in ("tuned", "1344", "1574", "1.17", "GB/s"):
        assert text.count(cell) == 2, text
    for name in ("winner", "median", "speed-up"):
        assert name in text
    # The spec alone may fold in a table, into parts that can be read, or be longer than a line.
    folded = "".join(line.split("\u2502")[1].strip() for line in lines if "\u2502" in line)
    assert SPEC in (folded or text)
    assert max(map(len, (line for line in lines if line != SPEC))) <= width


def test_a_narrow_terminal_gets_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_terminal(72, monkeypatch)
    row = [
        SPEC,
        "  winner tuned, median us 1344, default us 1574, speed-up 1.17, rate",
        "  25.0 GB/s, of roof -",
    ]
    assert printed(capsys, "what won") == ["what won", *row, *row]


def test_elsewhere_rows_are_separated_by_tabs(capsys: pytest.CaptureFixture[str]) -> None:
    row = "\t".join(map(str, ROW))
    assert printed(capsys, "what won") == ["# what won", "\t".join(COLUMNS), row, row]
