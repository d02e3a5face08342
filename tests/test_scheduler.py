"""Which rows a step gets: oldest first, decode before prefill, the newest gives way."""

from __future__ import annotations

import pytest

from tvmpaged import BlockManager, OutOfBlocksError, SamplingParams
from tvmpaged.runtime.detokenize import Detokenizer
from tvmpaged.runtime.limits import max_output_tokens
from tvmpaged.runtime.scheduler import Row, Scheduler
from tvmpaged.runtime.sequence import Request, Sequence, Status

pytestmark = pytest.mark.runtime


def scheduler(num_blocks: int = 64, max_num_seqs: int = 64, max_tokens: int = 1000) -> Scheduler:
    return Scheduler(BlockManager(num_blocks, 4), max_num_seqs, max_tokens)


def sequence(arrival: int, length: int, num_pending_forks: int = 0) -> Sequence:
    tokens = [1000 * arrival + place for place in range(length)]  # no prefix in common
    request = Request(str(arrival), arrival, None, tokens, SamplingParams(), 0, (), 99)
    detokenizer = Detokenizer(None, tokens)
    return Sequence(arrival, request, 0, tokens.copy(), detokenizer, num_pending_forks)


def run(line: Scheduler) -> list[tuple[int, int]]:
    """Schedule a step, compute it, draw a token where the sequence's end was reached."""
    rows = line.schedule()
    line.block_manager.take_copies()
    for row in rows:
        seq, ends = row.seq, row.reaches_end
        seq.num_computed += row.num_new
        line.block_manager.commit(seq.seq_id, seq.num_computed)
        if ends:
            seq.token_ids.append(7)
    line.block_manager.check_integrity()
    return [(row.seq.seq_id, row.num_new) for row in rows]


def test_decode_rows_come_first_then_chunks_then_newcomers() -> None:
    line = scheduler(max_tokens=10)
    for arrival, length in enumerate((4, 15, 9)):
        line.add(sequence(arrival, length))
    assert run(line) == [(0, 4), (1, 6)]
    assert run(line) == [(0, 1), (1, 9)]
    assert run(line) == [(0, 1), (1, 1), (2, 8)]
    assert run(line) == [(0, 1), (1, 1), (2, 1)]
    assert run(line) == [(0, 1), (1, 1), (2, 1)]


def test_more_sequences_than_tokens_take_turns_by_age() -> None:
    line = scheduler(max_tokens=2)
    for arrival in range(3):
        line.add(sequence(arrival, 1))
    assert run(line) == [(0, 1), (1, 1)]
    assert run(line) == [(0, 1), (1, 1)]
    line.finish([line.running[0]])
    assert run(line) == [(1, 1), (2, 1)]


def test_places_are_kept_for_samples_to_come() -> None:
    line = scheduler(max_num_seqs=4)
    line.add(sequence(0, 5, num_pending_forks=2))
    line.add(sequence(1, 5, num_pending_forks=1))
    line.add(sequence(2, 5))
    assert run(line) == [(0, 5)]  # nobody overtakes the second one
    assert line.num_slots == 3


def test_the_newest_gives_way_and_returns_to_its_place() -> None:
    line = scheduler(num_blocks=6)
    first, second = sequence(0, 8), sequence(1, 7)
    for seq in (first, second):
        line.add(seq)
    assert run(line) == [(0, 8), (1, 7)]
    line.add(sequence(2, 1))
    for _ in range(5):
        assert (0, 1) in run(line)
    assert line.num_preemptions == 1
    assert (second.status, second.num_computed) == (Status.WAITING, 0)
    assert second.request.metrics.num_preemptions == 1
    assert [seq.seq_id for seq in line.waiting] == [1, 2]
    line.finish([first])
    # Its tokens so far come back as a prompt; what is still in the prefix cache is not computed.
    (seq_id, num_new), (other, _) = run(line)
    assert (seq_id, other) == (1, 2)
    assert 0 < num_new <= len(second.token_ids)


def test_a_newcomer_leaves_the_others_room_to_go_on() -> None:
    line = scheduler(num_blocks=5)
    line.add(sequence(0, 8))
    line.add(sequence(1, 12))
    assert run(line) == [(0, 8)]  # 3 of the 3 free blocks would do, but the first needs one next
    assert run(line) == [(0, 1)]


def test_what_does_not_fit_alone_is_an_error_not_a_loop() -> None:
    line = scheduler(num_blocks=2)
    line.add(sequence(0, 9))
    with pytest.raises(OutOfBlocksError):
        line.schedule()
    with pytest.raises(ValueError, match="needs 3 blocks"):
        max_output_tokens(8, SamplingParams(max_tokens=2), line.block_manager, 100, 8)
    assert max_output_tokens(8, SamplingParams(max_tokens=1), line.block_manager, 100, 8) == 1
    assert max_output_tokens(5, SamplingParams(max_tokens=None), line.block_manager, 100, 8) == 4
    assert max_output_tokens(5, SamplingParams(max_tokens=50), line.block_manager, 8, 8) == 3


def test_finishing_is_harmless_wherever_a_sequence_stands() -> None:
    line = scheduler(num_blocks=2)
    running, waiting = sequence(0, 4), sequence(1, 8)
    for seq in (running, waiting):
        line.add(seq)
    run(line)
    assert (line.running, line.waiting) == ([running], [waiting])
    line.finish([running, waiting])
    line.finish([running, waiting])
    assert (line.running, line.waiting) == ([], [])
    assert line.block_manager.num_free_blocks == 2
    assert line.schedule() == []


def test_a_row_knows_whether_it_reaches_the_end() -> None:
    seq = sequence(0, 9)
    assert [Row(seq, count).reaches_end for count in (8, 9)] == [False, True]
