"""tritonserver's flags on the command line of `xlaserve serve`."""

import json
import re
from pathlib import Path

import aiohttp
import pytest
from support.process import command, run, served

from xlaserve.cli.serve.triton_flags import FLAGS, translate
from xlaserve.errors import InvalidSettings
from xlaserve.settings import Settings
from xlaserve.settings.description import describe_settings

_TLS = {"tls_endpoints": "grpc"}

OBEYED: list[tuple[list[str], dict[str, str]]] = [
    (["--http-port", "80"], {"http_endpoint": "port:80"}),
    (["--http-port=80", "--allow-http=false"], {"http_endpoint": "none"}),
    (["--allow-http", "true"], {}),
    (["--grpc-port=81", "--allow-grpc=true"], {"grpc_endpoint": "port:81"}),
    (["--metrics-port=82"], {"metrics_endpoint": "port:82"}),
    (["--allow-metrics=0", "--metrics-port=82"], {"metrics_endpoint": "none"}),
    (["--http-address=::", "--grpc-address", "::"], {"host": "::"}),
    (["--strict-readiness=true"], {"readiness": "models"}),
    (["--strict-readiness", "OFF"], {"readiness": "startup"}),
    (["--exit-on-error=false"], {"exit_on_error": "false"}),
    (["--model-store", "/a", "--model-store=/b"], {"model_repository": "/b"}),
    (["--repository-poll-secs=3"], {"poll_interval_seconds": "3"}),
    (["--exit-timeout-secs=3"], {"grace_seconds": "3"}),
    (["--model-load-thread-count=3"], {"load_threads": "3"}),
    (["--http-max-input-size=3000"], {"max_message_bytes": "3000"}),
    (["--id=triton"], {"server_name": "triton"}),
    (["--log-verbose=1", "--log-info=false"], {"log_level": "debug"}),
    (["--log-verbose=0"], {"log_level": "info"}),
    (["--log-info=false"], {"log_level": "warning"}),
    (["--log-info=false", "--log-warning=false"], {"log_level": "error"}),
    (["--grpc-use-ssl=true", "--grpc-server-cert=c"], {**_TLS, "tls_certificate": "c"}),
    (["--grpc-use-ssl=false", "--grpc-server-cert=c", "--grpc-server-key=k"], {}),
    (
        [
            "--grpc-use-ssl-mutual=true",
            *("--grpc-server-cert=c", "--grpc-server-key=k", "--grpc-root-cert=r"),
        ],
        {**_TLS, "tls_certificate": "c", "tls_key": "k", "tls_client_ca": "r"},
    ),
    (
        ["--grpc-use-ssl=true", "--grpc-server-cert=c", "--grpc-root-cert=r"],
        {**_TLS, "tls_certificate": "c"},
    ),
    (["--trace-config=triton,file=/t"], {"trace_file": "/t"}),
    (
        [
            *("--trace-config=level=TIMESTAMPS", "--trace-config=rate=2"),
            *("--trace-config", "count=5", "--trace-config=triton,file=/t"),
        ],
        {
            **{"trace_level": "TIMESTAMPS", "trace_rate": "2", "trace_count": "5"},
            "trace_file": "/t",
        },
    ),
    (["--trace-config=triton,log-frequency=9"], {"trace_log_frequency": "9"}),
    (["--trace-config=mode=opentelemetry"], {"trace_mode": "opentelemetry"}),
    (["--cache-config=local,size=5"], {"response_cache_bytes": "5"}),
    (["--response-cache-byte-size=5"], {"response_cache_bytes": "5"}),
    (["--allow-client-shm=true"], {"shared_memory": "all"}),
    (["--metrics-interval-ms=500"], {"gpu_metrics_seconds": "0.5"}),
    (["--allow-gpu-metrics=false"], {"gpu_metrics_seconds": "0"}),
    (["--metrics-interval-ms=500", "--allow-gpu-metrics=0"], {"gpu_metrics_seconds": "0"}),
    (["--allow-gpu-metrics", "true"], {}),
    (["--allow-client-shm=false"], {"shared_memory": "none"}),
]

REFUSED = {
    "--allow-grpc=false": "gRPC is always served",
    "--model-namespacing=true": "model names are unique across repositories",
    "--reuse-grpc-port=true": "a port serves one process",
    "--http-header-forward-pattern=.*": "headers are not passed to models",
    "--model-config-name=h100": "config.pbtxt or config.json",
    "--log-file=/tmp/log": "the server logs to stderr",
    "--allow-sagemaker=true": "--sagemaker does that",
    "--allow-vertex-ai=true": "it is not implemented",
    "--metrics-interval-ms=often": "milliseconds",
    "--allow-http=perhaps": "expected true or false, got 'perhaps'",
    "--trace-config=opentelemetry,url=u": "expected one of level=, rate=, count=, mode=",
    "--cache-config=redis,host=h": "expected local,size=<bytes>",
    "--grpc-use-ssl=true": "setting --grpc-server-cert: expected a file",
    "--http-port": "setting --http-port: expected a value",
    "--http-port --grpc-port 3": "setting --http-port: expected a value",
    "--http-port 1 --http-endpoint=port:2": "setting --http-endpoint: expected either the"
    " tritonserver flag",
    "--http-address ::1 --grpc-address ::": "expected one address for all endpoints (--host)",
}


