"""What users pass as prompts and params, brought into one shape and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from tvmpaged.runtime.params import SamplingParams

Params = TypeVar("Params")

#: A string, token ids, or messages.
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


def is_token_ids(prompt: object) -> bool:
    """Tell whether `prompt` is a list of token ids."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and all(hasattr(token, "__index__") for token in prompt)
    )


def is_messages(prompt: object) -> bool:
    """Tell whether `prompt` is a conversation: a list of dictionaries with a role."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and len(prompt) > 0
        and all(isinstance(message, Mapping) and "role" in message for message in prompt)
    )


def split_prompts(prompts: Any) -> list[Prompt]:
    """Return a list of prompts from one prompt or several.

    Raises
    ------
    TypeError
        When an entry is no prompt.
    """
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if isinstance(prompts, str) or is_messages(prompts):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise TypeError(
            f"prompts={prompts!r} must be a string, token ids, messages, or a list of such"
        )
    if prompts and is_token_ids(prompts):
        return [prompts]
    return [prompt.tolist() if hasattr(prompt, "tolist") else prompt for prompt in prompts]


def match_params(params: Params | Sequence[Params], count: int, kind: type[Params]) -> list[Params]:
    """Return one params object for each prompt.

    Raises
    ------
    TypeError, ValueError
        For another type, or a list of another length than the prompts.
    """
    if isinstance(params, kind):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(one, kind) for one in params):
        raise TypeError(f"params={params!r} must be {kind.__name__} or a list of them")
    if len(params) != count:
        raise ValueError(f"params has {len(params)} entries for {count} prompts; give one or all")
    return list(params)


def chat_text(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a conversation as the tokenizer's chat template prints it, ready for the answer.

    Raises
    ------
    ValueError
        Without a tokenizer or template.
    """
    if tokenizer is None:
        raise ValueError("messages need a tokenizer, and this model's folder has none")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("messages need a chat template, and this model's tokenizer has none")
    text: str = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=True
    )
    return text


def encode(tokenizer: Any, prompt: Prompt, vocab_size: int) -> tuple[str | None, list[int]]:
    """Return a prompt's text, if it has one, and its token ids.

    Raises
    ------
    TypeError, ValueError
        When it is no prompt, is empty, needs a tokenizer that is not there, or holds a token id
        that the model does not have.
    """
    text: str | None = None
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(
                f"prompt={prompt!r} needs a tokenizer, and this model's folder has none: "
                "pass token ids"
            )
        text, token_ids = prompt, list(tokenizer(prompt)["input_ids"])
    elif is_messages(prompt):
        text = chat_text(tokenizer, prompt)  # type: ignore[arg-type]
        token_ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    elif is_token_ids(prompt):
        token_ids = [token.__index__() for token in prompt]  # type: ignore[union-attr]
    else:
        raise TypeError(f"prompt={prompt!r} must be a string, a list of token ids, or messages")
    if not token_ids:
        raise ValueError(f"prompt={prompt!r} has no tokens; at least one is needed")
    check_token_ids("prompt", token_ids, vocab_size)
    return text, token_ids


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError for token ids outside the vocabulary."""
    wrong = next((token for token in token_ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ValueError(f"{name} holds token id {wrong}; allowed: 0 to {vocab_size - 1}")


def check_params(params: object, vocab_size: int) -> None:
    """Raise ValueError for params that name tokens outside the vocabulary."""
    if isinstance(params, SamplingParams):
        check_token_ids("stop_token_ids", params.stop_token_ids or (), vocab_size)
        check_token_ids("logit_bias", list(params.logit_bias or ()), vocab_size)
