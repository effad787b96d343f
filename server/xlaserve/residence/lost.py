"""Finds models that a replacement server lacks, and decides whether they block it.

A model whose files are gone does not block the replacement, since waiting would not bring it back.
A model whose files exist but fail to load does: the files can be fixed while the old server keeps
serving.
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec
import structlog

from xlaserve.concurrency.control_plane import ANSWERING, ControlPlane
from xlaserve.residence.following import RepositoryFollower
from xlaserve.residence.handover import ChangesNotTaken
from xlaserve.residence.registry import Registry

GONE = frozenset({"ModelNotFound", "FilesMissing"})
"""Names of the errors of a load that found no files."""
_ABSENT = "ModelNotFound", "it is not in the model repository"
_SHOWN = 10


_log = structlog.get_logger("replacing")


class NobodyAnswers(Exception):
    """No process that loads models has reported its ready versions."""

    def __init__(self) -> None:
        super().__init__("no model-loading process responds: it died, is starting or is silent")


class Answering(msgspec.Struct, frozen=True):
    """The models that a process serves, and the models that it failed to load."""

    versions: dict[str, list[str]]
    """Ready versions by model."""
    failed: dict[str, tuple[str, str]]
    """Error class and text of failed loads, by model."""
    unsettled: str = ""
    """Why the repository could not be read completely; empty if it was."""


def answer_answering(plane: ControlPlane, registry: Registry, follower: RepositoryFollower) -> None:
    """Make this process report, when asked, the models that it serves."""

    async def reply(_: object) -> object:
        if not plane.loads:
            return None  # the engine reports the models of front ends
        models = (
            (model.name, sorted(registry.answering(model.name))) for model in registry.models()
        )
        row = registry.standing.row
        return msgspec.to_builtins(
            Answering(
                {name: versions for name, versions in models if versions},
                dict(follower.failed),
                "" if row.is_settled else row.says,
            )
        )

    plane.answer(ANSWERING, reply)


def versions_of(answers: Sequence[object], *, everywhere: bool) -> dict[str, list[str]]:
    """Return the versions ready in every process (`everywhere`), or in at least one."""
    found: dict[str, set[str]] = {}
    for count, answer in enumerate(_read(answers)):
        for name in [*answer.versions, *found]:
            here = set(answer.versions.get(name, ()))
            known = found.get(name, set())
            found[name] = (here & known if count else here) if everywhere else here | known
    return {name: sorted(versions, key=int) for name, versions in found.items() if versions}


def known_versions(answers: Sequence[object]) -> dict[str, list[str]]:
    """Return the versions ready in at least one process. Raises NobodyAnswers if none replied.

    An empty result would make the replacement believe that all models are gone.
    """
    if not answers:
        raise NobodyAnswers
    return versions_of(answers, everywhere=False)


def check_lost(
    theirs: Mapping[str, Sequence[str]] | None,
    answers: Sequence[object],
    *,
    gone: Mapping[str, tuple[str, str]],
    unloaded: Collection[str],
    strict: bool,
) -> None:
    """Log which of the old server's models this replacement lacks; raises ChangesNotTaken.

    `theirs` are the ready versions of the old server by model; if it is None, no model due at
    startup may fail. `gone` are clients' loads that found no files, by model, and `unloaded` the
    models that clients unloaded from the old server. With `strict`, no other model due at startup
    may fail either. ChangesNotTaken names what blocks the replacement.
    """
    if not answers:
        raise ChangesNotTaken(str(NobodyAnswers()))
    ours = versions_of(answers, everywhere=True)
    read = _read(answers)
    failed = {name: error for answer in read for name, error in answer.failed.items()} | dict(gone)
    if unsettled := next((answer.unsettled for answer in read if answer.unsettled), ""):
        raise ChangesNotTaken(unsettled)
    needed = dict(theirs or {})
    if strict or theirs is None:
        needed = dict.fromkeys(failed.keys() - set(unloaded), ()) | needed
    broken = sorted(
        name
        for name, have in needed.items()
        if failed.get(name, _ABSENT)[0] not in GONE
        and (not ours.get(name) or not set(have) <= set(ours[name]))
    )
    if broken:
        named = "; ".join(f"model '{name}': {failed[name][1]}" for name in broken[:_SHOWN])
        raise ChangesNotTaken(f"{named}{' ...' if len(broken) > _SHOWN else ''}")
    if theirs and not theirs.keys() & ours.keys():
        raise ChangesNotTaken(f"none of the {len(theirs)} models served there is served here")
    for name, have in (theirs or {}).items():
        if left := sorted(set(have) - set(ours.get(name, ())), key=int):
            _tell(name, left, ours.get(name, []), failed.get(name, _ABSENT)[1])


def _tell(name: str, left: Sequence[str], ours: Sequence[str], reason: str) -> None:
    if ours:
        _log.warning(
            "model versions not taken over",
            model=name,
            versions=left,
            instead=ours,
            reason="they are not in the model repository or not selected by its version_policy",
        )
        return
    _log.error(
        "model not taken over",
        model=name,
        versions=left,
        reason=reason,
        to_do="its clients get NOT_FOUND; restore its files, then load it",
    )


def _read(answers: Sequence[object]) -> list[Answering]:
    return [msgspec.convert(answer, Answering) for answer in answers]
