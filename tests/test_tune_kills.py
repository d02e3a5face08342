"""A search that is killed anywhere, and resumed, ends as if nothing had been."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from kill_tools import MEASURED, NO_SPACE, Death, run
from mlflow_tools import log_folder
from tune_tools import SPEC, TARGET

from tvmpaged import records
from tvmpaged.records import Record
from tvmpaged.tuning.log import Lines, read_searches
from tvmpaged.tuning.session import BATCH

NUM_KILLS, NUM_FULL = 100, 12
#: Of one search; then it may go on to its end.
MAX_KILLS = 5


def finish(folder: Path) -> Record:
    """Go on to the end and return the record."""
    folder.mkdir(exist_ok=True)
    assert run(folder, Death("never")) == 0
    record = records.load(folder, TARGET, SPEC)
    assert record is not None
    return record


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Record:
    return finish(tmp_path_factory.mktemp("unbroken"))


def check_loss(folder: Path) -> None:
    """Check that no more than the batch in flight is lost, and nothing is there twice."""
    log = log_folder(folder) / "trials.jsonl"
    logged = [key for search in read_searches(log) for key in search.trials]
    written = [each for each in Lines(log).read() if each["kind"] == "trial"]
    assert len(logged) == len(set(logged)) == len(written)
    path = folder / MEASURED
    measured = path.read_text().split() if path.exists() else []
    assert len(set(measured) - set(logged)) <= BATCH
    # A record that is there is whole.
    records.load(folder, TARGET, SPEC)


def same(found: Record, expected: Record) -> bool:
    return (found.choices, found.trials, found.latency_us, found.speedup) == (
        expected.choices,
        expected.trials,
        expected.latency_us,
        expected.speedup,
    )


def draw(rng: np.random.Generator, folder: Path) -> Death:
    """Return a death: at any moment, or in the middle of a write."""
    kind = str(rng.choice(["moment", "moment", "byte", "byte", "record"]))
    log = log_folder(folder) / "trials.jsonl"
    size = log.stat().st_size if log.exists() else 0
    if kind == "byte":
        return Death(kind, max(0, size - 100) + 4000 * float(rng.random()))
    return Death(kind, {"moment": 0.12, "record": 2000.0}[kind] * float(rng.random()))


def test_a_hundred_kills_change_nothing(
    tmp_path: Path, unbroken: Record, rng: np.random.Generator
) -> None:
    kinds: Counter[str] = Counter()
    torn = searches = 0
    while kinds.total() < NUM_KILLS:
        folder = tmp_path / str(searches)
        folder.mkdir()
        log = log_folder(folder) / "trials.jsonl"
        for _ in range(MAX_KILLS):
            death = draw(rng, folder)
            code = run(folder, death)
            if code == 0:
                break
            assert code < 0, f"{death}: exit code {code}"
            kinds[death.kind] += 1
            torn += log.exists() and log.stat().st_size > 0 and log.read_bytes()[-1:] != b"\n"
            check_loss(folder)
        else:
            finish(folder)
        found = records.load(folder, TARGET, SPEC)
        assert found is not None
        assert same(found, unbroken), f"search {searches}"
        searches += 1
    # All of it happened: kills at any moment, torn lines, records cut in two.
    assert min(kinds[kind] for kind in ("moment", "byte", "record")) >= 3, kinds
    assert torn >= 5


def test_a_disk_that_is_full_at_any_byte_changes_nothing(
    tmp_path: Path, unbroken: Record, rng: np.random.Generator
) -> None:
    full = searches = 0
    while full < NUM_FULL:
        folder = tmp_path / str(searches)
        folder.mkdir()
        log = log_folder(folder) / "trials.jsonl"
        for _ in range(MAX_KILLS):
            size = log.stat().st_size if log.exists() else 0
            death = Death("full", max(0, size - 100) + 4000 * float(rng.random()))
            code = run(folder, death)
            assert code in (0, NO_SPACE)
            full += code == NO_SPACE
            check_loss(folder)
        assert same(finish(folder), unbroken)
        searches += 1
