"""The kernels on AMX tiles: registers by hand, and drawn choices against the reference.

`test_kernels` runs the untuned default, which for bfloat16 is tiles where the CPU has them; here
other choices are drawn, of tiles and of vectors, over sizes that tiles do not divide.
"""

import ctypes
import struct
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm_ffi

from tvmpaged import schedules
from tvmpaged.build import build_artifact
from tvmpaged.cpu import native_target
from tvmpaged.kernels.tile_registers import NUM_REGISTERS, TileRegisters
from tvmpaged.schedules.cpu_rules import has_amx, has_avx512
from tvmpaged.spec import AttentionSpec, TargetKey, native_family
from tvmpaged.tuning.candidates import Candidates
from tvmpaged.tuning.check import check, wrong

AMX = TargetKey("cpu", "sapphirerapids")
NATIVE = native_target()
#: What draws choices of each instruction set that run here.
TARGETS = {
    "amx": NATIVE,
    "vector": TargetKey("cpu", "x86-64-v4") if has_avx512(NATIVE) else NATIVE,
}
#: (kernel, head_dim, group_size, block_size, layout): tails of 16 dims, blocks that no tile fits,
#: groups beside a tile's 16 rows, one tile of dims.
SPECS = [
    ("decode", 80, 1, 16, "HND"),
    ("decode", 128, 4, 7, "HND"),
    ("decode", 96, 5, 17, "NHD"),
    ("decode", 64, 3, 40, "HND"),
    ("decode", 64, 17, 32, "NHD"),
    ("decode", 16, 16, 1, "HND"),
    ("prefill", 64, 3, 16, "NHD"),
    ("prefill", 80, 7, 48, "HND"),
    ("prefill", 256, 71, 24, "HND"),
]
#: The same for caches of pairs: V's tiles whole in a block or halves of two, few rows and many.
NATIVE_SPECS = [
    ("decode", 80, 3, 48, "native"),
    ("decode", 128, 16, 16, "native"),
    ("decode", 96, 17, 32, "native"),
    ("prefill", 112, 7, 16, "native"),
    ("prefill", 64, 3, 32, "native"),
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


def test_registers_where_tiles_are_cut_from_odd_blocks() -> None:
    """K's tile and its scores have as many rows as it has keys, and V a register of its own."""
    spec = make("decode", 128, 4, 7, "HND")
    registers = TileRegisters.plan(spec, schedules.default_choices(spec, AMX))
    assert registers.shapes == (
        (7, 64),  # scores
        (7, 64),  # K
        (16, 64),  # q
        (4, 64),  # accumulators
        (4, 64),
        (4, 64),  # probabilities
        (16, 64),  # V
    )
    assert (registers.k, registers.q, registers.v) == (1, 2, 6)


def test_tiles_of_k_are_equal_parts_of_a_block_where_16_keys_do_not_fit() -> None:
    for head_dim, block_size, rows in (
        *((128, size, rows) for size, rows in ((4, 4), (7, 7), (17, 9), (24, 12), (40, 14))),
        *((128, size, 16) for size in (1, 3, 16, 48)),
        (80, 7, 16),
    ):
        spec = make("decode", head_dim, 4, block_size, "HND")
        choices = schedules.default_choices(spec, AMX)
        assert TileRegisters.key_rows(spec, choices) == rows
    prefill = make("prefill", 128, 4, 7, "HND")
    assert TileRegisters.key_rows(prefill, schedules.default_choices(prefill, AMX)) == 16


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


def test_registers_of_pairs() -> None:
    """K and V are right operands; all else has as many rows as the group."""
    spec = make("decode", 80, 3, 48, "native")
    registers = TileRegisters.plan(spec, schedules.default_choices(spec, AMX))
    assert registers.shapes == (
        (3, 64),  # scores of 2 x 16 keys; accumulators
        (3, 64),
        (3, 64),  # q
        (16, 64),  # K
        (3, 32),  # the last 16 dims of q; probabilities of 16 keys
        (8, 64),  # and of K; V, of which 16 keys make a tile
    )
    assert (registers.q, registers.k, registers.q_tail, registers.k_tail) == (2, 3, 4, 5)
    assert (registers.acc, registers.probs, registers.v) == (0, 4, 5)


@pytest.mark.parametrize("layout", ["HND", "native"])
@pytest.mark.parametrize("group_size", [1, 3, 4, 8, 15, 16, 17, 71, 256])
@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_every_default_fits_the_registers(kernel: str, group_size: int, layout: str) -> None:
    for head_dim, block_size in product(
        (16, 48, 64, 80, 96, 112, 128, 192, 256, 512), (16,) if layout == "HND" else (16, 32)
    ):
        spec = make(kernel, head_dim, group_size, block_size, layout)
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


def test_the_native_layout_follows_from_what_kernels_of_a_cache_share() -> None:
    """On AMX pairs where they fit, else HND; and nothing else may be built."""
    for target, block_size, layout in (
        (AMX, 16, "pairs"),
        (AMX, 7, "HND"),
        (TargetKey("cpu", "icelake-server"), 16, "HND"),
    ):
        decode = make("decode", 64, 3, block_size, "native")
        for spec in native_family(decode).values():
            choices = schedules.default_choices(spec, target)
            assert choices["layout"] == layout
            assert schedules.space(spec, target)["layout"] == (layout,)
            other = choices | {"layout": "HND" if layout == "pairs" else "pairs"}
            assert "is not the native one" in str(schedules.reject(spec, target, other))
    fixed = make("decode", 64, 3, 16, "HND")
    choices = schedules.default_choices(fixed, AMX)
    assert "is no choice" in str(schedules.reject(fixed, AMX, choices | {"layout": "pairs"}))
    for name, value in (("step", "rows"), ("isa", "vector"), ("weigh_keys", 64)):
        decode = make("decode", 64, 3, 16, "native")
        choices = schedules.default_choices(decode, AMX) | {name: value}
        assert schedules.reject(decode, AMX, choices) is not None


@pytest.fixture(scope="module")
def merge(tmp_path_factory: pytest.TempPathFactory) -> Any:
    spec = AttentionSpec.make("merge", "bfloat16")
    return build(spec, schedules.default_choices(spec, NATIVE), tmp_path_factory.mktemp("merge"))


def build(spec: AttentionSpec, choices: dict[str, Any], folder: Path) -> Any:
    path = folder / f"{spec.kernel}.so"
    build_artifact(spec, NATIVE, choices, path)
    return tvm_ffi.load_module(str(path)).get_function(spec.kernel)


@pytest.mark.parametrize(
    ("sizes", "isa"),
    [*product(SPECS, ("amx", "vector")), *product(NATIVE_SPECS, ("amx",))],
    ids=lambda each: each if isinstance(each, str) else "-".join(map(str, each)),
)
def test_drawn_choices_equal_the_reference(
    merge: Any, tmp_path: Path, rng: np.random.Generator, sizes: Any, isa: str
) -> None:
    spec = make(*sizes)
    if isa == "amx" and not has_amx(spec, NATIVE):
        pytest.skip(f"{NATIVE} has no AMX: tiles cannot run here")
    choices = draw(spec, TARGETS[isa], isa, rng)
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
