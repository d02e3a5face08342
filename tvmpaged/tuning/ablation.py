"""What each option was worth, over all searches of a folder: a report for those who prune them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tvmpaged.tuning.log import LOG_NAME, read_searches
from tvmpaged.tuning.summary import option_costs
from tvmpaged.tuning.trial import Trial

#: Two timings of one kernel differ by as much; an option that is worth less has not shown itself.
NOISE = 0.02
#: Fewer searches say nothing of what an option never does.
MIN_SEARCHES = 3


@dataclass
class OptionWorth:
    """One option over all searches.

    Parameters
    ----------
    option : str
        Its name.
    searches : int
        Those that tried more than one value of it.
    worth_mean, worth_most : float
        How much slower the best kernel with the untuned default's value was than the best of all,
        as a fraction: what it would cost not to tune the option.
    most_in : str
        The spec of `worth_most`.
    winners : dict
        Value (as text) -> searches whose fastest candidate had it.
    """

    option: str
    searches: int = 0
    worth_mean: float = 0.0
    worth_most: float = 0.0
    most_in: str = ""
    winners: dict[str, int] = field(default_factory=dict)

    @property
    def never_wins(self) -> bool:
        """Whether several searches would all have done without it, as far as times tell."""
        return self.searches >= MIN_SEARCHES and self.worth_most < NOISE


def ablation(root: Path) -> list[OptionWorth]:
    """Return the options of all searches below a folder, the most worthy first."""
    worths: dict[str, list[tuple[float, str]]] = {}
    winners: dict[str, Counter[str]] = {}
    for spec, trials in _searches(root):
        default = trials[0].choices
        for option, costs in option_costs(trials).items():
            winners.setdefault(option, Counter())
            worths.setdefault(option, [])
            if len(costs) > 1:
                winners[option][str(min(costs, key=lambda value: costs[value]))] += 1
                worths[option].append((_cost(costs, default[option]) - 1, spec))
    found = [_row(option, each, winners[option]) for option, each in worths.items()]
    return sorted(found, key=lambda row: -row.worth_mean)


def _cost(costs: dict[Any, float], value: Any) -> float:
    return costs.get(value, 1.0)


def _row(option: str, worths: list[tuple[float, str]], winners: Counter[str]) -> OptionWorth:
    if not worths:
        return OptionWorth(option)
    most, where = max(worths)
    mean = sum(worth for worth, _ in worths) / len(worths)
    return OptionWorth(option, len(worths), mean, most, where, dict(winners.most_common()))


def _searches(root: Path) -> Iterator[tuple[str, list[Trial]]]:
    for log in sorted(root.rglob(LOG_NAME)):
        for search in read_searches(log):
            trials = [each for each in search.trials.values() if each.latency_us is not None]
            if trials:
                yield log.parent.name, trials
