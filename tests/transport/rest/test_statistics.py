"""Configuration and statistics as JSON, in Triton's spelling."""

import json
from typing import Any

import msgspec
import pytest
from support.executions import succeed

from xlaserve.http.v2.statistics import config_json, statistics_json
from xlaserve.model_config.text import parse_json
from xlaserve.residence.reports.monitor import MemoryUse, VersionReport
from xlaserve.runtime.config_served import ServedConfig
from xlaserve.runtime.loaded import Bucket, ModelInfo
from xlaserve.serving.statistics import VersionStatistics
from xlaserve.tensors import DATATYPES, TensorSpec

INFO = ModelInfo(
    "jax_export",
    (TensorSpec("x", DATATYPES["FP32"], (-1, 4)),),
    (TensorSpec("y", DATATYPES["FP32"], (-1, 2)),),
    max_batch_size=8,
)


def config(text: str) -> dict[str, Any]:
    written: dict[str, Any] = json.loads(
        msgspec.json.encode(config_json(ServedConfig("m", parse_json(text), INFO)))
    )
    return written


def test_a_config_names_its_fields_as_the_contract_does() -> None:
    """Numbers are numbers and enums are names; fields with default values are included."""
    found = config("{}")

    assert {
        "name": "x",
        "data_type": "TYPE_FP32",
        "format": "FORMAT_NONE",
        "dims": [4],
        "is_shape_tensor": False,
        "allow_ragged_batch": False,
        "optional": False,
        "is_non_linear_format_io": False,
    } == found["input"][0]
    assert {"latest": {"num_versions": 1}} == found["version_policy"]
    assert ([], {}, 8) == (found["instance_group"], found["metric_tags"], found["max_batch_size"])
    assert not {"dynamic_batching", "optimization"} & set(found)


WARM = {"x": {"data_type": "TYPE_FP32", "dims": [4], "zero_data": True}}
WRITTEN = {
    "optimization": {"cuda": {"graphs": True}},
    "dynamic_batching": {
        "priority_levels": 7,
        "default_priority_level": 3,
        "priority_queue_policy": {"7": {"timeout_action": "REJECT"}},
    },
    "model_metrics": {"metric_control": [{"histogram_options": {"buckets": [0.5, "Infinity"]}}]},
    "model_warmup": [{"name": "w", "batch_size": 1, "inputs": WARM}],
    "version_policy": {"specific": {"versions": [1, 3]}},
}


def contains(whole: Any, part: Any) -> bool:
    if isinstance(part, dict):
        return all(key in whole and contains(whole[key], each) for key, each in part.items())
    if isinstance(part, list):
        return len(whole) == len(part) and all(map(contains, whole, part))
    return bool(whole == part)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_was_written_is_in_the_json(name: str) -> None:
    found = config(json.dumps({name: WRITTEN[name]}))

    assert contains(found[name], WRITTEN[name])


def test_a_member_of_a_oneof_is_there_though_it_is_empty() -> None:
    found = config('{"version_policy": {"all": {}}}')

    assert {"all": {}} == found["version_policy"]


def test_the_json_of_a_config_reads_back_as_the_same() -> None:
    found = config(json.dumps(WRITTEN))

    assert found == config(json.dumps(found))


def test_statistics_have_the_members_of_tritons_answer() -> None:
    statistics = VersionStatistics()
    succeed(statistics, 3, (100, 110, 130, 160, 200), 1_700_000_000_123_000_000)
    statistics.failed(ValueError(), 5)
    report = VersionReport(
        "m", "2", statistics.totals(), (MemoryUse("GPU", 0, 99),), (Bucket(4, 0.5, 2e-6, (7,)),)
    )
    zero = {"count": 0, "ns": 0}

    assert {
        "model_stats": [
            {
                "name": "m",
                "version": "2",
                "last_inference": 1_700_000_000_123,
                "inference_count": 3,
                "execution_count": 1,
                "inference_stats": {
                    "success": {"count": 1, "ns": 100},
                    "fail": {"count": 1, "ns": 5},
                    "queue": {"count": 1, "ns": 20},
                    "compute_input": {"count": 1, "ns": 10},
                    "compute_infer": {"count": 1, "ns": 30},
                    "compute_output": {"count": 1, "ns": 40},
                    "cache_hit": zero,
                    "cache_miss": zero,
                },
                "response_stats": {},
                "batch_stats": [
                    {
                        "batch_size": 3,
                        "compute_input": {"count": 1, "ns": 10},
                        "compute_infer": {"count": 1, "ns": 30},
                        "compute_output": {"count": 1, "ns": 40},
                    }
                ],
                "memory_usage": [{"type": "GPU", "id": 0, "byte_size": 99}],
                "compile_stats": [
                    {
                        "batch_size": 4,
                        "sizes": [7],
                        "compile_ns": 500_000_000,
                        "execution_ns": 2000,
                    }
                ],
            }
        ]
    } == json.loads(msgspec.json.encode(statistics_json([report])))
