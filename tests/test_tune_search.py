"""The search: what it proposes, what its model sees, and that both can be repeated."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import xgboost
from record_tools import make_record
from tune_tools import SPEC, TARGET, FakeMachine, known_us, work
from tvm.s_tir import meta_schedule as ms

from tvmpaged import records, schedules
from tvmpaged.build import build_module
from tvmpaged.errors import UserError
from tvmpaged.records import Latency, Record
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning.candidates import Candidates
from tvmpaged.tuning.features import ChoiceFeatures, Encoder, choices_of
from tvmpaged.tuning.model_session import _Search, without_intrinsics
from tvmpaged.tuning.process import Answer
from tvmpaged.tuning.search import EXPLORE, FlatSearch, Progress, stand_in
from tvmpaged.tuning.session import BATCH
from tvmpaged.tuning.starts import neighbours, spec_seed
from tvmpaged.tuning.trial import Choices, Trial, choices_key


def candidates(spec: AttentionSpec = SPEC) -> Candidates:
    return Candidates(
        schedules.space(spec, TARGET),
        lambda each: schedules.reject(spec, TARGET, each),
        schedules.default_choices(spec, TARGET),
    )


@pytest.mark.parametrize(
    ("kernel", "dtype", "head_dim", "group_size"),
    [("decode", "float32", 64, 3), ("decode", "bfloat16", 80, 7), ("prefill", "float16", 128, 4)],
)
def test_every_draw_is_legal_and_draws_differ(
    kernel: str, dtype: str, head_dim: int, group_size: int
) -> None:
    spec = AttentionSpec.make(kernel, dtype, head_dim, group_size, 16)
    source, random = candidates(spec), np.random.default_rng(0)
    drawn = [source.draw(random) for _ in range(200)]
    varied = [source.vary(each, random) for each in drawn]
    assert all(schedules.reject(spec, TARGET, each) is None for each in drawn + varied)
    assert all(list(each) == list(source.space) for each in drawn + varied)
    assert len({choices_key(each) for each in drawn}) > 100
    assert sum(a != b for a, b in zip(drawn, varied, strict=True)) > 100


def test_draws_reach_every_value_that_some_legal_list_has() -> None:
    source, random = candidates(), np.random.default_rng(0)
    drawn = [source.draw(random) for _ in range(2000)]
    for name, values in source.space.items():
        legal = {each[name] for each in drawn}
        missing = set(values) - legal
        # What no draw shows must be illegal beside all of them.
        for value in missing:
            assert all(schedules.reject(SPEC, TARGET, each | {name: value}) for each in drawn)


def test_each_option_has_a_feature_of_its_own() -> None:
    space = schedules.space(SPEC, TARGET)
    encoder, default = Encoder(space), schedules.default_choices(SPEC, TARGET)
    row = encoder.encode(default)
    for name, values in space.items():
        for value in values:
            if value != default[name]:
                assert (encoder.encode(default | {name: value}) != row).any(), name


class Truth:
    """Stands for a model that has learnt everything."""

    def update(self, *args: Any) -> None:
        pass

    def predict(self, context: Any, wrapped: Any) -> Any:
        return np.array([1 / known_us(choices_of(each.sch.mod)) for each in wrapped])


def strategy(known: Sequence[Trial] = ()) -> Any:
    progress = Progress(lambda: BATCH, lambda keys: [], lambda batch: None)
    default = schedules.default_choices(SPEC, TARGET)
    made = FlatSearch(candidates(), [default], known, 0, progress)
    made.model = Truth()
    return made


def trial(choices: Choices) -> Trial:
    return Trial(choices, Latency.of([known_us(choices)]))


def test_the_default_comes_first_and_nothing_comes_twice() -> None:
    search = strategy()
    first = search.propose(BATCH)
    assert first[0] == schedules.default_choices(SPEC, TARGET)
    search.trials.update({each.key: each for each in map(trial, first)})
    second = search.propose(BATCH)
    keys = [choices_key(each) for each in first + second]
    assert len(set(keys)) == len(keys) == 2 * BATCH


def test_what_is_known_is_not_proposed_however_good() -> None:
    source, random = candidates(), np.random.default_rng(5)
    search = strategy([trial(source.draw(random)) for _ in range(200)])
    known = set(search.trials)
    best = min(search.trials.values(), key=lambda each: each.median_us)
    for _ in range(200):
        each = trial(source.vary(best.choices, random))
        search.trials[each.key] = each
    assert not {choices_key(each) for each in search.propose(50)} & (known | set(search.trials))


def test_a_batch_follows_the_model_and_keeps_exploring() -> None:
    source, random = candidates(), np.random.default_rng(5)
    search = strategy([trial(source.draw(random)) for _ in range(BATCH)])
    search.starts = []
    times = [known_us(each) for each in search.propose(20)]
    drawn = np.mean([known_us(source.draw(random)) for _ in range(100)])
    num_ranked = round(20 * (1 - EXPLORE))
    assert times[:num_ranked] == sorted(times[:num_ranked])
    least = 1000.0  # of `known_us`
    assert np.mean(times[:num_ranked]) - least < 0.3 * (drawn - least)
    assert np.mean(times[num_ranked:]) > np.mean(times[:num_ranked])


def stores(choices: Choices) -> list[str]:
    """Return what the program that choices stand for stores to, in its order."""
    lines = build_module(SPEC, TARGET, choices).script().splitlines()
    found = [re.match(r"\s*(\w+\[.*?\]) = ", each) for each in lines]
    return [each[1] for each in found if each is not None]


@pytest.mark.parametrize("name", ["prefetch_keys", "prefetch_level"])
def test_these_options_leave_the_stores_alone(name: str) -> None:
    default = schedules.default_choices(SPEC, TARGET)
    values = {each for each in schedules.space(SPEC, TARGET)[name] if each} - {default[name]}
    others = [default | {name: value} for value in values]
    other = next(each for each in others if schedules.reject(SPEC, TARGET, each) is None)
    assert stores(other) == stores(default)
    assert len(stores(default)) > 10
    # It is the stores that are compared: another number of lanes changes them.
    assert stores(default | {"lanes": 8}) != stores(default)


@pytest.mark.parametrize("name", ["prefetch_keys", "prefetch_level"])
def test_what_leaves_the_stores_alone_moves_the_models_ranking(name: str) -> None:
    space = schedules.space(SPEC, TARGET)
    default = schedules.default_choices(SPEC, TARGET)
    assert default["step"] == "rows"
    lists = [default | {name: value} for value in space[name]]
    lists = [each for each in lists if schedules.reject(SPEC, TARGET, each) is None]
    assert len(lists) >= 3
    with without_intrinsics():
        context = ms.TuneContext(mod=stand_in(), target=tvm.target.Target("llvm"), num_threads=1)
    wrapped = [strategy().wrap(each) for each in lists]
    for order in (1, 2):
        times = np.random.default_rng(order).permutation(np.linspace(1e-3, 4e-3, len(lists)))
        model = ms.cost_model.XGBModel(
            extractor=ChoiceFeatures(Encoder(space)), num_warmup_samples=2, num_tuning_cores=1
        )
        model.update(context, wrapped, [ms.runner.RunnerResult([each], None) for each in times])
        predicted = model.predict(context, wrapped)
        assert list(np.argsort(-predicted)) == list(np.argsort(times))


def proposed(folder: Path, seed: int, **settings: Any) -> tuple[list[str], Record]:
    machine = FakeMachine(folder)
    record = work(machine, folder, seed=seed, **settings).run()
    return machine.measured, record


def test_the_seed_decides_what_is_proposed(tmp_path: Path) -> None:
    first, record = proposed(tmp_path / "a", 7)
    again, same = proposed(tmp_path / "b", 7)
    other, _ = proposed(tmp_path / "c", 8)
    assert first == again
    assert record.choices == same.choices
    assert set(first) != set(other)


def test_the_seed_also_decides_what_the_model_guesses_before_it_knows(tmp_path: Path) -> None:
    default = schedules.default_choices(SPEC, TARGET)
    measured = []
    for name in "ab":
        machine = FakeMachine(tmp_path / name)
        # With one sample in the first batches the model answers at random.
        machine.broken = lambda choices: "step" in choices and choices != default
        work(machine, tmp_path / name, seed=3, trials=3 * BATCH).run()
        measured.append(machine.compiled)
    assert measured[0] == measured[1]


def test_each_spec_has_a_seed_of_its_own_that_follows_the_commands() -> None:
    pairs = [(seed, replace(SPEC, group_size=size)) for seed in (0, 1) for size in (1, 2, 3)]
    assert len({spec_seed(*each) for each in pairs}) == len(pairs)


def test_the_seed_reaches_xgboost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trees draw nothing as they are set up now; whoever turns on sampling relies on this."""
    train, seen = xgboost.train, []

    def watched(params: dict[str, Any], *args: Any, **options: Any) -> Any:
        seen.append(params["seed"])
        return train(params, *args, **options)

    monkeypatch.setattr(xgboost, "train", watched)
    for seed in (7, 8):
        proposed(tmp_path / str(seed), seed, trials=3 * BATCH)
    assert set(seen) == {spec_seed(seed, SPEC) % 2**31 for seed in (7, 8)}


