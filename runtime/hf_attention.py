"""The attention function that transformers' models call, and the step that it works on.

transformers hands such a function one layer's rotated queries and keys as ``[1, heads, num_tokens,
head_dim]`` and passes on every keyword of the model's call, so the step travels as the keyword
``tvmpaged_step``. The name has no entry in transformers' mask interface: no mask is built, which is
what a packed row of many sequences wants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from tvmpaged.runtime.attention import PagedAttention
    from tvmpaged.runtime.plan import Plan

#: The ``attn_implementation`` of `from_pretrained`.
ATTENTION_NAME = "tvmpaged"

#: Keyword -> what a model asks for with it, when it is not None.
NOT_SUPPORTED = {
    "s_aux": "attention sinks",
    "softcap": "an attention soft cap",
    "position_bias": "a position bias",
    "head_mask": "a head mask",
    "attention_bias": "an attention bias",
    "indices": "sparse attention",
}

#: Keywords that change nothing about attention.
_HARMLESS = frozenset(
    "position_ids position_embeddings use_cache cache_position past_key_values labels "
    "output_attentions output_hidden_states output_router_logits return_dict logits_to_keep "
    "inputs_embeds layer_idx attn_implementation token_type_ids".split()
)


class MissingStepError(ValueError):
    """The attention function was called without a step."""


class Step(Protocol):
    """What the attention function needs of a step."""

    max_seq_len: int

    def attend(
        self,
        layer_idx: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sm_scale: float | None,
    ) -> torch.Tensor:
        """Return one layer's ``out`` for ``q``, ``k``, ``v`` ``[num_tokens, heads, head_dim]``."""


@dataclass
class PagedStep:
    """One step over the paged cache, shared by all layers.

    Parameters
    ----------
    attention : PagedAttention
        The kernels.
    plan : Plan
        The step's work list.
    k_caches, v_caches : sequence of torch.Tensor
        One per layer.
    max_seq_len : int
        The longest of the step's ``seq_lens``.
    """

    attention: PagedAttention
    plan: Plan
    k_caches: Sequence[torch.Tensor]
    v_caches: Sequence[torch.Tensor]
    max_seq_len: int

    def attend(
        self,
        layer_idx: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sm_scale: float | None,
    ) -> torch.Tensor:
        """Write the layer's new K/V, then attend to all that each token sees."""
        k_cache, v_cache = self.k_caches[layer_idx], self.v_caches[layer_idx]
        self.attention.append_kv(k, v, k_cache, v_cache, self.plan.slot_mapping)
        out: torch.Tensor = self.attention.run(self.plan, q, k_cache, v_cache, sm_scale=sm_scale)
        return out


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    tvmpaged_step: Step | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Run one layer's attention for a packed row of tokens (transformers' calling convention).

    Parameters
    ----------
    module : torch.nn.Module
        The model's attention layer; its ``layer_idx`` chooses the cache.
    query, key, value : torch.Tensor
        ``[1, heads, num_tokens, head_dim]``, any strides.
    attention_mask : None
        Anything else is refused.
    scaling : float, optional
        ``sm_scale``.
    dropout : float
        Must be 0.
    tvmpaged_step : Step
        Handed to the model's call as a keyword.

    Returns
    -------
    tuple of (torch.Tensor, None)
        ``[1, num_tokens, heads, head_dim]``.

    Raises
    ------
    ValueError
        For what the kernels do not have, by name, and for a row that is not packed.
    """
    if tvmpaged_step is None:
        raise MissingStepError(
            f"attn_implementation={ATTENTION_NAME!r} works on a step: pass tvmpaged_step= to the "
            "model's call (generate() does not; use tvmpaged.Engine)"
        )
    if query.shape[0] != 1:
        raise ValueError(f"query has shape {list(query.shape)}; allowed: one packed row")
    reasons = reasons_against(module, attention_mask, dropout, kwargs, tvmpaged_step.max_seq_len)
    if reasons:
        raise ValueError(f"{type(module).__name__} needs {', '.join(reasons)}")
    out = tvmpaged_step.attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling,
    )
    return out.unsqueeze(0), None


def reasons_against(
    module: Any,
    attention_mask: torch.Tensor | None,
    dropout: float,
    kwargs: Mapping[str, Any],
    max_seq_len: int,
) -> list[str]:
    """Return what a layer's call asks for that the kernels do not have; empty when they do."""
    reasons = []
    if attention_mask is not None:
        reasons.append("an attention mask")
    if dropout:
        reasons.append("attention dropout (call eval() on the model)")
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        reasons.append("attention that is not causal")
    if getattr(module, "is_cross_attention", False):
        reasons.append("cross attention")
    for name, value in kwargs.items():
        if value is None or value is False or name in _HARMLESS or name == "is_causal":
            continue
        if name == "sliding_window":
            if value < max_seq_len:
                reasons.append(f"a sliding window of {value} tokens")
        else:
            reasons.append(NOT_SUPPORTED.get(name, f"the unknown attention argument {name}="))
    return reasons
