"""Ask a loaded model, once, whether packed attention gives it what it needs.

A packed row of many sequences is right for a model if each token's result follows from the token,
its position and the attention function alone. So the same tokens are run in order and in reverse,
with their positions, through an attention that goes by position: logits must agree. A model that
mixes neighbours outside attention (convolutions, recurrent states), ignores ``position_ids`` or
does not call our function is found that way, whatever its config says.
"""

from __future__ import annotations

from typing import Any

import torch

from tvmpaged.runtime.hf_attention import ATTENTION_NAME, MissingStepError
from tvmpaged.runtime.model_support import max_length

_NUM_TOKENS = 8

#: Largest ||a - b|| / ||b|| between the two orders; rounding stays far below, a fault far above.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.1}


class ProbeStep:
    """A step without a cache: plain causal attention by position, which notes what it sees."""

    def __init__(self, positions: torch.Tensor, max_seq_len: int) -> None:
        self.max_seq_len = max_seq_len
        self.shapes: dict[int, tuple[int, int, int, int]] = {}
        self._visible = positions[None, :] <= positions[:, None]

    def attend(
        self,
        layer_idx: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sm_scale: float | None,
    ) -> torch.Tensor:
        """Attend to the tokens at lower positions."""
        self.shapes[layer_idx] = (q.shape[1], k.shape[1], q.shape[2], v.shape[2])
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=self._visible[None, None], scale=sm_scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


def probe(model: Any) -> tuple[dict[str, int], list[str]]:
    """Run a few tokens through `model` and report its shape, and the reasons against it.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Loaded with ``attn_implementation="tvmpaged"``.

    Returns
    -------
    tuple of (dict, list of str)
        ``num_layers, num_qo_heads, num_kv_heads, head_dim, vocab_size``; and what the kernels lack,
        empty when the model can run.
    """
    positions = torch.arange(_NUM_TOKENS)
    reverse = positions.flip(0)
    try:
        forward, step = _logits(model, positions)
        backward, _ = _logits(model, reverse)
    except MissingStepError:
        return {}, ["an attention function without arguments of the caller (its layers drop them)"]
    except (ValueError, TypeError) as error:
        return {}, [f"what it calls attention with: {error}"]
    shapes = set(step.shapes.values())
    num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", len(step.shapes))
    if sorted(step.shapes) != list(range(num_layers)):
        calls = f"{len(step.shapes)} of {num_layers} layers call the {ATTENTION_NAME!r} function"
        return {}, [f"more than attention ({calls})"]
    if len(shapes) != 1:
        return {}, [f"layers of different shapes {sorted(shapes)}"]
    num_qo_heads, num_kv_heads, head_dim, head_dim_v = shapes.pop()
    if head_dim_v != head_dim:
        return {}, [f"K and V of different sizes ({head_dim} and {head_dim_v})"]
    difference = (backward.flip(0) - forward).norm() / forward.norm()
    if not difference <= _TOLERANCE.get(model.dtype, 0.1):
        why = "it ignores position_ids, or layers other than attention look at neighbouring tokens"
        return {}, [f"its tokens in order; packed rows change its results ({why})"]
    shape = {
        "num_layers": num_layers,
        "num_qo_heads": num_qo_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": forward.shape[-1],
    }
    return shape, []


def _logits(model: Any, positions: torch.Tensor) -> tuple[torch.Tensor, ProbeStep]:
    device = model.device
    vocab_size = model.config.get_text_config().vocab_size
    token_ids = ((positions + 1) * 7919) % vocab_size
    step = ProbeStep(positions.to(device), max_length(model.config))
    with torch.inference_mode():
        result = model(
            input_ids=token_ids[None].to(device),
            position_ids=positions[None].to(device),
            use_cache=False,
            logits_to_keep=torch.arange(len(positions), device=device),
            tvmpaged_step=step,
        )
    return result.logits[0].float(), step
