"""``manifest.json``: its bytes, written and read.

Reading is strict, because a manifest decides which code is run: an unknown or missing field, a
wrong type, a duplicate key or a file name that is no plain name is an error, never a guess.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from tvmpaged.bundle.errors import BundleError
from tvmpaged.bundle.manifest import KINDS, SCHEMA_VERSION, Abi, Artifact, BuiltWith, Git, Manifest
from tvmpaged.spec import AttentionSpec, TargetKey

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")

_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*\.so", re.ASCII)
_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REQUIRED = object()


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of ``manifest.json``."""
    data: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "target": str(manifest.target),
        "abi": vars(manifest.abi),
        "cpu_features": list(manifest.cpu_features),
        "sm_arch": manifest.sm_arch,
        "built_with": vars(manifest.built_with),
        "git": vars(manifest.git),
        "created_at": manifest.created_at,
        "artifacts": [artifact_data(each) for each in manifest.artifacts],
    }
    return (json.dumps(data, indent=2, allow_nan=False) + "\n").encode()


def artifact_data(artifact: Artifact) -> dict[str, Any]:
    """Return the artifact as the manifest holds it, plain data."""
    data = {each.name: getattr(artifact, each.name) for each in fields(artifact)}
    data |= {name: dict(vars(data[name])) for name in ("built_with", "git")}
    return {"spec": str(data.pop("spec")), "kernel": artifact.kernel, **data}


def decode(data: bytes) -> Manifest:
    """Read `encode`'s bytes.

    Raises
    ------
    BundleError
        Naming the field, its value and what is allowed.
    """
    top = _Fields(_load(data), "manifest")
    version = top.take("schema_version", int)
    if version != SCHEMA_VERSION:
        advice = (
            "is newer than this tvmpaged reads: upgrade tvmpaged"
            if version > SCHEMA_VERSION
            else "is no longer read: package it again"
        )
        raise BundleError(f"schema version {version} {advice} (it reads {SCHEMA_VERSION})")
    manifest = Manifest(
        target=_parsed(TargetKey.parse, top.take("target", str), "target"),
        abi=_read_abi(top.fields("abi")),
        cpu_features=tuple(top.take_list("cpu_features", str)),
        sm_arch=top.take("sm_arch", str, None),
        built_with=_read_built_with(top.fields("built_with")),
        git=_read_git(top.fields("git")),
        created_at=top.take("created_at", str),
        artifacts=tuple(
            _read_artifact(_Fields(each, f"artifacts[{index}]"))
            for index, each in enumerate(top.take_list("artifacts", dict))
        ),
    )
    top.end()
    for name in ("spec", "file"):
        values = [str(getattr(each, name)) for each in manifest.artifacts]
        if len(set(values)) < len(values):
            twice = next(value for value in values if values.count(value) > 1)
            raise BundleError(f"manifest lists the {name} {twice!r} twice")
    return manifest


class _Fields:
    """One JSON object, whose fields are taken one by one until none is left."""

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self._data = dict(data)
        self.where = where

    def take(self, name: str, kind: type | tuple[type, ...], default: object = _REQUIRED) -> Any:
        """Return the field; null only where the default is None."""
        if name not in self._data:
            raise BundleError(f"{self.where}.{name} is missing")
        value = self._data.pop(name)
        if value is None and default is None:
            return None
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(each.__name__ for each in kinds)
            raise BundleError(f"{self.where}.{name}={value!r} must be of type {wanted}")
        return value

    def take_list(self, name: str, kind: type) -> list[Any]:
        values: list[Any] = self.take(name, list)
        for value in values:
            if not isinstance(value, kind):
                raise BundleError(f"{self.where}.{name} holds {value!r}, not a {kind.__name__}")
        return values

    def match(self, name: str, pattern: re.Pattern[str], wanted: str) -> str:
        value: str = self.take(name, str)
        if pattern.fullmatch(value) is None:
            raise BundleError(f"{self.where}.{name}={value!r} must be {wanted}")
        return value

    def fields(self, name: str) -> _Fields:
        return _Fields(self.take(name, dict), f"{self.where}.{name}")

    def end(self) -> None:
        if self._data:
            raise BundleError(f"{self.where} holds unknown fields: {', '.join(sorted(self._data))}")


def _parsed(parse: Callable[[str], _T], text: str, where: str) -> _T:
    try:
        return parse(text)
    except (TypeError, ValueError) as error:
        raise BundleError(f"{where}: {error}") from error


def _read_artifact(entry: _Fields) -> Artifact:
    spec = _parsed(AttentionSpec.parse, entry.take("spec", str), f"{entry.where}.spec")
    if (kernel := entry.take("kernel", str)) != spec.kernel:
        raise BundleError(f"{entry.where}.kernel={kernel!r} is not its spec's, {spec.kernel!r}")
    kind = entry.take("kind", str)
    if kind not in KINDS:
        raise BundleError(f"{entry.where}.kind={kind!r}; allowed: {', '.join(KINDS)}")
    if kind == "generic" and not spec.is_generic:
        raise BundleError(f'{entry.where}.kind="generic", but its spec {spec} fixes all sizes')
    artifact = Artifact(
        spec=spec,
        file=entry.match("file", _FILE, "a plain name that ends in .so, without folders"),
        sha256=entry.match("sha256", _SHA256, "64 hexadecimal digits"),
        symbol=entry.match("symbol", _SYMBOL, "a C identifier"),
        kind=kind,
        choices=_read_choices(entry),
        source_sha256=entry.match("source_sha256", _SHA256, "64 hexadecimal digits"),
        built_with=_read_built_with(entry.fields("built_with")),
        git=_read_git(entry.fields("git")),
        created_at=entry.take("created_at", str),
        record_id=entry.take("record_id", str, None),
        mlflow_run_id=entry.take("mlflow_run_id", str, None),
        measured_us=entry.take("measured_us", (int, float), None),
        measured_on=entry.take("measured_on", str, None),
        num_threads=entry.take("num_threads", int, None),
    )
    entry.end()
    return artifact


def _read_choices(entry: _Fields) -> dict[str, int | str]:
    choices: dict[str, int | str] = entry.take("choices", dict)
    for name, value in choices.items():
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise BundleError(f"{entry.where}.choices.{name}={value!r} must be an int or a str")
    return choices


def _read_git(entry: _Fields) -> Git:
    git = Git(entry.take("commit", str, None), entry.take("dirty", bool, None))
    entry.end()
    return git


def _read_abi(entry: _Fields) -> Abi:
    abi = Abi(
        entry.take("kernels", int), entry.take("tvm_ffi", str), entry.take("tvm_runtime", str)
    )
    entry.end()
    for text in (abi.tvm_ffi, f"=={abi.tvm_runtime}.*"):
        try:
            SpecifierSet(text)
        except InvalidSpecifier as error:
            raise BundleError(f"{entry.where} holds {text!r}, no version range") from error
    return abi


def _read_built_with(entry: _Fields) -> BuiltWith:
    built_with = BuiltWith(
        tvmpaged=entry.take("tvmpaged", str),
        tvm=entry.take("tvm", str),
        tvm_ffi=entry.take("tvm_ffi", str),
        linker=entry.take("linker", str),
        toolkit=entry.take("toolkit", str, None),
    )
    entry.end()
    return built_with


def _load(data: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise BundleError("manifest holds a key twice")
        return found

    def refuse(constant: str) -> None:
        raise BundleError(f"manifest holds {constant}, which is no JSON")

    try:
        loaded = json.loads(data, object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"manifest is no JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise BundleError(f"manifest is a {type(loaded).__name__}, not an object")
    return loaded
