"""The benchmark of single lists, on a machine whose times are known."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from record_tools import make_record
from tune_tools import TARGET, FakeMachine

from tvmpaged import records, schedules
from tvmpaged.cpu import cpu_model, num_threads
from tvmpaged.records import Record
from tvmpaged.sources import source_sha256
from tvmpaged.spec import AttentionSpec
from tvmpaged.tuning.process import Answer
from tvmpaged.tuning.starts import default_start
from tvmpaged.tuning.trial import Choices

#: One row to a K/V head, so that no list with more rows is legal for both.
NARROW = AttentionSpec.make("decode", "float32", 64, 1, 16)
WIDE = AttentionSpec.make("decode", "float32", 64, 4, 16)
FAVOURITE = {NARROW: 16, WIDE: 64}
#: By how many powers of two the keys fetched ahead are off the favourite.
PENALTY = {0: 1.0, 1: 1.1, 2: 1.5, 3: 2.0}


def known_us(spec: AttentionSpec, choices: Choices) -> float:
    """Return a time that is least, for both specs together, at 32 keys ahead and one long split."""
    ahead = choices["prefetch_keys"]
    off = abs(int(np.log2(ahead / FAVOURITE[spec]))) if ahead else 3
    return 100.0 * PENALTY[off] * (1.0 + 0.1 * abs(np.log2(choices["split_length"] / 1024)))


class KnownMachine(FakeMachine):
    """Times each list as `known_us` says, and is asked for legal ones only."""

    def compile(self, spec: Any, target: Any, choices: Sequence[Choices]) -> list[Answer]:
        if spec.kernel == "decode":
            assert not any(schedules.reject(spec, target, each) for each in choices)
        return super().compile(spec, target, choices)

    def measure(
        self, spec: Any, workload: Any, merge: Any, candidates: Sequence[Choices], **options: Any
    ) -> Answer:
        for each in candidates:
            if answer := self.fate(each):
                return answer
        times = [known_us(spec, each) for each in candidates]
        samples = [{"times_us": [us] * 5, "disturbed": 0, "speedup": times[0] / us} for us in times]
        return Answer({"samples": samples})


@pytest.fixture
def single_list(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("single_list")


def tuned(spec: AttentionSpec, **changes: Any) -> Record:
    """Return the record of the best list there is for a spec."""
    best = {"prefetch_keys": FAVOURITE[spec], "prefetch_level": 2, "split_length": 1024}
    return make_record(
        spec=spec,
        target=TARGET,
        choices=default_start(spec, TARGET) | best,
        **(
            {
                "source_sha256": source_sha256("cpu"),
                "device": cpu_model(),
                "num_threads": num_threads(),
            }
            | changes
        ),
    )


def matrix_of(single_list: ModuleType, folder: Path, **options: Any) -> Any:
    by_spec = {spec: tuned(spec) for spec in (WIDE, NARROW)}
    return single_list.Matrix(KnownMachine(folder, **options), TARGET, by_spec)


def test_the_best_single_list_is_found_and_its_ratio_is_right(
    single_list: ModuleType, tmp_path: Path
) -> None:
    matrix, specs, told = matrix_of(single_list, tmp_path), [WIDE, NARROW], []
    assert set(matrix.rebuild().values()) == {1.0}
    single_list.search(matrix, specs, 8, 0, told.append)
    best = matrix.ranking(specs)[0]
    assert (best["prefetch_keys"], best["split_length"], best["row_tile"]) == (32, 1024, 1)
    row = single_list.final(matrix, specs, best)
    assert row["geomean"] == pytest.approx(1.1)
    assert row["ratios"] == {str(spec): pytest.approx(1.1) for spec in specs}
    assert "best 1.100" in told[-1]


def test_a_list_that_fails_on_one_spec_is_none(single_list: ModuleType, tmp_path: Path) -> None:
    def fate(choices: Choices) -> Answer | None:
        return Answer({"wrong": "no"}) if choices["prefetch_keys"] == 32 else None

    matrix, specs = matrix_of(single_list, tmp_path, fate=fate), [WIDE, NARROW]
    matrix.rebuild()
    single_list.search(matrix, specs, 8, 0, lambda _text: None)
    best = matrix.ranking(specs)[0]
    assert best["prefetch_keys"] in (16, 64)
    assert single_list.final(matrix, specs, best)["geomean"] == pytest.approx(1.5**0.5)


def test_a_climb_changes_one_option_after_the_other(
    single_list: ModuleType, tmp_path: Path
) -> None:
    matrix, specs = matrix_of(single_list, tmp_path), [WIDE, NARROW]
    matrix.rebuild()
    start = tuned(NARROW).choices | {"prefetch_keys": 128, "split_length": 256}
    matrix.race(specs, [start], 1.1)
    single_list.climb(matrix, specs, start)
    best = matrix.ranking(specs)[0]
    assert best == start | {"prefetch_keys": 32, "split_length": 1024}


def test_a_list_that_cannot_lead_is_given_up(single_list: ModuleType, tmp_path: Path) -> None:
    matrix, specs = matrix_of(single_list, tmp_path), [WIDE, NARROW]
    matrix.rebuild()
    good = tuned(NARROW).choices | {"prefetch_keys": 32}
    slow = good | {"prefetch_keys": 0, "prefetch_level": 1, "split_length": 256}
    matrix.race(specs, [good], 1.1)
    matrix.race(specs, [slow], 1.1)
    assert matrix.ranking(specs)[:1] == [good]
    key = single_list.choices_key(slow)
    assert (WIDE, key) in matrix.ratios
    assert (NARROW, key) not in matrix.ratios


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source_sha256": "0" * 64}, "the record is stale"),
        ({"device": "Z80"}, "tuned elsewhere"),
    ],
)
def test_records_that_do_not_hold_are_refused(
    single_list: ModuleType, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    records.save(tmp_path, tuned(NARROW))
    records.save(tmp_path, tuned(WIDE))
    assert len(single_list.read_records(tmp_path, "decode")) == 2
    records.save(tmp_path, tuned(WIDE, **changes))
    with pytest.raises(SystemExit, match=message):
        single_list.read_records(tmp_path, "decode")
    assert len(single_list.read_records(tmp_path, "decode", allow_stale=True)) == 2
    with pytest.raises(SystemExit, match="holds no prefill record"):
        single_list.read_records(tmp_path, "prefill")


def test_equal_lists_win_once_and_ties_never(single_list: ModuleType) -> None:
    one, other = {"step": "rows", "lanes": 16}, {"lanes": 16, "step": "columns"}
    made = [
        make_record(choices=one, speedup=1.2),
        make_record(choices=dict(reversed(one.items())), speedup=1.01),
        make_record(choices=other, speedup=1.009),
        make_record(choices=other, speedup=1.0, is_default=True),
    ]
    assert single_list.winners(made) == [one]
    assert len(single_list.winners([*made, make_record(choices=other, speedup=1.3)])) == 2
