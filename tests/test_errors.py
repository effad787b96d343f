import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from xlaserve import errors
from xlaserve.cli.author_errors import error_line
from xlaserve.errors import (
    MOST_CAUSES,
    BodyTimeout,
    BudgetExhausted,
    CompilationTimedOut,
    CrossSiteRequest,
    DeadlineExceeded,
    Decoupled,
    DeviceUnavailable,
    DuplicateTensor,
    EngineGone,
    EngineLost,
    ExecutionStalled,
    FileNameTooLong,
    FilesMissing,
    InvalidName,
    InvalidParameter,
    InvalidRegion,
    InvalidSettings,
    InvalidTensor,
    InvalidVersion,
    LoadCancelled,
    LoadFailed,
    LoadTimedOut,
    MissingInputs,
    ModelAlreadyLoaded,
    ModelControlForbidden,
    ModelNotFound,
    ModelNotReady,
    NotAcceptable,
    NotLocal,
    NotOneAnswer,
    OutOfFiles,
    OutOfMappings,
    OutOfMemory,
    OutOfSpace,
    OutputNotInForm,
    OutputNotText,
    Overloaded,
    ProcessSilent,
    QueueTimeout,
    RegionExists,
    RegionNotFound,
    RepositoryUnreadable,
    ShuttingDown,
    StartFailed,
    StillStarting,
    SwitchedOff,
    TooLarge,
    TooManyAbandoned,
    TooManyAnswers,
    TooManyChanges,
    TooManyRegions,
    UnknownDatatype,
    UnknownTensor,
    Unsupported,
    UnsupportedMediaType,
    WorkerDied,
    WorkersSilent,
    XlaserveError,
    causes,
)
from xlaserve.errors import access as access_errors
from xlaserve.errors import code as code_errors
from xlaserve.errors import language as language_errors
from xlaserve.errors import sequence as sequence_errors
from xlaserve.errors.access import (
    NotPermitted,
    QuotaExceeded,
    Restricted,
    TooManyRequests,
    Unauthenticated,
    WrongHost,
    WrongOrigin,
)
from xlaserve.errors.code import (
    CancelledByModel,
    ChangesItself,
    Deadlock,
    ExistsForModel,
    MissingOutputs,
    ModelFailed,
    NotFoundByModel,
    ProcessAbsent,
    ProcessLost,
    RefusedByModel,
    UnavailableToModel,
    UnknownToModel,
    UnsupportedByModel,
    WrongOutput,
)
from xlaserve.errors.language import (
    MessagesRefused,
    ModelHasNoTemplate,
    ModelHasNoText,
    NotText,
    SpelledSpecialToken,
    TemplateFailed,
    TextNotInstalled,
    TextProcessLost,
    TextTooLong,
    TokenizerFailed,
    TooManyTexts,
)
from xlaserve.errors.sequence import (
    MissingSequence,
    SequenceInterrupted,
    SequenceNotStarted,
    SequenceRows,
    StatesLost,
)
from xlaserve.residence.repository.exhaustion import load_failure
from xlaserve.runtime.devices.device_failures import device_failure

OF_CODE = (
    *(RefusedByModel, NotFoundByModel, ExistsForModel, UnavailableToModel),
    *(UnsupportedByModel, CancelledByModel, UnknownToModel),
)
"""Errors that a model's code may raise: only their class distinguishes them."""

