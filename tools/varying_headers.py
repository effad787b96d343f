"""Measure the CPU time per request that varying headers cost a running server.

    python tools/varying_headers.py grpc PORT PID [--form literal] [--seconds 2]
    python tools/varying_headers.py rest PORT PID

The server must serve `identity`, FP32[-1,16]. Requests with equal and with varying headers
alternate. A server that polls for the next request uses CPU time meanwhile, so start it with
--busy-poll-seconds 0. `tools/compare.py` uses the same client to compare servers.
"""

import argparse
import json
import statistics
from functools import partial

from comparison.rows import CPU
from comparison.varying import FORMS, drive, identity_load


def main() -> None:
    """Parse the arguments, measure alternately, and print a line of JSON for each form."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("protocol", choices=("grpc", "rest"))
    parser.add_argument("port", type=int)
    parser.add_argument("pid", type=int, help="the server, with its children")
    parser.add_argument("--form", action="append", choices=tuple(FORMS), help="of header blocks")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--load", default="4x16", help="connections x requests in flight")
    arguments = parser.parse_args()
    for form in arguments.form or (FORMS if arguments.protocol == "grpc" else ("rest",)):
        measures = {
            name: partial(
                drive,
                identity_load(arguments.protocol, arguments.port, arguments.load, form, vary=vary),
                arguments.pid,
                arguments.seconds,
            )
            for name, vary in (("equal", False), ("varying", True))
        }
        found: dict[str, list[float]] = {name: [] for name in measures}
        for _ in range(arguments.repetitions):
            for name, measure in measures.items():
                repetition = measure()
                if "error" in repetition:
                    raise SystemExit(repetition["error"])
                found[name].append(repetition[CPU])
        equal, varying = (statistics.median(found[name]) for name in ("equal", "varying"))
        print(json.dumps({"form": form, **found, "ratio": round(varying / equal, 3)}), flush=True)


if __name__ == "__main__":
    main()
