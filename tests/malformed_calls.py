"""A program that makes many malformed calls and reports what came of them, as JSON.

``malformed_calls.py BUNDLE SEED COUNT LAST``: each call changes one argument of a call that is
right (later two or three) into something else, and knows whether that is legal. A call that is not
must raise ValueError or TypeError, name an argument that was changed, and leave the caches, `out`
and the memory around them alone. A legal one must give the right bits. Before each call its text
goes into the file LAST, so that a crash tells who it was.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from doors import Door, doors
from malformed_values import Change, guards_hold


def calls(door: Door, rng: np.random.Generator, count: int) -> Iterator[dict[str, Change]]:
    """Give every single change, then combinations of two or three."""
    for argument, changes in door.changes.items():
        for change in changes:
            yield {argument: change}
    legal = {name: [each for each in door.changes[name] if each.legal] for name in door.changes}
    legal = {name: changes for name, changes in legal.items() if changes}
    for i in range(count):
        # Every fourth is legal where anything is: what is refused must not depend on company.
        pools = legal if legal and i % 4 == 0 else door.changes
        size = min(len(pools), int(rng.integers(2, 4)))
        picked = rng.choice(list(pools), size, replace=False)
        yield {name: pick(rng, pools[name]) for name in picked}


def pick(rng: np.random.Generator, changes: list[Change]) -> Change:
    return changes[int(rng.integers(len(changes)))]


def attempt(door: Door, changed: dict[str, Change]) -> str | None:
    """Make one call; return what is wrong with what came of it."""
    arguments = dict(door.arguments)
    for name, change in changed.items():
        arguments[name] = change.make(arguments[name])
    before = {name: door.arguments[name].clone() for name in door.writes}
    legal = all(change.legal for change in changed.values())
    try:
        result = door.call(**arguments)
    except (ValueError, TypeError) as error:
        door.counts["refused"] += 1
        problem = _refusal(error, changed, legal)
    except Exception as error:  # noqa: BLE001, any other exception is the finding
        problem = f"{type(error).__name__}: {error}"
    else:
        door.counts["accepted"] += 1
        right = not legal or door.observe(result) == door.expected
        problem = "accepted" if not legal else None if right else "gives another result"
    for name, old in before.items():
        if not legal and problem is None and not torch.equal(door.arguments[name], old):
            problem = f"was refused, but {name} was changed"
        if not guards_hold(door.arguments[name]):
            problem = f"wrote around {name}"
        door.arguments[name].copy_(old)
    return problem


def _refusal(error: Exception, changed: dict[str, Change], legal: bool) -> str | None:
    if legal:
        return f"refused, but it is legal: {error}"
    if not any(name in str(error) for name in changed):
        return f"{type(error).__name__} names no changed argument: {error}"
    return None


def main(bundle: str, seed: str, count: str, last: str) -> None:
    rng, problems, made = np.random.default_rng(int(seed)), [], Counter[str]()
    everything = doors(bundle)
    single = sum(len(changes) for door in everything for changes in door.changes.values())
    unit = (int(count) - single) / sum(door.weight for door in everything)
    with Path(last).open("wb", buffering=0) as note:
        for door in everything:
            before = {name: door.arguments[name].clone() for name in door.writes}
            door.expected = door.observe(door.call(**door.arguments))
            for name, old in before.items():
                door.arguments[name].copy_(old)
            for changed in calls(door, rng, int(unit * door.weight) + 1):
                text = ", ".join(f"{name}: {change.name}" for name, change in changed.items())
                note.seek(0)
                note.truncate()
                note.write(f"{door.name}({text})".encode())
                made[door.name] += 1
                problem = attempt(door, changed)
                if problem:
                    problems.append(f"{door.name}({text}): {problem}"[:400])
    counts = {door.name: dict(door.counts) for door in everything}
    print(json.dumps({"made": made, "counts": counts, "problems": problems}))


if __name__ == "__main__":
    main(*sys.argv[1:])