TEXTS = [
    (ModelFailed("m", "KeyError: 'x'\n"), "model 'm': KeyError: 'x'\\n"),
    *((kind("m", "too long"), "model 'm': too long") for kind in OF_CODE),
    (
        WrongOutput("m", "y", "FP32[4]", "INT64[4]"),
        "model 'm': output 'y' of its code: expected FP32[4], got INT64[4]",
    ),
    (
        WrongOutput("m", "", "a mapping", "NoneType"),
        "model 'm': its code: expected a mapping, got NoneType",
    ),
    (
        MissingOutputs("m", ["y", "z"], ["x"]),
        "model 'm': expected its code to return output 'y', 'z', got 'x'",
    ),
    (
        Deadlock("m", ["a", "m"]),
        "model 'm': deadlock: all its instances wait for nested calls (a -> m): raise its"
        " instance count (instance_group)",
    ),
    (
        ChangesItself("m", "inner", is_load=False),
        "model 'm': deadlock: its code cannot unload 'inner', because it would wait for itself:"
        " have a client unload it",
    ),
    (
        ProcessLost("m", "it ended with exit status 3"),
        "model 'm': its process was lost while it executed this request, it ended with exit status "
        "3; it is being restarted, and the request may be the cause: see the log before you send"
        " it again",
    ),
    (
        ProcessAbsent("m", "it ended with exit status 3"),
        "model 'm': its process was lost before it began this request, it ended with exit "
        "status 3; it is being restarted, try again",
    ),
    (
        MissingOutputs("m", ["y"], []),
        "model 'm': expected its code to return output 'y', got none",
    ),
    (ModelNotFound("m"), "Request for unknown model: 'm' is not found"),
    (ModelNotFound("m", "3"), "Request for unknown model: 'm' version 3 is not found"),
    (
        ModelNotFound("m", detail="has no available versions"),
        "Request for unknown model: 'm' has no available versions",
    ),
    (ModelNotReady("m", "", "LOADING"), "model 'm' is not ready, its state is LOADING"),
    (
        ModelNotReady("m", "2", "UNAVAILABLE", "no disk"),
        "model 'm' version 2 is not ready, its state is UNAVAILABLE: no disk",
    ),
    (FilesMissing("m", "a is missing"), "failed to load 'm', a is missing"),
    (LoadFailed("m", "no version"), "failed to load 'm', no version"),
    (
        LoadTimedOut("m", "warming 1 of 2", 600.0),
        "failed to load 'm', it was still warming 1 of 2 after 600 seconds (load_seconds) and was"
        " abandoned; its thread keeps its memory, and may keep a core busy, until it ends: raise"
        " load_seconds",
    ),
    (
        OutOfMappings("m", 80, 52400, 52424, 65530),
        "model 'm': out of memory, its compiled programs need about 80 memory mappings, but 52400 "
        "of 52424 are in use (max_memory_mappings; system limit 65530, sysctl vm.max_map_count): "
        "raise the smaller limit or unload models",
    ),
    (
        TooManyAbandoned("m", 8),
        "model 'm' cannot be compiled: 8 abandoned loads and compilations are still running"
        " (max_abandoned): restart the server",
    ),
    (
        CompilationTimedOut("m", (4, (7,)), 600.0),
        "model 'm': compiling shape (4, (7,)) took longer than 600 seconds (load_seconds) and was "
        "abandoned; no other shape compiles until it ends: raise load_seconds or send smaller "
        "shapes",
    ),
    (
        FileNameTooLong("m", "A" * 256, 255),
        f"failed to load 'm', failed to poll from model repository: file '{'A' * 80}...': expected "
        "a name of at most 255 bytes, got 256",
    ),
    (LoadFailed("m", "got '\x1b[2J\n'"), r"failed to load 'm', got '\x1b[2J\n'"),
    (LoadFailed("m", "x" * 5000), f"failed to load 'm', {'x' * 1000}..."),
    (LoadCancelled("m"), "failed to load 'm', the load was cancelled"),
    (
        ModelControlForbidden("load", "none"),
        "load of a model is not allowed while the model control mode is 'none', "
        "start the server with --model-control-mode explicit",
    ),
    (OutOfMemory("m", "9 bytes wanted"), "model 'm': out of memory, 9 bytes wanted"),
    (
        OutOfFiles("m", "Too many open files", 1024),
        "failed to load 'm', the server reached its limit of open files (1024, RLIMIT_NOFILE): "
        "Too many open files; try again, or start it with a higher limit (ulimit -n)",
    ),
    (
        OutOfSpace("m", "full"),
        "failed to load 'm', no disk space left for its files: full, free some",
    ),
    (InvalidVersion("m", "-1"), "model 'm': expected a version in digits, got '-1'"),
    (
        InvalidTensor("m", "input", "x", "FP32[-1,3]", "FP32[2,4]"),
        "model 'm', input 'x': expected FP32[-1,3], got FP32[2,4]",
    ),
    (
        UnknownTensor("m", "input", "z", ["x", "y"]),
        "model 'm': unexpected inference input 'z', it has 'x', 'y'",
    ),
    (
        MissingInputs("m", 2, 1, ["y"]),
        "model 'm': expected 2 inputs but got 1, missing 'y'",
    ),
    (
        MissingInputs("m", 3, 1, ["y"], optional=1),
        "model 'm': expected 2 to 3 inputs but got 1, missing 'y'",
    ),
    (
        DuplicateTensor("m", "input", "x"),
        "model 'm': input 'x' already exists in request, send one",
    ),
    (
        UnknownDatatype("FLOAT", ["FP32", "FP64"]),
        "unknown datatype 'FLOAT', expected one of FP32, FP64",
    ),
    (
        InvalidParameter("unload_dependents", "a bool", "a string"),
        "parameter 'unload_dependents': expected a bool, got a string",
    ),
    (
        InvalidName("model", "../x", "it points outside"),
        "model '../x' is not allowed: it points outside",
    ),
    (Unsupported("shared memory"), "shared memory is not implemented by this server"),
    (
        NotOneAnswer("m", "more"),
        "generate expects model 'm' to produce exactly 1 response, got more: use generate_stream "
        "for a model that generates various numbers of responses",
    ),
    (
        TooManyAnswers("m", 9, "max_steps"),
        "model 'm' did not finish within 9 answers: raise max_steps",
    ),
    (
        Decoupled("m"),
        "model 'm' gives any number of answers to a request: ModelInfer and infer don't support "
        "models with decoupled transaction policy, use ModelStreamInfer or generate_stream, or "
        "accept text/event-stream",
    ),
    (
        SwitchedOff("shared memory", "shared_memory"),
        "shared memory is turned off on this server: start it with shared_memory",
    ),
    (
        InvalidRegion("r", "a name", "none"),
        "shared memory region 'r': expected a name, got none",
    ),
    (
        RegionNotFound("system", "r"),
        "Unable to find system shared memory region: 'r', register it",
    ),
    (
        RegionExists("r"),
        "shared memory region 'r' already in manager, unregister it first",
    ),
    (
        TooManyRegions(8, "regions", "max_shared_memory_regions"),
        "no more than 8 regions of shared memory may be registered (max_shared_memory_regions), "
        "unregister some",
    ),
    (
        NotLocal("shared memory", "10.0.0.7:51824", "shared_memory"),
        "shared memory is only for clients on this machine (shared_memory), not for"
        " '10.0.0.7:51824': connect directly to a unix socket or a loopback address",
    ),
    (
        Overloaded("m", 8, "max_requests"),
        "model 'm': 8 requests are in progress already (max_requests), try again",
    ),
    (
        TooManyChanges("load", "m", 8),
        "load 'm': 8 changes of the server are in progress already, try again",
    ),
    (
        BudgetExhausted("the body", 60, 64),
        "no memory for the body of 60 bytes: clients hold nearly all of 64 bytes"
        " (max_held_bytes), or this connection holds its full share, try again",
    ),
    (
        TooLarge("the message", 64, "max_message_bytes"),
        "the message exceeds the limit of 64 bytes: send less or raise max_message_bytes",
    ),
    (ModelAlreadyLoaded("m"), "model 'm' is loaded already, unload it first"),
    (
        UnsupportedMediaType("text/html", ["text/csv", "image/*"]),
        "expected a Content-Type of text/csv, image/*, got 'text/html'",
    ),
    (
        NotAcceptable("text/html", ["text/csv"]),
        "expected an Accept of text/csv, got 'text/html'",
    ),
    (
        OutputNotInForm("m", "y", "strict JSON", "NaN", "use V2"),
        "model 'm', output 'y': strict JSON cannot hold NaN, use V2",
    ),
    (
        OutputNotText("m", "y"),
        "model 'm', output 'y': expected UTF-8 for a text answer, got other bytes: request"
        " binary_data (an output parameter of V2 requests) or set json_surrogates",
    ),
    (
        CrossSiteRequest(),
        "pages of other sites may not change this server: use its own pages",
    ),
    (
        BodyTimeout(2.5),
        "the body took over 2.5 s (message_timeout_seconds), send again",
    ),
    (
        MissingSequence("m"),
        "inference request to model 'm' must specify a non-zero or non-empty correlation ID (the "
        "parameter 'sequence_id')",
    ),
    (
        SequenceNotStarted("m", 7),
        "inference request for sequence 7 to model 'm' must specify the START flag on the first "
        "request of the sequence",
    ),
    (
        SequenceNotStarted("m", 7, 2),
        "inference request for sequence 7 to model 'm' must specify the START flag on the first "
        "request of the sequence; another of the server's 2 processes may hold the sequence: send "
        "all its requests on one connection",
    ),
    (
        ModelHasNoText("m"),
        "model 'm' has no tokenizer.json: it accepts no text, send token ids",
    ),
    (
        ModelHasNoText(),
        "the model has no tokenizer.json: it accepts no text, send token ids",
    ),
    (
        ModelHasNoTemplate("m"),
        "model 'm' has no chat template (chat_template.jinja, or 'chat_template' of "
        "tokenizer_config.json): it accepts text, not messages: send a prompt to /v1/completions",
    ),
    (
        TextNotInstalled("m", "jinja2"),
        "model 'm': text needs the package 'jinja2', which is not installed: "
        "pip install 'xlaserve[generation]'",
    ),
    (TextTooLong("m", 8, 9), "model 'm': expected a text of at most 8 characters, got 9"),
    (NotText("m"), "model 'm': expected text in Unicode, got half of a surrogate pair"),
    (
        SpelledSpecialToken("m", "<s>"),
        "model 'm': the text contains the special token '<s>', which its tokenizer cannot encode"
        " as plain text: leave it out",
    ),
    (
        MessagesRefused("m", "no\nroles"),
        "model 'm': its chat template rejected the request: no\\nroles",
    ),
    (
        TextProcessLost("m", "it ended"),
        "model 'm': the text process was lost: it ended; try again",
    ),
    (
        TooManyTexts("m", 2),
        "model 'm': 2 texts of this caller are already queued: send more when those are answered",
    ),
    (
        TokenizerFailed("m", "it is late"),
        "model 'm': its tokenizer failed on the text: it is late",
    ),
    (TemplateFailed("m", "it is late"), "model 'm': its chat template failed: it is late"),
    (
        SequenceRows("m", 2),
        "inference request to model 'm' must specify batch-size 1 due to requirements of sequence "
        "batcher, got 2 rows",
    ),
    (
        SequenceInterrupted("m", "a\n"),
        "model 'm': an earlier request of sequence a\\n failed, expired or was cancelled, so this "
        "one was not executed either; send it again from that request",
    ),
    (
        ExecutionStalled("m", 60.0),
        "model 'm': an execution has been running for 60 seconds (execution_seconds); the model is "
        "not ready until it ends: try again later",
    ),
    (
        StatesLost("m"),
        "model 'm': an execution failed on the device and its sequence states are lost: restart the"
        " sequences",
    ),
    (
        QueueTimeout(50),
        "the request waited for 50 microseconds in the queue and was not executed"
        " (default_timeout_microseconds of the model's queue policy), try again",
    ),
    (DeadlineExceeded(), "the deadline of the request has passed, send it with a later one"),
    (ShuttingDown(), "the server is shutting down, try again"),
    (
        WorkersSilent({"1": "no answer within 2 s", "3": "it ended"}),
        "some processes of the server did not answer: worker 1: no answer within 2 s; "
        "worker 3: it ended, try again",
    ),
    (
        ProcessSilent("model 'm'", "engine"),
        "model 'm': the engine process does not respond, try again",
    ),
    (
        EngineGone("m"),
        "model 'm': the engine process ended before it executed this request and is being"
        " replaced, try again",
    ),
    (
        EngineLost("m", "worker 1"),
        "model 'm': the worker 1 process ended while it executed this request and is being"
        " replaced; the request may be the cause: see the log before you send it again",
    ),
    (InvalidSettings("port", "a port", 99999), "setting port: expected a port, got 99999"),
    (
        RepositoryUnreadable("/models", "it cannot be read: Input/output error"),
        "model repository '/models': it cannot be read: Input/output error",
    ),
    (
        StillStarting("m", "", "the model repository has not been read yet"),
        "model 'm' is not available yet: the model repository has not been read yet, try again",
    ),
    (
        StillStarting("m", "3", "models are being loaded for the first time"),
        "model 'm' version 3 is not available yet: models are being loaded for the first time, "
        "try again",
    ),
    (
        StillStarting("", "", "models are being loaded for the first time"),
        "no model is available yet: models are being loaded for the first time, try again",
    ),
    (
        StartFailed(["a", "b"]),
        "not loaded at startup: 'a', 'b' (exit_on_error): see the log",
    ),
    (
        StartFailed(["a", "b"], shown=1),
        "not loaded at startup: 'a' and 1 more (exit_on_error): see the log",
    ),
    (
        WorkerDied(1, "it ended with exit status 1", 1),
        "worker 1 died: it ended with exit status 1, see its log",
    ),
    (WorkerDied(0, "why", 5), "worker 0 died 5 times within a minute: why, see its log"),
    (
        Unauthenticated(),
        "authentication required: send a known token (authorization: Bearer)",
    ),
    (
        NotPermitted("ci\n", "manage"),
        "caller 'ci\\n' may not manage: have the operator allow it (access_rules)",
    ),
    (Restricted("API", "key"), "This API is restricted, expecting header 'key'"),
    (
        TooManyRequests(Overloaded("m", 2, "max_requests_per_model")),
        "model 'm': 2 requests are in progress already (max_requests_per_model), try again",
    ),
    (
        QuotaExceeded("ci", "exceeded 2 requests per second", 0.25),
        "caller 'ci' has exceeded 2 requests per second, try again in 0.25 s",
    ),
    (
        WrongHost("evil.example"),
        "unknown host 'evil.example': start the server with --allowed-host evil.example, or have"
        " its proxy send an allowed Host",
    ),
    (
        WrongOrigin(),
        "cross-origin requests are not allowed: start the server with --cors-origin",
    ),
    (DeviceUnavailable("cuda", "no driver"), "device 'cuda' is not available: no driver"),
]

