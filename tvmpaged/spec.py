"""What is computed and for what machine: ``AttentionSpec`` and ``TargetKey``.

Both are frozen, and ``str()`` and ``parse()`` round-trip. That string is the folder name in
``tuning_logs/``, the key in a bundle's manifest, the MLflow parameter and the test id, so there is
exactly one spelling of each case.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

KERNELS = ("decode", "prefill", "merge", "append_kv", "copy_blocks")
ATTENTION_KERNELS = ("decode", "prefill")
DTYPES = ("float32", "float16", "bfloat16")
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
LAYOUTS = ("HND", "NHD", "native")
MAX_BLOCK_SIZE = 256
MAX_GROUP_SIZE = 256
MAX_HEAD_DIM = 512

#: A size that is an argument of the kernel instead of a constant in it (spelt "any").
RUN_TIME = 0

#: Numerics ids fix what decides the bits besides the choices. "n1": scores and sums in float32;
#: probabilities from a degree-6 polynomial for 2**x (kernels/exp2.py), on a GPU from its
#: instruction; partials of one sequence merged left to right by their log-sum-exp.
NUMERICS = ("n1",)


def dtype_name(value: Any) -> str:
    """Return the dtype's name: ``"float32"``, ``"float16"`` or ``"bfloat16"``.

    Parameters
    ----------
    value : str or torch.dtype or numpy.dtype
        Anything whose text ends in the dtype's name.

    Raises
    ------
    ValueError
        When it is none of the three.
    """
    name = value if isinstance(value, str) else str(value).rsplit(".", 1)[-1]
    if name not in DTYPES:
        raise ValueError(f"dtype={value!r} is not supported; allowed: {', '.join(DTYPES)}")
    return name


def _check_size(name: str, value: int, allowed: Callable[[int], bool], what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be an int")
    if value != RUN_TIME and not allowed(value):
        raise ValueError(f"{name}={value} is not supported; allowed: {what}")


def _head_dim_allowed(value: int) -> bool:
    return value % 8 == 0 and (0 < value <= 256 or value == MAX_HEAD_DIM)


@dataclass(frozen=True, order=True)
class AttentionSpec:
    """One case of one kernel; everything that changes its code and is not a choice.

    The number of kv heads, the batch, the number of blocks and all lengths stay symbolic.

    Parameters
    ----------
    kernel : str
        ``decode`` (one new token per sequence), ``prefill`` (any number), ``merge``, ``append_kv``
        or ``copy_blocks``.
    q_dtype, kv_dtype, out_dtype : str
        ``float32``, ``float16`` or ``bfloat16``.
    head_dim, head_dim_v : int
        Sizes of K and V rows; 0 means at run time.
    block_size : int
        Tokens per block; 0 means at run time.
    group_size : int
        Query heads per kv head; 0 means at run time.
    layout : str
        ``HND``, ``NHD`` or ``native``.
    variants : tuple of str
        Flags such as a sliding window; none exist yet.
    numerics : str
        See `NUMERICS`.

    Raises
    ------
    ValueError, TypeError
        Naming the field, its value and what is allowed.
    """

    kernel: str
    q_dtype: str
    kv_dtype: str
    out_dtype: str
    head_dim: int
    head_dim_v: int
    block_size: int
    group_size: int
    layout: str = "HND"
    variants: tuple[str, ...] = ()
    numerics: str = "n1"

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("kernel", self.kernel, KERNELS),
            ("q_dtype", self.q_dtype, DTYPES),
            ("kv_dtype", self.kv_dtype, DTYPES),
            ("out_dtype", self.out_dtype, DTYPES),
            ("layout", self.layout, LAYOUTS),
            ("numerics", self.numerics, NUMERICS),
        ):
            if value not in allowed:
                raise ValueError(
                    f"{name}={value!r} is not supported; allowed: {', '.join(allowed)}"
                )
        if self.variants:
            raise ValueError(f"variants={self.variants!r} is not supported; none exist yet")
        dims = f"multiples of 8 up to 256, and {MAX_HEAD_DIM}"
        for name in ("head_dim", "head_dim_v"):
            _check_size(name, getattr(self, name), _head_dim_allowed, dims)
        for name, most in (("block_size", MAX_BLOCK_SIZE), ("group_size", MAX_GROUP_SIZE)):
            _check_size(name, getattr(self, name), range(1, most + 1).__contains__, f"1..{most}")

    @classmethod
    def make(
        cls,
        kernel: str,
        dtype: Any,
        head_dim: int = RUN_TIME,
        group_size: int = RUN_TIME,
        block_size: int = RUN_TIME,
        *,
        kv_dtype: Any = None,
        head_dim_v: int | None = None,
        layout: str = "HND",
    ) -> AttentionSpec:
        """Spell a spec with the usual defaults: one dtype for q, K/V and out, equal head sizes."""
        name = dtype_name(dtype)
        return cls(
            kernel=kernel,
            q_dtype=name,
            kv_dtype=name if kv_dtype is None else dtype_name(kv_dtype),
            out_dtype=name,
            head_dim=head_dim,
            head_dim_v=head_dim if head_dim_v is None else head_dim_v,
            block_size=block_size,
            group_size=group_size,
            layout=layout,
        )

    @property
    def is_generic(self) -> bool:
        """True when head_dim, block and group size are arguments of the kernel."""
        return RUN_TIME in (self.head_dim, self.block_size, self.group_size)

    def generic(self) -> AttentionSpec:
        """Return the spec of the artifact that stands behind this one: all sizes at run time."""
        return replace(
            self,
            head_dim=RUN_TIME,
            head_dim_v=RUN_TIME,
            block_size=RUN_TIME,
            group_size=RUN_TIME,
        )

    def __str__(self) -> str:
        def size(value: int) -> str:
            return "any" if value == RUN_TIME else str(value)

        parts = [
            self.kernel,
            f"q.{self.q_dtype}",
            f"kv.{self.kv_dtype}",
            f"o.{self.out_dtype}",
            f"d{size(self.head_dim)}",
            f"v{size(self.head_dim_v)}",
            f"b{size(self.block_size)}",
            f"g{size(self.group_size)}",
            self.layout,
            *self.variants,
            self.numerics,
        ]
        return "-".join(parts)

    @classmethod
    def parse(cls, text: str) -> AttentionSpec:
        """Read back what `str()` wrote.

        Raises
        ------
        ValueError
            When the text is no spec; the message shows a correct one.
        """
        match = _SPEC.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"spec={text!r} cannot be read; a correct one: "
                "'decode-q.float32-kv.float32-o.float32-d64-v64-b16-g3-HND-n1'"
            )
        fields = match.groupdict()

        def size(name: str) -> int:
            return RUN_TIME if fields[name] == "any" else int(fields[name])

        return cls(
            kernel=fields["kernel"],
            q_dtype=fields["q"],
            kv_dtype=fields["kv"],
            out_dtype=fields["o"],
            head_dim=size("head_dim"),
            head_dim_v=size("head_dim_v"),
            block_size=size("block_size"),
            group_size=size("group_size"),
            layout=fields["layout"],
            numerics=fields["numerics"],
        )


def native_family(spec: AttentionSpec) -> dict[str, AttentionSpec]:
    """Return, by kernel, the specs that share a native cache: all that know how it lies.

    They are built together, because each is of no use without the others.
    """
    return {name: replace(spec, kernel=name) for name in (*ATTENTION_KERNELS, "append_kv")}


_SIZE = r"any|[1-9]\d*"
_SPEC = re.compile(
    r"(?P<kernel>\w+)-q\.(?P<q>\w+)-kv\.(?P<kv>\w+)-o\.(?P<o>\w+)"
    rf"-d(?P<head_dim>{_SIZE})-v(?P<head_dim_v>{_SIZE})-b(?P<block_size>{_SIZE})"
    rf"-g(?P<group_size>{_SIZE})-(?P<layout>\w+)-(?P<numerics>n\d+)",
    re.ASCII,
)

_TARGET_PART = re.compile(r"[a-z0-9][a-z0-9._+-]*")


@dataclass(frozen=True, order=True)
class TargetKey:
    """What code is built for: ``cpu/<microarchitecture>`` or ``cuda/<sm arch>/<gpu>``.

    Parameters
    ----------
    kind : str
        ``cpu`` or ``cuda``.
    arch : str
        An LLVM CPU name (``sapphirerapids``, ``x86-64-v3``) or an sm arch (``sm_90``).
    device : str
        For CUDA the driver's device name in lower case, blanks as hyphens; empty for CPU.

    Raises
    ------
    ValueError
        When a part is missing, not allowed for the kind, or could leave a folder.
    """

    kind: str
    arch: str
    device: str = ""

    def __post_init__(self) -> None:
        wanted = 'cpu/<microarchitecture> or cuda/<sm arch>/<gpu>, such as "cpu/x86-64-v3"'
        if self.kind not in ("cpu", "cuda"):
            raise ValueError(f"target kind {self.kind!r} is not supported; write {wanted}")
        parts = [self.arch, self.device] if self.kind == "cuda" else [self.arch]
        if (self.kind == "cpu" and self.device) or not all(map(_TARGET_PART.fullmatch, parts)):
            raise ValueError(f"target {str(self)!r} cannot be read; write {wanted}")

    def __str__(self) -> str:
        return "/".join(part for part in (self.kind, self.arch, self.device) if part)

    @classmethod
    def parse(cls, text: str) -> TargetKey:
        """Read back what `str()` wrote (``native`` and ``cuda`` are resolved by the caller)."""
        parts = text.strip().split("/")
        if not 2 <= len(parts) <= 3:
            raise ValueError(
                f"target={text!r} cannot be read; write cpu/<microarchitecture> or "
                'cuda/<sm arch>/<gpu>, such as "cpu/x86-64-v3", or "native"'
            )
        return cls(*parts)