def test_the_model_answers_after_one_batch() -> None:
    source, random = candidates(), np.random.default_rng(2)
    known = [trial(source.draw(random)) for _ in range(BATCH)]
    progress = Progress(lambda: BATCH, lambda keys: [], lambda batch: None)
    default = schedules.default_choices(SPEC, TARGET)
    made = _Search.make(SPEC, TARGET, [default], known, 0, progress)
    made.strategy.pre_tuning(0, 0, [], None, made.model)
    wrapped = [made.strategy.wrap(each.choices) for each in known]
    first, again = (made.model.predict(made.context, wrapped) for _ in range(2))
    # While it knows too little it answers at random, and so never the same twice.
    assert list(first) == list(again)
    fastest = min(range(BATCH), key=lambda index: known[index].median_us)
    assert first[fastest] == max(first) > min(first)


def test_the_search_finds_what_random_draws_do_not(tmp_path: Path) -> None:
    _, record = proposed(tmp_path, 1, trials=64)
    source, random = candidates(), np.random.default_rng(1)
    drawn = min(known_us(source.draw(random)) for _ in range(64))
    default = known_us(schedules.default_choices(SPEC, TARGET))
    assert record.latency_us.median < min(drawn, default)
    assert not record.is_default
    assert record.trials == 64


def test_failures_are_counted_by_reason_and_never_win(tmp_path: Path) -> None:
    def fate(choices: Choices) -> Answer | None:
        if choices["prefetch_keys"] == 64:
            return Answer({}, "crash", "SIGSEGV")
        if choices["weigh_vectors"] == 2:
            return Answer({"wrong": "relative error 1"})
        if choices["dot_keys"] == 1:
            return Answer({}, "time-out", "no answer in 60 s")
        return None

    record = work(FakeMachine(tmp_path, fate), tmp_path).run()
    assert set(record.failures) == {"crash", "wrong", "time-out"}
    assert record.trials == 40
    assert record.choices["prefetch_keys"] != 64
    assert record.choices["weigh_vectors"] != 2


