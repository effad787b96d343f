"""Serve every kind of model written by one version of JAX under another, and vice versa.

    python tools/lasts.py --work .tox/lasts

The kinds are those of `tests/support/kinds.py`. They are written by the newest JAX, which is the
installed one, and by the oldest that the server supports (`jax>=` in pyproject.toml), which is
installed next to it. Each writes and serves in separate processes with a common compilation cache:
the answers must be equal, and the second start of each version must find all of its programs there.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from http import HTTPStatus
from importlib import metadata
from pathlib import Path

import aiohttp

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
sys.path[:0] = [str(TESTS), str(ROOT / "tools")]

from support import kinds  # noqa: E402
from support.process import ServerProcess, served  # noqa: E402

TOLERANCE = 1e-4
WRITE = "import sys, pathlib; from support import kinds; kinds.write(pathlib.Path(sys.argv[1]))"
REQUESTS = (
    "import json; from support import kinds; "
    "print(json.dumps({name: kinds.request(name) for name in kinds.KINDS}))"
)
MIGRATE = (
    "import sys; from xlaserve.cli import application; "
    "application()(['repo', 'migrate', sys.argv[1]])"
)
PLAIN = "plain"
"""Written by jax.export alone, in the newest StableHLO: an older JAX needs it migrated."""
LOOKUPS = re.compile(r"^xlaserve_program_lookups_total\{(?P<labels>.*)\} (?P<count>\S+)$", re.M)

Answers = dict[str, list[float]]


def oldest() -> str:
    """Return the oldest version of JAX that the package allows."""
    text = (ROOT / "pyproject.toml").read_text()
    (found,) = re.findall(r'^    "jax>=([\d.]+)",$', text, re.M)
    return str(found)


def installed(version: str, work: Path) -> Path:
    """Return a directory with a version of JAX that takes precedence over the installed one."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    target = work / f"jax-{version}-py{python}"
    if not (target / "jax").exists():
        wanted = [f"jax=={version}", f"jaxlib=={version}"]
        uv = ["uv", "pip", "install", "--python", sys.executable, "--no-deps"]
        subprocess.run([*uv, "--target", str(target), *wanted], check=True)
    return target


def environment(overlay: Path | None) -> dict[str, str]:
    """Return the environment of a process that uses the JAX of an overlay, if given."""
    paths = [
        overlay,
        TESTS,
        ROOT / "tools",
        *filter(None, os.environ.get("PYTHONPATH", "").split(":")),
    ]
    return {"PYTHONPATH": ":".join(str(path) for path in paths if path)}


def run(code: str, overlay: Path | None, *arguments: object) -> str:
    """Run code in a separate process, and return its output."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    variables = os.environ | environment(overlay)
    return subprocess.run(
        command, env=variables, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


async def asked(
    repository: Path, overlay: Path | None, cache: Path, requests: dict[str, tuple[str, object]]
) -> tuple[Answers, int, str]:
    """Serve a repository; return all answers, the cache misses, and any failure."""
    flags = ("--allow-python-models", "--no-background-compile")
    variables = environment(overlay)
    async with served(repository, *flags, programs=str(cache), **variables) as server:
        async with aiohttp.ClientSession(f"http://{server.http}") as session:
            answers, failures = {}, []
            for name, (path, body) in requests.items():
                async with session.post(path, json=body) as answer:
                    text = await answer.text()
                    answers[name] = kinds.numbers(text)
                    if answer.status != HTTPStatus.OK or not answers[name]:
                        failures.append(
                            f"{name}: {answer.status} {text[:300]} {_reason(server, name)}"
                        )
            async with session.get("/metrics") as answer:
                metrics = await answer.text()
        await server.stop()
    missed = sum(
        float(found["count"])
        for found in LOOKUPS.finditer(metrics)
        if 'outcome="hit"' not in found["labels"]
    )
    return answers, int(missed), "; ".join(failures)


def _reason(server: ServerProcess, model: str) -> str:
    failed = [one for one in server.log if one.get("model") == model and one["level"] != "info"]
    return str(failed[-1:])


def differences(expected: Answers, found: Answers) -> list[str]:
    """Return the kinds whose answers differ."""
    return [
        f"{name}: expected {values[:8]}, got {found[name][:8]}"
        for name, values in expected.items()
        if len(values) != len(found[name])
        or any(
            abs(one - other) > TOLERANCE * max(1, abs(one))
            for one, other in zip(values, found[name], strict=True)
        )
    ]


async def check(work: Path) -> list[str]:
    """Return the failures; empty if all artifacts can be served."""
    newest, old = metadata.version("jax"), oldest()
    overlays = {newest: None, old: installed(old, work)}
    requests = json.loads(run(REQUESTS, None))
    problems: list[str] = []
    with tempfile.TemporaryDirectory(dir=work) as folder:
        cache = Path(folder, "cache")
        for writer in (newest, old):
            repository = Path(folder, f"by-{writer}")
            run(WRITE, overlays[writer], repository)
            run(MIGRATE, overlays[writer], repository / PLAIN)
            print(f"jax {writer} has written {len(requests)} kinds", flush=True)
            expected: Answers = {}
            for turn, server in enumerate(
                (newest, old, newest, old) if writer == newest else (old, newest)
            ):
                answers, missed, failure = await asked(
                    repository, overlays[server], cache, requests
                )
                said = f"written by jax {writer}, served by {server}"
                print(f"{said}: {len(answers)} kinds, {missed} programs not found", flush=True)
                problems += [f"{said}: {failure}"] if failure else []
                problems += [f"{said}: {one}" for one in differences(expected or answers, answers)]
                expected = expected or answers
                if turn >= len(overlays) and missed:
                    problems.append(
                        f"{said}, for the second time: {missed} programs were not found"
                    )
    return problems


def main() -> None:
    """Run the check, and exit with status 1 if it fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="where the other JAX is installed")
    work = parser.parse_args().work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    problems = asyncio.run(check(work))
    sys.exit("\n".join(problems) or None)


if __name__ == "__main__":
    main()
