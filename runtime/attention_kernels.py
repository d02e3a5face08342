"""Which kernels a `PagedAttention` needs, and loading them."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np

from tvmpaged.bundle import build_command
from tvmpaged.layout import layout_of
from tvmpaged.runtime.kernel_set import Kernel, load_kernel, rank_of
from tvmpaged.runtime.place import Place
from tvmpaged.runtime.plan import PHASES
from tvmpaged.runtime.reference_kernels import reference_kernel
from tvmpaged.spec import DTYPES, LAYOUTS, MAX_GROUP_SIZE, AttentionSpec, native_family

#: Far above any model; keeps what is computed from it within 64 bits.
MAX_KV_HEADS = 2**16


def check_count(name: str, value: Any) -> int:
    """Return a positive int; refuses anything else by name."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be an int")
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1")
    return int(value)


def attention_specs(
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: Any,
    kv_dtype: Any,
    kv_layout: str | None,
) -> dict[str, AttentionSpec]:
    """Return the spec of each kernel an instance needs; refuses what none can serve.

    Kernels of a native cache are specialised, all three that know how it lies.
    """
    num_qo_heads = check_count("num_qo_heads", num_qo_heads)
    num_kv_heads = check_count("num_kv_heads", num_kv_heads)
    head_dim = check_count("head_dim", head_dim)
    block_size = check_count("block_size", block_size)
    if num_qo_heads % num_kv_heads:
        raise ValueError(
            f"num_qo_heads={num_qo_heads} is not a multiple of num_kv_heads={num_kv_heads}"
        )
    if num_kv_heads > MAX_KV_HEADS:
        raise ValueError(f"num_kv_heads={num_kv_heads} is more than {MAX_KV_HEADS}")
    if num_qo_heads // num_kv_heads > MAX_GROUP_SIZE:
        raise ValueError(
            f"num_qo_heads={num_qo_heads} is more than {MAX_GROUP_SIZE} times "
            f"num_kv_heads={num_kv_heads}"
        )
    layout = "HND" if kv_layout is None else kv_layout
    for name, allowed, given in (
        ("dtype", DTYPES, dtype),
        ("kv_dtype", DTYPES, dtype if kv_dtype is None else kv_dtype),
        ("kv_layout", LAYOUTS, layout),
    ):
        if str(given).rsplit(".", 1)[-1] not in allowed:
            raise ValueError(f"{name}={given!r} is not supported; allowed: {', '.join(allowed)}")
    sizes = (head_dim, num_qo_heads // num_kv_heads, block_size)
    decode = AttentionSpec.make("decode", dtype, *sizes, kv_dtype=kv_dtype, layout=layout)
    return {
        **(native_family(decode) if layout == "native" else _fixed_family(decode)),
        "merge": AttentionSpec.make("merge", dtype),
        "copy_blocks": AttentionSpec.make("copy_blocks", "float32"),
    }


def _fixed_family(spec: AttentionSpec) -> dict[str, AttentionSpec]:
    """Return the kernels that know how a cache lies where its spec says so."""
    append = replace(spec.generic(), kernel="append_kv")
    return {**{phase: replace(spec, kernel=phase) for phase in PHASES}, "append_kv": append}


def load_kernels(
    specs: dict[str, AttentionSpec],
    bundle: Any,
    strict: bool,
    allow_reference: bool,
    place: Place,
) -> dict[str, Kernel]:
    """Load each kernel; `strict` concerns the two that have specialised artifacts.

    The reference is no artifact at all, so `strict` is stronger than `allow_reference`; and it
    computes on the CPU alone.

    Raises
    ------
    FileNotFoundError
        When a kernel is missing, or those found do not agree on how the cache lies.
    """
    if bundle is not None and not isinstance(bundle, str | os.PathLike):
        raise TypeError(f"bundle={bundle!r} must be a path")
    path = None if bundle is None else os.fspath(bundle)
    if specs["decode"].layout == "native" and not _prefers_native(specs, path, strict, place):
        specs = specs | _fixed_family(replace(specs["decode"], layout="HND"))

    def load(name: str, spec: AttentionSpec) -> Kernel:
        try:
            return load_kernel(spec, path, strict and name in PHASES, place)
        except FileNotFoundError:
            if strict or not allow_reference or place.is_gpu:
                raise
            return reference_kernel(spec)

    kernels = {name: load(name, spec) for name, spec in specs.items()}
    _check_layouts(kernels, place)
    return kernels


def _prefers_native(
    specs: dict[str, AttentionSpec], bundle: str | None, strict: bool, place: Place
) -> bool:
    """Tell whether bundles hold all native kernels, and none for HND that goes before them."""
    native = [
        rank_of(specs[name], bundle, strict and name in PHASES, place)
        for name in (*PHASES, "append_kv")
    ]
    if None in native:
        return False
    hnd = [replace(specs[phase], layout="HND") for phase in PHASES]
    others = [rank_of(each, bundle, strict, place) for each in hnd]
    # Decode is compared first; a tie goes to native.
    return None in others or native[: len(PHASES)] <= others


def _check_layouts(kernels: dict[str, Kernel], place: Place) -> None:
    """Refuse kernels that would read a cache otherwise than it is written."""
    found = {
        name: layout_of(kernels[name].spec, kernels[name].choices)
        for name in (*PHASES, "append_kv")
    }
    if len(set(found.values())) > 1:
        lines = [
            f"  {name}: {layout} ({kernels[name].description['artifact']})"
            for name, layout in found.items()
        ]
        spec = kernels["decode"].spec
        raise FileNotFoundError(
            f"the native kernels beside {spec} do not agree on the cache's layout:\n"
            + "\n".join(lines)
            + f"\nbuild them together: {build_command(spec, place.target, True)} --replace"
        )