def test_a_tie_goes_to_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = schedules.default_choices(SPEC, TARGET)
    monkeypatch.setattr("tune_tools.known_us", lambda choices: 100.0 + 0.5 * (choices == default))
    record = work(FakeMachine(tmp_path), tmp_path, trials=16).run()
    assert record.is_default
    assert record.choices == schedules.default_choices(SPEC, TARGET)
    assert record.speedup == 1.0


def test_a_spec_whose_default_fails_has_no_record(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, lambda _choices: Answer({}, "crash", "SIGSEGV"))
    with pytest.raises(UserError, match="default cannot be measured: SIGSEGV"):
        work(machine, tmp_path, trials=8).run()
    assert records.load(tmp_path, TARGET, SPEC) is None


def test_a_deadline_that_has_passed_still_measures_the_default(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    short = work(machine, tmp_path)
    short.deadline = 0.0
    record = short.run()
    assert 1 <= record.trials <= 2


def test_neighbours_are_of_the_same_target_and_kernel(tmp_path: Path) -> None:
    default = schedules.default_choices(SPEC, TARGET)
    near, far = replace(SPEC, block_size=32), replace(SPEC, block_size=32, group_size=2)
    mine, further = default | {"prefetch_keys": 64}, default | {"prefetch_keys": 128, "row_tile": 2}
    other = TargetKey("cpu", "x86-64-v4")
    for spec, target, choices in (
        (far, TARGET, further),
        (near, TARGET, mine),
        (near, other, default | {"prefetch_keys": 16}),
        (SPEC, TARGET, default | {"prefetch_keys": 0, "prefetch_level": 1}),
    ):
        records.save(tmp_path, make_record(spec=spec, target=target, choices=choices))
    # The one that is nearer comes first; its own record is no neighbour.
    assert neighbours(SPEC, TARGET, tmp_path) == [mine, further]
    # A record that is broken hides no other.
    (records.folder(tmp_path, TARGET, far) / "record.json").write_text("{")
    assert neighbours(SPEC, TARGET, tmp_path) == [mine]


def test_a_neighbours_winner_is_tried_right_after_the_default(tmp_path: Path) -> None:
    _, record = proposed(tmp_path, 1, trials=64)
    other = AttentionSpec.make("decode", "float32", 64, 3, 32)
    machine = FakeMachine(tmp_path)
    task = work(machine, tmp_path, trials=8)
    task.spec = other
    task.run()
    assert machine.measured[1] == choices_key(record.choices)
