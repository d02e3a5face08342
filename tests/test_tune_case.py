"""What a candidate is measured on: a batch and single sequences, over memory as that of serving."""

import re
from pathlib import Path
from typing import Any

import pytest

from tvmpaged import schedules
from tvmpaged.cpu import native_target
from tvmpaged.spec import AttentionSpec
from tvmpaged.tuning.case import Case
from tvmpaged.tuning.workload import Workload
from tvmpaged.worklist import Item, Merge

SPEC = AttentionSpec.make("decode", "float32", 64, 3, 16)
TARGET = native_target()


@pytest.mark.parametrize(
    ("num_alone", "batches"),
    [(0, [{0, 1, 2}]), (2, [{0}, {1}, {2}]), (1, [{0, 1}, {2}]), (3, [{0}, {1}, {2}])],
)
def test_a_sequence_that_is_decoded_alone_has_a_step_of_its_own(
    num_alone: int, batches: list[set[int]]
) -> None:
    workload = Workload(2, (1, 1, 1), (700, 40, 1100), num_alone)
    case = Case.make(SPEC, workload, num_steps=2)
    steps: list[set[int]] = []
    merged: list[int] = []

    def attention(*arguments: Any) -> None:
        items = arguments[4]
        assert int(arguments[5][-1]) == len(items)
        assert int(items[:, Item.PARTIAL].max()) < len(arguments[8])
        steps.append(set(items[:, Item.SEQ].tolist()))

    def merge(_out: Any, _lse: Any, merges: Any, *_rest: Any) -> None:
        merged.extend(merges[:, Merge.OUT_ROW].tolist())

    choices = schedules.default_choices(SPEC, TARGET) | {"split_length": 512}
    case.bind(attention, merge, choices, 2)()
    assert steps == batches
    assert merged == [0, 2]


def test_a_search_measures_a_batch_and_single_sequences_of_as_many_tokens() -> None:
    workload = Workload.representative(SPEC)
    batch, *alone = workload.batches
    assert len(batch) > 1
    assert len(alone) == workload.num_alone > 1
    tokens = [sum(workload.seq_lens[seq] for seq in step) for step in workload.batches]
    assert 0.8 < tokens[0] / sum(tokens[1:]) < 1.25
    prefill = Workload.representative(AttentionSpec.make("prefill", "float32", 64, 3, 16))
    assert prefill.num_alone == 0


def test_caches_lie_as_those_that_serve() -> None:
    """Huge pages are asked for, where the system has them."""
    case = Case.make(SPEC, Workload(8, (1,), (16384,)))
    address, found = case.k_cache.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        first, _, rest = line.partition(" ")
        if re.fullmatch("[0-9a-f]+-[0-9a-f]+", first):
            begin, end = (int(each, 16) for each in first.split("-"))
            found = begin <= address < end
        elif found and first == "VmFlags:":
            assert "hg" in rest.split()
            return
    pytest.fail("no mapping holds the cache")
