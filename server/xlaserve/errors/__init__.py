"""Error classes. Each takes facts and formats its own message.

Errors do not know status codes: `net/status.py` maps these classes to gRPC and HTTP statuses, and a
test requires a row for every class.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence


class XlaserveError(Exception):
    """Base class of all errors reported to clients and operators."""

    is_noted = False
    """Whether the error is already in the event log."""

    steps: Sequence[str] = ()
    """Names of ensemble steps that may occur in the text and that the client may not see."""


_REPEATED_CHARACTERS = 1_000
"""Maximum length of a reason, which may quote a client or file."""


def repeatable(text: str) -> str:
    """Return a text that is safe for logs and terminals: printable and limited in length."""
    if len(text) > _REPEATED_CHARACTERS:
        text = f"{text[:_REPEATED_CHARACTERS]}..."
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


MOST_CAUSES = 16
"""Maximum length of a chain of causes, which may be circular."""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the chain of its causes, up to a limit."""
    for _ in range(MOST_CAUSES):
        if error is None:
            return
        yield error
        error = error.__cause__


# --- models ------------------------------------------------------------------------------------


class ModelNotFound(XlaserveError):
    """The model or version does not exist. Must not be used for anything else.

    ModelMesh drops and reloads a model when it sees the status of this error, and clients match the
    beginning of the message.
    """

    def __init__(self, model: str, version: str = "", *, detail: str = "is not found") -> None:
        shown = f"'{model}'" if not version else f"'{model}' version {version}"
        super().__init__(f"Request for unknown model: {shown} {detail}")


class VersionNotFound(ModelNotFound):
    """The model exists, but not in the requested version.

    A separate class, because a mesh must not conclude that an existing model is gone.
    """


class ModelNotReady(XlaserveError):
    """The model exists, but no suitable version is ready."""

    def __init__(self, model: str, version: str, state: str, reason: str = "") -> None:
        shown = f"'{model}'" if not version else f"'{model}' version {version}"
        because = f": {reason}" if reason else ""
        super().__init__(f"model {shown} is not ready, its state is {state}{because}")


class StillStarting(ModelNotReady):
    """The model is missing, but may appear: the first scan of the repository is still running."""

    def __init__(self, model: str, version: str, because: str) -> None:
        named = f"model '{model}'" + (f" version {version}" if version else "")
        shown = f"{named} is not" if model else "no model is"
        XlaserveError.__init__(self, f"{shown} available yet: {because}, try again")


class LoadFailed(XlaserveError):
    """A model could not be loaded; earlier versions remain available."""

    def __init__(self, model: str, reason: str) -> None:
        self.reason = repeatable(reason)
        super().__init__(f"failed to load '{model}', {self.reason}")


class StoreUnavailable(LoadFailed):
    """A model could not be loaded because its store does not answer; a retry may succeed."""


class FilesMissing(LoadFailed):
    """A model could not be loaded because its version or a required file is missing."""


class FileNameTooLong(LoadFailed):
    """A file sent with a load request has a name that is too long for the file system."""

    def __init__(self, model: str, name: str, most_bytes: int) -> None:
        super().__init__(
            model[:80],
            f"failed to poll from model repository: file '{name[:80]}...': expected a name of at "
            f"most {most_bytes} bytes, got {len(name.encode(errors='replace'))}",
        )


class ModelAlreadyLoaded(XlaserveError):
    """A model with this name is already loaded."""

    def __init__(self, model: str) -> None:
        super().__init__(f"model '{model}' is loaded already, unload it first")


class InvalidModel(XlaserveError):
    """A model's files are invalid. Loads convert this to LoadFailed."""


class LoadTimedOut(LoadFailed):
    """A load exceeded its time limit and was abandoned."""

    def __init__(self, model: str, stage: str, seconds: float) -> None:
        super().__init__(
            model,
            f"it was still {stage} after {seconds:g} seconds (load_seconds) and was abandoned; its "
            "thread keeps its memory, and may keep a core busy, until it ends: raise load_seconds",
        )


class TooManyAbandoned(XlaserveError):
    """Too many abandoned loads and compilations are still running to start another."""

    def __init__(self, model: str, count: int) -> None:
        super().__init__(
            f"model '{model}' cannot be compiled: {count} abandoned loads and compilations are"
            " still running (max_abandoned): restart the server"
        )


class CompilationTimedOut(XlaserveError):
    """The compilation of a shape exceeded its time limit and was abandoned."""

    def __init__(self, model: str, shape: object, seconds: float) -> None:
        super().__init__(
            f"model '{model}': compiling shape {shape} took longer than {seconds:g} seconds"
            " (load_seconds) and was abandoned; no other shape compiles until it ends: raise"
            " load_seconds or send smaller shapes"
        )


