"""A loaded generator of the tiny language model, and requests that record their answers."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from support.tiny_language import VOCAB
from xlaserve.generation.loading import GeneratorModel
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime import loaders
from xlaserve.runtime.handling import AnswerParameters, UnsentRequest
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.programs import cache_key
from xlaserve.runtime.programs.compilation import Compilation
from xlaserve.runtime.programs.compilation_cache import CompilationCache

SLOTS, CHUNK = 3, 4
CONFIG = {"slots": str(SLOTS), "windows": "16", "chunk": str(CHUNK)}


class Kept:
    """Compilation cache shared by these tests: most of their time is compilation."""

    compilation = Compilation()

    def prepare(self, folder: Path) -> None:
        """Share the cache folder with other processes of the run."""
        cache = CompilationCache(folder, 1 << 30)
        cache.prepare(cache_key.target_of("cpu", str(jax.devices("cpu")[0].device_kind)))
        self.compilation = Compilation(cache)


kept = Kept()


class Asking(UnsentRequest):
    """A request that records its answers and can be cancelled or stop reading."""

    def __init__(
        self, prompt: list[int], parameters: Mapping[str, Any], reads: int | None = None
    ) -> None:
        """After `reads` answers the client stops reading until `read_on` is called."""
        super().__init__(
            {"tokens": np.array(prompt, np.int32)}, [], parameters=parameters, failed=self._ended
        )
        self.answers: list[Mapping[str, Any]] = []
        self.error: BaseException | None = None
        self.told: Mapping[str, Any] = {}
        self.over = threading.Event()
        self.some = threading.Event()
        self.paused = threading.Event()
        self.is_cancelled = False
        self.is_writable = True
        self._reads = reads
        self._resume: Any = None
        self._leave: Any = None
        self.has_ended = False
        """Whether it ended without a last answer."""

    def answer(
        self,
        outputs: Mapping[str, Any],
        *,
        last: bool = True,
        parameters: AnswerParameters | None = None,
    ) -> None:
        self.answers.append(outputs)
        self.some.set()
        if len(self.answers) == self._reads:
            self.is_writable = False
        if last:
            assert parameters is not None
            self.told = parameters.answer
            self.over.set()

    def when_writable(self, resume: Any) -> None:
        self._resume = resume
        self.paused.set()

    def read_on(self) -> None:
        self.is_writable = True
        assert self.paused.wait(60)  # the answer is recorded before the generator pauses
        self._resume()

    def when_cancelled(self, leave: Any) -> None:
        self._leave = leave

    def cancel(self) -> None:
        self.is_cancelled = True
        self._leave()

    def end(self) -> None:
        self.has_ended = True
        self.over.set()

    def _ended(self, error: BaseException) -> None:
        self.error = error
        self.over.set()

    @property
    def tokens(self) -> list[int]:
        assert self.over.wait(60)
        if self.error is not None:
            raise self.error
        return [int(found["token"][0]) for found in self.answers]


class Loaded:
    """A loaded model; counts its requests to wait for them."""

    def __init__(self, model: GeneratorModel) -> None:
        self.model = model
        self._freed = threading.Semaphore(0)
        self._begun = 0

    def ask(self, prompt: list[int], **parameters: Any) -> Asking:
        return self.begin(Asking(prompt, parameters))

    def begin(self, request: Asking) -> Asking:
        self._begun += 1
        self.model.handle(0, [request], self._freed.release)
        return request

    def wait_until_idle(self) -> None:
        for _ in range(self._begun):
            assert self._freed.acquire(timeout=60)
        self._begun = 0


def load(directory: Path, **changed: str) -> GeneratorModel:
    return load_configured(directory, ModelConfig(parameters=CONFIG | changed))


def load_configured(directory: Path, config: ModelConfig) -> GeneratorModel:
    """Load the model, reusing programs compiled by other tests of the run."""
    context = LoadContext("story", "1", config, compilation=kept.compilation)
    model = loaders.load(directory, context)
    assert isinstance(model, GeneratorModel)
    return model


def prompt_of(length: int, seed: int = 0) -> list[int]:
    found = np.random.default_rng(seed).integers(6, VOCAB, length)
    return [int(token) for token in found]
