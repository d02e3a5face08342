"""What a candidate is measured on: its sequences, and what they read and compute."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tvmpaged.spec import DTYPE_BYTES, AttentionSpec

DEFAULT_NUM_KV_HEADS = 8
#: By the kind of device: sequences of a decode step, and the mean of their lengths.
DECODE_BATCH = {"cpu": 8, "cuda": 32}
DECODE_CONTEXT = {"cpu": 1024, "cuda": 4096}
#: Lengths of the sequences that are decoded alone: as many tokens as the batch on a CPU, half as
#: many on a GPU, whose queue the batch has to fill. Few heads of one sequence are few kv ranges for
#: all workers: what a batch does not see of a split length.
DECODE_ALONE = {"cpu": (512, 512, 1024, 2048, 4096), "cuda": (16384,) * 4}
#: (new tokens, all tokens) of a prefill step: a whole prompt, and a chunk over cached context.
PREFILL_SEQUENCES = {"cpu": ((512, 512), (256, 1024)), "cuda": ((4096, 4096), (1024, 8192))}


@dataclass(frozen=True)
class Workload:
    """One step of a batch, and steps of single sequences after it.

    Parameters
    ----------
    num_kv_heads : int
        K/V heads.
    q_lens, seq_lens : tuple of int
        New tokens, and all tokens, of each sequence.
    num_alone : int
        The last so many sequences are no part of the batch: each has a step of its own.
    """

    num_kv_heads: int
    q_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_alone: int = 0

    @classmethod
    def representative(
        cls, spec: AttentionSpec, num_kv_heads: int = DEFAULT_NUM_KV_HEADS, kind: str = "cpu"
    ) -> Workload:
        """Return what a spec is tuned on, on a kind of device, unless another is named.

        Decode: a batch whose lengths spread evenly from three to five quarters of their mean, so
        that neither whole blocks nor equal shares of work come for free; then single sequences.
        """
        if spec.kernel == "decode":
            batch, context = DECODE_BATCH[kind], DECODE_CONTEXT[kind]
            first, step = context * 3 // 4, context // 2 // (batch - 1)
            alone = DECODE_ALONE[kind]
            lengths = (*(first + index * step for index in range(batch)), *alone)
            return cls(num_kv_heads, (1,) * len(lengths), lengths, len(alone))
        q_lens, seq_lens = zip(*PREFILL_SEQUENCES[kind], strict=True)
        return cls(num_kv_heads, q_lens, seq_lens)

    @property
    def batches(self) -> list[list[int]]:
        """The places of the sequences of each step: the batch, then one after the other."""
        first_alone = len(self.seq_lens) - self.num_alone
        batch = [list(range(first_alone))] if first_alone else []
        return batch + [[each] for each in range(first_alone, len(self.seq_lens))]

    def kv_bytes(self, spec: AttentionSpec) -> int:
        """Bytes of K and V in the sequences: what decode has to read."""
        row = (spec.head_dim + spec.head_dim_v) * DTYPE_BYTES[spec.kv_dtype]
        return sum(self.seq_lens) * self.num_kv_heads * row

    def flops(self, spec: AttentionSpec) -> int:
        """Operations of q.K and P.V over the pairs of row and key that are visible."""
        pairs = sum(
            q * (n - q) + q * (q + 1) // 2 for q, n in zip(self.q_lens, self.seq_lens, strict=True)
        )
        heads = self.num_kv_heads * spec.group_size
        return 2 * heads * pairs * (spec.head_dim + spec.head_dim_v)

    def rate(self, spec: AttentionSpec, latency_us: float) -> tuple[str, float]:
        """Return what bounds the kernel, as (``gb_per_s`` or ``gflop_per_s``, value)."""
        name = "gb_per_s" if spec.kernel == "decode" else "gflop_per_s"
        return name, self.amount(spec) / latency_us / 1e3

    def amount(self, spec: AttentionSpec) -> int:
        """Return what bounds the kernel: bytes that a decode reads, operations of a prefill."""
        return self.kv_bytes(spec) if spec.kernel == "decode" else self.flops(spec)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Workload:
        """Read back what `as_dict` gave; searches of long ago knew batches only."""
        lengths = tuple(data["q_lens"]), tuple(data["seq_lens"])
        return cls(int(data["num_kv_heads"]), *lengths, int(data.get("num_alone", 0)))
