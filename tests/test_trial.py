"""A trial is a time or a known reason; anything else in a log is passed over."""

from pathlib import Path
from typing import Any

import pytest
from tune_tools import SPEC

from tvmpaged.records import Latency
from tvmpaged.tuning.log import open_log
from tvmpaged.tuning.setting import Setting
from tvmpaged.tuning.trial import REASONS, Trial, as_reason
from tvmpaged.tuning.workload import Workload

TIMED = Trial({"lanes": 8}, Latency.of([10.0, 11.0]), scale=0.5)


@pytest.mark.parametrize("each", [TIMED, *(Trial({"lanes": 8}, reason=name) for name in REASONS)])
def test_what_is_written_is_read_back(each: Trial) -> None:
    assert Trial.from_dict(each.as_dict()) == each


@pytest.mark.parametrize(
    "change",
    [
        {"reason": "bad weather"},
        {"reason": "crash", "latency_us": TIMED.as_dict()["latency_us"]},
        {"reason": ""},
        {"reason": ["crash"]},
        *(
            {"reason": "", "latency_us": {**TIMED.as_dict()["latency_us"], "median": us}}
            for us in (0.0, -1.0, float("nan"), float("inf"), "10")
        ),
    ],
)
def test_what_is_no_trial_is_refused_and_passed_over_in_a_log(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    data = Trial({"lanes": 8}, reason="crash").as_dict() | change
    with pytest.raises((TypeError, ValueError), match=r"reason|is no time|not supported"):
        Trial.from_dict(data)
    setting = Setting.here(Workload.representative(SPEC))
    with open_log(tmp_path) as log:
        log.start(setting, 0)
        log._lines.append([{"kind": "trial", **data}])
        log.append([TIMED])
        assert log.earlier(setting).trials == [TIMED]


def test_an_unknown_reason_names_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"reason='slow'.*compile, crash"):
        as_reason("slow")
