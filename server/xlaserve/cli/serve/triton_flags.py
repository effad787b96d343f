"""The flags of tritonserver, translated to settings of `xlaserve serve`, ignored, or refused.

An unsupported flag is refused if it affects permissions or the served models. Other unsupported
flags are only logged.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from xlaserve.errors import InvalidSettings

Values: TypeAlias = Mapping[str, str]
"""The last value of each given flag, by its name without dashes."""

_TRUTHS = {
    **dict.fromkeys(("true", "on", "1"), True),
    **dict.fromkeys(("false", "off", "0"), False),
}


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of tritonserver; without `settings`, it is ignored or refused."""

    settings: Callable[[str, Values], Mapping[str, str]] | None = None
    """Returns the settings equivalent to a value, given the values of all flags."""
    refused: str = ""
    """Why the flag is refused; empty if it is only logged."""
    harmless: tuple[str, ...] = ()
    """Values that request no change, and are therefore accepted."""
    takes_value: bool = True
    is_switch: bool = False
    """Whether `serve` has a switch with this name, which takes no value."""


@dataclass(frozen=True, slots=True)
class Translation:
    """A command line after tritonserver's flags were translated."""

    arguments: Sequence[str]
    without_effect: Sequence[str]
    """Ignored flags, for the log."""
    obeyed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Settings that were set by flags, by their names."""


def truth(flag: str, text: str) -> bool:
    """Parse a boolean like tritonserver; raises InvalidSettings."""
    found = _TRUTHS.get(text.lower())
    if found is None:
        raise InvalidSettings(f"--{flag}", "true or false", text)
    return found


def _set(setting: str) -> Flag:
    return Flag(lambda value, values: {setting: value})


def _port(endpoint: str, allow: str) -> Flag:
    def settings(value: str, values: Values) -> Mapping[str, str]:
        allowed = truth(allow, values.get(allow, "true"))
        return {endpoint: f"port:{value}"} if allowed else {}

    return Flag(settings)


def _allow(endpoint: str, flag: str) -> Flag:
    return Flag(
        lambda value, values: {} if truth(flag, value) else {endpoint: "none"},
    )


def _address(value: str, values: Values) -> Mapping[str, str]:
    given = {values[name] for name in _ADDRESSES if name in values}
    if len(given) > 1:
        shown = ", ".join(sorted(given))
        raise InvalidSettings("--http-address", "one address for all endpoints (--host)", shown)
    return {"host": value}


_ADDRESSES = ("http-address", "grpc-address", "metrics-address")


def _readiness(value: str, values: Values) -> Mapping[str, str]:
    return {"readiness": "models" if truth("strict-readiness", value) else "startup"}


def _gpu_metrics(value: str, values: Values) -> Mapping[str, str]:
    return {} if truth("allow-gpu-metrics", value) else {"gpu_metrics_seconds": "0"}


def _metrics_interval(value: str, values: Values) -> Mapping[str, str]:
    if not value.isdecimal():
        raise InvalidSettings("--metrics-interval-ms", "milliseconds", value)
    allowed = truth("allow-gpu-metrics", values.get("allow-gpu-metrics", "true"))
    return {"gpu_metrics_seconds": str(int(value) / 1000)} if allowed else {}


def _log_level(value: str, values: Values) -> Mapping[str, str]:
    """Return the log level that results from all logging flags."""
    if values.get("log-verbose", "0") not in ("0", "false"):
        return {"log_level": "debug"}
    levels = (("log-info", "info"), ("log-warning", "warning"))
    enabled = (level for flag, level in levels if truth(flag, values.get(flag, "true")))
    return {"log_level": next(enabled, "error")}


def _exit_on_error(value: str, values: Values) -> Mapping[str, str]:
    return {"exit_on_error": str(truth("exit-on-error", value)).lower()}


def _certificate(setting: str) -> Flag:
    """Return a flag that only has an effect together with TLS."""

    def settings(value: str, values: Values) -> Mapping[str, str]:
        return {setting: value} if _uses_tls(values) else {}

    return Flag(settings)


def _authorities(value: str, values: Values) -> Mapping[str, str]:
    is_mutual = truth("grpc-use-ssl-mutual", values.get("grpc-use-ssl-mutual", "false"))
    return {"tls_client_ca": value} if is_mutual else {}


def _uses_tls(values: Values) -> bool:
    flags = ("grpc-use-ssl", "grpc-use-ssl-mutual")
    return any(truth(flag, values.get(flag, "false")) for flag in flags)


def _tls(needed: str) -> Flag:
    """Return a flag that enables TLS only for gRPC, as in Triton."""

    def settings(value: str, values: Values) -> Mapping[str, str]:
        if not _uses_tls(values):
            return {}
        if needed not in values:
            raise InvalidSettings(f"--{needed}", "a file, since TLS is enabled", None)
        return {"tls_endpoints": "grpc"}

    return Flag(settings)


def _shared_memory(value: str, values: Values) -> Mapping[str, str]:
    return {"shared_memory": "all" if truth("allow-client-shm", value) else "none"}


_TRACE_SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        **{name: f"trace_{name}" for name in ("level", "rate", "count", "mode")},
        "triton,file": "trace_file",
        "triton,log-frequency": "trace_log_frequency",
    }
)


def _trace_config(value: str, values: Values) -> Mapping[str, str]:
    """Return the setting for one value of the repeatable flag --trace-config."""
    name, _, text = value.partition("=")
    setting = _TRACE_SETTINGS.get(name)
    if setting is None:
        known = ", ".join(f"{name}=" for name in _TRACE_SETTINGS)
        expected = f"one of {known} (the variables OTEL_* say where spans go)"
        raise InvalidSettings("--trace-config", expected, value)
    return {setting: text}


def _cache(value: str, values: Values) -> Mapping[str, str]:
    name, _, setting = value.partition(",")
    size = setting.removeprefix("size=")
    if name != "local" or size == setting:
        raise InvalidSettings("--cache-config", "local,size=<bytes>", value)
    return {"response_cache_bytes": size}


_NONE = Flag()

FLAGS: Mapping[str, Flag] = MappingProxyType(
    {
        "id": _set("server_name"),
        "exit-timeout-secs": _set("grace_seconds"),
        # --- Models ---
        "model-store": Flag(lambda value, values: {"model_repository": value}),
        "exit-on-error": Flag(_exit_on_error, is_switch=True),
        "strict-readiness": Flag(_readiness),
        "repository-poll-secs": _set("poll_interval_seconds"),
        "model-load-thread-count": _set("load_threads"),
        "model-load-retry-count": _NONE,
        "model-config-name": Flag(
            refused="a model is configured by its config.pbtxt or config.json"
        ),
        "model-namespacing": Flag(
            refused="model names are unique across repositories", harmless=("false",)
        ),
        "disable-auto-complete-config": Flag(takes_value=False),
        "strict-model-config": _NONE,
        "enable-peer-access": _NONE,
        # --- Endpoints ---
        "allow-http": _allow("http_endpoint", "allow-http"),
        "http-address": Flag(_address),
        "http-port": _port("http_endpoint", "allow-http"),
        "reuse-http-port": Flag(refused="a port serves one process", harmless=("false", "0")),
        "http-header-forward-pattern": Flag(refused="headers are not passed to models"),
        "http-thread-count": _NONE,
        "http-max-input-size": _set("max_message_bytes"),
        "allow-grpc": Flag(
            refused="gRPC is always served; --grpc-endpoint unix:<path> keeps it off the network",
            harmless=("true", "1", "on"),
        ),
        "grpc-address": Flag(_address),
        "grpc-port": _port("grpc_endpoint", "allow-grpc"),
        "reuse-grpc-port": Flag(refused="a port serves one process", harmless=("false", "0")),
        "grpc-header-forward-pattern": Flag(refused="headers are not passed to models"),
        "grpc-infer-thread-count": _NONE,
        "grpc-infer-allocation-pool-size": _NONE,
        "grpc-max-response-pool-size": _NONE,
        "grpc-use-ssl": _tls("grpc-server-cert"),
        "grpc-use-ssl-mutual": _tls("grpc-root-cert"),
        "grpc-server-cert": _certificate("tls_certificate"),
        "grpc-server-key": _certificate("tls_key"),
        "grpc-root-cert": Flag(_authorities),
        "grpc-infer-response-compression-level": _NONE,
        "grpc-keepalive-time": _NONE,
        "grpc-keepalive-timeout": _NONE,
        "grpc-keepalive-permit-without-calls": _NONE,
        "grpc-http2-max-pings-without-data": _NONE,
        "grpc-http2-min-recv-ping-interval-without-data": _NONE,
        "grpc-http2-max-ping-strikes": _NONE,
        "grpc-max-connection-age": _NONE,
        "grpc-max-connection-age-grace": _NONE,
        "allow-metrics": _allow("metrics_endpoint", "allow-metrics"),
        "metrics-address": Flag(_address),
        "metrics-port": _port("metrics_endpoint", "allow-metrics"),
        "allow-gpu-metrics": Flag(_gpu_metrics),
        "allow-cpu-metrics": _NONE,
        "metrics-interval-ms": Flag(_metrics_interval),
        "metrics-config": _NONE,
        "allow-sagemaker": Flag(refused="--sagemaker does that", harmless=("false", "0")),
        "sagemaker-port": Flag(refused="--sagemaker serves the port of SageMaker"),
        "sagemaker-safe-port-range": _NONE,
        "sagemaker-thread-count": _NONE,
        "allow-vertex-ai": Flag(refused="it is not implemented", harmless=("false", "0")),
        "vertex-ai-port": Flag(refused="it is not implemented"),
        "vertex-ai-thread-count": _NONE,
        "vertex-ai-default-model": Flag(refused="it is not implemented"),
        # --- Log and traces ---
        "log-verbose": Flag(_log_level),
        "log-info": Flag(_log_level),
        "log-warning": Flag(_log_level),
        "log-error": _NONE,
        "log-format": _NONE,
        "log-file": Flag(refused="the server logs to stderr", harmless=("",)),
        "trace-config": Flag(_trace_config),
        # --- Memory, devices and caches ---
        "cache-config": Flag(_cache),
        "cache-directory": _NONE,
        "response-cache-byte-size": _set("response_cache_bytes"),
        "allow-client-shm": Flag(_shared_memory),
        "rate-limit": _NONE,
        "rate-limit-resource": _NONE,
        "pinned-memory-pool-byte-size": _NONE,
        "cuda-memory-pool-byte-size": _NONE,
        "cuda-virtual-address-size": _NONE,
        "min-supported-compute-capability": _NONE,
        "buffer-manager-thread-count": _NONE,
        "host-policy": _NONE,
        "model-load-gpu-limit": _NONE,
        "backend-directory": _NONE,
        "backend-config": _NONE,
        "repoagent-directory": _NONE,
    }
)
"""The translated flags by name. Flags that `serve` supports with the same name and values are not
listed: model-repository, model-control-mode, load-model, grpc-restricted-protocol,
http-restricted-api, trace-level, trace-rate, trace-count, trace-log-frequency."""

_REPEATED = frozenset({"model_repository"})
"""Settings that may be repeated."""


def translate(arguments: Sequence[str]) -> Translation:
    """Translate the flags of tritonserver on a command line to those of `serve`.

    Raises InvalidSettings for a refused flag, a missing value, or a setting that is also set by a
    flag of `serve`.
    """
    given, others = _split(arguments)
    values = dict(given)
    obeyed: dict[str, str] = {}
    made: list[str] = []
    unused: list[str] = []
    for name, value in given:
        row = FLAGS[name]
        if row.refused:
            if value not in row.harmless:
                raise InvalidSettings(f"--{name}", f"none: {row.refused}", value)
            continue
        if row.settings is None:
            unused.append(f"--{name}")
            continue
        settings = row.settings(value, values)
        for setting, text in settings.items():
            if setting in _REPEATED or obeyed.get(setting) != text:
                made += _spelled(setting, text)
            obeyed[setting] = text
    for setting in obeyed.keys() - _REPEATED:
        flag = f"--{setting.replace('_', '-')}"
        if any(other.split("=")[0] == flag for other in others):
            raise InvalidSettings(flag, "either the tritonserver flag or this one", flag)
    return Translation((*others, *made), tuple(dict.fromkeys(unused)), MappingProxyType(obeyed))


def _split(arguments: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Split a command line into tritonserver's flags with their values, and other arguments."""
    given: list[tuple[str, str]] = []
    others: list[str] = []
    rest = deque(arguments)
    while rest:
        argument = rest.popleft()
        if argument == "--":
            return given, [*others, argument, *rest]
        name, separator, value = argument.removeprefix("--").partition("=")
        row = FLAGS.get(name) if argument.startswith("--") else None
        is_own = row is not None and row.is_switch and not separator
        if row is None or (is_own and not (rest and rest[0].lower() in _TRUTHS)):
            others.append(argument)
            continue
        if row.takes_value and not separator:
            if not rest or rest[0].startswith("--"):
                raise InvalidSettings(argument, "a value", None)
            value = rest.popleft()
        given.append((name, value))
    return given, others


def _spelled(setting: str, text: str) -> list[str]:
    flag = setting.replace("_", "-")
    if text in ("true", "false"):
        return [f"--{flag}" if text == "true" else f"--no-{flag}"]
    return [f"--{flag}", text]