_CALLS = (
    *("accept", "ask", "choose", "connect", "free", "give", "have", "leave", "load", "raise"),
    *("register", "restart", "see", "send", "start", "try", "unload", "unregister", "use"),
    # Expectations about the request, or about the answer of a model's code.
    *("expected", "expecting", "missing", "must specify", "it has", "pip install"),
)
ACTIONS = re.compile(rf"(?:^|[,;:] |\b(?:or|and) )(?:{'|'.join(_CALLS)})\b|\bmust specify\b")
"""Verbs that ask the reader to act, at the beginning of a clause."""

NOBODY_ACTS: dict[type[XlaserveError], str] = {
    **dict.fromkeys((ModelFailed, *OF_CODE), "the text of the model's own code"),
    ModelNotFound: "Triton's words, which a mesh and clients compare",
    ModelNotReady: "its state, and the reason of the load that failed",
    FilesMissing: "the reason, which the loader words",
    LoadFailed: "the reason, which the loader words",
    LoadCancelled: "who cancelled it knows why",
    OutOfMemory: "what was wanted and is free, which the allocator words",
    InvalidName: "the problem of the name, which its check words",
    Unsupported: "no setting and no request changes it",
    MessagesRefused: "the text of the model's own template",
    TokenizerFailed: "the reason of the model's own tokenizer",
    TemplateFailed: "the reason of the model's own template",
    RepositoryUnreadable: "the reason of the operating system",
    DeviceUnavailable: "the reason of the driver",
}
"""Errors that end with the text of another component, and why."""

