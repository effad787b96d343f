"""Compiled programs of this process, shared by models of the same computation. Needs no JAX.

Programs are found by content: the key of a computation is a hash of its module, and the key of a
program adds its arguments, their places and the compiler's options. So what a hostile artifact is
found under is what it is.
"""

import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, TypeVar

from xlaserve.runtime.programs.footprint import Footprint

_LOOK_SECONDS = 0.05
"""Between two looks whether a load that waits for another's compilation was cancelled."""

_MAX_FACTS = 32
"""Facts that are remembered of a computation: configurations that clients send ask for them."""

T = TypeVar("T")


def _nothing() -> None:
    """Do nothing."""


@dataclass(slots=True, eq=False)
class SharedProgram:
    """A program on its devices, for all models of its computation."""

    executable: Any = None
    """A `jax.stages.Compiled`; None while it is being compiled."""
    is_cached: bool = False
    """Whether it came out of the compilation cache, and was not executed yet."""
    footprint: Footprint = field(default_factory=Footprint)
    compile_seconds: float = 0.0
    seconds: float = inf
    """Its quickest run, whatever the parameters were; infinity before the first."""
    users: "dict[Lease, None]" = field(default_factory=dict)
    """The models that use it or wait for it; the first one carries its memory in the books."""

    @property
    def is_compiled(self) -> bool:
        """Tell whether it may be executed."""
        return self.executable is not None


class _Computation:
    """Programs and proofs of one computation, held while a model of it is loaded."""

    def __init__(self, key: str, exported: Any, file_hash: str) -> None:
        self.key = key
        self.file_hash = file_hash
        """Hash of its module's file; empty if the file has more than the module."""
        self.frame = replace(exported, mlir_module_serialized=b"")
        """The artifact without its module, which is checked."""
        self.exported: Any = None
        """The artifact, while some model may have it compiled."""
        self.compilers: set[Lease] = set()
        """Models that can compile."""
        self.leases: dict[Lease, None] = {}
        """All models; the first accounts for the module."""
        self.programs: dict[Hashable, SharedProgram] = {}
        self.facts: dict[Hashable, Any] = {}


class SharedPrograms:
    """Holds each program once, for as long as a model uses it. Thread-safe."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Its lock guards all fields below, and is held only for lookups."""
        self._computations: dict[str, _Computation] = {}

    def known(self, key: str) -> Any:
        """Return a computation's artifact without its module; None unless it is in use.

        It was read and checked when it came.
        """
        with self.changed:
            found = self._computations.get(key)
            return None if found is None else found.frame

    def compiled_from(self, file_hash: str) -> int:
        """Return the number of programs compiled from a file with a module, for estimates."""
        with self.changed:
            return sum(
                program.is_compiled
                for one in self._computations.values()
                if file_hash and one.file_hash == file_hash
                for program in one.programs.values()
            )

    def lease(self, key: str, exported: Any, file_hash: str = "") -> "Lease":
        """Return a model's share of a computation; `exported` has its module."""
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
        """Return the computations in use; the lock is held."""
        return self._computations.values()

    def drop(self, computation: _Computation) -> None:
        """Drop a computation that no model uses; the lock is held."""
        if self._computations.get(computation.key) is computation:
            del self._computations[computation.key]


class Lease:
    """One model's share of a computation: programs in use stay until it is released."""

    def __init__(self, pool: SharedPrograms, computation: _Computation) -> None:
        self.key = computation.key
        self._pool = pool
        self._of = computation
        self._used: dict[Hashable, SharedProgram] = {}
        self._is_released = False
        self.is_leaving = False
        """Whether its model is on its way out: it inherits nothing while another one stays."""
        self.on_change: Callable[[], None] = _nothing
        """Called in any thread, with no lock held, when there is a program more, or when this model
        has to carry what another one carried that left."""

    # --- programs ---

    def get(
        self,
        key: Hashable,
        make: Callable[[SharedProgram], None],
        check_cancelled: Callable[[], None],
    ) -> tuple[SharedProgram, bool]:
        """Return a program, and whether this call made it; concurrent callers share one `make`.

        Several that ask at once wait for the first one. Where that fails or is cancelled, the next
        one makes it: nobody fails for another. Raises what `make` and `check_cancelled` raise.
        """
        while True:
            with self._pool.changed:
                found = self._of.programs.setdefault(key, SharedProgram())
                is_ours = not found.users and not found.is_compiled
                # Also while it is made: it does not go when its maker does.
                found.users[self] = None
                self._used[key] = found
                if found.is_compiled:
                    return found, False
                if is_ours:
                    break
                self._pool.changed.wait(_LOOK_SECONDS)
            try:
                check_cancelled()
            except BaseException:
                self.drop([key])
                raise
        return self._made(key, found, make)

    def _made(
        self, key: Hashable, found: SharedProgram, make: Callable[[SharedProgram], None]
    ) -> tuple[SharedProgram, bool]:
        """Compile a program that others may wait for, and tell them."""
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
        """Notify the computation's other models of new programs."""
        with self._pool.changed:
            others = [lease for lease in self._of.leases if lease is not self]
        _tell(others)

    def find(self, key: Hashable) -> SharedProgram | None:
        """Return an existing program, without keeping it."""
        with self._pool.changed:
            found = self._of.programs.get(key)
            return found if found is not None and found.is_compiled else None

    def take(self, keys: Iterable[Hashable]) -> list[SharedProgram] | None:
        """Return programs and keep them; None unless all exist."""
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
        """Use some programs no longer."""
        with self._pool.changed:
            heirs = self._drop([key for key in keys if key in self._used])
        _tell(heirs)

    def carries(self, key: Hashable) -> bool:
        """Tell whether the books have a program with this model."""
        with self._pool.changed:
            found = self._used.get(key)
            return found is not None and next(iter(found.users), None) is self

    @property
    def carries_module(self) -> bool:
        """Tell whether the books have the module with this model."""
        with self._pool.changed:
            return next(iter(self._of.leases), None) is self

    # --- the computation ---

    @property
    def exported(self) -> Any:
        """Return the artifact with its module, until `stop_compiling`."""
        return self._of.exported

    @property
    def is_alone(self) -> bool:
        """Tell whether no other model shares its programs; then nobody else is disturbed."""
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
        """Let the module go, once every model of the computation has."""
        with self._pool.changed:
            self._stop_compiling()

    def leave(self) -> None:
        """Mark the model as leaving; `release` follows once its requests have ended."""
        with self._pool.changed:
            self.is_leaving = True

    def release(self, handed_on: Callable[[], None] = _nothing) -> None:
        """Release every program, and drop those without users. Idempotent.

        `handed_on` is called before those that carry from now on what this model has carried, so
        that the books count it with nobody twice.
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
        """Hand programs to their next users; return the models that now account for more."""
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
            # The caches of JAX keep the artifacts that they saw, up to 4096 of them, with their
            # constants. jax.clear_caches() would do too, but slow the next call of every model.
            object.__setattr__(self._of.exported, "mlir_module_serialized", b"")
            self._of.exported = None


def _heir(users: dict[Lease, None]) -> Lease:
    """Choose the model that accounts for the shared memory from now on, and put it first.

    One that stays goes before those that leave: they would have to hand it on at once, and the
    books would count it with each of them in turn.
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
