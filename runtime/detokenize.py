"""Token ids to text while they come, and where stop strings cut it."""

from __future__ import annotations

from typing import Protocol

#: What a tokenizer prints for bytes that are no whole character yet.
_INCOMPLETE = "\ufffd"

#: A character has at most four bytes; the last of their tokens completes it.
_MOST_TOKENS_OF_A_CHARACTER = 3

#: Prompt tokens decoded with the first output tokens, which may depend on what is before them.
_CONTEXT_TOKENS = 5


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool = ...,
        clean_up_tokenization_spaces: bool = ...,
    ) -> str:
        """Return the tokens' text."""


def output_text(
    tokenizer: Tokenizer | None,
    prompt_token_ids: list[int],
    token_ids: list[int],
    skip_special_tokens: bool = True,
) -> str:
    """Return the text of a whole output, as `Detokenizer` would print it token by token."""
    detokenizer = Detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)
    detokenizer.extend(token_ids)
    detokenizer.flush()
    return detokenizer.text


class Detokenizer:
    """The text of one sequence, grown token by token.

    Parameters
    ----------
    tokenizer : Tokenizer or None
        None: no text.
    prompt_token_ids : list of int
        The prompt; a tokenizer may print an output's first token by what is before it.
    stop : tuple of str
        Strings that end the output.
    include_stop : bool
        Keep the stop string.
    skip_special_tokens : bool
        Leave special tokens out.

    Attributes
    ----------
    text : str
        Everything decoded so far, cut at the stop string once it has come. Without stop strings
        nothing is decoded until it is read.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_token_ids: list[int],
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._held_back = 0 if include_stop else max(map(len, stop), default=1) - 1
        self._window = prompt_token_ids[-_CONTEXT_TOKENS:]
        self._num_printed = len(self._window)
        self._text = ""

    def fork(self) -> Detokenizer:
        """Return an independent copy that goes on from here."""
        child = Detokenizer.__new__(Detokenizer)
        child.__dict__.update(self.__dict__)
        child._window = self._window.copy()
        return child

    def add(self, token_id: int, check_stop: bool = True) -> str | None:
        """Take one token and return the stop string that it completed, if any.

        With several, the one that starts first counts, and of those the longest.
        """
        if self._tokenizer is None:
            return None
        self._window.append(token_id)
        return self._advance(check_stop) if self._stop else None

    def extend(self, token_ids: list[int]) -> None:
        """Take many tokens at once, without looking for stop strings."""
        self._window += token_ids
        self._advance(check_stop=False)

    def flush(self) -> None:
        """Print what waits for bytes that will not come."""
        self._advance(check_stop=False, whole=False)

    @property
    def text(self) -> str:
        """Return everything decoded so far."""
        if not self._stop:
            self._advance(check_stop=False)
        return self._text

    def streamed_text(self) -> str:
        """Return the text without an end that a stop string may still cut off."""
        return self.text[: -self._held_back] if self._held_back else self.text

    def _advance(self, check_stop: bool, whole: bool = True) -> str | None:
        """Print the tokens that wait, as long as they make `whole` characters."""
        if self._tokenizer is None:
            return None
        for end in range(len(self._window), self._num_printed, -1):
            text = self._decode(self._window[:end])
            if not (whole and text.endswith(_INCOMPLETE)):
                return self._print(text, end, check_stop)
            if end == len(self._window) - _MOST_TOKENS_OF_A_CHARACTER:
                break
        return None

    def _print(self, text: str, end: int, check_stop: bool) -> str | None:
        """Print what `text`, of the window's tokens before `end`, adds."""
        before = self._decode(self._window[: self._num_printed])
        # A prompt may end inside a character; the output then starts with all of it.
        splits = not text.startswith(before)
        new = text[len(before.rstrip(_INCOMPLETE) if splits else before) :]
        if not new:
            return None
        # How the next token prints may depend on the tokens before it; these are enough.
        shift = 0 if splits else self._num_printed
        self._window = self._window[shift:]
        self._num_printed = end - shift
        begin = len(self._text)
        self._text += new
        return self._cut(begin) if check_stop else None

    def _cut(self, begin: int) -> str | None:
        """Cut the text at the first stop string that ends after `begin`."""
        found = [
            (place, -len(stop), stop)
            for stop in self._stop
            if (place := self._text.find(stop, max(0, begin - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        place, _, stop = min(found)
        self._text = self._text[: place + (len(stop) if self._include_stop else 0)]
        return stop

    def _decode(self, token_ids: list[int]) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(
            token_ids,
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
