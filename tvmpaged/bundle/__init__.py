"""Bundles: folders of compiled kernels with a manifest.

A bundle is code, so everything is checked before it is loaded. One noun per file: ``manifest``
(what is said), ``codec`` (its bytes), ``trust`` (reading files of others), ``signature``,
``folder`` (one target's folder), ``resolve`` (the decision), ``search`` (where to look), ``write``.
"""

from tvmpaged.bundle.codec import artifact_data, decode, encode
from tvmpaged.bundle.errors import BundleError
from tvmpaged.bundle.folder import Folder, open_artifact, read_artifact, read_manifest, scan
from tvmpaged.bundle.manifest import (
    KERNEL_ABI,
    SCHEMA_VERSION,
    Abi,
    Artifact,
    BuiltWith,
    Git,
    Manifest,
)
from tvmpaged.bundle.merge import Kept, Merge, merge
from tvmpaged.bundle.resolve import Accepted, Host, Rejected, Resolution, build_command, resolve
from tvmpaged.bundle.search import Found, find, host_for, prefer, search, user_cache
from tvmpaged.bundle.signature import load_private_key, load_public_key
from tvmpaged.bundle.write import Built, file_name, read_existing, utc_now, write

__all__ = [
    "KERNEL_ABI",
    "SCHEMA_VERSION",
    "Abi",
    "Accepted",
    "Artifact",
    "Built",
    "BuiltWith",
    "BundleError",
    "Folder",
    "Found",
    "Git",
    "Host",
    "Kept",
    "Manifest",
    "Merge",
    "Rejected",
    "Resolution",
    "artifact_data",
    "build_command",
    "decode",
    "encode",
    "file_name",
    "find",
    "host_for",
    "load_private_key",
    "load_public_key",
    "merge",
    "open_artifact",
    "prefer",
    "read_artifact",
    "read_existing",
    "read_manifest",
    "resolve",
    "scan",
    "search",
    "user_cache",
    "utc_now",
    "write",
]
