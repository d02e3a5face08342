"""What the outside is told of a search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvmpaged.records import Record
from tvmpaged.spec import AttentionSpec


@dataclass(frozen=True)
class Status:
    """How far one spec's search is.

    Parameters
    ----------
    spec : AttentionSpec
        Which.
    phase : str
        ``start``, ``search``, ``finalists`` or ``done``.
    trials, num_trials, failures : int
        Candidates tried, to be tried, failed.
    best_us, default_us : float or None
        Medians, microseconds.
    speedup : float or None
        The default's time by the best one's.
    rate_name : str
        ``gb_per_s`` or ``gflop_per_s``.
    rate : float or None
        Of the best.
    roof_fraction : float or None
        That rate by the measured roof's; see `tvmpaged.roofs`.
    eta_s : float or None
        Seconds until the search ends.
    """

    spec: AttentionSpec
    phase: str
    trials: int
    num_trials: int
    failures: int = 0
    best_us: float | None = None
    default_us: float | None = None
    speedup: float | None = None
    rate_name: str = ""
    rate: float | None = None
    roof_fraction: float | None = None
    eta_s: float | None = None


@dataclass(frozen=True)
class Tuned:
    """What became of one spec.

    Parameters
    ----------
    spec : AttentionSpec
        Which.
    record : Record or None
        What was found and written.
    failure : str
        Why there is none.
    """

    spec: AttentionSpec
    record: Record | None = None
    failure: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        record = None if self.record is None else self.record.as_dict()
        return {"spec": str(self.spec), "record": record, "failure": self.failure or None}


@dataclass(frozen=True)
class Estimate:
    """What a search of one spec would do.

    Parameters
    ----------
    spec : str
        Which.
    num_kv_heads : int
        Of its workload.
    combinations : int
        Of all options' values, illegal ones included.
    trials : int
        Candidates that would be tried.
    known_trials : int
        Of those, how many a resumed search takes from the log.
    seconds : float
        Roughly.
    """

    spec: str
    num_kv_heads: int
    combinations: int
    trials: int
    known_trials: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return dict(vars(self))
