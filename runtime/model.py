"""A causal language model of transformers with our attention in it.

No model code lives here: transformers builds the layers, `tvmpaged.runtime.hf_attention` is what
they call for attention, and a model that asks for more than the kernels have is refused by name
before it computes anything.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tvmpaged.model_source import find_model
from tvmpaged.runtime.hf_attention import ATTENTION_NAME, Step, attention_forward
from tvmpaged.runtime.model_support import max_length, missing_features
from tvmpaged.spec import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator


def import_transformers() -> Any:
    """Import transformers.

    Raises
    ------
    ModuleNotFoundError
        Naming the extra that brings it.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ModuleNotFoundError(
            "a model needs transformers, which is not installed; run: pip install 'tvmpaged[hf]'",
            name="transformers",
        ) from None
    return transformers


def register_attention() -> None:
    """Make ``attn_implementation="tvmpaged"`` known to transformers, once or again.

    Raises
    ------
    ModuleNotFoundError
        Without transformers; the message names the extra.
    """
    import_transformers().AttentionInterface.register(ATTENTION_NAME, attention_forward)


@dataclass
class CausalModel:
    """A loaded model and what the engine has to know of it.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        With `ATTENTION_NAME` as its attention, in eval mode.
    tokenizer : transformers tokenizer or None
        None when the folder has none: prompts are then token ids.
    model_type : str
        The config's.
    dtype, device : str
        Of weights and cache.
    num_layers, num_qo_heads, num_kv_heads, head_dim : int
        As seen in a first pass, not as the config says.
    vocab_size : int
        Logits per row.
    max_length : int
        Most tokens of a sequence.
    eos_token_ids : tuple of int
        Of the generation config, or else of the config.
    """

    model: Any
    tokenizer: Any
    model_type: str
    dtype: str
    device: str
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_length: int
    eos_token_ids: tuple[int, ...]

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logits_index: torch.Tensor,
        step: Step,
    ) -> torch.Tensor:
        """Run a packed row of tokens; only the rows of `logits_index` pay for the LM head.

        Parameters
        ----------
        input_ids, position_ids : torch.Tensor
            ``[num_tokens]`` int64.
        logits_index : torch.Tensor
            ``[num_rows]`` int64, places in the packed row.
        step : Step
            Handed to every layer's attention.

        Returns
        -------
        torch.Tensor
            ``[num_rows, vocab_size]`` float32.
        """
        with torch.inference_mode():
            result = self.model(
                input_ids=input_ids[None],
                position_ids=position_ids[None],
                use_cache=False,
                logits_to_keep=logits_index,
                tvmpaged_step=step,
            )
        logits: torch.Tensor = result.logits[0].float()
        return logits


def load_model(
    model: str | os.PathLike[str],
    *,
    dtype: Any = None,
    device: str = "cpu",
    revision: str | None = None,
) -> CausalModel:
    """Load a model through transformers, with our attention.

    Parameters
    ----------
    model : str or path
        See `find_model`. ``HF_HUB_OFFLINE`` is honoured; code from a hub is never run.
    dtype : str or torch.dtype, optional
        By default the checkpoint's, and float32 for GGUF.
    device : str
        Where the weights go.
    revision : str, optional
        Of a hub id.

    Raises
    ------
    ValueError
        For a model that needs what the kernels do not have (it names the model type and the
        feature), one that cannot be read, or a dtype that is not supported.
    FileNotFoundError, ModuleNotFoundError
        See `find_model` and `import_transformers`.
    """
    from tvmpaged.runtime.model_probe import probe

    if dtype is not None:
        dtype = dtype_name(dtype)
    _check_device(device)
    transformers = import_transformers()
    source = find_model(model)
    arguments = source.arguments | ({} if revision is None else {"revision": revision})
    with _readable_errors(model):
        config = transformers.AutoConfig.from_pretrained(source.folder, **arguments)
    _refuse(config, missing_features(config))
    register_attention()
    wanted = dtype or ("float32" if source.gguf_file else "auto")
    with _readable_errors(model):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            source.folder,
            config=config,
            attn_implementation=ATTENTION_NAME,
            dtype=wanted,
            **arguments,
        )
        tokenizer = None
        if source.has_tokenizer:
            tokenizer = transformers.AutoTokenizer.from_pretrained(source.folder, **arguments)
    loaded = loaded.to(device).eval()
    shape, reasons = probe(loaded)
    _refuse(config, reasons)
    return CausalModel(
        model=loaded,
        tokenizer=tokenizer,
        model_type=config.model_type,
        dtype=dtype_name(loaded.dtype),
        device=str(loaded.device),
        max_length=max_length(config),
        eos_token_ids=_eos_token_ids(loaded),
        **shape,
    )


def _check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        allowed = "'cpu' or 'cuda'" if torch.cuda.is_available() else "'cpu' (no GPU is found)"
        raise ValueError(f"device={device!r} cannot be used; allowed: {allowed}")


def _refuse(config: Any, reasons: list[str]) -> None:
    if reasons:
        raise ValueError(
            f"model type {config.model_type!r} needs {', '.join(reasons)}: "
            "not supported by the kernels yet"
        )


@contextlib.contextmanager
def _readable_errors(model: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        if error.args == (ATTENTION_NAME,):
            # Its code looks attention up in a table of its own.
            raise ValueError(
                f"model={os.fspath(model)!r} does not call attention through transformers' "
                "AttentionInterface: not supported"
            ) from None
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"model={os.fspath(model)!r} cannot be loaded: {reason[0]}") from error


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    found = getattr(model.generation_config, "eos_token_id", None)
    if found is None:
        found = getattr(model.config.get_text_config(), "eos_token_id", None)
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list | tuple) else (int(found),)
