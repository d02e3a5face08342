"""What was found under one key is found again under it alone: any change of what makes code counts.

The key of a candidate's time is its folder (target and spec), its setting and its choices.
"""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tvmpaged import records, schedules, sources
from tvmpaged.spec import ATTENTION_KERNELS, DTYPES, LAYOUTS, AttentionSpec, TargetKey
from tvmpaged.tuning.setting import Setting
from tvmpaged.tuning.trial import Choices, choices_key
from tvmpaged.tuning.workload import Workload

pytestmark = pytest.mark.runtime

names = st.text("abcdef0123456789.-", min_size=1, max_size=12)
sizes = st.integers(1, 1 << 40)

specs = st.builds(
    AttentionSpec,
    kernel=st.sampled_from(ATTENTION_KERNELS),
    q_dtype=st.sampled_from(DTYPES),
    kv_dtype=st.sampled_from(DTYPES),
    out_dtype=st.sampled_from(DTYPES),
    head_dim=st.sampled_from([8, 64, 80, 128, 256, 512]),
    head_dim_v=st.sampled_from([8, 64, 80, 128, 256, 512]),
    block_size=st.integers(1, 256),
    group_size=st.integers(1, 71),
    layout=st.sampled_from(LAYOUTS),
)
targets = st.sampled_from(
    [
        *(TargetKey("cpu", name) for name in ("sapphirerapids", "x86-64-v3", "x86-64-v4")),
        *(TargetKey("cuda", "sm_90", name) for name in ("nvidia-h200", "nvidia-h100")),
    ]
)
workloads = st.builds(
    lambda heads, lens, alone: Workload(
        heads, *(tuple(each) for each in zip(*lens, strict=True)), min(alone, len(lens))
    ),
    st.integers(1, 64),
    st.lists(st.tuples(st.integers(1, 64), st.integers(1, 4096)), min_size=1, max_size=4),
    st.integers(0, 4),
)
settings_of_times = st.builds(
    Setting,
    source_sha256=names,
    tvm=names,
    tvm_ffi=names,
    device=names,
    num_threads=st.integers(1, 512),
    caches_bytes=st.dictionaries(names, sizes, max_size=3),
    rotation_bytes=sizes,
    workload=workloads,
)
options = st.one_of(st.integers(0, 4096), names)
choice_lists = st.dictionaries(names, options, min_size=1, max_size=8)

Keyed = tuple[AttentionSpec, TargetKey, Setting, Choices]
keyed = st.tuples(specs, targets, settings_of_times, choice_lists)


def key(
    spec: AttentionSpec, target: TargetKey, setting: Setting, choices: Choices
) -> tuple[str, ...]:
    return (str(records.folder(Path(), target, spec)), setting.key, choices_key(choices))


@given(keyed, keyed)
def test_two_keys_are_equal_only_when_all_is(one: Keyed, other: Keyed) -> None:
    assert (key(*one) == key(*other)) == (one == other)


@given(keyed, keyed, options)
def test_changing_any_one_field_changes_the_key(one: Keyed, other: Keyed, option: Any) -> None:
    """Fields are taken from the classes, so a new one that the key forgets is seen here."""
    spec, target, setting, choices = one
    changed: list[Keyed] = [(spec, other[1], setting, choices)]
    for field in fields(AttentionSpec):
        value = getattr(other[0], field.name)
        changed.append((replace(spec, **{field.name: value}), target, setting, choices))
    for field in fields(Setting):
        value = getattr(other[2], field.name)
        changed.append((spec, target, replace(setting, **{field.name: value}), choices))
    for name in choices:
        changed.append((spec, target, setting, choices | {name: option}))
    for each in changed:
        assert (key(*each) == key(*one)) == (each == one)


@given(choice_lists, st.randoms())
def test_the_order_of_options_has_no_say(choices: Choices, random: Any) -> None:
    items = list(choices.items())
    random.shuffle(items)
    assert choices_key(dict(items)) == choices_key(choices)


@settings(max_examples=20)
@given(st.data())
def test_changing_any_source_changes_the_hash(
    tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    """A byte in any file of the kernels or the schedules."""
    root = tmp_path_factory.mktemp("sources")
    kind = data.draw(st.sampled_from(["cpu", "cuda"]))
    for name, file in sources._files(kind):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(file.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        before = sources.source_sha256(kind)
        patch.setattr(sources, "_PACKAGE", root / sources._PACKAGE.name)
        patch.setattr(sources, "_schedules", lambda: root / "schedules")
        assert sources.source_sha256(kind) == before
        path = data.draw(st.sampled_from(sorted(root.rglob("*.py"))))
        text = bytearray(path.read_bytes())
        assume(text)
        text[data.draw(st.integers(0, len(text) - 1))] ^= 1
        path.write_bytes(text)
        assert sources.source_sha256(kind) != before


def test_every_option_of_the_real_spaces_is_part_of_the_key() -> None:
    target = TargetKey("cpu", "x86-64-v3")
    for kernel in ATTENTION_KERNELS:
        spec = AttentionSpec.make(kernel, "float32", 64, 3, 16)
        default = schedules.default_choices(spec, target)
        space = schedules.space(spec, target)
        assert set(default) == set(space)
        seen = {choices_key(default)}
        for name, values in space.items():
            seen |= {choices_key(default | {name: value}) for value in values}
        assert len(seen) == 1 + sum(len(values) - 1 for values in space.values())
