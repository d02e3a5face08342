"""Whether what was measured still holds: the one place that says *stale* and *tuned elsewhere*."""

from __future__ import annotations

from tvmpaged.cpu import cpu_model, num_threads
from tvmpaged.gpu import gpu_of
from tvmpaged.sources import source_sha256
from tvmpaged.spec import TargetKey

CURRENT, STALE, ELSEWHERE = "current", "stale", "tuned elsewhere"


def device_here(target: TargetKey) -> tuple[str, int]:
    """Return the name of this machine's device of a target's kind, and its threads.

    Of a GPU that is not here the name is empty; a GPU's threads are its multiprocessors.
    """
    if target.kind == "cpu":
        return cpu_model(), num_threads()
    found = gpu_of(target)
    return (found.name, found.multiprocessors) if found else ("", 0)


def freshness(target: TargetKey, made_from: str, device: str | None, threads: int | None) -> str:
    """Return what a record or an artifact is worth on this machine with the installed sources.

    Parameters
    ----------
    target : TargetKey
        What it was built for, or is to run on.
    made_from : str
        `source_sha256` of the sources it was made from.
    device : str or None
        What it was measured on; None when nothing was measured.
    threads : int or None
        With how many threads.

    Returns
    -------
    str
        ``stale`` when it was made from other kernel or schedule sources than the installed ones;
        ``tuned elsewhere`` when it was measured on another device or with another number of
        threads than this machine has; else ``current``.
    """
    if made_from != source_sha256(target.kind):
        return STALE
    here = device_here(target)
    if device not in (None, here[0]) or threads not in (None, here[1]):
        return ELSEWHERE
    return CURRENT
