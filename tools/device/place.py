"""The environment of a step: its device, directories, sizes and durations."""

import os
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from device.findings import Findings

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "models"
_VARIABLE = "DEVICE_CHECK"


@dataclass(frozen=True, slots=True)
class Place:
    """Settings shared by all steps of a run."""

    device: str
    out: str
    """Directory of results.jsonl and logs."""
    work: str
    """Directory of models and caches."""
    quick: bool = False
    """Whether to use small models and short durations, as on a CPU."""
    smoke: bool = False

    @classmethod
    def here(cls) -> "Place":
        """Return the settings of the step that runs in this process."""
        return msgspec.json.decode(os.environ[_VARIABLE], type=cls)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of a step; the step itself selects JAX's platform."""
        return os.environ | {
            _VARIABLE: msgspec.json.encode(asdict(self)).decode(),
            "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
            "PYTHONUNBUFFERED": "1",
        }

    def findings(self, step: str = "") -> Findings:
        """Return the findings file, for use by a step."""
        return Findings(Path(self.out) / "results.jsonl", step)

    @property
    def folder(self) -> Path:
        """Return the directory of models and caches."""
        return Path(self.work)

    @property
    def models(self) -> Path:
        """Return the directory of the models made for this run."""
        return self.folder / "models"

    @property
    def cache(self) -> Path:
        """Return the compilation cache shared by all steps."""
        return self.folder / "cache"

    @property
    def seconds(self) -> float:
        """Return the duration of one speed measurement."""
        return 0.05 if self.quick else 1.5

    @property
    def batches(self) -> tuple[int, ...]:
        """Return the batch sizes of large models."""
        return (1, 2) if self.quick else (1, 8, 32, 64)

    @property
    def is_gpu(self) -> bool:
        """Tell whether the device is a real GPU."""
        return self.device == "cuda"


def card_bytes() -> int:
    """Return the bytes in use on the first GPU, according to its driver; 0 without one."""
    asked = ("nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    try:
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        return int(said.strip()) << 20
    except (OSError, ValueError, subprocess.CalledProcessError):
        return 0
