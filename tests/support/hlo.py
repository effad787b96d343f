"""What a compiled program has to do with the host, read from its HLO."""

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
"""By what it is. XLA's memory space 5 is that of the host."""

_ALIAS = re.compile(r"input_output_alias=\{ *\{")
_DONOR = re.compile(r"buffer_donor=\{ *\(")


def host_traffic(text: str) -> list[str]:
    """Return what an optimized module does with the host besides its arguments and results."""
    return [
        f"{kind}: {line.strip()[:200]}"
        for line in text.splitlines()
        for kind, pattern in _HOST.items()
        if pattern.search(line)
    ]


def donates(text: str) -> bool:
    """Tell whether a result may be written over an argument."""
    return bool(_ALIAS.search(text) or _DONOR.search(text))
