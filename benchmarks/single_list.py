"""Compare what was tuned for each spec with the best single choice list for all of them.

    python benchmarks/single_list.py --kernel decode --draws 64

The matrix is the records of a kernel for this machine in HND; their choices are all that the tuned
kernels are rebuilt from. A single list is one that may be built for every spec of a group: all of
the matrix, and all of one dtype (float32 has no tiles, so a list for both dtypes has none). Lists
are proposed as winners and untuned defaults of the matrix, as random draws, and by changing one
option at a time of the best few. Each is timed in turns with the winner of each spec, and given up
once it can no longer lead; the best few are timed once more, longer, before one is named.
Writes ``<out>.json``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from tuned_matrix import Matrix, geomean

from tvmpaged import records, schedules
from tvmpaged.bundle.write import utc_now
from tvmpaged.cpu import cpu_model, native_target, num_threads
from tvmpaged.freshness import CURRENT
from tvmpaged.provenance import built_with
from tvmpaged.recorded import note_on, state_of
from tvmpaged.records import Record
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning.candidates import Candidates, Space
from tvmpaged.tuning.finalists import MIN_GAIN
from tvmpaged.tuning.machine import open_machine
from tvmpaged.tuning.starts import default_start, why_not_tried
from tvmpaged.tuning.trial import Choices, choices_key

#: A drawn list is timed on all specs while it may come this near to the best.
SLACK = 1.1
#: Lists that one option at a time is changed of, and what a change must gain.
NUM_CLIMBS, MIN_STEP = 2, 0.005
#: Lists that are timed once more, and for how many times as long.
NUM_FINALISTS, FINAL_FACTOR = 3, 8
#: Draws, legal for one spec, until as many as wanted are legal for all.
DRAWS_EACH = 200
RESULTS = Path(__file__).parent / "results"


def read_records(root: Path, kernel: str, *, allow_stale: bool = False) -> list[Record]:
    """Return a kernel's records in HND for this machine; refuse what does not hold."""
    found, problems = records.load_all(root, native_target())
    found = [each for each in found if (each.spec.kernel, each.spec.layout) == (kernel, "HND")]
    notes = [note_on(each) for each in found if state_of(each) != CURRENT and not allow_stale]
    notes += [
        f"{each.spec}: record {each.record_id} cannot be used: {why}"
        for each in found
        if (why := why_not_tried(each.spec, each.target, each.choices))
    ]
    if notes or problems or not found:
        notes = [*notes, *problems.values()] or [f"{root} holds no {kernel} record in HND"]
        raise SystemExit("\n".join(notes))
    return found


def winners(found: Iterable[Record]) -> list[Choices]:
    """Return the different lists that beat an untuned default by more than chance."""
    won = [each.choices for each in found if not each.is_default and each.speedup >= 1 + MIN_GAIN]
    return list({choices_key(each): dict(each) for each in won}.values())


def union_space(specs: Iterable[AttentionSpec], target: TargetKey) -> Space:
    """Return each option's values in any of the specs' spaces."""
    values: dict[str, set[Any]] = {}
    for spec in specs:
        for name, each in schedules.space(spec, target).items():
            values.setdefault(name, set()).update(each)
    return {name: tuple(sorted(each)) for name, each in values.items()}


def rejecter(specs: Sequence[AttentionSpec], target: TargetKey) -> Callable[[Choices], str | None]:
    """Return what says why a list cannot be built for all specs."""

    def reject(choices: Choices) -> str | None:
        reasons = (schedules.reject(each, target, choices) for each in specs)
        return next((each for each in reasons if each), None)

    return reject


