"""The flags that say which specs a command works on, the same for every command.

A command takes them as one parameter::

    @takes_specs
    def run(specs: SpecFlags, trials: Annotated[int, typer.Option()] = 64) -> ExitCode:
        for spec in specs.required():
            ...
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from tvmpaged.spec import AttentionSpec
from tvmpaged.specs_from import SpecRequest, Wanted, add, matrix_specs

Result = TypeVar("Result")

_PANEL = "Specs"


def _flag(text: str, metavar: str) -> Any:
    return typer.Option(help=text, metavar=metavar, rich_help_panel=_PANEL)


@dataclass(frozen=True)
class SpecFlags:
    """The values of the spec flags; fields are the flags' names."""

    model: Annotated[
        list[str] | None, _flag("Take heads, head_dim and dtype from this model.", "PATH|ID")
    ] = None
    num_qo_heads: Annotated[list[int] | None, _flag("Query heads.", "N")] = None
    num_kv_heads: Annotated[
        list[int] | None, _flag("KV heads, one for each --num-qo-heads.", "N")
    ] = None
    group_size: Annotated[
        list[int] | None, _flag("Query heads per kv head, instead of both.", "N")
    ] = None
    head_dim: Annotated[list[int] | None, _flag("Size of a head.", "N")] = None
    block_size: Annotated[
        list[int] | None, _flag("Tokens per block of the KV cache [16].", "N")
    ] = None
    dtype: Annotated[
        list[str] | None,
        _flag("float32, float16 or bfloat16 [the model's, else bfloat16].", "DTYPE"),
    ] = None
    layout: Annotated[list[str] | None, _flag("HND, NHD or native [HND].", "LAYOUT")] = None
    kernel: Annotated[
        list[str] | None, _flag("decode, prefill or both with a comma [both].", "KERNEL")
    ] = None
    spec: Annotated[list[str] | None, _flag("A whole spec, as printed by `show`.", "SPEC")] = None
    matrix: Annotated[
        list[Path] | None, _flag("TOML file with tables [[specs]] of these names.", "FILE")
    ] = None

    def wanted(self) -> Wanted:
        """Return the specs that were asked for, each once; empty when no flag was given.

        Raises
        ------
        ValueError
            Naming the flag that is missing, contradicts another or is not supported.
        """
        request = SpecRequest(
            spec=tuple(self.spec or ()),
            model=tuple(self.model or ()),
            num_qo_heads=tuple(self.num_qo_heads or ()),
            num_kv_heads=tuple(self.num_kv_heads or ()),
            group_size=tuple(self.group_size or ()),
            head_dim=tuple(self.head_dim or ()),
            block_size=tuple(self.block_size or ()),
            dtype=tuple(self.dtype or ()),
            layout=tuple(self.layout or ()),
            kernel=tuple(_split(self.kernel or ())),
        )
        found: Wanted = {}
        for file in self.matrix or ():
            add(found, matrix_specs(file).items())
        if request != SpecRequest():
            add(found, request.specs().items())
        return found

    def specs(self) -> list[AttentionSpec]:
        """Return them without their heads; raises as `wanted`."""
        return list(self.wanted())

    def required(self) -> list[AttentionSpec]:
        """Return the specs, at least one.

        Raises
        ------
        ValueError
            When no flag was given.
        """
        found = self.specs()
        if not found:
            raise ValueError(
                "no spec is given; for example: --model PATH, or --num-qo-heads 9 "
                "--num-kv-heads 3 --head-dim 64 --block-size 16, or --matrix FILE.toml"
            )
        return found


def kv_heads(flags: SpecFlags) -> dict[AttentionSpec, int]:
    """Return the K/V heads of the specs that the flags name with heads."""
    return {spec: heads for spec, heads in flags.wanted().items() if heads is not None}


def _split(values: Iterable[str]) -> list[str]:
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def takes_specs(command: Callable[..., Result]) -> Callable[..., Result]:
    """Give `command` the spec flags: its parameter ``specs`` becomes one flag per field."""
    names = [field.name for field in fields(SpecFlags)]

    @wraps(command)
    def with_flags(**values: Any) -> Result:
        flags = SpecFlags(**{name: values.pop(name) for name in names})
        return command(specs=flags, **values)

    hints = {
        **get_type_hints(command, include_extras=True),
        **get_type_hints(SpecFlags, include_extras=True),
    }
    del hints["specs"]
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "specs"]
    flags = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in names]
    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *flags)]
    parameters = [p.replace(annotation=hints[p.name]) for p in keyword]
    # What the parser reads instead of the wrapper's own **values.
    with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_flags.__annotations__ = hints
    return with_flags
