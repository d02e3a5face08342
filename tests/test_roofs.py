"""Measured roofs: all is read, by as many threads as were asked for, and a kernel in turns."""

import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch

from tvmpaged import host_memory
from tvmpaged.cli.console import percent
from tvmpaged.host_memory import zero_pages
from tvmpaged.roofs import PRODUCT_SIZE, MeasuredRoof, Roof, product_roof, read_roof, roof_for
from tvmpaged.tuning import roof
from tvmpaged.tuning.clock import CpuClock
from tvmpaged.tuning.roof import MIN_ROUNDS, _Round, _summary, measure_roof
from tvmpaged.tuning.timing import Taken

pytestmark = pytest.mark.runtime

MIB = 1 << 20


def test_a_read_reads_every_byte_and_other_ones_until_all_were_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The parts hold 1, 2 and 3; the dot product tells which was read, and how much of it.
    parts: list[torch.Tensor] = []

    def watched(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        parts.append(zero_pages(shape, dtype))
        return parts[-1]

    monkeypatch.setattr(host_memory, "zero_pages", watched)
    roof = read_roof(8 * MIB, 24 * MIB, threads=1)
    for value, part in enumerate(parts, 1):
        part.fill_(value)
    assert (roof.name, roof.amount) == ("gb_per_s", 8 * MIB)
    squares = [float(roof.call()) / (2 * MIB) for _ in range(5)]
    assert squares == pytest.approx([1.0, 4.0, 9.0, 1.0, 4.0], rel=1e-4)


def test_a_read_is_never_too_short_to_time() -> None:
    assert read_roof(1, 1, threads=1).amount == 4 * MIB


def test_a_product_counts_its_operations() -> None:
    roof = product_roof("bfloat16", threads=1)
    assert (roof.name, roof.amount) == ("gflop_per_s", 2 * PRODUCT_SIZE**3)
    assert roof.call().dtype == torch.bfloat16
    assert roof.rate(1e6) == pytest.approx(2 * PRODUCT_SIZE**3 / 1e9)
    sizes = {"num_bytes": MIB, "rotation_bytes": MIB}
    assert roof_for("decode", "float16", 1, **sizes).name == "gb_per_s"
    assert roof_for("prefill", "float32", 1, **sizes).name == "gflop_per_s"


THREADS = """
import time, torch
from pathlib import Path
from tvmpaged.roofs import {make}
roof = {make}
assert torch.get_num_threads() == 1
end = time.process_time() + 1.0
while time.process_time() < end:
    roof.call()
assert torch.get_num_threads() == 1
used = [int(file.read_text().split()[0]) for file in Path("/proc/self/task").glob("*/schedstat")]
print(sorted([0, *used])[-2] / 1e9)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
@pytest.mark.parametrize(
    "make", ["read_roof(8 << 20, 64 << 20, {n})", 'product_roof("float32", {n})']
)
def test_a_roof_uses_its_threads_whatever_the_process_does_otherwise(make: str) -> None:
    def second_threads_seconds(threads: int) -> float:
        name = make.split("(", 1)[0]
        code = THREADS.replace("import {make}", f"import {name}").replace("{make}", make)
        done = subprocess.run(
            [sys.executable, "-c", code.replace("{n}", str(threads))],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        return float(done.stdout)

    assert second_threads_seconds(1) < 0.05
    assert second_threads_seconds(2) > 0.3


def _takes(seconds: float, log: list[str], name: str) -> Callable[[], None]:
    def call() -> None:
        log.append(name)
        time.sleep(seconds)

    return call


def test_a_kernel_is_timed_in_turns_with_its_roof() -> None:
    log: list[str] = []
    roof = Roof("gb_per_s", 10**6, _takes(0.004, log, "roof"))
    found = MeasuredRoof(**measure_roof(roof, CpuClock, _takes(0.008, log, "kernel"), 10**6))
    assert found.name == "gb_per_s"
    assert found.value == pytest.approx(10**6 / 4e3 / 1e3, rel=0.2)
    assert found.fraction == pytest.approx(0.5, rel=0.2)
    turns = "".join("r" if name == "roof" else "k" for name in log)
    assert turns.count("rk") >= MIN_ROUNDS
    assert max(map(len, turns.split("k"))) <= 8
    twice = measure_roof(roof, CpuClock, _takes(0.008, log, "kernel"), 2 * 10**6)
    assert twice["fraction"] == pytest.approx(1.0, rel=0.2)


def test_a_roof_alone_has_no_fraction() -> None:
    found = measure_roof(Roof("gflop_per_s", 10**6, _takes(0.002, [], "")), CpuClock)
    assert found["fraction"] is None
    assert MeasuredRoof(**found).fraction_of(found["value"] / 4) == 0.25


def test_disturbed_rounds_do_not_count_while_there_are_others() -> None:
    clean = [_Round(True, 20.0 + i, 10.0 + i / 2) for i in range(MIN_ROUNDS)]
    noise = [_Round(False, 60.0, 1.0)] * 3
    assert _summary([*noise, *clean]) == (22.0, 0.5)
    # With too few, what was least held up: the best of each.
    few = [_Round(False, 10.0, 9.0), _Round(False, 20.0, 4.0), _Round(True, 5.0, 10.0)]
    assert _summary(few) == (20.0, 0.5)


def test_a_turn_is_its_fastest_call_but_never_the_first() -> None:
    timed: list[int] = []
    made: list[int] = []

    class Clock:
        def once(self, call: Callable[[], None]) -> Taken:
            call()
            timed.append(len(made))
            return Taken(us=100.0 - 10.0 * (len(made) == 3), clean=True, waiting=0.0)

        def close(self) -> None: ...

    assert roof._turn(lambda: made.append(1), Clock()).us == 90.0
    assert timed == [2, 3, 4, 5, 6]


def test_a_busy_machine_ends_the_search_for_undisturbed_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns = iter([Taken(us=100.0, clean=False, waiting=0.5)] * 20)
    monkeypatch.setattr(roof, "_turn", lambda _call, _clock: next(turns))
    monkeypatch.setattr(roof, "MAX_SECONDS", 0.0)
    assert measure_roof(Roof("gb_per_s", 1000, lambda: None), CpuClock)["value"] > 0


def test_a_fraction_is_a_percentage_or_a_dash() -> None:
    assert [percent(each) for each in (0.674, 1.0, None)] == ["67%", "100%", "-"]
