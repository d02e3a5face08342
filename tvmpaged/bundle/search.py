"""Where bundles are looked for, and the artifact that is found there."""

from __future__ import annotations

import inspect
import logging
import os
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from tvmpaged import tvm_libs
from tvmpaged.bundle import trust
from tvmpaged.bundle.errors import BundleError
from tvmpaged.bundle.folder import Folder, read_artifact, read_manifest, scan
from tvmpaged.bundle.resolve import Accepted, Host, Resolution, resolve
from tvmpaged.bundle.signature import load_public_key
from tvmpaged.cpu import cpu_flags

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    from tvmpaged.spec import AttentionSpec, TargetKey

BUNDLE_VARIABLE = "TVMPAGED_BUNDLE"
SIGNATURE_VARIABLE = "TVMPAGED_REQUIRE_SIGNATURE"
ENTRY_POINTS = "tvmpaged.bundles"

_LOG = logging.getLogger(__name__)
_PREFERRED: ContextVar[Folder | None] = ContextVar("preferred", default=None)


def installed_version(distribution: str) -> str:
    """Return an installed distribution's version, or ``none``."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "none"


def host_for(target: TargetKey, runtime_version: str | None = None) -> Host:
    """Return this machine's facts for a target.

    Parameters
    ----------
    target : TargetKey
        What code built for exactly this machine is called.
    runtime_version : str, optional
        Version of the ``libtvm_runtime.so`` that will be loaded; None: of the one `tvm_libs` finds.
    """
    return Host(
        target=target,
        cpu_flags=cpu_flags(),
        tvm_ffi_version=installed_version("apache-tvm-ffi"),
        runtime_version=runtime_version or tvm_libs.runtime_version() or "none",
    )


def user_cache() -> Path:
    """Return the bundle that ``tvmpaged package --install`` writes."""
    from platformdirs import user_cache_path

    return user_cache_path("tvmpaged") / "bundles"


def search(bundle: str | os.PathLike[str] | None = None) -> list[Folder]:
    """Return the checked folders of all bundles, in the order of the search path.

    The order is: the argument, ``TVMPAGED_BUNDLE`` (a path list), the user cache, bundles of
    installed packages (entry points ``tvmpaged.bundles``, each a package or a function that returns
    a path), the bundle inside tvmpaged itself. With ``TVMPAGED_REQUIRE_SIGNATURE=KEY.pem`` in the
    environment, a bundle that this Ed25519 public key did not sign has a problem.

    Raises
    ------
    FileNotFoundError
        When the argument names no folder: a slip of the pen, not a bundle that does not fit.
    BundleError
        When that key cannot be read.
    """
    if bundle is not None and not Path(bundle).is_dir():
        raise FileNotFoundError(f"bundle={os.fspath(bundle)!r} is no folder")
    key = _required_key()
    places: list[tuple[Path | str, str]] = []
    if bundle is not None:
        places.append((Path(bundle), "argument"))
    parts = os.environ.get(BUNDLE_VARIABLE, "").split(os.pathsep)
    places += [(Path(part), BUNDLE_VARIABLE) for part in parts if part]
    places.append((user_cache(), "user cache"))
    points = entry_points(group=ENTRY_POINTS)
    places += [(_entry_point_path(point), f"entry point {point.name}") for point in points]
    places.append((Path(__file__).parents[1] / "data" / "bundles", "inside tvmpaged"))

    folders: list[Folder] = []
    for place, source in places:
        if isinstance(place, str):
            folders.append(Folder(Path(source), source, None, None, place))
        else:
            folders.extend(scan(place.absolute(), source, key))
    return folders


def _required_key() -> Ed25519PublicKey | None:
    path = os.environ.get(SIGNATURE_VARIABLE, "")
    return load_public_key(Path(path)) if path else None


def _entry_point_path(point: EntryPoint) -> Path | str:
    """Return the path that an entry point names, or why it names none."""
    try:
        named = point.load()
        if callable(named):
            named = named()
    except Exception as error:  # noqa: BLE001, foreign code must not keep other bundles from use
        return f"{point.value} failed: {type(error).__name__}: {error}"
    if isinstance(named, ModuleType):
        file = inspect.getsourcefile(named) if named.__file__ else None
        return Path(file).parent if file else Path(next(iter(named.__path__)))
    if isinstance(named, str | os.PathLike):
        return Path(named)
    return f"{point.value} names neither a package nor a function that returns a path"


@contextmanager
def prefer(folder: Folder) -> Iterator[None]:
    """Let `find` take from this folder whatever it can serve, for a check of just its artifacts."""
    token = _PREFERRED.set(folder)
    try:
        yield
    finally:
        _PREFERRED.reset(token)


@dataclass(frozen=True)
class Found:
    """The artifact that serves a spec; its bytes are read and have the manifest's digest."""

    accepted: Accepted
    resolution: Resolution
    data: bytes

    @contextmanager
    def open(self) -> Iterator[Path]:
        """Give an absolute path ending in ``.so`` that loads exactly `data`, inside the block."""
        with trust.sealed_copy(self.data, self.accepted.artifact.file) as path:
            yield path


def find(
    spec: AttentionSpec,
    host: Host,
    bundle: str | os.PathLike[str] | None = None,
    strict: bool = False,
) -> Found:
    """Find the artifact that serves a spec, with everything checked that can be before loading.

    Parameters
    ----------
    spec : AttentionSpec
        What is to be computed.
    host : Host
        From `host_for`.
    bundle : path, optional
        A bundle to look in first.
    strict : bool
        As for `resolve`.

    Raises
    ------
    FileNotFoundError
        When nothing serves it; lists every candidate and why it was rejected.
    BundleError
        When the key that signatures are required from cannot be read.
    """
    preferred = _PREFERRED.get()
    if preferred is not None and resolve(spec, host, [preferred], strict).accepted:
        folders = [preferred]
    else:
        folders = search(bundle)
    while True:
        resolution = resolve(spec, host, folders, strict)
        best = resolution.require()
        try:
            data = read_artifact(best.folder.bundle, best.target, best.artifact)
        except BundleError as error:
            index = folders.index(best.folder)
            folders[index] = _read_again(best, error)
        else:
            return Found(best, resolution, data)


def _read_again(accepted: Accepted, error: BundleError) -> Folder:
    """Return the folder as it is now: a writer may have replaced the artifact meanwhile.

    Otherwise the folder is not what was packaged, and nothing in it is used any more.
    """
    folder = accepted.folder
    try:
        manifest = read_manifest(folder.bundle, accepted.target, _required_key())
    except BundleError as again:
        return replace(folder, manifest=None, problem=str(again))
    if manifest.find(accepted.artifact.spec) != accepted.artifact:
        return replace(folder, manifest=manifest)
    _LOG.warning("bundle refused: %s", error)
    return replace(folder, manifest=None, problem=str(error))
