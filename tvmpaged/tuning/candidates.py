"""Drawing choice lists that can be built, without knowing what any option means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations, product
from typing import Any

import numpy as np

from tvmpaged.tuning.trial import Choices

Space = Mapping[str, tuple[Any, ...]]

#: Times that a change is drawn until one is legal.
_ATTEMPTS = 4


class Candidates:
    """The legal choice lists of a space.

    Of all combinations about one in a hundred is legal, so none is found by luck. A draw starts
    at an *anchor*, a legal list, and takes over the values of a random combination one option after
    the other, each where the list stays legal. Anchors are all legal lists that differ from the
    default, or from the options' first values, in at most two options: so that every region that
    two options open together can be reached from either.

    Parameters
    ----------
    space : mapping
        Option -> values.
    reject : callable
        Returns why a choice list cannot be built, or None.
    default : choices
        A legal list.
    """

    def __init__(
        self, space: Space, reject: Callable[[Choices], str | None], default: Choices
    ) -> None:
        self.space = dict(space)
        self.reject = reject
        first = {name: values[0] for name, values in self.space.items()}
        self.anchors = self._near(self._ordered(default)) + self._near(first)

    def draw(self, random: np.random.Generator) -> Choices:
        """Return a random legal list."""
        anchor = self.anchors[int(random.integers(len(self.anchors)))]
        wanted = {name: self._value(name, random) for name in self.space}
        return self._toward(wanted, anchor, random)

    def vary(self, choices: Choices, random: np.random.Generator) -> Choices:
        """Return a legal list that differs from a legal one in a few options.

        Where the neighbourhood is sparse it may, after a few attempts, be the same list.
        """
        free = [name for name, values in self.space.items() if len(values) > 1]
        changed = dict(choices)
        for _attempt in range(_ATTEMPTS if free else 0):
            changed = self._changed(choices, free, random)
            if changed != choices:
                break
        return changed

    def _changed(self, choices: Choices, free: list[str], random: np.random.Generator) -> Choices:
        count = min(int(random.choice([1, 1, 2, 3])), len(free))
        names = [free[i] for i in random.choice(len(free), size=count, replace=False)]
        wanted = {name: self._other(name, choices[name], random) for name in names}
        changed = choices | wanted
        return changed if self.reject(changed) is None else self._toward(wanted, choices, random)

    def _value(self, name: str, random: np.random.Generator) -> Any:
        values = self.space[name]
        return values[int(random.integers(len(values)))]

    def _other(self, name: str, value: Any, random: np.random.Generator) -> Any:
        values = [each for each in self.space[name] if each != value]
        return values[int(random.integers(len(values)))]

    def _toward(self, wanted: Choices, legal: Choices, random: np.random.Generator) -> Choices:
        names = list(wanted)
        result = dict(legal)
        # Twice: what an option forbids at first may be free once another has changed.
        for index in (*random.permutation(len(names)), *random.permutation(len(names))):
            changed = result | {names[index]: wanted[names[index]]}
            if changed != result and self.reject(changed) is None:
                result = changed
        return result

    def _near(self, center: Choices) -> list[Choices]:
        found = {}
        for one, other in combinations(self.space, 2):
            for value, other_value in product(self.space[one], self.space[other]):
                choices = center | {one: value, other: other_value}
                if self.reject(choices) is None:
                    found[tuple(choices.values())] = choices
        return list(found.values())

    def _ordered(self, choices: Choices) -> Choices:
        """Return the same list with its options in the space's order."""
        return {name: choices[name] for name in self.space}
