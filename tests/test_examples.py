"""Each example runs as it is and prints what it says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from engine_tools import tiny_folder
from kernel_bundles import ROOT, bundle

pytestmark = pytest.mark.runtime

EXAMPLES = ROOT / "examples"

#: Example -> what its output must hold.
EXPECTED = {
    "n_samples.py": ["sample 3:", "only once", "3 copied on write"],
    "fork_by_hand.py": ["trunk, before the fork:", "branch:", "blocks copied on write: 1"],
    "own_engine.py": ["copied on write: [(", "branch against dense attention"],
    "attention_in_transformers.py": ["'One, two, three,' -> 'One, two, three,"],
}


def test_every_example_is_here() -> None:
    assert {file.name for file in EXAMPLES.glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_it_runs(name: str) -> None:
    command = [sys.executable, str(EXAMPLES / name)]
    if name != "own_engine.py":
        command += ["--model", str(tiny_folder())]
    environment = os.environ | {"TVMPAGED_BUNDLE": str(bundle("base"))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for text in EXPECTED[name]:
        assert text in done.stdout
