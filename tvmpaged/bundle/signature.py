"""Signatures: Ed25519 over the bytes of ``manifest.json``, which holds the digest of every file.

``manifest.json.sig`` has one signature per line, in base64; one that verifies is enough. During a
rewrite it holds the old manifest's line and the new one's, so that whichever manifest a crash
leaves is signed.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING

from tvmpaged.bundle.errors import BundleError

if TYPE_CHECKING:
    from pathlib import Path

    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

_INSTALL = "signatures need the package cryptography: pip install 'tvmpaged[sign]'"


def load_private_key(path: Path) -> Ed25519PrivateKey:
    """Read an unencrypted Ed25519 private key in PEM form.

    Raises
    ------
    BundleError
        When it is none, or `cryptography` is not installed.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError as error:
        raise BundleError(_INSTALL) from error
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise BundleError(f"{path} cannot be read as a private key: {error}") from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise BundleError(f"{path} holds a key of another kind; an Ed25519 key is needed")
    return key


def load_public_key(path: Path) -> Ed25519PublicKey:
    """Read an Ed25519 public key in PEM form.

    Raises
    ------
    BundleError
        When it is none, or `cryptography` is not installed.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError as error:
        raise BundleError(_INSTALL) from error
    try:
        key = load_pem_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read as a public key: {error}") from error
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise BundleError(f"{path} holds a key of another kind; an Ed25519 key is needed")
    return key


def sign(key: Ed25519PrivateKey, manifest: bytes) -> bytes:
    """Return the line of ``manifest.json.sig`` for these manifest bytes."""
    return base64.b64encode(key.sign(manifest)) + b"\n"


def check_signature(key: Ed25519PublicKey, manifest: bytes, signatures: bytes) -> None:
    """Refuse a manifest that none of the signature lines signs.

    Raises
    ------
    BundleError
        When none verifies under this key.
    """
    from cryptography.exceptions import InvalidSignature

    for line in signatures.splitlines():
        try:
            key.verify(base64.b64decode(line, validate=True), manifest)
        except (InvalidSignature, binascii.Error):
            continue
        return
    raise BundleError("the manifest's signature is not by the required key")
