"""Make the Python code of every contract from its protos, or prove that it is fresh (`--check`).

The versions of the compiler, of betterproto and of black are pinned in the `generate` dependency
group, so that the output is the same on every machine.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGETS = (
    (ROOT / "protos", ROOT / "generated" / "xlaserve_proto"),
    (ROOT / "examples/custom_service", ROOT / "examples/custom_service/digits_proto"),
)
"""Directories of protos, and the packages generated from them."""

DESCRIPTOR_SET = "descriptor_set.binpb"
COMMITTED_BY_HAND = frozenset({"py.typed"})


def generate(protos: Path, target: Path) -> None:
    """Compile the contracts of a folder into `target`, which must exist and be empty."""
    sources = sorted(path.name for path in protos.glob("*.proto"))
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"--proto_path={protos}",
        f"--plugin=protoc-gen-python_betterproto={_plugin()}",
        f"--python_betterproto_out={target}",
        "--include_imports",
        f"--descriptor_set_out={target / DESCRIPTOR_SET}",
        *sources,
    ]
    compiled = subprocess.run(command, check=False, capture_output=True, text=True)
    if compiled.returncode:
        sys.exit(compiled.stderr)


def _plugin() -> Path:
    return Path(sys.executable).parent / "protoc-gen-python_betterproto"


def _files(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def differences(fresh: Path, committed: Path) -> list[str]:
    """Report committed files that differ from a fresh run."""
    wanted, found = _files(fresh), _files(committed)
    found = {name: data for name, data in found.items() if name not in COMMITTED_BY_HAND}
    both = wanted.keys() & found.keys()
    return (
        [f"missing: {name}" for name in wanted.keys() - found.keys()]
        + [f"left over: {name}" for name in found.keys() - wanted.keys()]
        + [f"changed: {name}" for name in both if wanted[name] != found[name]]
    )


def _replace(fresh: Path, committed: Path) -> None:
    wanted = _files(fresh)
    for name in _files(committed).keys() - wanted.keys() - COMMITTED_BY_HAND:
        (committed / name).unlink()
    for name, data in wanted.items():
        path = committed / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _refresh(protos: Path, committed: Path, *, check: bool) -> bool:
    with tempfile.TemporaryDirectory() as name:
        fresh = Path(name)
        generate(protos, fresh)
        stale = sorted(differences(fresh, committed))
        if not check:
            _replace(fresh, committed)
    for line in stale:
        print(f"{committed.relative_to(ROOT)}: {line}")
    return not stale


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if not fresh")
    check = parser.parse_args().check
    fresh = [_refresh(protos, committed, check=check) for protos, committed in TARGETS]
    if not check:
        return 0
    print("the generated code is fresh" if all(fresh) else "stale: run tools/generate.py")
    return 0 if all(fresh) else 1


if __name__ == "__main__":
    sys.exit(main())
