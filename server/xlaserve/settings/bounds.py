"""Minimum and maximum values of numeric settings."""

from collections.abc import Mapping
from types import MappingProxyType

from xlaserve.errors import InvalidSettings

SMALLEST: Mapping[str, float] = MappingProxyType(
    {
        "processes": 1,
        "front_end_shared_bytes": 1 << 20,
        "max_front_end_requests": 1,
        # With less, a busy machine would replace processes that only wait for a core.
        "process_answer_seconds": 1,
        "offload_seconds": 0,
        "offload_shared_bytes": 1 << 20,
        "listen_backlog": 1,
        "unix_socket_mode": -1,
        "max_principals": 1,
        "python_process_seconds": 0,
        "python_process_bytes": 0,
        "python_shared_bytes": 0,
        "poll_interval_seconds": 0.01,
        "poll_unload_fraction": 0,
        "load_threads": 0,
        "compile_processes": -1,
        "compile_process_bytes": 512 << 20,
        "load_seconds": 0.01,
        "max_abandoned": 1,
        "max_memory_mappings": 0,
        "max_on_demand_shapes": 0,
        "max_sequences_per_model": 1,
        "execute_threads": 0,
        "spare_execute_threads": 0,
        "compilation_cache_max_bytes": 0,
        "compilation_cache_max_days": 0,
        "compilation_cache_url_seconds": 0.01,
        "conversion_cache_max_bytes": 0,
        "max_conversion_bytes": 1,
        "gpu_memory_fraction": 0.01,
        "gpu_metrics_seconds": 0,
        "inline_execution_seconds": 0,
        "execution_seconds": 0,
        "max_requests_per_model": 1,
        "drain_seconds": 0,
        "capacity_bytes": 0,
        "memory_wait_seconds": 0,
        "memory_overhead_bytes": 0,
        "default_model_size_bytes": 1,
        "mesh_slack_bytes": -1,
        "max_remembered_sizes": 1,
        "model_loading_timeout_ms": 100,
        "max_concurrency": 1,
        "container_memory_bytes": 0,
        "message_timeout_seconds": 0.001,
        "answer_timeout_seconds": 0.001,
        "grace_seconds": 0,
        "max_message_bytes": 1024,
        "max_typed_answer_bytes": 0,
        "max_message_fields": 100,
        "max_message_depth": 10,
        "max_streams_per_connection": 1,
        "max_connections": 1,
        "max_header_bytes": 1024,
        "max_held_bytes": 1 << 20,
        "allocator_kept_bytes": 0,
        "max_spare_bytes": 0,
        "response_cache_bytes": 0,
        "busy_poll_seconds": 0,
        "max_stream_resets": 1,
        "max_control_frames": 10,
        "control_window_seconds": 0.01,
        "max_work_per_pass": 16,
        "stream_window_bytes": 65_535,
        "connection_window_bytes": 65_535,
        "max_frame_bytes": 16_384,
        "preface_seconds": 0.01,
        "max_http_connections": 1,
        "http_idle_seconds": 0.01,
        "max_http_header_bytes": 1024,
        "max_http_heads": 1,
        "max_http_chunks": 1,
        "max_json_depth": 10,
        "max_image_bytes": 1024,
        "max_image_pixels": 1,
        "max_health_watchers": 1,
        "max_reflection_requests": 1,
        "max_config_bytes": 1024,
        "max_override_bytes": 0,
        "max_override_files": 0,
        "trial_seconds": 0,
        "max_models": 1,
        "remote_cache_max_bytes": 1,
        "remote_threads": 1,
        "remote_stall_seconds": 0.01,
        "remote_fetch_seconds": 0.01,
        "remote_max_objects": 1,
        "trace_rate": 1,
        "trace_count": -1,
        "trace_log_frequency": 0,
        "max_trace_bytes": 1024,
        "access_log_rate": 0,
        "access_log_slow_ms": 0,
        "max_access_records": 1,
        "max_event_bytes": 0,
        "max_metric_versions": 0,
        "max_shared_memory_regions": 1,
        "max_shared_memory_bytes": 1,
        "max_infer_streams": 1,
        "max_infer_stream_requests": 1,
        "max_infer_stream_bytes": 1,
        "max_choices": 1,
        "max_embedding_inputs": 1,
        "max_waiting_texts": 1,
        # A normal text takes longer than this on a slow machine.
        "template_seconds": 0.01,
        "tokenizer_seconds": 0.01,
        "grammar_seconds": 0.01,
        "text_process_bytes": 16 << 20,
    }
)
"""Minimum value by setting, in the setting's unit."""

_DEEPEST = 100
"""The limit of protobuf, and of Triton for JSON; Python's recursion limit is beyond it."""

LARGEST: Mapping[str, float] = MappingProxyType(
    {
        "processes": 1024,
        "gpu_memory_fraction": 1,
        "poll_unload_fraction": 1,
        "access_log_rate": 1,
        # The event log is sent as one message to the parent, and read as a whole by the web page.
        "max_event_bytes": 8 << 20,
        # All communication between processes could be delayed by this long.
        "process_answer_seconds": 3600,
        # Polling longer has no benefit.
        "busy_poll_seconds": 0.01,
        "unix_socket_mode": 0o777,
        # The kernel uses 32 bits.
        "listen_backlog": 2**31 - 1,
        "max_message_depth": _DEEPEST,
        "max_json_depth": _DEEPEST,
        # The limit of the trace extension.
        **dict.fromkeys(("trace_rate", "trace_count", "trace_log_frequency"), 2**31 - 1),
        # RFC 9113, 6.5.2
        "stream_window_bytes": 2**31 - 1,
        "connection_window_bytes": 2**31 - 1,
        "max_frame_bytes": 2**24 - 1,
    }
)
"""Maximum value by setting; settings without an entry are unlimited."""


def check_bounds(settings: object) -> None:
    """Raise InvalidSettings for the first setting that is out of bounds."""
    for name, smallest in SMALLEST.items():
        if getattr(settings, name) < smallest:
            raise InvalidSettings(name, f"at least {smallest}", getattr(settings, name))
    for name, largest in LARGEST.items():
        if getattr(settings, name) > largest:
            raise InvalidSettings(name, f"at most {largest}", getattr(settings, name))
