"""The command line's rules, on a made-up command."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import pytest
import typer

import tvmpaged
from tvmpaged.cli import app, console
from tvmpaged.cli.errors import ExitCode
from tvmpaged.errors import UserError
from tvmpaged.spec import AttentionSpec

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "numpy", "tvm", "tvm_ffi", "transformers", "mlflow", "xgboost")

Run = Callable[..., tuple[int, str, str]]


def python(code: str, *, without_compiler: bool = False) -> subprocess.CompletedProcess[str]:
    path = {"PYTHONPATH": str(ROOT / "ci" / "no_tvm")} if without_compiler else {}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | path,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def run(install_command: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `tvmpaged tune`, which prints its trials and folders."""

    def tune(
        trials: Annotated[int, typer.Option(help="How many.")] = 64,
        work_dir: Annotated[list[str] | None, typer.Option()] = None,
        dry_run: Annotated[bool, typer.Option("--dry-run")] = False,
    ) -> None:
        """Search."""
        print(trials, *(work_dir or ()), *(["dry"] if dry_run else []))

    install_command(tune)

    def call(*argv: str) -> tuple[int, str, str]:
        code = app.main(argv)
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = f"import tvmpaged, sys; print([m for m in {HEAVY} if m in sys.modules])"
    assert python(code).stdout.strip() == "[]"


def test_public_names_are_listed_and_loaded_when_used() -> None:
    assert set(tvmpaged.__all__) <= set(dir(tvmpaged))
    assert tvmpaged.AttentionSpec is AttentionSpec
    assert tvmpaged.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="no attribute 'PagedAtention'"):
        _ = tvmpaged.PagedAtention


@pytest.mark.parametrize("name", tvmpaged.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(tvmpaged, name) is not None


def test_help_lists_the_commands_without_importing_them() -> None:
    code = (
        "import sys; from tvmpaged.cli.app import main; code = main(['--help'])\n"
        f"print(code, [m for m in ({HEAVY} + ('tvmpaged.cli.env',)) if m in sys.modules])"
    )
    lines = python(code).stdout.splitlines()
    assert lines[-1] == "0 []"
    listed = [line.split()[0] for line in lines if line.startswith("  ") and line.split()]
    assert [name for name in listed if name in app.COMMANDS] == list(app.COMMANDS)


@pytest.mark.parametrize("name", app.COMMANDS)
def test_each_commands_help_ends_with_an_example_and_needs_no_extra(name: str) -> None:
    code = (
        f"import sys; from tvmpaged.cli.app import main; code = main(['{name}', '--help'])\n"
        f"print(code, [m for m in {HEAVY} if sys.modules.get(m)])"
    )
    done = python(code, without_compiler=True)
    lines = done.stdout.splitlines()
    assert lines[-1] == "0 []", done.stderr
    example = lines.index("  Example:")
    assert lines[example + 1].split()[:2] in (["tvmpaged", name], ["$", "tvmpaged"])


@pytest.mark.parametrize("name", app.COMMANDS)
def test_options_are_named_like_their_parameters(name: str) -> None:
    # Else TVMPAGED_<COMMAND>_<OPTION> and the configuration file would spell them differently.
    for parameter in app.load_command(name).params:
        if parameter.param_type_name == "option":
            assert f"--{parameter.name.replace('_', '-')}" in parameter.opts, parameter.opts


def test_precedence_is_flag_environment_file_default(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("tune")[1] == "64\n"
    Path("pyproject.toml").write_text("[tool.tvmpaged.tune]\ntrials = 1\n")
    assert run("tune")[1] == "1\n"
    Path("tvmpaged.toml").write_text("[tune]\ntrials = 2\n")
    assert run("tune")[1] == "2\n"
    monkeypatch.setenv("TVMPAGED_TUNE_TRIALS", "3")
    assert run("tune")[1] == "3\n"
    assert run("tune", "--trials", "4")[1] == "4\n"


def test_the_file_takes_both_spellings_lists_and_flags(run: Run) -> None:
    Path("tvmpaged.toml").write_text("[tune]\nwork-dir = ['a', 'b']\ndry_run = true\n")
    assert run("tune")[1] == "64 a b dry\n"
    Path("tvmpaged.toml").write_text("[tune]\nwork_dir = 'c'\n")
    assert run("tune")[1] == "64 c\n"
    Path("other.toml").write_text("[tune]\ntrials = 9\n")
    assert run("--config", "other.toml", "tune")[1] == "9\n"


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("[tune]\ntrails = 3", 1, "tvmpaged.toml: [tune] has no option 'trails'; did you mean"),
        ("[tun]\ntrials = 3", 1, "tvmpaged.toml: no command is called [tun]; did you mean 'tune'"),
        ("trials = 3", 1, "no command is called [trials]"),
        ("tune = 3", 1, "must be a table, [tune]"),
        ("[tune]\ntrials = [3]", 1, "[tune] trials = [3] must be one value"),
        ("[tune", 1, "tvmpaged.toml is no valid TOML"),
        ("[tune]\ntrials = 'x'", 2, "tvmpaged.toml, table [tune])"),
    ],
)
def test_a_fault_in_the_file_is_named(run: Run, text: str, code: int, said: str) -> None:
    Path("tvmpaged.toml").write_text(text + "\n")
    result, out, err = run("tune")
    assert (result, out) == (code, "")
    assert said in err
    assert "Traceback" not in err


