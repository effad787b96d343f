"""Judges random batched programs in a separate process.

    python row_programs_process.py moves|broad interpreted|compiled SEED...

It prints one line of JSON per program. Each program leaves memory behind in JAX, and the
interpreter aborts its process on an unsupported operation.
"""

# jax is only partly typed.
# mypy: disallow-untyped-calls=False

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[2] / "tests"
MOST_SECONDS = 30
"""CPU seconds for one program, so that other load on the machine does not count."""
_SHOWN = 160


def main() -> None:
    """Judge the programs of a family with the given seeds."""
    sys.path.append(str(_TESTS))
    family, how, *seeds = sys.argv[1:]
    judge = _FAMILIES[family]
    with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
        for seed in map(int, seeds):
            began = time.process_time()
            # Without a handler, SIGPROF kills the process: a Python handler would not run in the
            # interpreter.
            signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
            try:
                found = judge(seed, is_compiled=how == "compiled")
            except Exception as error:
                found = {"ended": f"{type(error).__name__}: {error}"[:_SHOWN]}
            took = round(time.process_time() - began, 3)
            print(json.dumps({"seed": seed, **found, "seconds": took}), flush=True)


def _move(seed: int, *, is_compiled: bool) -> dict[str, Any]:
    import jax.numpy as jnp
    from support.row_moves import INPUTS, Moves, leaks
    from support.rows import exported, findings_of

    del is_compiled
    program = Moves(seed)
    if not program.outputs:
        return {"unexported": "has no outputs"}
    try:
        artifact = exported(lambda *x: program(jnp, *x), INPUTS)
        findings = findings_of(artifact)
    # JAX cannot trace or export it with a symbolic batch size.
    except Exception as error:
        return {"unexported": f"{type(error).__name__}: {error}"[:_SHOWN]}
    return {"outputs": _outputs(findings, leaks(program, seed)), "steps": program.taken}


def _broad(seed: int, *, is_compiled: bool) -> dict[str, Any]:
    import jax
    from support.row_broad import STEPS, plain
    from support.row_programs import INPUTS, Program
    from support.row_trial import dependences
    from support.rows import exported, findings_in

    from xlaserve.row_proofs import refining

    program = Program(seed, steps=6, of=STEPS)
    try:
        artifact = exported(plain(program), INPUTS)
    except Exception as error:
        return {"unexported": f"{type(error).__name__}: {error}"[:_SHOWN]}
    with jax.enable_x64(True), refining.parsing():
        refinery = refining.Refinery(artifact, {}, "b")
        try:
            findings = findings_in(refinery, artifact)
        # The server rejects programs whose shapes stay symbolic once the batch size is known, too.
        except jax.errors.JaxRuntimeError as error:
            return {"unexported": f"{type(error).__name__}: {error}"[:_SHOWN]}
        # Try one in ten with XLA, whose programs are what the server executes.
        seen, is_compiled = dependences(
            refinery,
            INPUTS,
            seed,
            is_compiled=is_compiled or not seed % 10,
            counts="until_all_are_long" in program.taken,
            proved=[finding is None for finding in findings],
        )
    outputs = _outputs(findings, seen)
    return {"outputs": outputs, "steps": program.taken, "compiled": is_compiled}


def _outputs(findings: Sequence[Any], seen: Sequence[str]) -> list[tuple[bool, str, str]]:
    return [
        (finding is None, "" if finding is None else f"{finding.operation} {finding.reason}", leak)
        for finding, leak in zip(findings, seen, strict=True)
    ]


_FAMILIES: Mapping[str, Callable[..., dict[str, Any]]] = {"moves": _move, "broad": _broad}


if __name__ == "__main__":
    main()
