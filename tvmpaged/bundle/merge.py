"""What becomes of a folder's artifacts when others are written to it: a pure decision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tvmpaged.bundle.manifest import Artifact, Manifest

#: What all artifacts of a folder share.
_SHARED = ("abi", "cpu_features", "sm_arch")
#: An artifact with equal values of these is the same one again; what was measured may differ.
_IDENTITY = ("kind", "choices", "source_sha256", "record_id", "symbol", "built_with")


@dataclass(frozen=True)
class Kept:
    """Something in the bundle that differs from what was to be written, and was kept.

    Parameters
    ----------
    what : str
        A spec, or the target when nothing can be added to its folder.
    field : str
        What differs first.
    existing, new : object
        Both values.
    """

    what: str
    field: str
    existing: object
    new: object

    def __str__(self) -> str:
        return (
            f"{self.what}: kept, because its {self.field} is {self.existing!r} and would be "
            f"{self.new!r} now; --replace takes the new one"
        )


@dataclass(frozen=True)
class Merge:
    """What a write does to a folder: afterwards it holds `taken` and `stays`.

    Parameters
    ----------
    taken, stays : tuple of Artifact
        The new ones that go in, and the existing ones that remain.
    unchanged : tuple of Artifact
        Those of `stays` that the new ones equal.
    replaced, dropped : tuple of Artifact
        Existing ones that go: for a new one of the same spec, or without.
    kept : tuple of Kept
        Why others of `stays` were preferred to the new ones.
    """

    taken: tuple[Artifact, ...] = ()
    stays: tuple[Artifact, ...] = ()
    unchanged: tuple[Artifact, ...] = ()
    replaced: tuple[Artifact, ...] = ()
    dropped: tuple[Artifact, ...] = ()
    kept: tuple[Kept, ...] = ()


def merge(
    existing: Manifest | None, header: Manifest, new: Sequence[Artifact], replace: bool
) -> Merge:
    """Decide what a write does.

    Parameters
    ----------
    existing : Manifest or None
        What is there.
    header : Manifest
        What the new artifacts share; its own artifacts are not looked at.
    new : sequence of Artifact
        One per spec; file and sha256 are not looked at, so it can be asked before compiling.
    replace : bool
        Take the new one where both differ. When what all artifacts share differs, those without a
        new one are dropped, because one folder has one manifest.
    """
    if existing is None:
        return Merge(taken=tuple(new))
    specs = {each.spec for each in new}
    there = tuple(each for each in existing.artifacts if each.spec in specs)
    others = tuple(each for each in existing.artifacts if each.spec not in specs)
    shared = _first_difference(_SHARED, existing, header)
    if shared and not replace:
        return Merge(stays=existing.artifacts, kept=(Kept(str(header.target), *shared),))
    if shared:
        return Merge(taken=tuple(new), replaced=there, dropped=others)
    taken, unchanged, replaced, kept = [], [], [], []
    for artifact in new:
        old = existing.find(artifact.spec)
        difference = _first_difference(_IDENTITY, old, artifact) if old else None
        if old and not difference:
            unchanged.append(old)
        elif difference and not replace:
            kept.append(Kept(str(artifact.spec), *difference))
        else:
            taken.append(artifact)
            replaced += [old] if old else []
    stays = tuple(each for each in existing.artifacts if each not in replaced)
    return Merge(
        tuple(taken), stays, tuple(unchanged), tuple(replaced), dropped=(), kept=tuple(kept)
    )


def _first_difference(
    names: Sequence[str], old: Artifact | Manifest, new: Artifact | Manifest
) -> tuple[str, object, object] | None:
    for name in names:
        mine, yours = getattr(old, name), getattr(new, name)
        if mine == yours:
            continue
        if hasattr(mine, "__dataclass_fields__"):
            inner = _first_difference(list(mine.__dataclass_fields__), mine, yours)
            return (f"{name}.{inner[0]}", *inner[1:]) if inner else None
        return name, mine, yours
    return None
