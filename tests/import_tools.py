"""Taking results home, which is done where the compiler is."""

from pathlib import Path
from typing import Any

from tvmpaged import tune_offline
from tvmpaged.records import Record
from tvmpaged.tuning.work import Settings


def settings(work_dir: Path, **more: Any) -> Settings:
    return Settings(**{"trials": 12, "work_dir": work_dir, "use_mlflow": False, **more})


def take_in(folder: Path, work_dir: Path) -> Record:
    """Import the results of a single spec."""
    (tuned,) = tune_offline.import_results(folder, settings(work_dir))
    assert tuned.record is not None, tuned.failure
    return tuned.record
