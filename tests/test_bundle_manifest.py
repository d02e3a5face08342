"""The manifest: every byte of it is either understood or refused."""

import json
from dataclasses import replace
from typing import Any

import pytest
from bundle_tools import OTHER_SPEC, SPEC, V3, artifact, header, manifest

from tvmpaged.bundle import KERNEL_ABI, SCHEMA_VERSION, BundleError, decode, encode
from tvmpaged.sm import Resources
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.worklist import Item, Merge

pytestmark = pytest.mark.runtime


def as_data(**changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(encode(manifest(V3, artifact())))
    return data | changes


def as_entry(**changes: Any) -> dict[str, Any]:
    data = as_data()
    data["artifacts"][0].update(changes)
    return data


def read(data: dict[str, Any]) -> None:
    decode(json.dumps(data).encode())


@pytest.mark.parametrize(
    "found",
    [
        manifest(V3),
        manifest(
            V3,
            artifact(OTHER_SPEC, "tuned", measured_us=12.5, measured_on="A CPU", num_threads=2),
            artifact(SPEC, "tuned", record_id="r1", mlflow_run_id="abc"),
            artifact(SPEC.generic(), "generic"),
        ),
        manifest(
            TargetKey("cuda", "sm_90", "nvidia-h200"), artifact(resources=Resources(96, 512, 0, 8))
        ),
    ],
)
def test_what_was_written_is_read(found: Any) -> None:
    assert decode(encode(found)) == found


def test_the_manifest_is_plain_readable_json() -> None:
    data = as_data()
    entry = data["artifacts"][0]
    assert data["schema_version"] == SCHEMA_VERSION
    assert data["target"] == "cpu/x86-64-v3"
    assert data["abi"]["tvm_ffi"] == ">=0.1.13.post3,<0.1.16"
    assert "avx2" in data["cpu_features"]
    assert entry["spec"] == str(SPEC)
    assert entry["kernel"] == "decode"
    assert entry["choices"] == {"split_length": 512, "isa": "avx2"}


def test_a_newer_schema_is_refused_with_both_versions() -> None:
    with pytest.raises(BundleError, match=r"version 3 is newer .* upgrade tvmpaged .*reads 2"):
        read(as_data(schema_version=3, something_new=1))
    with pytest.raises(BundleError, match="version 1 is no longer read"):
        read(as_data(schema_version=1))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (as_data(extra=1), "unknown fields: extra"),
        (as_data(target="cpu/../x"), "target"),
        (as_data(target="cpu/x86-64-v3/x/y"), "target"),
        (as_data(cpu_features=["avx2", 3]), "cpu_features holds 3"),
        (as_data(schema_version=True), "schema_version=True must be of type int"),
        (as_data(abi={"kernels": 1, "tvm_ffi": "newest", "tvm_runtime": "0.27"}), "newest"),
        (as_data(git={"commit": None, "dirty": "no"}), "dirty='no'"),
        ({k: v for k, v in as_data().items() if k != "git"}, "manifest.git is missing"),
        (as_entry(file="../x.so"), r"file='../x.so' must be a plain name"),
        (as_entry(file="/tmp/x.so"), "plain name"),
        (as_entry(file="a/x.so"), "plain name"),
        (as_entry(file=".x.so"), "plain name"),
        (as_entry(file="x.so\n"), "plain name"),
        (as_entry(file="x.py"), "plain name"),
        (as_entry(sha256="0" * 63), "64 hexadecimal digits"),
        (as_entry(symbol="a b"), "C identifier"),
        (as_entry(kind="fast"), "kind='fast'; allowed: tuned, default, generic"),
        (as_entry(kind="generic"), "fixes all sizes"),
        (as_entry(kernel="prefill"), "is not its spec's"),
        (as_entry(spec="decode"), "cannot be read"),
        (as_entry(choices={"a": [1]}), r"choices.a=\[1\]"),
        (as_entry(choices={"a": True}), "choices.a=True"),
        (as_entry(measured_us="fast"), "measured_us='fast'"),
        (as_entry(resources={"registers": 9}), r"resources.shared_bytes is missing"),
        (as_entry(resources=[]), r"resources=\[\] must be of type dict"),
        (as_entry(surprise=1), "unknown fields: surprise"),
    ],
)
def test_a_wrong_field_is_refused_by_name(data: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        read(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no JSON"),
        ("[]", "not an object"),
        ('{"schema_version": 1, "schema_version": 1}', "key twice"),
        ('{"schema_version": NaN}', "NaN"),
        ("[" * 100_000, "no JSON"),
        ("\udcff", "no JSON"),
    ],
)
def test_what_is_no_manifest_is_refused(text: str, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        decode(text.encode(errors="surrogateescape"))


def test_a_spec_or_a_file_listed_twice_is_refused() -> None:
    data = as_data()
    data["artifacts"] *= 2
    with pytest.raises(BundleError, match=r"lists the spec .* twice"):
        read(data)
    two = manifest(V3, artifact(SPEC, file="x.so"), artifact(OTHER_SPEC, file="x.so"))
    with pytest.raises(BundleError, match=r"lists the file 'x.so' twice"):
        decode(encode(two))


def test_every_field_of_a_spec_makes_another_key() -> None:
    found = manifest(V3, artifact(SPEC))
    assert found.find(AttentionSpec.parse(str(SPEC))) is not None
    for change in (
        {"kernel": "prefill"},
        {"q_dtype": "float16"},
        {"kv_dtype": "float16"},
        {"out_dtype": "float16"},
        {"head_dim": 128},
        {"head_dim_v": 128},
        {"block_size": 32},
        {"group_size": 4},
        {"layout": "NHD"},
    ):
        assert found.find(replace(SPEC, **change)) is None


def test_the_calling_convention_has_a_number() -> None:
    """A new column must raise KERNEL_ABI, or an old artifact would read the wrong ones."""
    columns = (",".join(Item.__members__), ",".join(Merge.__members__))
    known = {
        1: (
            "SEQ,KV_HEAD,Q_START,ROW_BEGIN,ROW_END,KV_BEGIN,KV_END,VISIBLE,PARTIAL",
            "OUT_ROW,PARTIAL,COUNT,STRIDE",
        )
    }
    assert known[KERNEL_ABI] == columns
    assert header().abi.kernels == KERNEL_ABI
