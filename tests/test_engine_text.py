"""Text: it grows with the tokens, ends at stop strings, and starts from a chat template."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from engine_tools import (
    EOS,
    GREEDY,
    SIZES,
    VOCAB_SIZE,
    byte_tokenizer,
    run_to_end,
    save_model,
    tiny_engine,
)

from tvmpaged import Engine, SamplingParams
from tvmpaged.runtime.detokenize import Detokenizer, output_text

pytestmark = pytest.mark.runtime

TEXT = "Paging, à la carte: 日本語 and 🙂!"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text)["input_ids"])


def test_characters_appear_whole(tokenizer: Any) -> None:
    detokenizer = Detokenizer(tokenizer, ids(tokenizer, "x"))
    seen = [""]
    for token in ids(tokenizer, TEXT):
        detokenizer.add(token)
        seen.append(detokenizer.text)
    assert seen[-1] == TEXT
    assert not any("\ufffd" in text for text in seen)
    assert all(text in (before, before + text[-1:]) for before, text in itertools.pairwise(seen))


def test_a_prompt_that_ends_inside_a_character(tokenizer: Any) -> None:
    whole = ids(tokenizer, TEXT)
    for cut in range(len(whole)):
        detokenizer = Detokenizer(tokenizer, whole[:cut])
        for token in whole[cut:]:
            detokenizer.add(token)
        detokenizer.flush()
        assert TEXT.endswith(detokenizer.text)
        assert len(detokenizer.text) >= len(bytes(TEXT, "utf-8")[cut:].decode("utf-8", "ignore"))
        assert output_text(tokenizer, whole[:cut], whole[cut:]) == detokenizer.text


def test_bytes_that_are_no_character_are_printed_at_the_end(tokenizer: Any) -> None:
    detokenizer = Detokenizer(tokenizer, [])
    for token in ids(tokenizer, "a日")[:-1]:
        detokenizer.add(token)
    assert detokenizer.text == "a"
    detokenizer.flush()
    assert detokenizer.text == "a\ufffd"


def test_special_tokens_are_left_out_or_kept(tokenizer: Any) -> None:
    tokens = [*ids(tokenizer, "a"), EOS, *ids(tokenizer, "b")]
    assert output_text(tokenizer, [], tokens) == "ab"
    assert output_text(tokenizer, [], tokens, skip_special_tokens=False) == "a<|end|>b"
    assert output_text(None, [], tokens) == ""


@pytest.mark.parametrize(
    ("stop", "include", "text", "found"),
    [
        (("car",), False, "Paging, à la ", "car"),
        (("car",), True, "Paging, à la car", "car"),
        (("語 a", "zz"), False, "Paging, à la carte: 日本", "語 a"),
        (("rte", "carte"), False, "Paging, à la ", "carte"),
        (("P",), False, "", "P"),
        (("nothing",), False, TEXT, None),
    ],
)
def test_stop_strings(
    tokenizer: Any, stop: tuple[str, ...], include: bool, text: str, found: str | None
) -> None:
    detokenizer = Detokenizer(tokenizer, [], stop, include)
    streamed, result = [], None
    for token in ids(tokenizer, TEXT):
        result = detokenizer.add(token)
        if result:
            break
        streamed.append(detokenizer.streamed_text())
    assert (detokenizer.text, result) == (text, found)
    assert all(text.startswith(part) for part in streamed), "a streamed text was taken back"


def test_several_stop_strings_in_one_token_the_first_wins(tokenizer: Any) -> None:
    detokenizer = Detokenizer(tokenizer, [], ("b", "ab", "abc"))
    detokenizer.extend(ids(tokenizer, "x"))
    detokenizer._window += ids(tokenizer, "ab")
    assert detokenizer.add(ids(tokenizer, "c")[0]) == "abc"
    assert detokenizer.text == "x"


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "temperature": 1.0, "seed": 5} | values)


def test_text_of_an_output_is_that_of_its_tokens() -> None:
    engine = tiny_engine()
    output = engine.generate("Once upon a time", params(ignore_eos=True))[0].outputs[0]
    assert output.text == engine.tokenizer.decode(output.token_ids, skip_special_tokens=True)
    no_text = engine.generate("Once", params(detokenize=False))[0].outputs[0]
    assert no_text.text == ""
    assert no_text.token_ids


def test_stop_strings_and_token_ids_end_a_request() -> None:
    engine = tiny_engine()
    free = engine.generate("Stop", params())[0].outputs[0]
    stop = next(char for char in free.text[2:] if char.isascii() and char.isprintable())
    cut = engine.generate("Stop", params(stop=[stop, "never there"]))[0].outputs[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.text == free.text[: free.text.index(stop)]
    kept = engine.generate("Stop", params(stop=stop, include_stop_str_in_output=True))[0]
    assert kept.outputs[0].text == cut.text + stop
    late = engine.generate("Stop", params(stop=stop, min_tokens=len(cut.token_ids) + 1))[0]
    assert len(late.outputs[0].token_ids) > len(cut.token_ids)

    token = free.token_ids[6]
    place = free.token_ids.index(token)
    by_id = engine.generate("Stop", params(stop_token_ids=[token]))[0].outputs[0]
    assert (by_id.finish_reason, by_id.stop_reason) == ("stop", token)
    assert by_id.token_ids == free.token_ids[: place + 1]
    assert by_id.text == engine.tokenizer.decode(free.token_ids[:place], skip_special_tokens=True)


def test_chat_is_the_template_and_then_a_prompt() -> None:
    engine = tiny_engine()
    messages = [{"role": "user", "content": "Hi"}]
    result = engine.chat(messages, params(**GREEDY))[0]
    assert result.prompt == "<|start|>user: Hi<|end|><|start|>assistant: "
    assert result.prompt_token_ids == ids(engine.tokenizer, result.prompt)
    assert result.prompt_token_ids.count(EOS) == 1
    same = engine.generate(result.prompt_token_ids, params(**GREEDY))[0]
    assert same.outputs[0].token_ids == result.outputs[0].token_ids
    assert len(engine.chat([messages, messages], params(**GREEDY))) == 2
    assert engine.generate([messages, "x"], params(**GREEDY))[0].prompt == result.prompt
    with pytest.raises(TypeError, match="role and content"):
        engine.chat("Hi", params())  # type: ignore[arg-type]


def test_a_folder_without_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    from kernel_bundles import bundle
    from transformers import LlamaConfig

    save_model(tmp_path, LlamaConfig(**SIZES))
    engine = Engine.from_pretrained(tmp_path, num_blocks=32, bundle=bundle("base"))
    result = engine.generate([1, 2, 3], params(logprobs=1))[0]
    assert (result.prompt, result.outputs[0].text) == (None, "")
    with pytest.raises(ValueError, match="needs a tokenizer"):
        engine.generate("text", params())
    with pytest.raises(ValueError, match="need a tokenizer"):
        engine.chat([{"role": "user", "content": "Hi"}])
    engine.add_request("r", [VOCAB_SIZE - 1], params())
    assert run_to_end(engine)["r"].finished
