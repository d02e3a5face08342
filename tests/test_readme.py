"""What the README shows runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

from tvmpaged.cli.app import COMMANDS

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_python_of_the_readme_runs(base_bundle: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    program = "\n".join(blocks).replace("bundles/", str(base_bundle))
    program += "\nassert out.isfinite().all() and out.shape == (6, 32, 128)\n"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()


def test_every_command_of_the_readme_exists() -> None:
    named = re.findall(r"^tvmpaged ([\w-]+)", README, re.MULTILINE)
    assert named
    assert set(named) <= set(COMMANDS)
