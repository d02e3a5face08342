"""The measuring worker on a GPU: a kernel that breaks it takes nobody with it."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tvmpaged.cpu import cpu_flags
from tvmpaged.tuning import measure_worker

pytestmark = pytest.mark.runtime

CHILD = """
import torch
from tvmpaged.tuning import measure_worker

def fail(*_):
    raise RuntimeError("CUDA error: an illegal memory access was encountered\\nmore")

measure_worker._device = lambda: torch.device("cuda:0")
measure_worker.measure_candidates = fail
torch.cuda.synchronize = {synchronize}
print(measure_worker.answer({{}}))
"""


@pytest.mark.parametrize(
    ("synchronize", "code", "last"),
    [
        # The context is broken: so the process ends, and says why.
        ("fail", 1, "CUDA error: an illegal memory access was encountered"),
        # It is not: what was raised is the answer.
        ("lambda: None", 1, "more"),
    ],
)
def test_a_broken_context_ends_the_process(synchronize: str, code: int, last: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(synchronize=synchronize)],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stderr.strip().splitlines()
    assert (done.returncode, lines[-1]) == (code, last)
    assert ("Traceback" in done.stderr) == (synchronize != "fail")


def test_on_a_cpu_what_was_raised_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_request: Any) -> Any:
        raise ValueError("no such symbol")

    monkeypatch.setattr(measure_worker, "measure_candidates", fail)
    monkeypatch.setattr(os, "_exit", lambda _code: pytest.fail("it must go on"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pytest.fail("there is no GPU"))
    with pytest.raises(ValueError, match="no such symbol"):
        measure_worker.answer({})


@pytest.mark.skipif("amx_tile" not in cpu_flags(), reason="needs a CPU with AMX")
def test_a_new_process_may_use_tiles_from_its_first_candidate_on() -> None:
    """Also when no roof was measured in it, whose library might have asked for them."""
    code = (
        "import ctypes; from tvmpaged.tuning import measure_worker\n"
        "measure_worker.measure_candidates({'ping': True})\n"
        "granted = ctypes.c_uint64()\n"
        "arch_prctl, get_permission, tile_data = 158, 0x1022, 18\n"
        "ctypes.CDLL(None).syscall(arch_prctl, get_permission, ctypes.byref(granted))\n"
        "print(granted.value >> tile_data & 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
