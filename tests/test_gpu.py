"""What the driver says of GPUs: driver, clocks, power state; nothing where there is none."""

from pathlib import Path

import pytest

from tvmpaged.gpu import FACTS, gpu_state, gpus, native_gpu
from tvmpaged.spec import TargetKey

pytestmark = pytest.mark.runtime

H200 = "NVIDIA H200, 595.58, 143771 MiB, 9.0, P0, 1980 MHz, 1980 MHz, 3201 MHz, 700.00 W, Enabled"
TARGET = TargetKey("cuda", "sm_90", "nvidia-h200")


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the driver's program, alone on the path; it prints the file ``says``."""
    tool = tmp_path / "nvidia-smi"
    (tmp_path / "says").write_text(f"NVIDIA L4{H200[11:]}\n{H200}\n")
    tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\nexec /bin/cat {tmp_path}/says\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_a_targets_gpu_is_found_by_its_name(driver: Path) -> None:
    state = gpu_state(TARGET)
    assert state is not None
    assert list(state) == list(FACTS)
    assert (state["name"], state["driver_version"], state["pstate"]) == (
        "NVIDIA H200",
        "595.58",
        "P0",
    )
    assert (state["clocks.sm"], state["clocks.mem"]) == ("1980 MHz", "3201 MHz")
    assert f"--query-gpu={','.join(FACTS)}" in (driver / "asked").read_text()
    assert len(gpus()) == 2


def test_a_cpu_has_none_and_the_driver_is_not_even_asked(driver: Path) -> None:
    assert gpu_state(TargetKey("cpu", "x86-64-v3")) is None
    assert not (driver / "asked").exists()
    assert gpu_state(TargetKey("cuda", "sm_100", "nvidia-b200")) is None


def test_no_driver_or_a_broken_one_is_no_gpu(
    driver: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (driver / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    assert gpus() == []
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert gpus() == []
    assert gpu_state(TARGET) is None
    with pytest.raises(ValueError, match="name the one to build for, such as cuda/sm_90/nvidia"):
        native_gpu()


def test_the_gpu_of_this_machine_as_a_target(driver: Path) -> None:
    (driver / "says").write_text(f"{H200}\n")
    assert native_gpu() == TARGET
