"""A record as a search would have written it, for tests of what reads records."""

import hashlib
import json
from typing import Any

from tvmpaged.records import Latency, Record
from tvmpaged.spec import AttentionSpec, TargetKey

SPEC = AttentionSpec.make("decode", "float32", 64, 3, 16)
TARGET = TargetKey("cpu", "sapphirerapids")


def make_record(**changes: Any) -> Record:
    values: dict[str, Any] = {
        "spec": SPEC,
        "target": TARGET,
        "choices": {"step": "rows", "lanes": 16},
        "is_default": False,
        "source_sha256": "0" * 64,
        "tvm": "0.27.0.post1",
        "tvm_ffi": "0.1.14.post1",
        "device": "A CPU",
        "num_threads": 2,
        "caches_bytes": {"L1": 49152},
        "rotation_bytes": 1 << 27,
        "latency_us": Latency(12.5, 12.0, 13.0, 31),
        "default_latency_us": Latency(15.0, 14.0, 16.0, 31),
        "speedup": 1.2,
        "gb_per_s": 16.9,
        "gflop_per_s": None,
        "roof_gb_per_s": 25.0,
        "roof_gflop_per_s": None,
        "roof_fraction": 0.67,
        "gpu": None,
        "workload": {"num_kv_heads": 3, "q_lens": [1], "seq_lens": [1024]},
        "trials": 64,
        "failures": {"compile": 1},
        "seed": 0,
        "mlflow_run_id": "run",
        "created_at": "2026-01-01T00:00:00+00:00",
    }
    return Record(**(values | changes))


def edited(record: Record, **changes: Any) -> dict[str, Any]:
    """Return the plain data of a record with other fields, and the id that belongs to them."""
    data = record.as_dict() | changes
    plain = {**data, "record_id": ""}
    del plain["schema_version"]
    text = json.dumps(plain, sort_keys=True)
    return data | {"record_id": hashlib.sha256(text.encode()).hexdigest()[:16]}
