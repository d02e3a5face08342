"""Nothing that is run here tells anybody that it was run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: What decides whether MLflow's and Hugging Face's libraries report.
MLFLOW = """
from mlflow.telemetry import get_telemetry_client, set_telemetry_client
set_telemetry_client()
print(get_telemetry_client())
"""
HUB = "from huggingface_hub import constants; print(constants.HF_HUB_DISABLE_TELEMETRY)"
#: A service sets these, and MLflow is silent there whatever else is set.
ELSEWHERE = ("CI", "GITHUB_ACTIONS", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER")


def plain_environment() -> dict[str, str]:
    quiet = ("DO_NOT_TRACK", "HF_HUB_DISABLE_TELEMETRY", "MLFLOW_DISABLE_TELEMETRY", *ELSEWHERE)
    return {name: value for name, value in os.environ.items() if name not in quiet}


def answer(*command: str) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env=plain_environment(), capture_output=True, text=True, check=True
    )
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("script", sorted((ROOT / "ci").glob("*.sh")), ids=lambda each: each.name)
def test_each_script_that_runs_programs_turns_it_off(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    # Those two run pip and mypy alone.
    if "python" in text and script.name not in ("setup.sh", "typecheck.sh"):
        assert "telemetry.sh" in text


@pytest.mark.parametrize(("code", "said"), [(MLFLOW, "None"), (HUB, "True")], ids=["mlflow", "hub"])
def test_the_libraries_are_silent_in_our_scripts(code: str, said: str) -> None:
    script = f'. ci/telemetry.sh; exec "{sys.executable}" -c "$0"'
    assert answer("bash", "-c", script, code) == said


@pytest.mark.parametrize(("code", "said"), [(MLFLOW, "None"), (HUB, "True")], ids=["mlflow", "hub"])
def test_the_libraries_are_silent_in_our_program(code: str, said: str) -> None:
    program = f"from tvmpaged.cli import app\nassert app.main(['env', '--help']) == 0\n{code}"
    assert answer(sys.executable, "-c", program) == said
