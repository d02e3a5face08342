"""The kernels on AMX tiles: registers by hand, and drawn choices against the reference.

`test_kernels` runs the untuned default, which for bfloat16 is tiles where the CPU has them; here
other choices are drawn, of tiles and of vectors, over sizes that tiles do not divide.
"""

import ctypes
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm_ffi

from tvmpaged import schedules
from tvmpaged.build import build_artifact
from tvmpaged.cpu import native_target
from tvmpaged.kernels.tile_registers import NUM_REGISTERS, TileRegisters
from tvmpaged.schedules.rules import has_amx
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning.candidates import Candidates
from tvmpaged.tuning.check import check, wrong

AMX = TargetKey("cpu", "sapphirerapids")
NATIVE = native_target()
#: (kernel, head_dim, group_size, block_size, layout): tails of 16 dims, blocks that no tile fits,
#: groups beside a tile's 16 rows, one tile of dims.
SPECS = [
    ("decode", 80, 1, 16, "HND"),
    ("decode", 128, 4, 7, "HND"),
    ("decode", 64, 17, 32, "NHD"),
    ("decode", 16, 16, 1, "HND"),
    ("prefill", 64, 3, 16, "NHD"),
    ("prefill", 80, 7, 48, "HND"),
    ("prefill", 256, 71, 24, "HND"),
]


def make(kernel: str, head_dim: int, group_size: int, block_size: int, layout: str) -> Any:
    return AttentionSpec.make(kernel, "bfloat16", head_dim, group_size, block_size, layout=layout)


def draw(spec: AttentionSpec, target: TargetKey, isa: str, random: np.random.Generator) -> Any:
    default = schedules.default_choices(spec, target)
    candidates = Candidates(
        schedules.space(spec, target),
        lambda each: schedules.reject(spec, target, each),
        default,
    )
    for _ in range(1000):
        choices = candidates.draw(random)
        if choices["isa"] == isa and choices != default:
            return choices
    raise AssertionError(f"no choices with isa={isa} were drawn for {spec}")


def test_registers_of_a_decode() -> None:
    """Few rows: the second product's tiles have as many rows as the group, V shares K's."""
    choices = schedules.default_choices(make("decode", 80, 3, 16, "HND"), AMX)
    registers = TileRegisters.plan(make("decode", 80, 3, 16, "HND"), choices)
    assert registers.shapes == (
        (16, 64),  # scores
        (16, 64),  # K, and V
        (16, 64),  # q
        (16, 32),  # the last 16 dims of K
        (8, 64),  # and of q
        (3, 64),  # accumulators
        (3, 64),
        (3, 64),  # probabilities
    )
    assert (registers.v, registers.acc, registers.probs) == (1, 5, 7)


def test_registers_of_a_prefill_are_used_by_both_products() -> None:
    spec = make("prefill", 64, 3, 16, "HND")
    registers = TileRegisters.plan(spec, schedules.default_choices(spec, AMX))
    assert registers.shapes == ((16, 64),) * 7  # 2 x 2 accumulators, 1 and 2 operands
    assert (registers.score, registers.acc) == (0, 0)


def test_the_configuration_is_laid_out_as_the_manual_says() -> None:
    spec = make("decode", 80, 3, 16, "HND")
    registers = TileRegisters.plan(spec, schedules.default_choices(spec, AMX))
    data = struct.pack("<8q", *registers.configuration())
    assert (data[0], data[1]) == (1, 0)  # palette 1, from row 0
    widths = struct.unpack("<8H", data[16:32])
    assert tuple(zip(data[48:56], widths, strict=True)) == registers.shapes


@pytest.mark.parametrize("group_size", [1, 3, 4, 8, 15, 16, 17, 71, 256])
@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_every_default_fits_the_registers(kernel: str, group_size: int) -> None:
    for head_dim in (16, 48, 64, 80, 96, 112, 128, 192, 256, 512):
        spec = make(kernel, head_dim, group_size, 16, "HND")
        choices = schedules.default_choices(spec, AMX)
        assert choices["isa"] == "amx"
        assert schedules.reject(spec, AMX, choices) is None
        assert len(TileRegisters.plan(spec, choices).shapes) <= NUM_REGISTERS


@pytest.mark.parametrize(
    ("spec", "target"),
    [
        (AttentionSpec.make("decode", "float32", 64, 3, 16), AMX),
        (AttentionSpec.make("decode", "float16", 64, 3, 16), AMX),
        (AttentionSpec.make("decode", "float32", 64, 3, 16, kv_dtype="bfloat16"), AMX),
        (AttentionSpec.make("decode", "bfloat16", 72, 3, 16), AMX),
        (AttentionSpec.make("decode", "bfloat16"), AMX),
        (AttentionSpec.make("decode", "bfloat16", 64, 3, 16), TargetKey("cpu", "icelake-server")),
    ],
    ids=lambda each: str(each),
)
def test_what_tiles_cannot_do_takes_vectors(spec: AttentionSpec, target: TargetKey) -> None:
    assert schedules.default_choices(spec, target)["isa"] == "vector"
    assert schedules.space(spec, target)["isa"] == ("vector",)
    tiles = schedules.default_choices(make("decode", 64, 3, 16, "HND"), AMX)
    assert schedules.reject(spec, target, tiles) is not None


@pytest.fixture(scope="module")
def merge(tmp_path_factory: pytest.TempPathFactory) -> Any:
    spec = AttentionSpec.make("merge", "bfloat16")
    return build(spec, schedules.default_choices(spec, NATIVE), tmp_path_factory.mktemp("merge"))


def build(spec: AttentionSpec, choices: dict[str, Any], folder: Path) -> Any:
    path = folder / f"{spec.kernel}.so"
    build_artifact(spec, NATIVE, choices, path)
    return tvm_ffi.load_module(str(path)).get_function(spec.kernel)


@pytest.mark.parametrize("isa", ["amx", "vector"])
@pytest.mark.parametrize("sizes", SPECS, ids=lambda each: "-".join(map(str, each)))
def test_drawn_choices_equal_the_reference(
    merge: Any, tmp_path: Path, rng: np.random.Generator, sizes: Any, isa: str
) -> None:
    spec = make(*sizes)
    if isa == "amx" and not has_amx(spec, NATIVE):
        pytest.skip(f"{NATIVE} has no AMX: tiles cannot run here")
    choices = draw(spec, NATIVE, isa, rng)
    attention = build(spec, choices, tmp_path)
    assert wrong(check(spec, attention, merge, choices, num_workers=2)) == "", choices


def test_tiles_are_permitted_where_they_are_native() -> None:
    """Linux must have been asked before the first instruction; asking again is harmless."""
    if not has_amx(make("decode", 64, 3, 16, "HND"), NATIVE):
        pytest.skip(f"{NATIVE} has no AMX: there is nothing to permit")
    permitted = ctypes.c_uint64()
    get_permission, arch_prctl = 0x1022, 158
    libc = ctypes.CDLL(None)
    assert libc.syscall(arch_prctl, get_permission, ctypes.byref(permitted)) == 0
    assert permitted.value & (1 << 18)
