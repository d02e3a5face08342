"""Ten thousand malformed calls in a process of their own: none ends it, each is refused by name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.runtime

PROGRAM = Path(__file__).parent / "malformed_calls.py"
CALLS = 12_000


def test_malformed_calls_are_refused_by_name_and_never_crash(
    base_bundle: Path, rng: np.random.Generator, tmp_path: Path
) -> None:
    last = tmp_path / "last"
    seed = str(rng.integers(2**31))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", PROGRAM, base_bundle, seed, str(CALLS), last],
        env={**os.environ, "TVMPAGED_BUNDLE": str(base_bundle), "PYTHONFAULTHANDLER": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"it died in {last.read_text()}\n{done.stderr[-3000:]}"
    report = json.loads(done.stdout)
    assert sum(report["made"].values()) >= 10_000
    assert not report["problems"], "\n".join(report["problems"][:20])
    refused = sum(each["refused"] for each in report["counts"].values())
    accepted = sum(each.get("accepted", 0) for each in report["counts"].values())
    assert refused > 8_000
    assert accepted > 500
