"""What the driver says of GPUs: limits, clocks, who computes there; nothing where there is none."""

from pathlib import Path

import pytest
from gpu_tools import H200, H200_TARGET, Program, build_driver, gpu, gpus_here

from tvmpaged import driver
from tvmpaged.gpu import FACTS, find_gpu, gpu_facts, native_gpu, num_processes, target_of
from tvmpaged.sm import LIMITS, limits
from tvmpaged.spec import TargetKey

pytestmark = pytest.mark.runtime


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """The driver's program, alone on the path."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return Program.write(tmp_path, f"NVIDIA L4{H200[11:]}\n{H200}")


def test_the_driver_is_asked_for_every_limit(tmp_path: Path) -> None:
    expected = (gpu(), gpu(1, "NVIDIA GeForce RTX 5090", (12, 0)))
    found = driver.gpus(str(build_driver(tmp_path / "libcuda.so.1", expected)))
    assert [each.name for each in found] == [each.name for each in expected]
    assert found == expected
    assert target_of(found[0]) == H200_TARGET


def test_no_driver_an_empty_one_and_one_without_gpus_are_no_gpu(tmp_path: Path) -> None:
    assert driver.gpus(str(tmp_path / "none.so")) == ()
    assert driver.gpus(str(build_driver(tmp_path / "without.so", []))) == ()
    assert driver.gpus("libc.so.6") == ()  # a library without the driver's functions


def test_limits_are_the_drivers_where_there_is_one() -> None:
    odd = gpu(sm=(10, 3))
    assert limits("sm_103")[1] != ""
    found, warning = limits("sm_103a", [odd])
    assert (found.shared_per_block, found.threads_per_sm, warning) == (227 << 10, 2048, "")
    assert limits("sm_90", [odd]) == (LIMITS[9, 0], "")
    with gpus_here(odd):
        assert limits("sm_103") == limits("sm_103", [odd])


def test_the_facts_of_one_gpu_or_of_all(program: Program) -> None:
    assert len(gpu_facts()) == 2
    state = gpu_facts("GPU-1")[1]
    assert list(state) == list(FACTS)
    assert (state["name"], state["driver_version"], state["pstate"]) == (
        "NVIDIA H200",
        "595.58",
        "P0",
    )
    assert (state["clocks.sm"], state["clocks.mem"]) == ("1980 MHz", "3201 MHz")
    query = f"--query-gpu={','.join(FACTS)} --format=csv,noheader"
    assert program.asked == [query, f"{query} -i GPU-1"]


def test_processes_are_counted_and_notes_are_none(program: Program) -> None:
    assert num_processes("GPU-1") == 0
    program.computes(17, 4)
    assert num_processes("GPU-1") == 2
    assert program.asked[-1] == "--query-compute-apps=pid --format=csv,noheader -i GPU-1"
    (program.folder / "processes").write_text("No running processes found\n")
    assert num_processes("GPU-1") == 0


def test_no_driver_or_a_broken_one_is_no_gpu(
    program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (program.folder / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    assert gpu_facts() == []
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert gpu_facts() == []
    assert num_processes("GPU-1") == 0
    with gpus_here(), pytest.raises(ValueError, match="name its target, such as cuda/sm_90/nvidia"):
        native_gpu()


def test_a_gpu_of_this_machine_by_its_number() -> None:
    with gpus_here(gpu(), gpu(1, "NVIDIA L4", (8, 9))):
        assert native_gpu() == H200_TARGET
        assert target_of(find_gpu("cuda:1")) == TargetKey("cuda", "sm_89", "nvidia-l4")
        with pytest.raises(ValueError, match="device='cuda:2' is not there; allowed: cuda:0 to"):
            find_gpu("cuda:2")
        for text in ("gpu", "cuda:x", "cpu", "cuda:-1"):
            with pytest.raises(ValueError, match="is no GPU; such are cuda, cuda:0"):
                find_gpu(text)
