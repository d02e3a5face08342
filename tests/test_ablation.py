"""What options were worth: hand-made searches whose answer is known."""

import json
from pathlib import Path

import pytest

from tvmpaged.cli.app import main
from tvmpaged.records import Latency
from tvmpaged.tuning.ablation import ablation
from tvmpaged.tuning.log import LOG_NAME
from tvmpaged.tuning.trial import Trial


def search(root: Path, spec: str, *trials: tuple[dict[str, int], float]) -> None:
    folder = root / "cpu" / "x86-64-v3" / spec
    folder.mkdir(parents=True)
    lines = [{"kind": "run", "setting_key": "k", "setting": {}, "seed": 0, "mlflow_run_id": None}]
    lines += [
        {"kind": "trial"} | Trial(choices, Latency.of([us] * 5)).as_dict() for choices, us in trials
    ]
    (folder / LOG_NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Two searches: unroll decides the first, and the second a little; the rest nothing."""
    search(
        tmp_path,
        "first",
        ({"unroll": 1, "ahead": 0, "fixed": 7}, 200.0),
        ({"unroll": 4, "ahead": 0, "fixed": 7}, 101.0),
        ({"unroll": 4, "ahead": 8, "fixed": 7}, 100.0),
    )
    search(
        tmp_path,
        "second",
        ({"unroll": 1, "ahead": 0, "fixed": 7}, 110.0),
        ({"unroll": 2, "ahead": 0, "fixed": 7}, 100.0),
        ({"unroll": 8, "ahead": 0, "fixed": 7}, 150.0),
    )
    return tmp_path


def test_an_option_is_worth_what_the_defaults_value_would_cost(logs: Path) -> None:
    unroll, ahead, fixed = ablation(logs)
    assert (unroll.option, unroll.searches, unroll.most_in) == ("unroll", 2, "first")
    assert unroll.worth_most == pytest.approx(1.0)
    assert unroll.worth_mean == pytest.approx((1.0 + 0.1) / 2)
    assert unroll.winners == {"4": 1, "2": 1}
    assert (ahead.option, ahead.searches) == ("ahead", 1)
    assert ahead.worth_most == pytest.approx(0.01)
    assert not ahead.never_wins  # one search says little
    assert not unroll.never_wins
    assert (fixed.option, fixed.searches, fixed.winners) == ("fixed", 0, {})


def test_the_command_names_what_never_wins(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for spec in ("third", "fourth"):
        assert main(["show", "--options", "--work-dir", str(logs)]) == 0
        assert "ahead" not in capsys.readouterr().err
        search(
            logs, spec, ({"unroll": 1, "ahead": 0}, 100.0), ({"unroll": 1, "ahead": 8}, 101.0)
        )  # fmt: skip
    assert main(["show", "--options", "--work-dir", str(logs), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["never_win"] == ["ahead"]
    assert [row["option"] for row in found["options"]] == ["unroll", "ahead", "fixed"]
    assert main(["show", "--options", "--work-dir", str(logs)]) == 0
    captured = capsys.readouterr()
    assert "100.0%" in captured.out
    assert "ahead" in captured.err


def test_one_thing_at_a_time(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--options", "--records", "--work-dir", str(logs)]) != 0
    assert "give one of" in capsys.readouterr().err
