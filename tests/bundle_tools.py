"""Real bundles for the tests: tiny shared libraries, built by gcc, behind a real manifest."""

import ctypes
import os
import signal
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from tvmpaged.bundle import Abi, Artifact, Built, BuiltWith, Git, Host, Manifest, encode, write
from tvmpaged.bundle.trust import sha256
from tvmpaged.cpu import MICROARCHITECTURES
from tvmpaged.spec import AttentionSpec, TargetKey

V3 = TargetKey("cpu", "x86-64-v3")
V4 = TargetKey("cpu", "x86-64-v4")
SAPPHIRE = TargetKey("cpu", "sapphirerapids")
SPEC = AttentionSpec.make("decode", "float32", head_dim=64, group_size=3, block_size=16)
OTHER_SPEC = AttentionSpec.make("prefill", "float32", head_dim=64, group_size=3, block_size=16)
BUILT_WITH = BuiltWith(tvmpaged="0.1", tvm="0.27.0.post1", tvm_ffi="0.1.14.post1", linker="gcc 12")
GIT = Git(commit="0" * 40, dirty=False)
TIME = "2026-01-01T00:00:00+00:00"


@cache
def library(answer: int, folder: Path) -> bytes:
    """Return a shared library whose function ``answer`` returns this number; compiles in folder."""
    source, file = folder / f"{answer}.c", folder / f"{answer}.so"
    source.write_text(f"int answer(void) {{ return {answer}; }}\n")
    command = ["gcc", "-shared", "-fPIC", "-nostdlib", "-o", str(file), str(source)]
    subprocess.run(command, check=True)
    return file.read_bytes()


def call(path: Path) -> int:
    """Load a library and return its answer."""
    return int(ctypes.CDLL(str(path)).answer())


def header(target: TargetKey = V3) -> Manifest:
    cpu = target.kind == "cpu"
    return Manifest(
        target=target,
        abi=Abi(),
        cpu_features=tuple(sorted(MICROARCHITECTURES.get(target.arch, ()))) if cpu else (),
        sm_arch=None if cpu else target.arch,
        built_with=BUILT_WITH,
        git=GIT,
        created_at=TIME,
    )


def artifact(spec: AttentionSpec = SPEC, kind: str = "default", **changes: object) -> Artifact:
    plain = Artifact(
        spec=spec,
        file=f"{spec}.so",
        sha256="0" * 64,
        symbol="answer",
        kind=kind,
        choices={"split_length": 512, "isa": "avx2"},
        source_sha256="1" * 64,
        built_with=BUILT_WITH,
        git=GIT,
        created_at=TIME,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def manifest(target: TargetKey, *artifacts: Artifact, **changes: object) -> Manifest:
    found = replace(header(target), **changes)  # type: ignore[arg-type]
    return found.with_artifacts(list(artifacts))


def host(target: TargetKey = V3, **changes: object) -> Host:
    flags = MICROARCHITECTURES[target.arch if target.kind == "cpu" else "x86-64-v3"]
    plain = Host(target, flags, "0.1.14.post1", "0.27.0.post1")
    return replace(plain, **changes)  # type: ignore[arg-type]


def put(bundle: Path, data: bytes, *artifacts: Artifact, target: TargetKey = V3) -> Path:
    """Write a bundle and return its target folder."""
    write(header(target), [Built(each, data) for each in artifacts], bundle)
    return bundle / str(target)


def put_raw(folder: Path, data: bytes, name: str, found: Manifest | None = None) -> None:
    """Write a folder as an attacker would: any name, any manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    entry = artifact(file=name, sha256=sha256(data))
    raw = encode((found or header()).with_artifacts([entry]))
    (folder / "manifest.json").write_bytes(raw)


def build_with_gcc(
    spec: AttentionSpec, target: TargetKey, choices: dict[str, Any], path: Path
) -> None:
    """Compile in place of TVM: quick, and fails as a spec's block size says."""
    if spec.block_size == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    if spec.block_size == 14:
        raise ValueError("choices cannot be built: no")
    path.write_bytes(library(spec.block_size + 100, path.parent))


def key_pair(stem: Path) -> tuple[Path, Path]:
    """Write a new Ed25519 key pair and return the private and the public file."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private, public = stem.with_suffix(".key.pem"), stem.with_suffix(".pem")
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return private, public