class LoadCancelled(XlaserveError):
    """A load was cancelled."""

    def __init__(self, model: str) -> None:
        super().__init__(f"failed to load '{model}', the load was cancelled")


class ModelControlForbidden(XlaserveError):
    """The model control mode does not allow clients to load or unload models."""

    def __init__(self, operation: str, mode: str) -> None:
        super().__init__(
            f"{operation} of a model is not allowed while the model control mode is '{mode}', "
            "start the server with --model-control-mode explicit"
        )


class OutOfMemory(XlaserveError):
    """The device or the host has not enough memory."""

    def __init__(self, model: str, detail: str, *, needed_bytes: int = 0) -> None:
        self.needed_bytes = needed_bytes
        """Bytes that a load needs on one device; 0 if unknown."""
        super().__init__(f"model '{model}': out of memory, {detail}")


class OutOfMappings(OutOfMemory):
    """Further compiled programs could exceed the limit of memory mappings and crash XLA."""

    def __init__(self, model: str, needed: int, used: int, limit: int, system: int) -> None:
        super().__init__(
            model,
            f"its compiled programs need about {needed} memory mappings, but {used} of {limit}"
            f" are in use (max_memory_mappings; system limit {system}, sysctl vm.max_map_count):"
            " raise the smaller limit or unload models",
        )


class OutOfSpace(XlaserveError):
    """The disk is too full for the files of a load."""

    def __init__(self, model: str, why: str) -> None:
        super().__init__(
            f"failed to load '{model}', no disk space left for its files: {why}, free some"
        )


class OutOfFiles(XlaserveError):
    """The process or the system has reached its limit of open files; the model is not at fault."""

    def __init__(self, model: str, detail: str, limit: int) -> None:
        super().__init__(
            f"failed to load '{model}', the server reached its limit of open files ({limit},"
            f" RLIMIT_NOFILE): {detail}; try again, or start it with a higher limit (ulimit -n)"
        )


# --- requests ----------------------------------------------------------------------------------


class InvalidRequest(XlaserveError):
    """The client is at fault: the same request can never succeed."""


class InvalidVersion(InvalidRequest):
    """The requested version is not a valid version number."""

    def __init__(self, model: str, version: str) -> None:
        shown = repeatable(version)
        super().__init__(f"model '{model}': expected a version in digits, got '{shown}'")


class InvalidTensor(InvalidRequest):
    """A tensor does not match the model's specification, or its own shape or datatype."""

    def __init__(self, model: str, kind: str, tensor: str, expected: str, got: str) -> None:
        super().__init__(f"model '{model}', {kind} '{tensor}': expected {expected}, got {got}")


class UnknownTensor(InvalidRequest):
    """The request names a tensor that the model does not have."""

    def __init__(self, model: str, kind: str, tensor: str, known: Iterable[str]) -> None:
        names = ", ".join(f"'{name}'" for name in known)
        super().__init__(f"model '{model}': unexpected inference {kind} '{tensor}', it has {names}")


class MissingInputs(InvalidRequest):
    """The request lacks inputs that the model requires."""

    def __init__(
        self, model: str, expected: int, got: int, missing: Iterable[str], *, optional: int = 0
    ) -> None:
        """`optional` is the number of `expected` inputs that may be omitted."""
        names = ", ".join(f"'{name}'" for name in missing)
        count = f"{expected - optional} to {expected}" if optional else str(expected)
        super().__init__(f"model '{model}': expected {count} inputs but got {got}, missing {names}")


class DuplicateTensor(InvalidRequest):
    """The request names a tensor twice."""

    def __init__(self, model: str, kind: str, tensor: str) -> None:
        super().__init__(f"model '{model}': {kind} '{tensor}' already exists in request, send one")


