"""GPU programs, executed without a GPU: as OpenCL on the CPU (PoCL), barriers and all.

The programs, choices, plans and host wrappers are those of a CUDA artifact; only the code generator
is another one, and what a warp's threads do together goes through local memory: shuffles, and the
instructions that tensor cores need (`tvmpaged.kernels.cuda.warp_loops`). So this proves indices,
barriers and local memory; it proves neither those instructions nor anything about time.

The host wrapper is the one that TVM makes for a device: it checks the tensors and calls the kernel
by its name with pointers, sizes and the launch's extents. Here that name is a Python function.
"""

import ctypes
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pyopencl as cl
import pytest
import torch
import tvm
import tvm_ffi
from torch.utils.dlpack import from_dlpack

from tvmpaged import PagedAttention, build, schedules
from tvmpaged.runtime import attention as runtime
from tvmpaged.runtime.kernel_set import Kernel
from tvmpaged.runtime.plan import PHASES
from tvmpaged.schedules import cuda_choices
from tvmpaged.spec import ATTENTION_KERNELS, RUN_TIME, AttentionSpec, TargetKey

TARGET = TargetKey("cuda", "sm_90", "nvidia-h200")
OPENCL = 4  # DLPack's number of the device type
Choices = dict[str, Any]


class Built:
    """One spec under one choice list, as an OpenCL program that takes torch tensors.

    Parameters
    ----------
    spec : AttentionSpec
        Of float32 or bfloat16: PoCL 3.0 has no half.
    changes : dict
        Choices that differ from the untuned default of the CUDA target; of another ``isa``, from
        the untuned list with that.
    edit : callable, optional
        Changes the OpenCL source: faults are planted with it.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        changes: Choices | None = None,
        edit: Callable[[str], str] = lambda source: source,
    ) -> None:
        self.spec = spec
        self.choices = _start(spec, (changes or {}).get("isa"))
        if "fold" in self.choices:
            self.choices["fold"] = "shared"
        self.choices |= changes or {}
        module = build.build_module(spec, TARGET, self.choices)
        self._host, self._device, source = _compile(module, self.choices.get("isa") == "mma")
        queue = _queue()
        # Optimized by PoCL 3.0, the first thread of a tensor-core program reads what is not there
        # yet where a loop begins with a barrier (one more before the loop mends it), and threads
        # that wait at barriers only from a later turn of a loop on (`stage_vectors`) get wrong
        # numbers, though none reads what another wrote. To optimize a tensor-core program also
        # takes longer than to run it as it is; with others it is the reverse.
        waits_late = self.choices.get("stages", 1) > 1
        as_it_is = waits_late or self.choices.get("isa") == "mma"
        options = ["-cl-opt-disable"] if as_it_is else []
        program = cl.Program(queue.context, edit(source)).build(options)
        self._kernel = cl.Kernel(program, f"{spec.kernel}_kernel")
        self._memory: dict[int, torch.Tensor] = {}

    def __call__(self, *arguments: Any) -> None:
        """Run the host wrapper, which launches the kernel."""
        # What a plan passes was converted for kernels of the CPU.
        arguments = tuple(from_dlpack(x) if isinstance(x, tvm_ffi.Tensor) else x for x in arguments)
        self._memory = {t.data_ptr(): t for t in arguments if isinstance(t, torch.Tensor)}
        name = f"{self.spec.kernel}_kernel"
        # The wrapper keeps what it finds under the name at its first call.
        tvm_ffi.register_global_func(name, self._launch, override=True)
        tensors = [_as_opencl(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        self._host[self.spec.kernel](*tensors)

    def _launch(self, *arguments: Any) -> None:
        queue = _queue()
        kernel = self._kernel
        tags = [str(tag) for tag in self._device.attrs["tirx.kernel_launch_params"]]
        values, extents = (
            arguments[: -len(tags)],
            dict(zip(tags, arguments[-len(tags) :], strict=True)),
        )
        held = []  # pyopencl does not keep what it is given
        for index, (parameter, value) in enumerate(zip(self._device.params, values, strict=True)):
            if isinstance(value, ctypes.c_void_p):
                assert value.value is not None
                held.append(_memory(self._memory[value.value]))
                kernel.set_arg(index, held[-1])
            else:
                kernel.set_arg(index, np.dtype(str(parameter.ty)).type(value))
        local = [extents.get(f"threadIdx.{axis}", 1) for axis in "xyz"]
        groups = [extents.get(f"blockIdx.{axis}", 1) for axis in "xyz"]
        cl.enqueue_nd_range_kernel(
            queue, kernel, [g * n for g, n in zip(groups, local, strict=True)], local
        )
        queue.finish()


def _start(spec: AttentionSpec, isa: str | None) -> Choices:
    """Return the choices of CUDA's untuned default, or of the untuned list with an isa."""
    lists = {"simt": cuda_choices.simt_choices, "mma": cuda_choices.mma_choices}
    return lists[isa](spec) if isa else schedules.default_choices(spec, TARGET)


@cache
def _queue() -> cl.CommandQueue:
    (platform,) = (each for each in cl.get_platforms() if "Portable" in each.name)
    return cl.CommandQueue(cl.Context(platform.get_devices()))