@pytest.mark.parametrize(("given", "settings"), OBEYED, ids=[" ".join(row[0]) for row in OBEYED])
def test_a_flag_sets_what_stands_for_it(given: list[str], settings: dict[str, str]) -> None:
    translated = translate(["/models", *given])

    assert settings == translated.obeyed
    assert "/models" == translated.arguments[0]
    assert [] == list(translated.without_effect)
    # Each maps to a setting, which accepts the value.
    Settings.read({}, repository="/models", **settings)


@pytest.mark.parametrize(("given", "problem"), REFUSED.items())
def test_what_is_not_obeyed_and_matters_is_refused(given: str, problem: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        translate(["/models", *given.split(" ")])

    assert problem in str(caught.value)


def test_what_does_not_matter_is_named_once() -> None:
    """The word after a flag without a value is kept."""
    given = ["--host-policy", "a,b=c", "--host-policy=x,y=z", "--disable-auto-complete-config"]
    translated = translate([*given, "/models", "--", "--host-policy"])
    named = ["--host-policy", "--disable-auto-complete-config"]

    assert named == list(translated.without_effect)
    assert ["/models", "--", "--host-policy"] == list(translated.arguments)


def test_no_row_hides_a_flag_of_our_own() -> None:
    """Except for flags that would be spelled alike but differ in meaning."""
    own = {row.name.replace("_", "-") for row in describe_settings()}

    assert {"exit-on-error"} == own & FLAGS.keys()


def test_every_row_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs/moving.md").read_text()
    named = set(re.findall(r"`--([a-z0-9-]+)", page))

    assert FLAGS.keys() <= named


@pytest.mark.parametrize("given", [[], ["--exit-on-error"], ["--no-exit-on-error"]])
def test_our_own_switches_keep_their_form(given: list[str]) -> None:
    assert given == list(translate(given).arguments)


@pytest.mark.slow
async def test_a_command_line_of_tritonserver_serves(example_models: Path, tmp_path: Path) -> None:
    """Metrics then have their own endpoint, and are absent from the HTTP one."""
    other = tmp_path / "other"
    (other / "echo/1").mkdir(parents=True)
    tensors = '[ { name: "x" data_type: TYPE_STRING dims: [ 1 ] } ]'
    (other / "echo/config.pbtxt").write_text(
        f'backend: "identity" input {tensors} output {tensors.replace("x", "y")}'
    )
    flags = (
        f"--model-repository={other}",
        *("--metrics-port", "0", "--strict-readiness=true", "--log-verbose=1"),
        *("--model-control-mode=explicit", "--load-model=echo", "--load-model=simple"),
        *("--backend-config=onnxruntime,a=b", "--pinned-memory-pool-byte-size=0"),
    )
    async with served(example_models, *flags) as server, aiohttp.ClientSession() as session:
        named = server.event("tritonserver flags without effect")
        addresses = server.event("listening")
        async with session.get(f"http://{addresses['metrics']}/metrics") as response:
            metrics = await response.text()
        statuses = []
        for address, path in (
            (addresses["http"], "/metrics"),
            (addresses["http"], "/v2/health/ready"),
            (addresses["metrics"], "/v2/health/ready"),
        ):
            async with session.get(f"http://{address}{path}") as response:
                statuses.append(response.status)

        assert ["--backend-config", "--pinned-memory-pool-byte-size"] == named["flags"]
        assert 'nv_inference_request_success{model="echo",version="1"}' in metrics
        assert [404, 200, 200] == statuses
        assert {"echo", "simple"} == {
            record["model"] for record in server.log if record["event"] == "model loaded"
        }


@pytest.mark.slow
async def test_exit_on_error_ends_the_server(tmp_path: Path) -> None:
    (tmp_path / "broken/1").mkdir(parents=True)
    serve = command("serve", f"--model-store={tmp_path}", "--http-port=0", "--grpc-port=0")
    status, _, log = await run(*serve, "--exit-on-error=true", "--device=cpu")

    assert 1 == status
    text = "error: not loaded at startup: 'broken' (exit_on_error): see the log"
    assert text == log.splitlines()[-1]
    assert "stopped" in {json.loads(line)["event"] for line in log.splitlines()[:-1]}
