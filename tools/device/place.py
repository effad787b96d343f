"""Where a step runs: its device, its folders, and how large and long things are."""

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
    """What all steps of a run share."""

    device: str
    out: str
    """Directory of results.jsonl, and of logs."""
    work: str
    """Directory of models and caches."""
    quick: bool = False
    """Whether models are small and times short, as for a CPU."""
    smoke: bool = False

    @classmethod
    def here(cls) -> "Place":
        """Return the place of the step that this process is."""
        return msgspec.json.decode(os.environ[_VARIABLE], type=cls)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of a step; it decides for itself where JAX runs."""
        return os.environ | {
            _VARIABLE: msgspec.json.encode(asdict(self)).decode(),
            "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
            "PYTHONUNBUFFERED": "1",
        }

    def findings(self, step: str = "") -> Findings:
        """Return the file of findings, for a step."""
        return Findings(Path(self.out) / "results.jsonl", step)

    @property
    def folder(self) -> Path:
        """Return the directory of models and caches."""
        return Path(self.work)

    @property
    def models(self) -> Path:
        """Return the directory of models that were made for this run."""
        return self.folder / "models"

    @property
    def cache(self) -> Path:
        """Return the cache of programs of all steps."""
        return self.folder / "cache"

    @property
    def seconds(self) -> float:
        """Return how long one speed is measured."""
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
    """Return the bytes in use on the first GPU, as its driver says; 0 where there is none."""
    asked = ("nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    try:
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        return int(said.strip()) << 20
    except (OSError, ValueError, subprocess.CalledProcessError):
        return 0