MODULES = (errors, sequence_errors, language_errors, code_errors, access_errors)


def _subclasses(parent: type[XlaserveError]) -> Iterator[type[XlaserveError]]:
    for child in parent.__subclasses__():
        yield child
        yield from _subclasses(child)


@pytest.mark.parametrize(("error", "text"), TEXTS, ids=[type(e).__name__ for e, _ in TEXTS])
def test_error_forms_its_text_from_facts(error: XlaserveError, text: str) -> None:
    assert text == str(error)


def test_every_error_that_takes_facts_has_its_text_stated_here() -> None:
    stated = {type(error) for error, _ in TEXTS}
    with_facts = {
        error
        for error in _subclasses(XlaserveError)
        if error.__module__ in {module.__name__ for module in MODULES} and "__init__" in vars(error)
    }

    assert set() == with_facts - stated


def test_each_text_that_a_person_can_act_on_says_what_to_do() -> None:
    """Its last clause names an action; errors without one are listed with the reason."""
    silent = {
        type(error): str(error)
        for error, _ in TEXTS
        if type(error) not in NOBODY_ACTS and not ACTIONS.search(str(error))
    }

    assert {} == silent


def test_no_error_is_excused_that_says_what_to_do() -> None:
    never = {type(error) for error, _ in TEXTS if not ACTIONS.search(str(error))}

    assert set() == NOBODY_ACTS.keys() - never


