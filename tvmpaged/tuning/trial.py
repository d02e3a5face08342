"""One candidate and what became of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from tvmpaged.records import Latency

Choices = dict[str, Any]

#: Why a candidate has no time. "interrupted" says nothing about it: it is tried again.
Reason = Literal["compile", "crash", "memory", "time-out", "wrong", "run", "interrupted"]
REASONS: tuple[Reason, ...] = get_args(Reason)


def as_reason(text: str) -> Reason:
    """Return the reason that a text names.

    Raises
    ------
    ValueError
        When it is none.
    """
    for each in REASONS:
        if each == text:
            return each
    raise ValueError(f"reason={text!r} is not known; allowed: {', '.join(REASONS)}")


def choices_key(choices: Choices) -> str:
    """Return a short name for a choice list; the order of its options has no say."""
    text = json.dumps(choices, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Trial:
    """A candidate's time, or the reason why it has none.

    Parameters
    ----------
    choices : dict
        The candidate.
    latency_us : Latency or None
        Its time.
    reason : str
        A `Reason`, empty when it has a time.
    detail : str
        For a person.
    scale : float
        What the times were multiplied with, so that they compare with the default's.
    """

    choices: Choices
    latency_us: Latency | None = None
    reason: Reason | Literal[""] = ""
    detail: str = ""
    scale: float = 1.0

    @property
    def key(self) -> str:
        """The candidate's short name."""
        return choices_key(self.choices)

    @property
    def median_us(self) -> float:
        """Median time in microseconds; infinite for a failure."""
        return float("inf") if self.latency_us is None else self.latency_us.median

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        data: dict[str, Any] = {"choices": self.choices}
        if self.latency_us is not None:
            return data | {"latency_us": asdict(self.latency_us), "scale": self.scale}
        return data | {"reason": self.reason, "detail": self.detail}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Trial:
        """Read back what `as_dict` gave.

        Raises
        ------
        KeyError, TypeError, ValueError
            When it is no trial: without time and reason, with both, or with a reason unknown here.
        """
        latency, reason = data.get("latency_us"), data.get("reason", "")
        if bool(latency) == bool(reason):
            raise ValueError("a trial has either a time or a reason")
        return cls(
            choices=dict(data["choices"]),
            latency_us=Latency.read(latency) if latency else None,
            reason=as_reason(reason) if reason else "",
            detail=str(data.get("detail", "")),
            scale=float(data.get("scale", 1.0)),
        )