class UnknownDatatype(InvalidRequest):
    """The datatype does not exist in the V2 protocol."""

    def __init__(self, datatype: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown datatype '{datatype}', expected one of {', '.join(known)}")


class InvalidParameter(InvalidRequest):
    """A parameter is unknown, or its value has the wrong type."""

    def __init__(self, parameter: str, expected: str, got: str) -> None:
        self.parameter = parameter
        super().__init__(f"parameter '{parameter}': expected {expected}, got {got}")


class InvalidName(InvalidRequest):
    """A name is not allowed, for example because it leads outside of its directory."""

    def __init__(self, kind: str, name: str, problem: str) -> None:
        shown = name if len(name) <= 64 else name[:64] + "..."
        super().__init__(f"{kind} {shown!r} is not allowed: {problem}")


class InvalidBody(InvalidRequest):
    """The request body cannot be parsed."""


class UnsupportedMediaType(InvalidRequest):
    """The request body has an unsupported Content-Type."""

    def __init__(self, got: str, known: Iterable[str]) -> None:
        super().__init__(f"expected a Content-Type of {', '.join(known)}, got '{got[:80]}'")


class NotAcceptable(InvalidRequest):
    """The requested response format is not available."""

    def __init__(self, got: str, known: Iterable[str]) -> None:
        super().__init__(f"expected an Accept of {', '.join(known)}, got '{got[:80]}'")


class OutputNotInForm(XlaserveError):
    """A model's output cannot be expressed in the response format; not the client's fault."""

    def __init__(self, model: str, tensor: str, form: str, got: str, action: str) -> None:
        super().__init__(f"model '{model}', output '{tensor}': {form} cannot hold {got}, {action}")


class OutputNotText(InvalidRequest):
    """A model's output is not UTF-8, but the response format is text: JSON or CSV."""

    def __init__(self, model: str, tensor: str) -> None:
        super().__init__(
            f"model '{model}', output '{tensor}': expected UTF-8 for a text answer, got other"
            " bytes: request binary_data (an output parameter of V2 requests) or set"
            " json_surrogates"
        )


class CrossSiteRequest(XlaserveError):
    """A cross-site request from the browser of an authorized user."""

    def __init__(self) -> None:
        super().__init__("pages of other sites may not change this server: use its own pages")


class BodyTimeout(XlaserveError):
    """The request body did not arrive in time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the body took over {seconds:g} s (message_timeout_seconds), send again")


class InvalidRegion(InvalidRequest):
    """A shared memory region is missing, or differs from its description."""

    def __init__(self, region: str, expected: str, got: str) -> None:
        super().__init__(f"shared memory region {region!r}: expected {expected}, got {got}")


class RegionNotFound(XlaserveError):
    """A status request names a region that is not registered."""

    def __init__(self, kind: str, region: str) -> None:
        super().__init__(f"Unable to find {kind} shared memory region: {region!r}, register it")


class RegionExists(XlaserveError):
    """The region's name is already registered."""

    def __init__(self, region: str) -> None:
        super().__init__(f"shared memory region {region!r} already in manager, unregister it first")


class TooManyRegions(XlaserveError):
    """The limit of registered shared memory is reached; unregister a region first."""

    def __init__(self, limit: int, unit: str, setting: str) -> None:
        super().__init__(
            f"no more than {limit} {unit} of shared memory may be registered "
            f"({setting}), unregister some"
        )


class NotLocal(XlaserveError):
    """A remote client asked for an operation reserved for local ones."""

    def __init__(self, what: str, peer: str, setting: str) -> None:
        super().__init__(
            f"{what} is only for clients on this machine ({setting}), not for '{peer}': connect"
            " directly to a unix socket or a loopback address"
        )


class Unsupported(XlaserveError):
    """The server does not support this part of the protocol."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is not implemented by this server")


class Decoupled(Unsupported):
    """The request expects one answer, but the model is decoupled and may send any number.

    The message contains the name of Triton's policy, which Triton's clients match.
    """

    def __init__(self, model: str) -> None:
        XlaserveError.__init__(
            self,
            f"model '{model}' gives any number of answers to a request: ModelInfer and infer don't "
            "support models with decoupled transaction policy, use ModelStreamInfer or "
            "generate_stream, or accept text/event-stream",
        )


class NotOneAnswer(XlaserveError):
    """A model was expected to give one answer, and gave none or several."""

    def __init__(self, model: str, count: str) -> None:
        super().__init__(
            f"generate expects model '{model}' to produce exactly 1 response, got {count}: use "
            "generate_stream for a model that generates various numbers of responses"
        )


class TooManyAnswers(XlaserveError):
    """A model exceeded its maximum number of answers per request."""

    def __init__(self, model: str, limit: int, setting: str) -> None:
        super().__init__(f"model '{model}' did not finish within {limit} answers: raise {setting}")


class SwitchedOff(XlaserveError):
    """The operator has turned off this part of the protocol."""

    def __init__(self, what: str, setting: str) -> None:
        super().__init__(f"{what} is turned off on this server: start it with {setting}")


class Overloaded(XlaserveError):
    """A limit of work in progress is reached; the same request may succeed later."""

    def __init__(self, model: str, limit: int, setting: str) -> None:
        super().__init__(
            f"model '{model}': {limit} requests are in progress already ({setting}), try again"
        )


class BudgetExhausted(XlaserveError):
    """The memory for client data, or a connection's share of it, is exhausted; retry later."""

    def __init__(self, what: str, count: int, limit: int) -> None:
        super().__init__(
            f"no memory for {what} of {count} bytes: clients hold nearly all of {limit} bytes"
            " (max_held_bytes), or this connection holds its full share, try again"
        )


class QueueTimeout(XlaserveError):
    """A request exceeded the queue timeout of its model."""

    def __init__(self, microseconds: int) -> None:
        super().__init__(
            f"the request waited for {microseconds} microseconds in the queue and was not"
            " executed (default_timeout_microseconds of the model's queue policy), try again"
        )


class ExecutionStalled(XlaserveError):
    """An execution exceeded its limit and was abandoned; it cannot be interrupted."""

    def __init__(self, model: str, seconds: float) -> None:
        super().__init__(
            f"model '{model}': an execution has been running for {seconds:g} seconds"
            " (execution_seconds); the model is not ready until it ends: try again later"
        )


class DeadlineExceeded(XlaserveError):
    """A request's deadline expired before it was answered."""

    def __init__(self) -> None:
        super().__init__("the deadline of the request has passed, send it with a later one")


class TooLarge(XlaserveError):
    """A message or a set of files exceeds a limit of the server."""

    def __init__(self, what: str, limit: int, setting: str) -> None:
        super().__init__(f"{what} exceeds the limit of {limit} bytes: send less or raise {setting}")


class TooManyChanges(XlaserveError):
    """The queue of changes that all server processes must make is full."""

    def __init__(self, kind: str, subject: str, limit: int) -> None:
        super().__init__(
            f"{kind} '{subject}': {limit} changes of the server are in progress already, try again"
        )


class ShuttingDown(XlaserveError):
    """The server is shutting down and accepts no new work."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down, try again")


class WorkersSilent(XlaserveError):
    """Some processes of the server did not contribute to an answer that requires all of them."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        listed = "; ".join(f"worker {worker}: {reason}" for worker, reason in reasons.items())
        super().__init__(f"some processes of the server did not answer: {listed}, try again")


class ProcessSilent(XlaserveError):
    """Another process of the server does not respond; it will be replaced unless it recovers."""

    def __init__(self, what: str, process: str) -> None:
        super().__init__(f"{what}: the {process} process does not respond, try again")


class EngineGone(XlaserveError):
    """The engine process ended before it started to execute the request; it is being replaced."""

    def __init__(self, model: str, process: str = "engine") -> None:
        super().__init__(
            f"model '{model}': the {process} process ended before it executed this request and is"
            " being replaced, try again"
        )


class EngineLost(XlaserveError):
    """The engine process ended while it executed the request; it is being replaced."""

    def __init__(self, model: str, process: str = "engine") -> None:
        super().__init__(
            f"model '{model}': the {process} process ended while it executed this request and is"
            " being replaced; the request may be the cause: see the log before you send it again"
        )


# --- startup ---


class InvalidSettings(XlaserveError):
    """A setting, flag or environment variable is invalid."""

    def __init__(self, setting: str, expected: str, got: object) -> None:
        super().__init__(f"setting {setting}: expected {expected}, got {got!r}")


class RepositoryUnreadable(XlaserveError):
    """The model directory is unreadable, so the models to load are unknown."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"model repository '{path}': {reason}")


class StartFailed(XlaserveError):
    """A model failed to load at startup, and the operator wants the server to exit."""

    def __init__(self, models: Sequence[str], shown: int = 10) -> None:
        names = ", ".join(f"'{name}'" for name in models[:shown])
        more = f" and {len(models) - shown} more" if len(models) > shown else ""
        super().__init__(f"not loaded at startup: {names}{more} (exit_on_error): see the log")


class WorkerDied(XlaserveError):
    """A worker process died during startup, or too often recently."""

    def __init__(self, worker: int, reason: str, deaths: int) -> None:
        often = "" if deaths == 1 else f" {deaths} times within a minute"
        super().__init__(f"worker {worker} died{often}: {reason}, see its log")


class InvalidReference(XlaserveError):
    """Code referenced on the command line is missing or invalid."""


class DeviceUnavailable(XlaserveError):
    """The requested device is missing, or JAX cannot use it."""

    def __init__(self, device: str, detail: str) -> None:
        super().__init__(f"device '{device}' is not available: {detail}")
