"""What `kill_tools` runs in its children; imported once, in the process that they are forks of."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xgboost
from kill_tools import MEASURED, NO_SPACE, TRIALS, Death
from tune_tools import FakeMachine, work

from tvmpaged import records
from tvmpaged.tuning import search as search_module
from tvmpaged.tuning.process import Answer
from tvmpaged.tuning.trial import Choices, choices_key

# How good the model is decides who is tried, not what a kill may do: a quick one serves. What is
# done here once is not done in each child.
search_module.NUM_DRAWN, search_module.NUM_VARIED = 16, 32
_train = xgboost.train
xgboost.train = lambda *args, **options: _train(*args, **options | {"num_boost_round": 8})
xgboost.DMatrix(np.zeros((1, 1)), nthread=1)


class ReplayMachine(FakeMachine):
    """Answers with recorded times, and notes what it was asked."""

    def measure(
        self, spec: Any, workload: Any, merge: Any, candidates: Sequence[Choices], **options: Any
    ) -> Answer:
        answer = super().measure(spec, workload, merge, candidates, **options)
        if len(candidates) <= 2:  # not the finalists
            with (self.folder / MEASURED).open("ab", buffering=0) as file:
                file.write(choices_key(candidates[-1]).encode() + b"\n")
        return answer


def search(folder: Path, death: Death) -> None:
    """Go on with a search, up to this process's death."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Whatever ends this child, nothing of Python's runs any more.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN if death.kind == "full" else signal.SIG_DFL)
    if death.kind == "moment":
        signal.setitimer(signal.ITIMER_PROF, max(1e-3, death.value))
    elif death.kind in ("byte", "full"):
        _limit(death.value)
    elif death.kind == "record":
        save = records.save

        def limited(*args: Any) -> Path:
            _limit(death.value)
            return save(*args)

        records.save = limited
    try:
        work(ReplayMachine(folder), folder, trials=TRIALS, resume=True).run()
    except OSError:
        os._exit(NO_SPACE)
    os._exit(0)


def _limit(num_bytes: float) -> None:
    """Let no file grow beyond so many bytes: the kernel writes that far and no further."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(num_bytes), hard))
