"""``manifest.json``: its bytes, written and read."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from tvmpaged.bundle.errors import BundleError
from tvmpaged.bundle.fields import Fields, load_object, parsed
from tvmpaged.bundle.manifest import KINDS, SCHEMA_VERSION, Abi, Artifact, BuiltWith, Git, Manifest
from tvmpaged.sm import Resources
from tvmpaged.spec import AttentionSpec, TargetKey

_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


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
    parts = ("built_with", "git", "resources")
    data |= {name: dict(vars(data[name])) for name in parts if data[name] is not None}
    return {"spec": str(data.pop("spec")), "kernel": artifact.kernel, **data}


def decode(data: bytes) -> Manifest:
    """Read `encode`'s bytes.

    Raises
    ------
    BundleError
        Naming the field, its value and what is allowed.
    """
    top = Fields(load_object(data), "manifest")
    version = top.take("schema_version", int)
    if version != SCHEMA_VERSION:
        advice = (
            "is newer than this tvmpaged reads: upgrade tvmpaged"
            if version > SCHEMA_VERSION
            else "is no longer read: package it again"
        )
        raise BundleError(f"schema version {version} {advice} (it reads {SCHEMA_VERSION})")
    manifest = Manifest(
        target=parsed(TargetKey.parse, top.take("target", str), "target"),
        abi=_read_abi(top.fields("abi")),
        cpu_features=tuple(top.take_list("cpu_features", str)),
        sm_arch=top.take("sm_arch", str, None),
        built_with=_read_built_with(top.fields("built_with")),
        git=_read_git(top.fields("git")),
        created_at=top.take("created_at", str),
        artifacts=tuple(
            _read_artifact(Fields(each, f"artifacts[{index}]"))
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


def _read_artifact(entry: Fields) -> Artifact:
    spec = parsed(AttentionSpec.parse, entry.take("spec", str), f"{entry.where}.spec")
    if (kernel := entry.take("kernel", str)) != spec.kernel:
        raise BundleError(f"{entry.where}.kernel={kernel!r} is not its spec's, {spec.kernel!r}")
    kind = entry.take("kind", str)
    if kind not in KINDS:
        raise BundleError(f"{entry.where}.kind={kind!r}; allowed: {', '.join(KINDS)}")
    if kind == "generic" and not spec.is_generic:
        raise BundleError(f'{entry.where}.kind="generic", but its spec {spec} fixes all sizes')
    artifact = Artifact(
        spec=spec,
        file=entry.file(),
        sha256=entry.sha256(),
        symbol=entry.match("symbol", _SYMBOL, "a C identifier"),
        kind=kind,
        choices=entry.choices(),
        source_sha256=entry.sha256("source_sha256"),
        built_with=_read_built_with(entry.fields("built_with")),
        git=_read_git(entry.fields("git")),
        created_at=entry.take("created_at", str),
        record_id=entry.take("record_id", str, None),
        mlflow_run_id=entry.take("mlflow_run_id", str, None),
        measured_us=entry.take("measured_us", (int, float), None),
        measured_on=entry.take("measured_on", str, None),
        num_threads=entry.take("num_threads", int, None),
        resources=_read_resources(entry),
    )
    entry.end()
    return artifact


def _read_resources(entry: Fields) -> Resources | None:
    data = entry.take("resources", dict, None)
    if data is None:
        return None
    taken = Fields(data, f"{entry.where}.resources")
    resources = Resources(*(taken.take(each.name, int) for each in fields(Resources)))
    taken.end()
    return resources


def _read_git(entry: Fields) -> Git:
    git = Git(entry.take("commit", str, None), entry.take("dirty", bool, None))
    entry.end()
    return git


def _read_abi(entry: Fields) -> Abi:
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


def _read_built_with(entry: Fields) -> BuiltWith:
    built_with = BuiltWith(
        tvmpaged=entry.take("tvmpaged", str),
        tvm=entry.take("tvm", str),
        tvm_ffi=entry.take("tvm_ffi", str),
        linker=entry.take("linker", str),
        toolkit=entry.take("toolkit", str, None),
    )
    entry.end()
    return built_with
