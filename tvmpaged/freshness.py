"""Whether what was measured still holds: the one place that says *stale* and *tuned elsewhere*."""

from __future__ import annotations

from tvmpaged.cpu import cpu_model, num_threads
from tvmpaged.sources import source_sha256

CURRENT, STALE, ELSEWHERE = "current", "stale", "tuned elsewhere"


def freshness(made_from: str, device: str | None, threads: int | None) -> str:
    """Return what a record or an artifact is worth on this machine with the installed sources.

    Parameters
    ----------
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
    if made_from != source_sha256():
        return STALE
    if device not in (None, cpu_model()) or threads not in (None, num_threads()):
        return ELSEWHERE
    return CURRENT