def test_every_error_says_what_it_means() -> None:
    assert [] == [error for error in _subclasses(XlaserveError) if not error.__doc__]


def test_errors_know_no_status() -> None:
    """Statuses belong to the single table in transport."""
    words = ("NOT_FOUND", "INVALID_ARGUMENT", "grpc", "http", "404", "400")
    for module in MODULES:
        source = Path(str(module.__file__)).read_text().split('"""', 2)[2].lower()

        assert [] == [word for word in words if word.lower() in source]


def test_long_name_is_shown_in_part() -> None:
    text = str(InvalidName("model", "x" * 100_000, "it is too long"))

    assert len(text) < 200


def test_control_characters_of_a_name_are_escaped() -> None:
    text = str(InvalidName("model", "a\n\x1b[31mb", "it is not printable"))

    assert text.isprintable()


@pytest.mark.parametrize("length", [1, 2, 3])
def test_errors_that_caused_one_another_are_looked_at_so_often(length: int) -> None:
    """The chain may be cyclic, and a search for its root must end."""
    ring = [ValueError(str(number)) for number in range(length)]
    for number, error in enumerate(ring):
        error.__cause__ = ring[(number + 1) % length]

    found = list(causes(ring[0]))

    assert MOST_CAUSES == len(found)
    assert (ring * MOST_CAUSES)[:MOST_CAUSES] == found
    assert "a.py: ValueError: 0" == error_line("a.py", ring[0])
    assert device_failure(ring[0]) is None
    assert LoadFailed is type(load_failure("m", "wrong", ring[0]))
    assert [] == list(causes(None))
