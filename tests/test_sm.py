"""CUDA architectures: names, limits, and what a kernel leaves room for."""

import pytest

from tvmpaged.sm import LIMITS, Resources, SmArch, limits, occupancy, runs_on

pytestmark = pytest.mark.runtime


@pytest.mark.parametrize("text", ["sm_80", "sm_90", "sm_90a", "sm_100f", "sm_120"])
def test_names_are_read_and_written(text: str) -> None:
    arch = SmArch.parse(text)
    assert arch is not None
    assert str(arch) == text
    assert arch.number == text[3:]


@pytest.mark.parametrize("text", ["", "sm_9", "90", "sm_90b", "sm_90aa", "compute_90", "sm_90\n"])
def test_what_is_no_name(text: str) -> None:
    assert SmArch.parse(text) is None
    with pytest.raises(ValueError, match="is no sm architecture; such are sm_80"):
        limits(text)


@pytest.mark.parametrize("suffix", ["", "a", "f"])
def test_known_archs_have_their_own_limits(suffix: str) -> None:
    for (major, minor), expected in LIMITS.items():
        assert limits(f"sm_{major}{minor}{suffix}") == (expected, "")


def test_an_unknown_minor_takes_the_least_of_its_major_with_a_warning() -> None:
    found, warning = limits("sm_103")
    assert found == LIMITS[10, 0]
    assert warning == "the limits of sm_103 are not known; those of sm_100 are taken"
    found, warning = limits("sm_87")
    assert (found.shared_per_block, found.threads_per_sm, found.blocks_per_sm) == (
        99 * 1024,
        1536,
        16,
    )
    assert "sm_80, sm_86, sm_89" in warning


@pytest.mark.parametrize(
    ("code", "gpu", "runs"),
    [
        ("sm_90", "sm_90", True),
        ("sm_80", "sm_89", True),  # a lower minor of its major
        ("sm_89", "sm_80", False),
        ("sm_80", "sm_90", False),
        ("sm_90a", "sm_90", True),
        ("sm_80a", "sm_89", False),  # for exactly one
        ("sm_100f", "sm_103", True),
        ("sm_80+ptx", "sm_90", True),  # compiled by the driver
        ("sm_90+ptx", "sm_120", True),
        ("sm_90+ptx", "sm_89", False),
        ("sm_90", "gfx90a", False),
    ],
)
def test_what_runs_where(code: str, gpu: str, runs: bool) -> None:
    assert runs_on(code, gpu)[0] == runs


def test_machine_code_goes_before_what_the_driver_compiles() -> None:
    codes = ["sm_80+ptx", "sm_100", "sm_103", "sm_90+ptx"]
    near = sorted(codes, key=lambda code: runs_on(code, "sm_103")[1])
    assert near == ["sm_103", "sm_100", "sm_90+ptx", "sm_80+ptx"]


def test_an_unknown_major_is_refused() -> None:
    with pytest.raises(ValueError, match="arch='sm_75' is not supported; allowed: sm_80"):
        limits("sm_75")


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "blocks"),
    [
        (128, 32, 0, 16),  # as many threads as fit
        (128, 64, 0, 8),  # registers: 65536 / (64 x 128)
        (128, 65, 0, 7),  # given out eight at a time: 72 x 128
        (128, 32, 56 * 1024, 4),  # shared memory: 228 KiB / 57 KiB
        (32, 16, 0, 32),  # as many blocks as fit
        (1024, 255, 0, 0),  # does not fit at all
    ],
)
def test_occupancy_by_hand(threads: int, registers: int, shared: int, blocks: int) -> None:
    taken = Resources(registers, shared, spill_bytes=0, stack_bytes=0)
    assert occupancy(LIMITS[9, 0], threads, taken) == blocks * threads / 2048
