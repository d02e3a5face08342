"""Serving on a GPU: which device that is, what it refuses at the door, whose stream and device."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from gpu_tools import H200_TARGET, gpu, gpus_here

from tvmpaged import PagedAttention
from tvmpaged.cpu import native_target, num_threads
from tvmpaged.planning.items import RESIDENT_THREADS, workers_on
from tvmpaged.runtime.kernel_set import NVTX_VARIABLE, load_kernel, on_gpu
from tvmpaged.runtime.place import Place, place_of
from tvmpaged.runtime.tensors import check_cache
from tvmpaged.spec import AttentionSpec

pytestmark = pytest.mark.runtime

CUDA = Place(torch.device("cuda:0"), H200_TARGET, 132)


def test_devices_of_this_machine() -> None:
    assert place_of() == place_of("cpu") == place_of(torch.device("cpu", 0))
    assert place_of() == Place(torch.device("cpu"), native_target(), num_threads())
    for device, said in (
        ("mps", "device='mps' is not supported"),
        ("gpu:0", "is none"),
        (None, "is none"),
    ):
        with pytest.raises(ValueError, match=said):
            place_of(device)


def test_a_gpu_is_named_by_its_number_or_is_torchs_current_one() -> None:
    found = [gpu(), gpu(1)]
    with (
        gpus_here(*found),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "current_device", return_value=1),
    ):
        assert place_of("cuda:0") == CUDA
        assert place_of("cuda").device == torch.device("cuda:1")
        with pytest.raises(ValueError, match="'cuda:2' is not there; allowed: cuda:0 to cuda:1"):
            place_of("cuda:2")
    with gpus_here(*found), pytest.raises(ValueError, match="finds no GPU"):
        place_of("cuda:0")  # torch here is built for CPUs


def test_a_miss_on_a_gpu_names_the_command_for_its_kind(tmp_path: Path) -> None:
    spec = AttentionSpec.make("decode", "bfloat16", 128, 4, 16)
    with pytest.raises(FileNotFoundError, match=r"package --target cuda --spec 'decode"):
        load_kernel(spec, str(tmp_path), place=CUDA)
    with (
        gpus_here(gpu()),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
    ):
        # The reference computes on the CPU alone.
        options = {"bundle": tmp_path, "device": "cuda:0", "allow_reference": True}
        (why,) = PagedAttention.supports(32, 8, 128, **options)
    assert "no artifact for spec decode" in why
    assert "cuda/sm_90/nvidia-h200" in why


def test_a_gpus_workers_are_as_many_blocks_as_have_room() -> None:
    assert workers_on(132, {"threads": 128}) == 132 * RESIDENT_THREADS // 128
    assert workers_on(132, {"threads": 2 * RESIDENT_THREADS}) == 132
    assert workers_on(7, {"lanes": 8}) == 7


@pytest.mark.parametrize(("stride", "is_whole"), [(64, True), (72, True), (68, False)])
def test_a_block_stride_that_no_vector_load_fits_is_refused_by_name(
    stride: int, is_whole: bool
) -> None:
    inner, meta = (1, 8, 8), torch.device("meta")
    cache = torch.empty_strided((3, *inner), (stride, 64, 8, 1), dtype=torch.bfloat16, device=meta)
    # As of a tensor that lies there.
    with mock.patch.object(torch.Tensor, "device", CUDA.device):
        if is_whole:
            assert check_cache("k_cache", cache, inner, torch.bfloat16, CUDA.device) is cache
        else:
            with pytest.raises(ValueError, match=r"k_cache has block stride 68 \(136 bytes\)"):
                check_cache("k_cache", cache, inner, torch.bfloat16, CUDA.device)


def test_the_stride_of_a_single_block_means_nothing() -> None:
    cache = torch.empty_strided((1, 1, 8, 8), (3, 64, 8, 1))
    assert check_cache("k_cache", cache, (1, 8, 8), torch.float32).stride() == (64, 64, 8, 1)


class Cuda:
    """What `torch.cuda` is to a loaded kernel."""

    def __init__(self, num_gpus: int) -> None:
        self.num_gpus, self.current, self.log = num_gpus, 1, list[str]()
        self.nvtx = SimpleNamespace(
            range_push=lambda name: self.log.append(f"<{name}"),
            range_pop=lambda: self.log.append(">"),
        )

    def device_count(self) -> int:
        return self.num_gpus

    def current_device(self) -> int:
        return self.current

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        yield
        self.current = index

    def kernel(self, *arguments: Any) -> None:
        self.log.append("launch")
        self.current = 0
        if arguments == ("bad",):
            raise TypeError(arguments)


def test_a_call_leaves_torchs_current_gpu_as_it_was() -> None:
    cuda = Cuda(num_gpus=2)
    on_gpu(cuda.kernel, "name", cuda)()
    assert (cuda.current, cuda.log) == (1, ["launch"])


def test_with_one_gpu_and_no_profiler_nothing_stands_before_the_kernel() -> None:
    cuda = Cuda(num_gpus=1)
    assert on_gpu(cuda.kernel, "name", cuda) == cuda.kernel


def test_a_profiler_sees_the_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NVTX_VARIABLE, "1")
    cuda = Cuda(num_gpus=1)
    call = on_gpu(cuda.kernel, "tvmpaged decode", cuda)
    call(1, 2)
    with pytest.raises(TypeError):
        call("bad")
    assert cuda.log == ["<tvmpaged decode", "launch", ">"] * 2
