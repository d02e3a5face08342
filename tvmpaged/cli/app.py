"""The ``tvmpaged`` program: its commands by name, loaded when they are asked for.

A command is a module ``tvmpaged/cli/<name>.py`` with a function ``run`` whose annotated parameters
are its options, and a text ``EXAMPLE`` that ends its help. `COMMANDS` lists it.
"""

import importlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from tvmpaged.cli.config import ENVIRONMENT_PREFIX, load_config, nearest
from tvmpaged.cli.console import set_up_logging
from tvmpaged.cli.errors import ExitCode, report

#: Command -> its line in ``tvmpaged --help``, in the order of the work.
COMMANDS = {
    "tune": "Search the best kernels for a device, offline.",
    "measure": "Time exported candidates on a device without compiler.",
    "package": "Compile records into a bundle that needs no compiler.",
    "show": "Show what a bundle or the records hold.",
    "verify": "Check a bundle: hashes, versions, numbers.",
    "bench": "Measure kernels, or a whole engine.",
    "mlflow-sync": "Upload what an unreachable tracking server missed.",
    "generate": "Decode text with a model.",
    "env": "Print everything a bug report needs.",
}

#: Read when torch loads its OpenMP library. Idle threads of that library spin for milliseconds by
#: default; beside the kernels' own threads, or anyone else's load, each parallel region then costs
#: a scheduler's slice (measured on two cores, idle or busy: a decode step takes twice as long).
_THREAD_SETTINGS = {"GOMP_SPINCOUNT": "20000"}
#: What is used here tells nobody that it was; whoever wants it otherwise sets the variable.
_NO_TELEMETRY = {
    "DO_NOT_TRACK": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


@cache
def load_command(name: str) -> Any:
    """Import a command's module and build its parser."""
    word = name.replace("-", "_")
    module = importlib.import_module(f"tvmpaged.cli.{word}")
    elsewhere = (
        f"Options are also read from {ENVIRONMENT_PREFIX}_{word.upper()}_<OPTION> and from "
        f"[{name}] in tvmpaged.toml."
    )
    epilog = f"{elsewhere}\n\n{_example(module.EXAMPLE)}"
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name, help=module.run.__doc__, epilog=epilog)(module.run)
    command = typer.main.get_command(single)
    for parameter in command.params:
        # The epilog says it once for all.
        parameter.show_envvar = False  # type: ignore[attr-defined]
    return command


def _example(text: str) -> str:
    # The mark keeps the lines as they are written.
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in text.strip().splitlines())


class LazyGroup(TyperGroup):
    """Commands by name: help lists them without importing any."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands in the table's order."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a stand-in that carries the name and the line of help."""
        del ctx
        line = COMMANDS.get(cmd_name)
        return None if line is None else TyperCommand(cmd_name, help=line, rich_markup_mode=None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Replace the stand-in of the command that is going to run."""
        if args and args[0] not in COMMANDS:
            ctx.fail(f"no command is called {args[0]!r}{nearest(args[0], COMMANDS)}")
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else load_command(name), rest


app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    rich_markup_mode=None,
    invoke_without_command=True,
    epilog=_example("tvmpaged env\ntvmpaged tune --help"),
    context_settings={
        "auto_envvar_prefix": ENVIRONMENT_PREFIX,
        "help_option_names": ["-h", "--help"],
    },
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"tvmpaged {version('tvmpaged')}")
        raise typer.Exit


@app.callback()
def _options(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(help="Read defaults from this file instead of ./tvmpaged.toml."),
    ] = None,
    verbose: Annotated[
        int,
        typer.Option(
            "--verbose", "-v", count=True, show_default=False, help="Log more; twice: everything."
        ),
    ] = 0,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_print_version,
            allow_from_autoenv=False,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Paged attention that its users can tune.

    Options come from flags, then TVMPAGED_<COMMAND>_<OPTION>, then tvmpaged.toml (or
    [tool.tvmpaged] of pyproject.toml), then the defaults.
    """
    del version
    name = ctx.invoked_subcommand
    if name is None:
        typer.echo(ctx.get_help(), err=True)
        raise typer.Exit(ExitCode.BAD_ARGUMENTS)
    set_up_logging(verbose)
    found = load_config(config, Path.cwd())
    found.check_tables(COMMANDS)
    options = {
        parameter.name: bool(getattr(parameter, "multiple", False) or parameter.nargs != 1)
        for parameter in load_command(name).params
    }
    ctx.default_map = {name: found.defaults(name, options)}
    ctx.find_root().meta["tvmpaged.config"] = found.file


@contextmanager
def _sigterm_interrupts() -> Iterator[list[int]]:
    """Let SIGTERM unwind like Ctrl-C, so that whatever saves its work on the one does on both."""
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        del frame
        received.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments, without the program's name; by default those of the process.

    Returns
    -------
    int
        See `tvmpaged.cli.errors.ExitCode`.
    """
    for name, value in (_THREAD_SETTINGS | _NO_TELEMETRY).items():
        os.environ.setdefault(name, value)
    with _sigterm_interrupts() as received:
        try:
            args = None if argv is None else list(argv)
            result = typer.main.get_command(app).main(
                args=args, prog_name="tvmpaged", standalone_mode=False
            )
        except KeyboardInterrupt:
            result = ExitCode.INTERRUPTED
        except Exception as error:  # noqa: BLE001, the last place that can explain it
            result = report(error)
    if received:
        return ExitCode.TERMINATED
    return result if isinstance(result, int) else ExitCode.DONE
