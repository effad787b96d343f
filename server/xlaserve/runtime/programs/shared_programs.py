"""Compiled programs shared by models with the same computation. Does not import JAX.

Programs are identified by content: the key of a computation is a hash of its module; the key of a
program adds its arguments, their placement and the compiler options. A hostile artifact therefore
cannot replace another model's programs.
"""

import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, TypeVar

from xlaserve.runtime.programs.footprint import Footprint

_POLL_SECONDS = 0.05
"""Interval in seconds at which a load that waits for another load's compilation checks for
cancellation.
"""

_MAX_FACTS = 32
"""Maximum number of cached facts per computation, since clients can send any number of
configurations.
"""

T = TypeVar("T")


def _nothing() -> None:
    """Do nothing."""


@dataclass(slots=True, eq=False)
class SharedProgram:
    """A program on its devices, shared by all models with its computation."""

    executable: Any = None
    """A `jax.stages.Compiled`, or None while it is being compiled."""
    is_cached: bool = False
    """Whether the program came from the compilation cache and has not been executed yet."""
    footprint: Footprint = field(default_factory=Footprint)
    compile_seconds: float = 0.0
    seconds: float = inf
    """Fastest run in seconds, with the parameters of any model; infinity before the first run."""
    users: "dict[Lease, None]" = field(default_factory=dict)
    """The models that use the program or wait for it; the first one accounts for its memory."""

    @property
    def is_compiled(self) -> bool:
        """Tell whether the program is compiled and may be executed."""
        return self.executable is not None


class _Computation:
    """The programs and proofs of one computation, kept while a model with it is loaded."""

    def __init__(self, key: str, exported: Any, file_hash: str) -> None:
        self.key = key
        self.file_hash = file_hash
        """Hash of the module's file, or an empty string if the file contains more than the module.
        """
        self.frame = replace(exported, mlir_module_serialized=b"")
        """The artifact without its module; it has been validated."""
        self.exported: Any = None
        """The artifact, as long as some model may still compile it."""
        self.compilers: set[Lease] = set()
        """Models that may still compile."""
        self.leases: dict[Lease, None] = {}
        """All models with this computation; the first one accounts for the module."""
        self.programs: dict[Hashable, SharedProgram] = {}
        self.facts: dict[Hashable, Any] = {}


class SharedPrograms:
    """Keeps one instance of each program while a model uses it. Thread-safe."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Its lock guards all fields below, and is held only for look-ups."""
        self._computations: dict[str, _Computation] = {}

    def known(self, key: str) -> Any:
        """Return a computation's artifact without its module; None if no model uses it.

        The artifact was validated when it was first loaded.
        """
        with self.changed:
            found = self._computations.get(key)
            return None if found is None else found.frame

    def compiled_from(self, file_hash: str) -> int:
        """Return how many programs were compiled from the module in this file, for estimates."""
        with self.changed:
            return sum(
                program.is_compiled
                for one in self._computations.values()
                if file_hash and one.file_hash == file_hash
                for program in one.programs.values()
            )

    def lease(self, key: str, exported: Any, file_hash: str = "") -> "Lease":
        """Return a lease on a computation for a model; `exported` includes its module."""
        with self.changed:
            found = self._computations.get(key)
            if found is None:
                found = self._computations[key] = _Computation(key, exported, file_hash)
            if found.exported is None:
                found.exported = exported
            lease = Lease(self, found)
            found.leases[lease] = None
            found.compilers.add(lease)
            return lease

    @property
    def counts(self) -> tuple[int, int]:
        """Return the number of computations and of programs."""
        with self.changed:
            programs = sum(len(one.programs) for one in self._computations.values())
            return len(self._computations), programs

    @property
    def computations(self) -> Iterable[_Computation]:
        """Return the computations in use. The caller holds the lock."""
        return self._computations.values()

    def drop(self, computation: _Computation) -> None:
        """Drop a computation that no model uses. The caller holds the lock."""
        if self._computations.get(computation.key) is computation:
            del self._computations[computation.key]


