"""What the cost model sees of a candidate: its options' values.

Features taken from the program's stores are blind to options that leave the stores alone, such as
a prefetch distance or an inner unroll; these are not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.feature_extractor import PyFeatureExtractor

from tvmpaged.tuning.candidates import Space
from tvmpaged.tuning.trial import Choices

#: Under this name a candidate's choices ride on its module, as JSON.
CHOICES_ATTRIBUTE = "tvmpaged.choices"


def choices_of(module: Any) -> Choices:
    """Return the choices that ride on a candidate's module."""
    choices: Choices = json.loads(str(module.attrs[CHOICES_ATTRIBUTE]))
    return choices


class Encoder:
    """Choices as numbers: sizes by their logarithm, words one column per word."""

    def __init__(self, space: Space) -> None:
        self._words: dict[str, Sequence[Any]] = {
            name: values
            for name, values in space.items()
            if any(isinstance(v, str) for v in values)
        }
        self._sizes = [name for name in space if name not in self._words]

    def encode(self, choices: Choices) -> npt.NDArray[np.float32]:
        """Return one row."""
        row = [math.log2(1 + choices[name]) for name in self._sizes]
        for name, values in self._words.items():
            row += [float(choices[name] == value) for value in values]
        return np.array(row, np.float32)


@derived_object
class ChoiceFeatures(PyFeatureExtractor):  # type: ignore[misc]
    """MetaSchedule's feature extractor over an `Encoder`."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder

    def extract_from(self, context: Any, candidates: Any) -> list[Any]:
        """Return one matrix of one row per candidate."""
        del context
        rows = [self.encoder.encode(choices_of(each.sch.mod)) for each in candidates]
        return [tvm.runtime.tensor(row[None]) for row in rows]
