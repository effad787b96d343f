"""State of a generation request, from queueing to its last token."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from xlaserve.generation.asking import GenerationParameters
from xlaserve.generation.constraint import Constraint
from xlaserve.generation.step import Step
from xlaserve.generation.texts import element
from xlaserve.language.detokenizing import Detokenizer
from xlaserve.runtime.generator.info import TEXT
from xlaserve.runtime.handling import AnswerParameters, ModelRequest
from xlaserve.tensors import Parameter, Tensor

_NO_TOKENS, _NO_LOGPROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)


class StepResults(NamedTuple):
    """The results of a step, split into one answer per row."""

    step: Step
    numbers: Sequence[int]
    tokens: Sequence[Tensor]
    """The token of each row, INT32 [1]."""
    logprobs: Sequence[Tensor]
    """The log-probability of each row's token, FP32 [1]."""

    @classmethod
    def of(cls, step: Step) -> "StepResults":
        """Split the results of a step."""
        # Splitting into a list is several times faster than indexing the array for each slot.
        rows = list(step.tokens[:, None]), list(step.logprobs[:, None])
        return cls(step, step.tokens.tolist(), *rows)

    def top(self, row: int, most: int) -> tuple[Tensor, Tensor]:
        """Return the most likely tokens of a row, with their log-probabilities."""
        if not most:
            return _NO_TOKENS, _NO_LOGPROBS
        return self.step.top_tokens[row, :most], self.step.top_logprobs[row, :most]


class Running:
    """A request that has a slot or waits for one."""

    def __init__(
        self,
        request: ModelRequest,
        freed: Callable[[], None],
        prompt: Tensor,
        parameters: GenerationParameters,
        level: int = 0,
        *,
        text: Detokenizer | None = None,
    ) -> None:
        """`prompt` is int32; a lower `level` means a higher priority.

        `text` detokenizes the answer; None if no text is requested.
        """
        self._text = text
        self._pieces: list[str] = []
        """The text so far, for a request with a single answer."""
        self.constraint: Constraint | None = None
        """State of the answer within its grammar."""
        self.grow: Callable[[], Future[None]] | None = None
        """Starts to let the grammar grow on another thread; None without a grammar."""
        self.growth: Future[None] | None = None
        """The growth that the request waits for, or whose outcome was not looked at yet."""
        self.request = request
        self.freed = freed
        self.prompt = prompt
        self.parameters = parameters
        self.seed_words = parameters.seed_words
        self.level = level
        self.sender = request.sender
        self.passed = 0
        """Number of times that the request was passed over since it was last chosen."""
        self.context = prompt
        """The prompt, followed after a preemption by the tokens generated before."""
        self.written = 0
        """Number of the request's tokens whose rows are in the cache."""
        self.cached = 0
        """Number of the request's tokens found in the prefix cache."""
        self.preempted = 0
        """Number of times that the request was preempted."""
        self.admitted = 0
        """Sequence number of the request's admission."""
        self.output: list[int] = []
        self.is_paused = False
        """Whether generation is paused until its client reads, or its grammar has grown."""
        self.last_token_ns = self.sender.submitted_ns or time.perf_counter_ns()
        """Time of submission, then of the last token."""
        self._whole: list[tuple[float, Tensor, Tensor]] = []
        """Log-probability and most likely tokens per token, for a request with a single answer."""

    @property
    def is_prefilled(self) -> bool:
        """Tell whether all tokens but the last are in the cache."""
        return self.written >= len(self.context) - 1

    @property
    def left(self) -> int:
        """Return the number of tokens not yet in the cache."""
        return len(self.context) - self.written

    @property
    def last(self) -> int:
        """Return the input token of the next step."""
        return self.output[-1] if self.output else int(self.prompt[-1])

    @property
    def tokens(self) -> Tensor:
        """Return the tokens whose rows are in the cache."""
        if self.written <= len(self.prompt):
            return self.prompt[: self.written]
        whole = np.concatenate([self.prompt, np.array(self.output, np.int32)])
        return np.ascontiguousarray(whole[: self.written])

    def give_up(self) -> None:
        """Prepare the request to be continued after a preemption.

        Everything that determines its next token is kept: seed and position, token counts, grammar
        state, and held-back text.
        """
        self.context = np.concatenate([self.prompt, np.array(self.output, np.int32)])
        self.written = 0
        self.preempted += 1

    def take(self, row: int, given: StepResults, max_length: int) -> bool:
        """Process the token in a row of a step, and send it; return whether it was the last.

        Raises InvalidParameter if the grammar fails.
        """
        token, parameters = given.numbers[row], self.parameters
        self.written += 1
        self.output.append(token)
        generated = len(self.output)
        is_stop = generated > parameters.min_tokens and token in parameters.stops
        has_ended = is_stop or (self.constraint is not None and self.constraint.take(token))
        is_last = has_ended or self.written >= max_length or generated >= parameters.max_tokens
        piece = ""
        if self._text is not None:
            # A stop token produces no text.
            piece = "" if is_stop else self._text.push(token)
            is_last = is_last or self._text.stopped is not None
            piece += self._text.end() if is_last else ""
        ending = self._ending(has_ended=has_ended, is_stop=is_stop) if is_last else None
        if self.sender.takes_many:
            outputs = _outputs(row, given, parameters.logprobs)
            if self._text is not None:
                outputs[TEXT] = element(piece)
            self.request.answer(outputs, last=is_last, parameters=ending)
            return is_last
        self._pieces.append(piece)
        self._whole.append((float(given.logprobs[row][0]), *given.top(row, parameters.logprobs)))
        if is_last:
            self.request.answer(self._all_outputs(), parameters=ending)
        return is_last

    def _all_outputs(self) -> Mapping[str, Tensor]:
        logprobs, top_tokens, top_logprobs = zip(*self._whole, strict=True)
        return {
            TEXT: element("".join(self._pieces)),
            "tokens": np.array(self.output, np.int32),
            "logprobs": np.array(logprobs, np.float32),
            "top_tokens": np.concatenate(top_tokens),
            "top_logprobs": np.concatenate(top_logprobs),
        }

    def _ending(self, *, has_ended: bool, is_stop: bool) -> AnswerParameters:
        stopped = None if self._text is None else self._text.stopped
        parameters: dict[str, Parameter] = {
            "finish_reason": "stop" if has_ended or stopped else "length",
            "prompt_tokens": len(self.prompt),
            "cached_tokens": self.cached,
        }
        if is_stop:
            parameters["stop_token"] = True
        elif stopped:
            parameters["stop_string"] = stopped
        return AnswerParameters(parameters)


def _outputs(row: int, given: StepResults, most: int) -> dict[str, Tensor]:
    top_tokens, top_logprobs = given.top(row, most)
    return {
        "token": given.tokens[row],
        "logprob": given.logprobs[row],
        "top_tokens": top_tokens,
        "top_logprobs": top_logprobs,
    }
