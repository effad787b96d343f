"""The gRPC services, methods and protos that the documentation offers."""

import io
import json
import re
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from shlex import quote
from types import MappingProxyType

FOLDER = "protos"
"""Directory of the protos in the archive, as named in the grpcurl examples."""

_CHECKOUT = Path(__file__).resolve().parents[4] / FOLDER
"""Directory of the protos in a checkout; in a wheel they are in the package."""

_LINES = "grpcurl.txt"
_PACKAGE = re.compile(r"^package ([\w.]+);", re.MULTILINE)
_SERVICE = re.compile(r"^service (\w+) \{(.*?)^\}", re.MULTILINE | re.DOTALL)
_METHOD = re.compile(r"^ +rpc (\w+)\(", re.MULTILINE)
_REFLECTION = "reflection"
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Fixed file time, so that every server returns an identical archive."""

_MODEL: Mapping[str, object] = MappingProxyType({"name": "identity"})
_REPOSITORY: Mapping[str, object] = MappingProxyType({"model_name": "identity"})
_ID: Mapping[str, object] = MappingProxyType({"modelId": "identity"})
_INFERENCE: Mapping[str, object] = MappingProxyType(
    {
        "model_name": "identity",
        "inputs": [
            {
                "name": "x",
                "datatype": "FP32",
                "shape": [1, 16],
                "contents": {"fp32_contents": list(range(16))},
            }
        ],
    }
)
_EXAMPLES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "ModelReady": _MODEL,
        "ModelMetadata": _MODEL,
        "ModelInfer": _INFERENCE,
        "ModelStreamInfer": _INFERENCE,
        "ModelConfig": _MODEL,
        "ModelStatistics": _MODEL,
        "RepositoryModelLoad": _REPOSITORY,
        "RepositoryModelUnload": _REPOSITORY,
        "SystemSharedMemoryRegister": {"name": "input", "key": "/input", "byte_size": 64},
        "CudaSharedMemoryRegister": {"name": "input", "raw_handle": "", "byte_size": 64},
        "loadModel": {"modelId": "identity", "modelPath": "identity"},
        "predictModelSize": {"modelId": "identity", "modelPath": "identity"},
        "unloadModel": _ID,
        "modelSize": _ID,
    }
)
"""Example messages by method; other methods take an empty message."""


@dataclass(frozen=True, slots=True)
class Service:
    """One gRPC service."""

    proto: str
    """The file that defines the service."""
    name: str
    """Full name with its package: `inference.GRPCInferenceService`."""
    methods: tuple[str, ...]


def read_protos() -> dict[str, str]:
    """Return the text of each proto by file name, sorted."""
    packaged = resources.files("xlaserve.http.dashboard").joinpath(FOLDER)
    folder = packaged if packaged.is_dir() else _CHECKOUT
    found = (path for path in folder.iterdir() if path.name.endswith(".proto"))
    return {path.name: path.read_text() for path in sorted(found, key=lambda path: path.name)}


def services(protos: Mapping[str, str]) -> list[Service]:
    """Return the services in the protos, except reflection, which grpcurl calls itself."""
    found = []
    for proto, text in protos.items():
        package = _PACKAGE.search(text)
        prefix = f"{package[1]}." if package else ""
        for name, body in _SERVICE.findall(text):
            if _REFLECTION not in prefix:
                found.append(Service(proto, prefix + name, tuple(_METHOD.findall(body))))
    return found


def command(service: Service, method: str, address: str) -> str:
    """Return a shell command that calls a method, using the protos in `protos/`."""
    message = _EXAMPLES.get(method)
    data = f"-d {quote(json.dumps(dict(message)))} " if message else ""
    return (
        f"grpcurl -plaintext -import-path {FOLDER} -proto {service.proto} {data}"
        f"{address} {service.name}/{method}"
    )


def archive(protos: Mapping[str, str], address: str) -> bytes:
    """Return a zip archive of the protos, and a file with a command for each method."""
    lines = [
        command(service, method, address)
        for service in services(protos)
        for method in service.methods
    ]
    files = {f"{FOLDER}/{name}": text for name, text in protos.items()}
    return _zipped({**files, _LINES: "\n".join((*_notes(), *lines, ""))}.items())


def _notes() -> Iterable[str]:
    yield "# One call of each method. Run them next to the directory of protos."
    yield "# For a server with TLS, leave out -plaintext."


def _zipped(files: Iterable[tuple[str, str]]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as made:
        for name, text in files:
            info = zipfile.ZipInfo(name, _EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            made.writestr(info, text)
    return buffer.getvalue()