def _compile(module: tvm.IRModule, has_fragments: bool) -> tuple[Any, Any, str]:
    """Return the host wrapper, the device function and its OpenCL source.

    Fragments are registers on a GPU. Written out they lie in local memory, and TVM, which would let
    arrays share it as if all threads were as far as each other, is kept from that.
    """
    generate, found = tvm.get_global_func("target.build.opencl"), []

    def keep(device: tvm.IRModule, target: tvm.target.Target) -> Any:
        found.append(device)
        return generate(device, target)

    tvm_ffi.register_global_func("target.build.opencl", keep, override=True)
    try:
        target = tvm.target.Target({"kind": "opencl"}, host={"kind": "llvm"})
        with tvm.transform.PassContext(
            disabled_pass=build.GPU_PASSES_OFF,
            config={"tirx.disable_storage_rewrite": has_fragments},
        ):
            host = tvm.compile(module, target=target).mod
    finally:
        tvm_ffi.register_global_func("target.build.opencl", generate, override=True)
    (device,) = found
    (function,) = device.functions.values()
    source = _hoist(host.imports[0].inspect_source())
    host.clear_imports()  # TVM has no OpenCL runtime; the name is looked up among Python's instead
    tvm_ffi.register_global_func("__tvm_set_device", lambda *_: None, override=True)
    return host, function, source


def _hoist(source: str) -> str:
    """Declare local memory where OpenCL wants it, at a kernel's beginning."""
    declared = re.compile(r"^ *__local \w+ \w+\[\d+\];\n", re.MULTILINE)
    found = "".join(declared.findall(source))
    return re.sub(r"__kernel [^{;]*\{\n", lambda k: k[0] + found, declared.sub("", source))


def _memory(tensor: torch.Tensor) -> cl.SVM:
    """Return the tensor's own memory, from its first element to its last; PoCL shares ours."""
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    elements = sum((extent - 1) * stride for extent, stride in extents) + 1
    size = max(1, elements) * tensor.element_size()
    memory = (ctypes.c_char * size).from_address(tensor.data_ptr())
    return cl.SVM(np.frombuffer(memory, np.uint8))


class _Device(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int))


def _as_opencl(tensor: torch.Tensor) -> Any:
    """Return a tensor of the host as one that says it is on an OpenCL device."""
    capsule = tensor.detach().__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    _Device.from_address(pointer(capsule, b"dltensor")).device_type = OPENCL

    class Exporter:
        def __dlpack__(self, **_: Any) -> Any:
            return capsule

        def __dlpack_device__(self) -> tuple[int, int]:
            return OPENCL, 0

    return tvm_ffi.from_dlpack(Exporter())


def warp_attention(
    group_size: int,
    head_dim: int,
    block_size: int,
    *,
    layout: str = "HND",
    at_run_time: bool = False,
    prefill: Choices | None = None,
    decode: Choices | None = None,
    **more: Any,
) -> PagedAttention:
    """Return a `PagedAttention` of bfloat16 whose kernels multiply as tensor cores do.

    Parameters
    ----------
    group_size, head_dim, block_size, layout, more
        As of `gpu_attention`.
    at_run_time : bool
        Take programs to which block and group size are arguments: one for all of them.
    prefill, decode : dict, optional
        Choices that differ from `cuda_choices.mma_choices`.
    """
    built = {}
    for kernel, each in (("prefill", prefill), ("decode", decode)):
        spec = AttentionSpec.make(
            kernel, "bfloat16", head_dim, group_size, block_size, layout=layout
        )
        if at_run_time:
            spec = replace(spec, group_size=RUN_TIME, block_size=RUN_TIME)
        changes = {"isa": "mma"} | (each or {})
        built[kernel] = _built(spec, tuple(changes.items()))
    return gpu_attention(
        group_size,
        head_dim,
        block_size,
        "bfloat16",
        layout=layout,
        built=built,
        generic=True,
        **more,
    )


@cache
def _built(spec: AttentionSpec, changes: tuple[tuple[str, Any], ...]) -> Built:
    return Built(spec, dict(changes))


def gpu_kernel(spec: AttentionSpec, **changes: Any) -> Kernel:
    """Return the kernel of a spec under the untuned default but for some choices.

    Built once; a test that needs half precision is skipped.
    """
    if "float16" in (spec.q_dtype, spec.kv_dtype, spec.out_dtype):
        pytest.skip("PoCL 3.0 has no half precision")
    return _kernel(_built(spec, tuple(changes.items())))


def _kernel(found: Built) -> Kernel:
    description = {"kind": "default", "sha256": str(found.spec)}
    return Kernel(found, found.spec, found.choices, description)


def gpu_attention(
    group_size: int,
    head_dim: int,
    block_size: int,
    dtype: str = "float32",
    *,
    num_kv_heads: int | None = None,
    layout: str = "HND",
    kv_dtype: str | None = None,
    num_workers: int = 5,
    generic: bool = False,
    built: dict[str, Built] | None = None,
    **changes: Any,
) -> PagedAttention:
    """Return a `PagedAttention` whose kernels are the GPU's, on OpenCL.

    Parameters
    ----------
    group_size, head_dim, block_size, dtype, num_kv_heads, layout, kv_dtype
        As of `PagedAttention`.
    num_workers : int
        Thread blocks of an attention kernel.
    generic : bool
        Take the programs whose sizes are known at run time.
    built : dict
        Kernels to take instead of those that would be built.
    changes
        Choices of the attention kernels that differ from the untuned default.
    """

    def load(specs: dict[str, AttentionSpec], *_: Any) -> dict[str, Kernel]:
        kernels = {}
        for name, spec in specs.items():
            wanted = spec.generic() if generic else spec
            more = changes if name in ATTENTION_KERNELS else {}
            found = (built or {}).get(name)
            kernel = _kernel(found) if found else gpu_kernel(wanted, **more)
            kernels[name] = replace(kernel, spec=spec)
        return kernels

    with mock.patch.object(runtime, "load_kernels", load):
        heads = num_kv_heads or (1 if group_size > 16 else 2)
        attn = PagedAttention(
            heads * group_size, heads, head_dim, block_size, dtype, kv_dtype, layout
        )
    attn._num_workers = dict.fromkeys(PHASES, num_workers)
    return attn
