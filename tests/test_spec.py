"""Specs and targets: one spelling of each case, and errors that name the field."""

from dataclasses import fields, replace
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tvmpaged.spec import (
    DTYPES,
    KERNELS,
    LAYOUTS,
    MAX_BLOCK_SIZE,
    MAX_GROUP_SIZE,
    RUN_TIME,
    AttentionSpec,
    TargetKey,
    dtype_name,
)

pytestmark = pytest.mark.runtime

HEAD_DIMS = [RUN_TIME, *range(8, 257, 8), 512]
SPEC = AttentionSpec.make("decode", "float32", head_dim=64, group_size=3, block_size=16)

specs = st.builds(
    AttentionSpec,
    kernel=st.sampled_from(KERNELS),
    q_dtype=st.sampled_from(DTYPES),
    kv_dtype=st.sampled_from(DTYPES),
    out_dtype=st.sampled_from(DTYPES),
    head_dim=st.sampled_from(HEAD_DIMS),
    head_dim_v=st.sampled_from(HEAD_DIMS),
    block_size=st.integers(0, MAX_BLOCK_SIZE),
    group_size=st.integers(0, MAX_GROUP_SIZE),
    layout=st.sampled_from(LAYOUTS),
)

#: Another legal value for each field that has one.
OTHER = {
    "kernel": "prefill",
    "q_dtype": "float16",
    "kv_dtype": "bfloat16",
    "out_dtype": "float16",
    "head_dim": 128,
    "head_dim_v": 128,
    "block_size": 32,
    "group_size": 4,
    "layout": "NHD",
}


@given(specs)
def test_parsing_reads_back_what_str_wrote(spec: AttentionSpec) -> None:
    assert AttentionSpec.parse(str(spec)) == spec
    assert AttentionSpec.parse(f" {spec}\n") == spec


@given(specs, specs)
def test_two_specs_have_the_same_text_only_if_they_are_equal(
    one: AttentionSpec, other: AttentionSpec
) -> None:
    assert (str(one) == str(other)) == (one == other) == (hash(one) == hash(other))


def test_the_text_is_what_folders_are_called() -> None:
    assert str(SPEC) == "decode-q.float32-kv.float32-o.float32-d64-v64-b16-g3-HND-n1"
    assert str(SPEC.generic()) == (
        "decode-q.float32-kv.float32-o.float32-dany-vany-bany-gany-HND-n1"
    )


@pytest.mark.parametrize("field", OTHER)
def test_another_value_of_one_field_makes_another_key(field: str) -> None:
    other = replace(SPEC, **{field: OTHER[field]})
    assert str(other) != str(SPEC)
    assert other != SPEC


def test_every_field_is_part_of_the_key() -> None:
    assert set(OTHER) | {"variants", "numerics"} == {each.name for each in fields(AttentionSpec)}


def test_the_order_in_which_fields_are_given_does_not_matter() -> None:
    sizes = {"head_dim": 64, "group_size": 3, "block_size": 16}
    for order in permutations(sizes):
        given_so = {name: sizes[name] for name in order}
        assert AttentionSpec.make("decode", "float32", **given_so) == SPEC


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kernel": "sort"}, ValueError, r"kernel='sort'.*decode, prefill"),
        ({"q_dtype": "int8"}, ValueError, r"q_dtype='int8'.*float32"),
        ({"kv_dtype": "fp8"}, ValueError, "kv_dtype='fp8'"),
        ({"out_dtype": ""}, ValueError, "out_dtype=''"),
        ({"layout": "HDN"}, ValueError, r"layout='HDN'.*HND, NHD"),
        ({"numerics": "n0"}, ValueError, "numerics='n0'"),
        ({"variants": ("window",)}, ValueError, r"variants=\('window',\)"),
        ({"head_dim": 65}, ValueError, r"head_dim=65.*multiples of 8 up to 256, and 512"),
        ({"head_dim": 264}, ValueError, "head_dim=264"),
        ({"head_dim": -8}, ValueError, "head_dim=-8"),
        ({"head_dim": 64.0}, TypeError, r"head_dim=64\.0 must be an int"),
        ({"head_dim_v": 12}, ValueError, "head_dim_v=12"),
        ({"block_size": 257}, ValueError, r"block_size=257.*1\.\.256"),
        ({"block_size": -1}, ValueError, "block_size=-1"),
        ({"block_size": "16"}, TypeError, "block_size='16' must be an int"),
        ({"group_size": 257}, ValueError, "group_size=257"),
        ({"group_size": None}, TypeError, "group_size=None must be an int"),
        ({"group_size": True}, TypeError, "group_size=True must be an int"),
    ],
    ids=str,
)
def test_what_is_not_allowed_is_refused_by_name(
    change: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        replace(SPEC, **change)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "decode",
        str(SPEC) + "-x",
        str(SPEC).replace("-n1", ""),
        str(SPEC).replace("d64", "d064"),
        str(SPEC).replace("d64", "d0"),
        str(SPEC).replace("d64", "d٦٤"),
        str(SPEC).replace("b16", "b-16"),
        str(SPEC).replace("-g3", "/../g3"),
    ],
)
def test_other_text_is_refused_with_a_correct_example(text: str) -> None:
    with pytest.raises(ValueError, match="a correct one: 'decode-q"):
        AttentionSpec.parse(text)


def test_the_example_in_that_message_is_correct() -> None:
    with pytest.raises(ValueError, match="cannot be read") as caught:
        AttentionSpec.parse("nonsense")
    example = str(caught.value).split("'")[-2]
    assert AttentionSpec.parse(example) == SPEC


@given(specs)
def test_the_generic_spec_keeps_what_is_not_a_size(spec: AttentionSpec) -> None:
    generic = spec.generic()
    assert generic.is_generic
    assert generic.generic() == generic
    for name in ("kernel", "q_dtype", "kv_dtype", "out_dtype", "layout", "numerics"):
        assert getattr(generic, name) == getattr(spec, name)


@pytest.mark.parametrize("value", ["bfloat16", torch.bfloat16], ids=["str", "torch"])
def test_dtypes_come_as_text_or_torch_dtypes(value: object) -> None:
    assert dtype_name(value) == "bfloat16"
    assert dtype_name(np.dtype("float16")) == "float16"


@pytest.mark.parametrize("value", ["half", "float64", torch.int8, None, 32, "torch.float32"])
def test_other_dtypes_are_refused_with_what_is_allowed(value: object) -> None:
    with pytest.raises(ValueError, match="float32, float16, bfloat16"):
        dtype_name(value)


@pytest.mark.parametrize(
    "text", ["cpu/x86-64-v3", "cpu/sapphirerapids", "cuda/sm_90/nvidia-h200", "cuda/sm_100a/gb200"]
)
def test_targets_round_trip(text: str) -> None:
    assert str(TargetKey.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "native",
        "cpu",
        "cpu/",
        "cpu/x86/extra",
        "cuda/sm_90",
        "cuda/sm_90/NVIDIA H200",
        "rocm/gfx942/mi300",
        "cpu/..",
        "cuda/sm_90/../x",
        "cpu/a/b/c",
    ],
)
def test_other_targets_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="cpu/x86-64-v3"):
        TargetKey.parse(text)
