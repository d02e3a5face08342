"""Which models the kernels can run, told from the config alone, before weights are read.

`tvmpaged.runtime.model_probe` asks the loaded model itself afterwards, so a feature that no field
here names is found all the same.
"""

from __future__ import annotations

from typing import Any

_ALIBI_TYPES = ("bloom", "mpt")
_STATE_FIELDS = (
    "ssm_cfg",
    "ssm_state_size",
    "mamba_d_state",
    "mamba_expand",
    "layers_block_type",
    "linear_num_value_heads",
    "conv_L_cache",
    "attention_hidden_size",  # RWKV
)
_SINK_TYPES = ("gpt_oss",)
_DYNAMIC_ROPE = ("dynamic",)


def missing_features(config: Any) -> list[str]:
    """Return what a model needs and the kernels lack, in words; empty when they can run it.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        The model's.
    """
    text = config.get_text_config()
    found = [*_attention_kind(config, text), *_window(text)]
    if getattr(text, "kv_lora_rank", None):
        found.append(f"multi-head latent attention (kv_lora_rank={text.kv_lora_rank})")
    if getattr(text, "attn_logit_softcapping", None):
        found.append(
            f"an attention soft cap (attn_logit_softcapping={text.attn_logit_softcapping})"
        )
    if text.model_type in _SINK_TYPES:
        found.append("attention sinks")
    if text.model_type in _ALIBI_TYPES or getattr(text, "alibi", False):
        found.append("ALiBi")
    head_dim = _head_dim(text)
    if head_dim is not None and not (head_dim % 8 == 0 and (head_dim <= 256 or head_dim == 512)):
        found.append(f"head_dim={head_dim} (allowed: multiples of 8 up to 256, and 512)")
    dynamic = [rope for rope in _rope_types(text) if rope in _DYNAMIC_ROPE]
    if dynamic:
        found.append(f"rotary positions that depend on the batch (rope_type={dynamic[0]!r})")
    return list(dict.fromkeys(found))


def max_length(config: Any) -> int:
    """Return the most tokens that a sequence of this model may have.

    For longrope that is the length up to which positions do not depend on the other sequences.
    """
    text = config.get_text_config()
    limits = [
        value
        for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
        if isinstance(value := getattr(text, name, None), int) and value > 0
    ]
    limit: int = limits[0] if limits else 2**20
    if "longrope" in _rope_types(text):
        parameters = getattr(text, "rope_parameters", None) or {}
        original = parameters.get("original_max_position_embeddings")
        original = original or getattr(text, "original_max_position_embeddings", None)
        limit = min(limit, int(original)) if original else limit
    return limit


def _attention_kind(config: Any, text: Any) -> list[str]:
    found = []
    if getattr(config, "is_encoder_decoder", False):
        found.append("cross attention (an encoder and a decoder)")
    elif getattr(text, "add_cross_attention", False):
        found.append("cross attention")
    if getattr(text, "is_causal", True) is False:
        found.append("attention that is not causal")
    fields = [name for name in _STATE_FIELDS if getattr(text, name, None) is not None]
    if fields:
        found.append(f"layers that are no attention, such as state-space layers ({fields[0]})")
    return found


def _window(text: Any) -> list[str]:
    kinds = set(getattr(text, "layer_types", None) or ())
    window = getattr(text, "sliding_window", None)
    if getattr(text, "use_sliding_window", None) is False:
        window = None
    found = []
    # A window that no position can leave is none.
    short = window is None or window < max_length(text)
    windowed = "sliding_attention" in kinds if kinds else window is not None
    if windowed and short:
        found.append(f"a sliding window (sliding_window={window})")
    others = sorted(kinds - {"full_attention", "sliding_attention"})
    if others:
        found.append(f"layers of type {', '.join(others)}")
    return found


def _head_dim(text: Any) -> int | None:
    head_dim = getattr(text, "head_dim", None)
    if isinstance(head_dim, int):
        return head_dim
    hidden, heads = getattr(text, "hidden_size", None), getattr(text, "num_attention_heads", None)
    if isinstance(hidden, int) and isinstance(heads, int) and heads:
        return hidden // heads
    return None


def _rope_types(text: Any) -> list[str]:
    """Return the rope types; the parameters may be one dictionary or one per layer type."""
    parameters = getattr(text, "rope_parameters", None) or {}
    if not isinstance(parameters, dict):
        return []
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return [str(one["rope_type"]) for one in (parameters, *nested) if "rope_type" in one]