def draw(
    specs: Sequence[AttentionSpec],
    target: TargetKey,
    starts: Sequence[tuple[AttentionSpec, Choices]],
    count: int,
    seed: int,
) -> list[Choices]:
    """Return legal lists: by turns one within two options of a start, and one from anywhere.

    The latter are drawn for one spec, and kept when all the others may have them too.
    """
    space, reject = union_space(specs, target), rejecter(specs, target)
    near = [Candidates(space, reject, start).anchors for _, start in starts]
    near = [each for each in near if each]
    far = [Candidates(space, rejecter([spec], target), start) for spec, start in starts]
    random, drawn = np.random.default_rng(seed), dict[str, Choices]()
    for turn in range(DRAWS_EACH * count):
        if turn % 2 or not near:
            each = far[turn // 2 % len(far)].draw(random)
        else:
            anchors = near[turn // 2 % len(near)]
            each = anchors[int(random.integers(len(anchors)))]
        if reject(each) is None:
            drawn.setdefault(choices_key(each), each)
        if len(drawn) == count:
            break
    return list(drawn.values())


def climb(matrix: Matrix, specs: Sequence[AttentionSpec], here: Choices) -> None:
    """Change one option after the other for the better, until none is worth a change."""
    space, reject = union_space(specs, matrix.target), rejecter(specs, matrix.target)
    kept = 0
    for name in cycle(space):
        bar = matrix.bound(specs, here) * (1 - MIN_STEP)
        changed = [here | {name: value} for value in space[name] if value != here[name]]
        around = [each for each in changed if reject(each) is None]
        matrix.race(specs, around, bar / matrix.bound(specs, matrix.ranking(specs)[0]))
        better = [each for each in matrix.ranking(specs) if each in around][:1]
        moved = bool(better) and matrix.bound(specs, better[0]) <= bar
        kept = 0 if moved else kept + 1
        here = better[0] if moved else here
        if kept == len(space):
            return


def search(
    matrix: Matrix,
    specs: Sequence[AttentionSpec],
    draws: int,
    seed: int,
    tell: Callable[[str], None],
) -> None:
    """Propose and time single lists of all specs."""
    starts = [
        (spec, start)
        for spec, record in matrix.records.items()
        for start in (default_start(spec, matrix.target), dict(record.choices))
    ]
    reject = rejecter(specs, matrix.target)

    def done(what: str) -> None:
        means = [matrix.bound(specs, each) for each in matrix.ranking(specs)]
        best = min(means, default=np.inf)
        tell(f"{what}: best {best:.3f}, {len(means)} lists timed on all specs")

    matrix.race(specs, [each for _, each in starts if reject(each) is None], float("inf"))
    done("winners and defaults")
    own = [each for each in starts if each[0] in specs]
    matrix.race(specs, draw(specs, matrix.target, own, draws, seed), SLACK)
    done("draws")
    for each in matrix.ranking(specs)[:NUM_CLIMBS]:
        climb(matrix, specs, each)
        done("a climb")


def final(matrix: Matrix, specs: Sequence[AttentionSpec], choices: Choices) -> dict[str, Any]:
    """Time a list once more, longer, and return what the report says of it."""
    seconds = FINAL_FACTOR * matrix.seconds
    found = {str(each): matrix.compare(each, choices, seconds) for each in specs}
    ratios = {spec: ratio for spec, (ratio, _) in found.items()}
    return {
        "geomean": geomean(ratios.values()),
        "min": min(ratios.values()),
        "max": max(ratios.values()),
        "choices": choices,
        "ratios": ratios,
        "doubtful": [spec for spec, (_, doubtful) in found.items() if doubtful],
    }


def groups(specs: Iterable[AttentionSpec]) -> dict[str, list[AttentionSpec]]:
    """Return all specs, and those of each dtype where there are several."""
    found: dict[str, list[AttentionSpec]] = {"all": list(specs)}
    dtypes = sorted({each.q_dtype for each in found["all"]})
    for dtype in dtypes if len(dtypes) > 1 else ():
        found[dtype] = [each for each in found["all"] if each.q_dtype == dtype]
    return found


def describe(row: dict[str, Any]) -> str:
    """Return a group's result for a person."""
    return (
        f"tuned is {row['geomean']:.3f} times as fast as the best single list (geomean of "
        f"{len(row['ratios'])} specs, {row['min']:.3f} to {row['max']:.3f}; machine too busy in "
        f"{len(row['doubtful'])}): {json.dumps(row['choices'])}"
    )


def main() -> None:
    """Search for each group; results are written after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--records", type=Path, default=Path("tuning_logs"))
    parser.add_argument("--kernel", choices=("decode", "prefill"), default="decode")
    parser.add_argument("--draws", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.3, help="for each list on each spec")
    parser.add_argument("--allow-stale", action="store_true", help="to rehearse; proves nothing")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/single_list_KERNEL")
    arguments = parser.parse_args()
    out = arguments.out or RESULTS / f"single_list_{arguments.kernel}"
    out.parent.mkdir(parents=True, exist_ok=True)
    found = read_records(arguments.records, arguments.kernel, allow_stale=arguments.allow_stale)
    by_spec, target, begin = {each.spec: each for each in found}, native_target(), time.monotonic()
    report: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "created_at": utc_now(),
        "device": cpu_model(),
        "num_threads": num_threads(),
        "built_with": asdict(built_with(target)),
        "records": {str(each.spec): [each.record_id, state_of(each)] for each in found},
        "winners": winners(found),
        "groups": {},
    }
    with open_machine() as machine:
        machine.start()
        matrix = Matrix(machine, target, by_spec, arguments.seconds, arguments.seed)
        report["itself"] = {str(spec): ratio for spec, ratio in matrix.rebuild().items()}
        print(f"{len(found)} winners rebuilt from their records alone", flush=True)
        for name, specs in groups(by_spec).items():
            tell = partial(print, f"{name}:", flush=True)
            search(matrix, specs, arguments.draws, arguments.seed, tell)
            best = matrix.ranking(specs)[:NUM_FINALISTS]
            finals = [final(matrix, specs, each) for each in best]
            row = min(finals, key=lambda each: each["geomean"], default=None)
            report["groups"][name] = row
            report |= {"lists": len(matrix.lists), "wall_s": time.monotonic() - begin}
            out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    for name in ("command", "created_at", "device", "num_threads", "built_with", "wall_s"):
        print(f"{name}: {report[name]}")
    print(f"different lists that beat a default by {MIN_GAIN:.0%}: {len(report['winners'])}")
    print(f"winners beside themselves: {min(report['itself'].values()):.3f} to", end=" ")
    print(f"{max(report['itself'].values()):.3f}")
    for name, row in report["groups"].items():
        print(f"{name}: {describe(row) if row else 'no list is legal for all'}")


if __name__ == "__main__":
    main()
