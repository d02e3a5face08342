"""A plan whose tensors lie elsewhere than they are filled, as on a GPU: two memories, one copy."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields

import numpy as np
import pytest
import torch
from cases import assert_close, make_case, random_rows, run, stored

from tvmpaged import PagedAttention
from tvmpaged.runtime.place import Place, place_of
from tvmpaged.runtime.plan_memory import Buffers

pytestmark = pytest.mark.runtime

Attention = Callable[..., PagedAttention]


@dataclass(frozen=True)
class Elsewhere(Place):
    """A device that is this CPU, but for its memory."""

    log: list[str] = field(default_factory=list)

    @property
    def is_gpu(self) -> bool:
        return True

    def twin(self, memory: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(memory)

    def copy(self, twin: torch.Tensor, memory: torch.Tensor) -> Callable[[], None]:
        self.log.append(f"copy {len(twin)}")
        memory.copy_(twin)
        return lambda: self.log.append("wait")


@pytest.fixture
def place() -> Elsewhere:
    here = place_of()
    return Elsewhere(*(getattr(here, each.name) for each in fields(Place)))


def test_one_copy_brings_the_indices_and_no_scratch(place: Elsewhere) -> None:
    shapes = {
        "slots": ((3,), np.dtype(np.int64)),
        "items": ((2, 9), np.dtype(np.int32)),
        "partial": ((1000,), np.dtype(np.float32)),
    }
    buffers = Buffers(shapes, place)
    slots, items = np.array([7, -1, 2**40]), np.arange(18, dtype=np.int32).reshape(2, 9)
    buffers.fill({"slots": slots, "items": items})
    assert place.log == ["copy 48"]  # in words, each buffer at a multiple of 16
    assert buffers.tensors["slots"].tolist() == slots.tolist()
    assert buffers.tensors["items"].tolist() == items.tolist()
    assert set(buffers.arrays) == {"slots", "items"}
    buffers.fill({"items": items + 1})
    assert place.log == ["copy 48", "wait", "copy 48"]
    assert buffers.tensors["items"].tolist() == (items + 1).tolist()


def test_a_step_is_the_same_there(
    generic: Attention, rng: np.random.Generator, place: Elsewhere
) -> None:
    attn = generic(3, 64, 4, "float32")
    case = make_case(rng, attn, [1, 5, 0, 1], [2049, 30, 7, 3])
    expected, expected_lse = run(attn, case)
    attn._place = place
    plan = attn.plan(*case.step)
    assert plan.slot_mapping is plan.slots
    for again in (False, True):
        plan = attn.plan(*case.step, into=plan) if again else plan
        out, lse = attn.run(plan, case.q, *stored(attn, case), case.sm_scale, return_lse=True)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
    # Memory that a call may still be reading is not given to the next plan.
    memory = plan.buffers
    del plan
    assert attn.plan(*case.step).buffers is not memory


def test_slots_that_were_written_to_are_checked_again(
    generic: Attention, rng: np.random.Generator, place: Elsewhere
) -> None:
    attn = generic(3, 64, 4, "float32")
    attn._place = place
    case = make_case(rng, attn, [1, 1], [9, 3])
    k, v = (random_rows(rng, (2, attn.num_kv_heads, 64), attn.dtype).clone() for _ in range(2))
    plan = attn.plan(*case.step)
    attn.append_kv(k, v, *stored(attn, case), plan.slot_mapping)
    plan.slot_mapping[0] = 10**6
    with pytest.raises(ValueError, match="slot 1000000"):
        attn.append_kv(k, v, *stored(attn, case), plan.slot_mapping)


def test_a_frame_holds_there_too(
    generic: Attention, rng: np.random.Generator, place: Elsewhere
) -> None:
    attn = generic(3, 64, 4, "float32")
    attn._place = place
    long, short = (make_case(rng, attn, [1, 1], lengths) for lengths in ([1500, 2], [3, 0]))
    plan = attn.plan(*long.step, max_seq_len=1500)
    again = attn.plan(*short.step, into=plan)
    out = attn.run(again, short.q, *stored(attn, short), short.sm_scale)
    assert_close(out, again.lse, *short.expected(), slack=short.slack())
