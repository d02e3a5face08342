"""Temporary folders: gone with their command, and those of killed ones with the next."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tvmpaged.tuning.scratch import scratch_folder

HOLD = """
import sys
from tvmpaged.tuning.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "candidate.so").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_the_folder_of_a_killed_command_goes_with_the_next_and_a_live_ones_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stranger = tmp_path / "tvmpaged-scratch-link"
    stranger.symlink_to(Path(__file__).parent)
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert child.stdout is not None
    held = Path(child.stdout.readline().strip())
    assert held.parent == tmp_path
    try:
        os.utime(held, (0, 0))
        with scratch_folder() as mine:
            assert mine.is_dir()
            assert (held / "candidate.so").exists()
        assert not mine.exists()
    finally:
        child.kill()
        child.communicate()
    os.utime(held)
    with scratch_folder():
        assert held.exists()  # it might have been made just now
    os.utime(held, (0, 0))
    with scratch_folder():
        assert not held.exists()
    assert stranger.is_symlink()
    assert Path(__file__).exists()


def test_the_tuner_uses_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tvmpaged.tuning.machine import open_machine

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with open_machine(measures=False) as machine:
        assert machine.folder.name.startswith("tvmpaged-scratch-")
