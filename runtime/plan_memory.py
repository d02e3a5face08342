"""The memory of plans: buffers by name, which several steps' plans use one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tvmpaged.planning.indices import LongArray
from tvmpaged.planning.step import Step
from tvmpaged.runtime.kernel_set import argument_of
from tvmpaged.runtime.place import Place
from tvmpaged.runtime.tensors import ALIGNMENT_BYTES

if TYPE_CHECKING:
    from tvmpaged.runtime.plan import Plan

Array = np.ndarray[Any, np.dtype[Any]]

#: What a plan's memory is counted in.
_WORD_BYTES = 4
_FLOAT32 = np.dtype(np.float32)
_TORCH = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    _FLOAT32: torch.float32,
}

#: Name -> shape and dtype.
Shapes = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]


def _nobody() -> None:
    """Own nothing."""


class Buffers:
    """Memory of a plan, and of those made in it later: one stretch, cut into buffers by name.

    Where a buffer starts, and what it can hold, stays as the first plan needed it.

    Parameters
    ----------
    shapes : mapping
        What the first plan keeps.
    place : Place
        Where the tensors lie. A GPU's are filled from memory of the same shape on the CPU.
    frame : Frame, optional
        What its plans share.

    Attributes
    ----------
    owner : callable
        Returns the plan that this memory belongs to; None when that is gone.
    arrays, tensors : dict
        Name -> the buffer in the shape that the owner needs: as it is filled, but for scratch, and
        as kernels see it.
    arguments : dict
        The same tensors as kernels take them fastest.
    """

    def __init__(self, shapes: Shapes, place: Place, frame: Frame | None = None) -> None:
        self.place = place
        self.frame = frame
        self.owner: Callable[[], Plan | None] = _nobody
        self._buffers: dict[str, tuple[int, int]] = {}  # name -> start in words, elements
        words = indices = 0
        for name, (shape, dtype) in shapes.items():
            # One element at least: an empty tensor has no address to align.
            count = max(1, math.prod(shape))
            self._buffers[name] = words, count
            words += -(-count * dtype.itemsize // ALIGNMENT_BYTES) * (
                ALIGNMENT_BYTES // _WORD_BYTES
            )
            indices = indices if dtype == _FLOAT32 else words  # scratch comes last
        self._memory = torch.empty(words, dtype=torch.int32, device=place.device)
        self._indices = self._memory[:indices]
        self._filled = place.twin(self._indices)
        self._wait = place.no_wait
        self._shapes: Shapes = {}
        self.take_over(shapes)

    def missing(self, shapes: Shapes) -> str:
        """Return what these shapes need and the memory does not have; nothing when they fit."""
        for name, (shape, _) in shapes.items():
            _, capacity = self._buffers.get(name, (0, 0))
            if capacity < math.prod(shape):
                return (
                    f"its buffer {name!r} holds {capacity} elements, this step needs "
                    f"{math.prod(shape)}"
                )
        return ""

    def take_over(self, shapes: Shapes) -> None:
        """Shape the buffers for a new plan, where nothing is `missing`; the one before is over."""
        self.owner = _nobody
        if shapes == self._shapes:  # as from one step of a batch to the next
            return
        self._shapes = shapes
        self.tensors = {
            name: self._view(self._memory, name, *each) for name, each in shapes.items()
        }
        self.arguments = {name: argument_of(each) for name, each in self.tensors.items()}
        self.arrays = {
            name: self._view(self._filled, name, *each).numpy()
            for name, each in shapes.items()
            if each[1] != _FLOAT32
        }

    def _view(
        self, memory: torch.Tensor, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> torch.Tensor:
        start, _ = self._buffers[name]
        end = start + math.prod(shape) * dtype.itemsize // _WORD_BYTES
        return memory[start:end].view(_TORCH[dtype]).view(shape)

    def fill(self, arrays: Mapping[str, Array]) -> None:
        """Write a new owner's arrays, which may be smaller than their buffers."""
        self._wait()
        for name, array in arrays.items():
            buffer = self.arrays[name]
            if buffer.shape == array.shape:
                buffer[...] = array
            else:
                buffer[...] = 0
                kept = tuple(map(slice, np.minimum(buffer.shape, array.shape)))
                buffer[kept] = array[kept]
        self._wait = self.place.copy(self._filled, self._indices)


@dataclass(frozen=True)
class Frame:
    """What all plans made in one memory share, so that one captured launch serves them all.

    Parameters
    ----------
    max_seq_len : int
        The longest sequence.
    q_lens : array
        ``[num_seqs]``, new tokens of each sequence.
    shapes : dict
        Name -> shape of an index array that has room for sequences of that length, and the rows of
        ``partials``.
    """

    max_seq_len: int
    q_lens: LongArray
    shapes: dict[str, tuple[int, ...]]

    def check(self, step: Step) -> None:
        """Refuse a step that does not fit.

        Raises
        ------
        ValueError
            Naming what does not.
        """
        if not np.array_equal(step.q_lens, self.q_lens):
            raise ValueError(
                f"query_start_loc gives {step.q_lens.tolist()} new tokens per sequence; under "
                f"max_seq_len they stay {self.q_lens.tolist()}"
            )
        longest = int(step.seq_lens.max(initial=0))
        if longest > self.max_seq_len:
            most = self.max_seq_len
            raise ValueError(f"seq_lens has {longest}, which is over max_seq_len={most}")


def lay_out(
    arrays: dict[str, Array],
    scratch: dict[str, tuple[int, ...]],
    place: Place,
    frame: Frame | None,
    into: Plan | None,
    spare: Buffers | None,
) -> Buffers:
    """Copy arrays into new or reused memory, beside float32 scratch.

    An array that is smaller than the frame's stands at the beginning; what follows is zeros, which
    are items without rows, or is not read.

    Parameters
    ----------
    arrays : dict
        Name -> index array of the step.
    scratch : dict
        Name -> shape of float32 memory that holds nothing yet.
    place : Place
        Where new memory is made.
    frame : Frame or None
        What all plans in this memory share.
    into : Plan or None
        A plan whose memory is reused; it is not current any more then.
    spare : Buffers or None
        Memory that belongs to no plan, reused if the step fits.

    Raises
    ------
    ValueError
        When the memory of `into` is too small; nothing has been written then.
    """
    extents: dict[str, tuple[int, ...]] = {name: each.shape for name, each in arrays.items()}
    if frame is not None:
        extents = {name: frame.shapes.get(name, given) for name, given in extents.items()}
    shapes = {name: (extents[name], each.dtype) for name, each in arrays.items()}
    shapes.update((name, (shape, _FLOAT32)) for name, shape in scratch.items())
    if into is not None:
        buffers = into.buffers
        if missing := buffers.missing(shapes):
            raise ValueError(f"into: {missing}; make the plan that is reused from the largest step")
        buffers.take_over(shapes)
    elif spare is not None and not spare.missing(shapes):
        buffers = spare
        buffers.take_over(shapes)
    else:
        buffers = Buffers(shapes, place, frame)
    buffers.fill(arrays)
    return buffers
