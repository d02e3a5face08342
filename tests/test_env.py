"""`tvmpaged env`, and where TVM's runtime libraries are found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tvmpaged
from tvmpaged import env, tvm_libs
from tvmpaged.cli import app

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.runtime


def test_env_is_json_alone_and_cuts_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TVMPAGED_TUNE_MLFLOW_URI", "https://me:pw@host/x?a=1&token=t")
    monkeypatch.setenv("TVMPAGED_API_KEY", "k")
    monkeypatch.setenv("UNRELATED", "x")
    assert app.main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema_version"] == env.SCHEMA_VERSION
    assert report["packages"]["tvmpaged"] == tvmpaged.__version__
    assert report["environment"]["TVMPAGED_TUNE_MLFLOW_URI"] == "https://***@host/x?a=***&token=***"
    assert report["environment"]["TVMPAGED_API_KEY"] == "***"
    assert "UNRELATED" not in report["environment"]
    assert report["libraries"][tvm_libs.RUNTIME] == str(tvm_libs.find())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:hunter2@host:5000", "http://***@host:5000"),
        ("https://hunter2@host/x?token=hunter2&a=1", "https://***@host/x?token=***&a=***"),
        # What nobody escaped: an @ and a slash in the password.
        ("http://me:hun@ter2@host", "http://***@host"),
        ("http://me:hunt/er2@host/path", "http://***@host/path"),
        ("postgresql+psycopg2://me:hunter2@db/runs", "postgresql+psycopg2://***@db/runs"),
        (
            "API request to http://me:hunter2@host/api failed: HTTPConnectionPool(host='host')",
            "API request to http://***@host/api failed: HTTPConnectionPool(host='host')",
        ),
        ("'http://a:hunter2@one', 'http://b:hunter2@two'", "'http://***@one', 'http://***@two'"),
        ("sqlite:///mlflow.db", "sqlite:///mlflow.db"),
    ],
)
def test_logins_are_cut_from_any_text(text: str, shown: str) -> None:
    assert env.hide_secrets("", text) == shown


def test_env_prints_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["env"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.splitlines()[0] == "what\tvalue"


def test_env_imports_nothing_heavy_and_needs_no_compiler() -> None:
    code = (
        "import sys; from tvmpaged.cli.app import main; code = main(['env'])\n"
        "heavy = ('torch', 'numpy', 'tvm', 'tvm_ffi', 'transformers')\n"
        "print(code, [name for name in heavy if sys.modules.get(name)])"
    )
    variables = os.environ | {"PYTHONPATH": str(ROOT / "ci" / "no_tvm")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 []"


def test_a_missing_runtime_library_is_named_with_its_places(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tvm_libs, "candidates", lambda name: [tmp_path / name])
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        tvm_libs.find()
