"""A machine made of arithmetic, for tests of the search: nothing is compiled, times are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tvmpaged.cpu import native_target
from tvmpaged.roofs import MeasuredRoof
from tvmpaged.spec import AttentionSpec
from tvmpaged.tuning.process import Answer
from tvmpaged.tuning.trial import Choices, choices_key
from tvmpaged.tuning.work import Settings, Work

SPEC = AttentionSpec.make("decode", "float32", 64, 3, 16)
TARGET = native_target()
#: Where a process finds the workers of these tests.
TESTS = {"PYTHONPATH": str(Path(__file__).parent)}


def known_us(choices: Choices) -> float:
    """Return a time that some options decide, and a little noise that is always the same."""
    us = 1000.0 + 400.0 * (choices["row_tile"] < 3)
    us += 30.0 * abs(np.log2(1 + choices["prefetch_keys"]) - np.log2(65))
    us += 40.0 * abs(choices["prefetch_level"] - 2) + 25.0 * abs(np.log2(choices["dot_keys"]) - 2)
    us += 15.0 * abs(np.log2(choices["keys_per_step"]) - 6)
    us += 20.0 * (choices["split_length"] < 512) + 8.0 * abs(choices["weigh_vectors"] - 3)
    noise = int(choices_key(choices)[:4], 16) / 0xFFFF
    return float(us + noise)


class FakeMachine:
    """What `tvmpaged.tuning.machine.Machine` is to the search.

    Parameters
    ----------
    folder : Path
        Of artifacts.
    fate : callable
        Choices -> a failure such as ``Answer({}, "crash", "SIGSEGV")``, or None.
    """

    def __init__(
        self, folder: Path, fate: Callable[[Choices], Answer | None] = lambda _choices: None
    ) -> None:
        self.folder = folder
        self.fate = fate
        self.broken: Callable[[Choices], bool] = lambda _choices: False
        self.compiled: list[str] = []
        self.measured: list[str] = []
        self.stop = False
        self.compilers: list[Any] = []
        self.num_devices = 1
        self.roof: MeasuredRoof | None = MeasuredRoof("gb_per_s", 25.0, 0.5)

    def interrupted(self) -> bool:
        return self.stop

    def path(self, spec: AttentionSpec, key: str) -> Path:
        return self.folder / f"{key}.so"

    def compile(self, spec: Any, target: Any, choices: Sequence[Choices]) -> list[Answer]:
        self.compiled += [choices_key(each) for each in choices]
        return [Answer({"error": "broken"} if self.broken(each) else {}) for each in choices]

    def measure_roof(self, *_what: Any, **_options: Any) -> MeasuredRoof | None:
        return self.roof

    def measure(
        self, spec: Any, workload: Any, merge: Any, candidates: Sequence[Choices], **options: Any
    ) -> Answer:
        if self.stop:
            return Answer({}, "interrupted", "interrupted")
        # Candidates come with the default as their yardstick; a new leader comes again at once.
        keys = [choices_key(each) for each in candidates[1:] or candidates]
        if keys != self.measured[-1:] or options.get("phase") == "finalists":
            self.measured += keys
        for each in candidates:
            answer = self.fate(each)
            if answer is not None:
                return answer
        times = [known_us(each) for each in candidates]
        samples = [{"times_us": [us] * 5, "disturbed": 0, "speedup": times[0] / us} for us in times]
        return Answer({"samples": samples})


def work(machine: FakeMachine, folder: Path, **settings: Any) -> Work:
    """Return the search of `SPEC` on a made-up machine."""
    chosen = Settings(work_dir=folder, **{"trials": 40, "use_mlflow": False, **settings})
    return Work(
        SPEC,
        TARGET,
        chosen,
        machine,
        float("inf"),
        None,
        lambda _status: None,  # type: ignore[arg-type]
    )
