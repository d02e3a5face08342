"""Exit codes, and what a failure looks like to the person at the terminal."""

import os
import sys
import traceback
from enum import IntEnum

import typer

from tvmpaged.errors import UserError, missing_extra

#: Base class of everything the argument parser raises; typer names only this child of it.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class ExitCode(IntEnum):
    """What a command returns; ``None`` means `DONE`."""

    DONE = 0
    FAILED = 1
    BAD_ARGUMENTS = 2
    PARTLY_FAILED = 3
    INTERRUPTED = 130
    TERMINATED = 143


def exit_code(failed: int, total: int) -> ExitCode:
    """Return how a command ends when so many of several things failed."""
    if not failed:
        return ExitCode.DONE
    return ExitCode.FAILED if failed == total else ExitCode.PARTLY_FAILED


def report(error: Exception) -> ExitCode:
    """Print `error` to stderr the way a user wants it, and return the exit code.

    What the user can put right is one message. Anything else is a fault of the program and keeps
    its traceback; ``TVMPAGED_DEBUG=1`` shows it always.
    """
    code, message = _explain(error)
    if message is None or os.environ.get("TVMPAGED_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)
    print(f"error: {message or f'unexpected {type(error).__name__}: {error}'}", file=sys.stderr)
    return code


def _explain(error: Exception) -> tuple[ExitCode, str | None]:
    if isinstance(error, UsageError):
        return ExitCode.BAD_ARGUMENTS, _usage(error)
    if isinstance(error, typer.Abort):
        return ExitCode.FAILED, "aborted"
    if isinstance(error, ImportError):
        return ExitCode.FAILED, missing_extra(error)
    if isinstance(error, (ValueError, TypeError)):
        # By contract these name an argument, its value and what is allowed.
        return ExitCode.BAD_ARGUMENTS, str(error)
    if isinstance(error, (UserError, OSError)):
        return ExitCode.FAILED, str(error)
    return ExitCode.FAILED, None


def _usage(error: Exception) -> str:
    """Return the parser's message, where a bad value came from, and where help is."""
    message = str(getattr(error, "format_message", error.__str__)())
    context: typer.Context | None = getattr(error, "ctx", None)
    if context is None:
        return message
    parameter = getattr(error, "param", None)
    source = context.get_parameter_source(parameter.name) if parameter is not None else None
    if source is not None and source.name == "DEFAULT_MAP":
        config = context.find_root().meta.get("tvmpaged.config", "the configuration file")
        message += f" (from {config}, table [{context.info_name}])"
    elif source is not None and source.name == "ENVIRONMENT" and parameter is not None:
        variable = parameter.envvar or f"{context.auto_envvar_prefix}_{parameter.name.upper()}"
        message += f" (from the environment variable {variable})"
    return f"{message}\nTry '{context.command_path} --help'."