def test_bad_arguments_exit_2_and_say_where_they_came_from(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run()[0] == 2
    code, _, err = run("tun")
    assert (code, err.splitlines()[0]) == (
        2,
        "error: no command is called 'tun'; did you mean 'tune'?",
    )
    assert run("tune", "--nope")[0] == 2
    monkeypatch.setenv("TVMPAGED_TUNE_TRIALS", "many")
    code, _, err = run("tune")
    assert code == 2
    assert "environment variable TVMPAGED_TUNE_TRIALS" in err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("do this"), 1, "error: do this\n"),
        (FileNotFoundError("no bundle"), 1, "error: no bundle\n"),
        (ValueError("trials=0"), 2, "error: trials=0\n"),
        (TypeError("trials='a'"), 2, "error: trials='a'\n"),
        (ModuleNotFoundError("", name="tvm.target"), 1, "pip install 'tvmpaged[tune]'"),
        (ModuleNotFoundError("", name="transformers"), 1, "pip install 'tvmpaged[hf]'"),
        (KeyboardInterrupt(), 130, ""),
        (typer.Exit(3), 3, ""),
    ],
)
def test_what_the_user_can_put_right_is_one_message(
    install_command: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    said: str,
) -> None:
    def fail() -> None:
        raise error

    install_command(fail)
    assert app.main(["tune"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "Traceback" not in err
    if said:
        monkeypatch.setenv("TVMPAGED_DEBUG", "1")
        assert app.main(["tune"]) == code
        assert "Traceback" in capsys.readouterr().err


def test_a_fault_of_the_program_keeps_its_traceback(
    install_command: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    install_command(fail)
    assert app.main(["tune"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("error: unexpected RuntimeError: a bug\n")


def test_a_command_returns_its_exit_code(install_command: Callable[..., None]) -> None:
    install_command(lambda: ExitCode.PARTLY_FAILED)
    assert app.main(["tune"]) == 3
    install_command(lambda: None)
    assert app.main(["tune"]) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_unwind_and_set_the_exit_code(number: int, code: int) -> None:
    script = """
import sys, time, types
from tvmpaged.cli import app
module = types.ModuleType("tvmpaged.cli.tune")
def run():
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("saved", flush=True)
module.run, module.EXAMPLE = run, "x"
sys.modules["tvmpaged.cli.tune"] = module
sys.exit(app.main(["tune"]))
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (code, "saved\n", "")


def test_progress_is_plain_lines_on_stderr_without_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with console.progress("compile", 3) as advance:
        for done in (1, 2, 3):
            advance(done, f"[spec {done}]")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["compile 1/3 [spec 1]", "compile 3/3 [spec 3]"]