class Lease:
    """One model's share of a computation; its programs are kept until it is released."""

    def __init__(self, pool: SharedPrograms, computation: _Computation) -> None:
        self.key = computation.key
        self._pool = pool
        self._of = computation
        self._used: dict[Hashable, SharedProgram] = {}
        self._is_released = False
        self.is_leaving = False
        """Whether the model is being unloaded; it then takes over memory only if no other model
        can.
        """
        self.on_change: Callable[[], None] = _nothing
        """Called from any thread, without a lock, when the computation has a new program or when
        this model must account for memory of a model that was unloaded.
        """

    # --- programs ---

    def get(
        self,
        key: Hashable,
        make: Callable[[SharedProgram], None],
        check_cancelled: Callable[[], None],
    ) -> tuple[SharedProgram, bool]:
        """Return a program, and whether this call made it; concurrent callers share one `make`.

        Concurrent callers wait for the first one. If it fails or is cancelled, the next caller
        makes the program: no caller fails because of another. Raises the exceptions of `make` and
        `check_cancelled`.
        """
        while True:
            with self._pool.changed:
                found = self._of.programs.setdefault(key, SharedProgram())
                is_ours = not found.users and not found.is_compiled
                # Register as a user before the program is made, so that it survives if the model
                # that makes it is unloaded.
                found.users[self] = None
                self._used[key] = found
                if found.is_compiled:
                    return found, False
                if is_ours:
                    break
                self._pool.changed.wait(_POLL_SECONDS)
            try:
                check_cancelled()
            except BaseException:
                self.drop([key])
                raise
        return self._made(key, found, make)

    def _made(
        self, key: Hashable, found: SharedProgram, make: Callable[[SharedProgram], None]
    ) -> tuple[SharedProgram, bool]:
        """Compile a program, and notify the callers that wait for it."""
        made = SharedProgram()
        try:
            make(made)
        except BaseException:
            with self._pool.changed:
                del self._of.programs[key]
                self._used.pop(key, None)
                self._pool.changed.notify_all()
            raise
        with self._pool.changed:
            found.is_cached = made.is_cached
            found.footprint, found.compile_seconds = made.footprint, made.compile_seconds
            found.executable = made.executable
            self._pool.changed.notify_all()
        return found, True

    def announce(self) -> None:
        """Notify other models with this computation of new programs."""
        with self._pool.changed:
            others = [lease for lease in self._of.leases if lease is not self]
        _tell(others)

    def find(self, key: Hashable) -> SharedProgram | None:
        """Return an existing program, without registering as its user."""
        with self._pool.changed:
            found = self._of.programs.get(key)
            return found if found is not None and found.is_compiled else None

    def take(self, keys: Iterable[Hashable]) -> list[SharedProgram] | None:
        """Return these programs and register as their user; None unless all exist."""
        with self._pool.changed:
            wanted = {key: self._of.programs.get(key) for key in keys}
            found = {key: one for key, one in wanted.items() if one and one.is_compiled}
            if self._is_released or len(found) < len(wanted):
                return None
            for one in found.values():
                one.users[self] = None
            self._used |= found
            return list(found.values())

    def drop(self, keys: Iterable[Hashable]) -> None:
        """Stop using these programs."""
        with self._pool.changed:
            heirs = self._drop([key for key in keys if key in self._used])
        _tell(heirs)

    def carries(self, key: Hashable) -> bool:
        """Tell whether this model accounts for the memory of a program."""
        with self._pool.changed:
            found = self._used.get(key)
            return found is not None and next(iter(found.users), None) is self

    @property
    def carries_module(self) -> bool:
        """Tell whether this model accounts for the memory of the module."""
        with self._pool.changed:
            return next(iter(self._of.leases), None) is self

    # --- the computation ---

    @property
    def exported(self) -> Any:
        """Return the artifact with its module; valid until `stop_compiling`."""
        return self._of.exported

    @property
    def is_alone(self) -> bool:
        """Tell whether no other model uses its programs, so that using them disturbs no one."""
        with self._pool.changed:
            return all(
                user is self
                for one in self._pool.computations
                for program in one.programs.values()
                if program.is_compiled
                for user in program.users
            )

    @property
    def is_shared(self) -> bool:
        """Tell whether another model uses the computation."""
        return len(self._of.leases) > 1

    def fact(self, key: Hashable, find: Callable[[], T]) -> T:
        """Return the result of `find`, cached: it depends only on the module and the key."""
        facts = self._of.facts
        with self._pool.changed:
            if key in facts:
                known: T = facts[key]
                return known
        found = find()
        with self._pool.changed:
            if len(facts) >= _MAX_FACTS:
                facts.clear()
            facts[key] = found
        return found

    def stop_compiling(self) -> None:
        """Release the module, once no model with this computation may still have to compile it."""
        with self._pool.changed:
            self._stop_compiling()

    def leave(self) -> None:
        """Mark the model as being unloaded; `release` follows when its requests have ended."""
        with self._pool.changed:
            self.is_leaving = True

    def release(self, handed_on: Callable[[], None] = _nothing) -> None:
        """Release every program, and drop those without other users. Idempotent.

        `handed_on` is called before the models that now account for this model's shared memory are
        notified, so that no memory is counted twice.
        """
        with self._pool.changed:
            if self._is_released:
                return
            self._is_released = True
            self.on_change = _nothing
            self._stop_compiling()
            heirs = self._drop(list(self._used))
            carried = next(iter(self._of.leases)) is self
            del self._of.leases[self]
            if not self._of.leases:
                self._pool.drop(self._of)
            elif carried:
                heirs.add(_heir(self._of.leases))
            self._pool.changed.notify_all()
        if heirs:
            handed_on()
        _tell(heirs)

    def _drop(self, keys: Iterable[Hashable]) -> "set[Lease]":
        """Hand programs to their next users; return the models that now account for more memory."""
        heirs: set[Lease] = set()
        for key in keys:
            one = self._used.pop(key)
            carried = next(iter(one.users), None) is self
            one.users.pop(self, None)
            if not one.users and self._of.programs.get(key) is one:
                del self._of.programs[key]
            elif one.users and carried:
                heirs.add(_heir(one.users))
        return heirs

    def _stop_compiling(self) -> None:
        self._of.compilers.discard(self)
        if not self._of.compilers and self._of.exported is not None:
            # JAX's caches keep up to 4096 artifacts that they have seen, including constants, so
            # free the module's bytes. jax.clear_caches() would slow down the next call of every
            # model.
            object.__setattr__(self._of.exported, "mlir_module_serialized", b"")
            self._of.exported = None


def _heir(users: dict[Lease, None]) -> Lease:
    """Choose the model that accounts for shared memory from now on, and move it to the front.

    Models that are being unloaded come last, because they would have to hand the memory on
    immediately.
    """
    heir = next((lease for lease in users if not lease.is_leaving), next(iter(users)))
    del users[heir]
    others = dict(users)
    users.clear()
    users[heir] = None
    users.update(others)
    return heir


def _tell(leases: Iterable[Lease]) -> None:
    for lease in leases:
        lease.on_change()
