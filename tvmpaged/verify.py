"""What ``tvmpaged verify`` checks: a bundle's files, and the numbers its artifacts give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmpaged.bundle import (
    Artifact,
    BundleError,
    Folder,
    host_for,
    load_public_key,
    prefer,
    read_artifact,
    resolve,
    scan,
)
from tvmpaged.cpu import native_target
from tvmpaged.spec import ATTENTION_KERNELS

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    from tvmpaged.bundle import Host
    from tvmpaged.spec import TargetKey

SCHEMA_VERSION = 1

#: Makes a `tvmpaged.runtime.PagedAttention`; passed in, because serving stands above this layer.
MakeAttention = Callable[..., Any]


@dataclass(frozen=True)
class Check:
    """One thing that was checked.

    Parameters
    ----------
    what : str
        A folder, a file or a spec.
    name : str
        The check: ``files``, ``hash``, ``signature``, ``runs here``, ``numbers``, ``relations``.
    outcome : str
        ``ok``, ``failed`` or ``not run``.
    detail : str
        Why it failed or was not run; a measured value.
    """

    what: str
    name: str
    outcome: str
    detail: str = ""


def verify(
    bundle: Path,
    *,
    make_attention: MakeAttention | None = None,
    require_signature: Path | None = None,
    target: TargetKey | None = None,
) -> list[Check]:
    """Check a bundle: everything that can be without loading it, then (if asked) its numbers.

    Parameters
    ----------
    bundle : Path
        Its top folder.
    make_attention : callable, optional
        `PagedAttention`: also load each artifact and compare its numbers with the reference.
    require_signature : Path, optional
        PEM file of the Ed25519 public key that must have signed the manifests.
    target : TargetKey, optional
        The device that `make_attention` computes on; by default this machine's CPU.

    Raises
    ------
    FileNotFoundError
        When there is no such bundle.
    BundleError
        When the key cannot be read.
    """
    if not bundle.is_dir():
        raise FileNotFoundError(f"bundle={str(bundle)!r} is no folder")
    key = load_public_key(require_signature) if require_signature is not None else None
    host = host_for(target or native_target())
    checks = list(_strangers(bundle))
    for folder in scan(bundle, public_key=key):
        checks += _check_folder(folder, key, host)
        sound = all(each.outcome != "failed" for each in checks)
        if folder.manifest is not None:
            checks += _check_numbers(folder, make_attention, sound, host)
    return checks


def _strangers(bundle: Path) -> Iterator[Check]:
    """Yield what lies beside the target folders, where no manifest could list it."""
    allowed = {str(each.path) for each in scan(bundle)}
    parents = {str(parent) for each in allowed for parent in Path(each).parents}
    for top in (bundle / "cpu", bundle / "cuda"):
        for path in sorted(top.rglob("*")) if top.is_dir() else []:
            inside = allowed & {str(path), *map(str, path.parents)}
            if not inside and str(path) not in parents:
                yield Check(str(path), "files", "failed", "belongs to no target folder")


def _check_folder(folder: Folder, key: Ed25519PublicKey | None, host: Host) -> Iterator[Check]:
    place = str(folder.path)
    if folder.manifest is None or folder.target is None:
        yield Check(place, "files", "failed", folder.problem)
        return
    yield Check(place, "files", "ok", "modes, owners, links, unlisted files, manifest")
    if key is None:
        yield Check(place, "signature", "not run", "no --require-signature KEY")
    else:
        yield Check(place, "signature", "ok")
    for artifact in folder.manifest.artifacts:
        try:
            read_artifact(folder.bundle, folder.target, artifact)
        except BundleError as error:
            yield Check(artifact.file, "hash", "failed", str(error))
        else:
            yield Check(artifact.file, "hash", "ok")
    # No failure: bundles are built on other machines than they serve on.
    reason = _cannot_run_here(folder, host)
    yield Check(place, "runs here", "not run" if reason else "ok", reason)


def _cannot_run_here(folder: Folder, host: Host) -> str:
    assert folder.manifest is not None
    if not folder.manifest.artifacts:
        return "it holds no artifact"
    spec = folder.manifest.artifacts[0].spec
    found = resolve(spec, host, [folder])
    return found.rejected[0].reason if found.rejected else ""


def _check_numbers(
    folder: Folder, make_attention: MakeAttention | None, sound: bool, host: Host
) -> Iterator[Check]:
    assert folder.manifest is not None
    if make_attention is None:
        reason = "no --numbers"
    elif not sound:
        reason = "nothing is loaded after a failed check"
    else:
        reason = _cannot_run_here(folder, host)
    if reason or make_attention is None:
        yield Check(str(folder.path), "numbers", "not run", reason)
        return
    for artifact in folder.manifest.artifacts:
        yield from _run_artifact(folder, artifact, make_attention)


def _run_artifact(
    folder: Folder, artifact: Artifact, make_attention: MakeAttention
) -> Iterator[Check]:
    from tvmpaged.relations import relations
    from tvmpaged.verify_numbers import TOLERANCES, NotServedError, attention_of, error_of

    spec, what, name = artifact.spec, artifact.file, "numbers"
    try:
        with prefer(folder):
            attention = attention_of(artifact, make_attention)
            error, limit = error_of(spec, attention)
            outcome = "ok" if error <= limit else "failed"
            yield Check(what, name, outcome, f"error {error:.2e}, at most {limit:.1e}")
            if spec.kernel in ATTENTION_KERNELS:
                name = "relations"
                tried = list(relations(attention, spec.kernel, TOLERANCES[spec.out_dtype]))
                broken = [str(each) for each in tried if not each.holds]
                detail = "; ".join(broken) or f"{len(tried)} hold"
                yield Check(what, name, "failed" if broken else "ok", detail)
    except NotServedError as not_served:
        yield Check(what, name, "not run", str(not_served))
    except Exception as raised:  # noqa: BLE001, whatever running it raised is the finding
        yield Check(what, name, "failed", f"{type(raised).__name__}: {raised}")
