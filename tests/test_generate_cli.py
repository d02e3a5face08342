"""`tvmpaged generate`: text on stdout, numbers on stderr, JSON alone with --json."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from engine_tools import tiny_engine, tiny_folder
from kernel_bundles import bundle

from tvmpaged import BeamSearchParams, SamplingParams
from tvmpaged.cli.app import main

pytestmark = pytest.mark.runtime

PROMPT = "Once upon a time"


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.chdir(tmp_path)


def generate(*arguments: str) -> int:
    """Run the command on the tiny model."""
    model = ["--model", str(tiny_folder()), "--bundle", str(bundle("base")), "--num-blocks", "64"]
    return main(["generate", *model, *arguments])


def expected(params: SamplingParams | BeamSearchParams, prompt: Any = PROMPT) -> list[str]:
    engine = tiny_engine(block_size=16)
    if isinstance(params, BeamSearchParams):
        [result] = engine.beam_search(prompt, params)
    else:
        [result] = engine.generate(prompt, params)
    return [output.text for output in result.outputs]


def test_one_prompt_prints_its_text_and_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("--prompt", PROMPT, "--max-tokens", "12") == 0
    out, err = capsys.readouterr()
    assert out == expected(SamplingParams(temperature=0.0, max_tokens=12))[0] + "\n"
    for text in ("tokens/s", "first token after", "used", "shared", "copied", "utilisation"):
        assert text in err
    assert "kernels: generic" in err


def test_a_terminal_sees_the_text_grow(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert generate("--chat", "Hi", "--max-tokens", "12") == 0
    chat = [{"role": "user", "content": "Hi"}]
    text = expected(SamplingParams(temperature=0.0, max_tokens=12), chat)[0]
    assert capsys.readouterr().out == text + "\n"


def test_samples_and_several_prompts_have_headings(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--n", "2", "--seed", "3", "--max-tokens", "8", "--top-p", "0.9", "--top-k", "40"]
    assert generate("--prompt", PROMPT, "--prompt", "Two", *options) == 0
    out = capsys.readouterr().out
    params = SamplingParams(n=2, seed=3, temperature=0.8, max_tokens=8, top_p=0.9, top_k=40)
    for place, prompt in enumerate((PROMPT, "Two"), start=1):
        for index, text in enumerate(expected(params, prompt), start=1):
            assert f"== prompt {place}, output {index}\n{text}\n" in out


def test_json_is_all_there_is_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("--prompt", PROMPT, "--beam-width", "3", "--max-tokens", "6", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema_version"] == 1
    [result] = report["results"]
    texts = expected(BeamSearchParams(beam_width=3, max_tokens=6))
    assert [output["text"] for output in result["outputs"]] == texts
    assert result["prompt"] == PROMPT
    assert report["stats"]["num_blocks"] == 64
    assert report["attention"]["kind"] == "generic"


def test_stop_ends_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    text = expected(SamplingParams(temperature=0.0, max_tokens=12))[0]
    stop = text[4]
    assert generate("--prompt", PROMPT, "--max-tokens", "12", "--stop", stop) == 0
    assert capsys.readouterr().out == text[: text.index(stop)] + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --prompt TEXT or --chat TEXT"),
        (["--prompt", "x", "--temperature", "-1"], "temperature=-1.0 must be at least 0"),
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens=0"),
        (["--prompt", "x", "--beam-width", "2", "--n", "2"], "--beam-width draws nothing"),
        (["--prompt", "x", "--beam-width", "2", "--top-p", "0.5"], "--top-p=0.5"),
        (["--prompt", "x", "--dtype", "int8"], "dtype='int8' is not supported"),
        (["--prompt", "x", "--block-size", "0"], "block_size=0"),
        (["--prompt", "x", "--num-tokens", "3"], "No such option"),
        (["--prompt", "x", "--max-tokens", "5000", "--num-blocks", "4"], "num_blocks=4"),
    ],
    ids=str,
)
def test_bad_arguments_are_two_and_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_a_missing_model_says_what_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", "/no/such/model", "--prompt", "x"]) == 1
    err = capsys.readouterr().err
    assert "model='/no/such/model' does not exist; allowed:" in err
    assert "Traceback" not in err
