"""Finds host transfers and donated arguments in the HLO of a compiled program."""

import re

_HOST = {
    "callback": re.compile(r"custom_call_target=\"[^\"]*callback[^\"]*\""),
    "placement": re.compile(
        r"custom_call_target=\"(MoveToHost|MoveToDevice|annotate_device_placement|PinTo\w*)\""
    ),
    "feed": re.compile(r"= [^=]*\b(infeed|outfeed)\("),
    "transfer": re.compile(r"= [^=]*\b(send|recv)(-done)?\([^\n]*is_host_transfer=true"),
    "host memory": re.compile(r"\{[\d,]*:[^}]*S\(5\)[^}]*\}"),
    "host computation": re.compile(r"_xla_compute_type=\"host\"|HostExecute"),
}
"""Patterns by kind of host access. XLA's memory space 5 is host memory."""

_ALIAS = re.compile(r"input_output_alias=\{ *\{")
_DONOR = re.compile(r"buffer_donor=\{ *\(")


def host_traffic(text: str) -> list[str]:
    """Return the host accesses of an optimized module besides its arguments and results."""
    return [
        f"{kind}: {line.strip()[:200]}"
        for line in text.splitlines()
        for kind, pattern in _HOST.items()
        if pattern.search(line)
    ]


def donates(text: str) -> bool:
    """Return whether a result may overwrite an argument."""
    return bool(_ALIAS.search(text) or _DONOR.search(text))
