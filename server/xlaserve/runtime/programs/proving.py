"""Runs row proofs for a load, in a compiler process or in this process.

JAX and MLIR hold the GIL for about 10 ms at a time while they lower and refine a module.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import structlog
from jax.export import Exported

from xlaserve.row_proofs import loops_follow_inputs, prove
from xlaserve.row_proofs.verdict import Independence, Verdict
from xlaserve.runtime.devices.sites import Site
from xlaserve.runtime.loaded import Stage
from xlaserve.runtime.programs import cache_key
from xlaserve.runtime.programs.compilation import Compilation, flags
from xlaserve.runtime.programs.compilers.jobs import Job, Packed, Proof
from xlaserve.runtime.programs.compilers.pool import CompilerProcesses, Refused

_NO_PARAMETERS = Packed(0, (), {}, ())

_log = structlog.get_logger("proof")


@dataclass(frozen=True, slots=True)
class Prover:
    """Runs the proofs of one load."""

    site: Site
    compilation: Compilation
    model: str = ""
    is_niced: bool = True
    """Whether requests take precedence over a proof in a compiler process."""
    check_cancelled: Callable[[], None] = lambda: None
    on_stage: Callable[[Stage], None] = lambda stage: None
    """Called before each proof."""

    def prove(
        self,
        computation: str,
        exported: Exported,
        parameters: int,
        outputs: Sequence[str],
        sizes: Mapping[str, int],
    ) -> Verdict:
        """Return the verdict of `rows.prove` for the site's platform.

        Raises InvalidModel or OutOfMemory if the proof crashes its process or exceeds a limit, or
        the exception of `check_cancelled`.
        """
        platforms = (self.site.platform,)
        module = digest_of(exported)
        proof = Proof(module, parameters, tuple(outputs), sizes, platforms)
        return self._answer(computation, exported, proof)

    def loops_follow_inputs(
        self, computation: str, exported: Exported, sizes: Mapping[str, int]
    ) -> bool:
        """Return the result of `rows.loops_follow_inputs`; raises as `prove` does."""
        proof = Proof(digest_of(exported), 0, (), sizes, (), of_loops=True)
        return self._answer(computation, exported, proof).loops_follow_inputs

    def _answer(self, computation: str, exported: Exported, proof: Proof) -> Verdict:
        self.on_stage(Stage("proving"))
        processes = self.compilation.processes
        if processes is not None and self._is_process_wanted(processes):
            try:
                return self._elsewhere(processes, computation, exported, proof)
            except Refused as refused:
                _log.info(
                    "rows analyzed in the server process", model=self.model, reason=str(refused)
                )
        return answered(exported, proof)

    def _is_process_wanted(self, processes: CompilerProcesses) -> bool:
        """Tell whether a process is running, or will be needed for the load's programs."""
        if self.site.platform != "cpu":
            return False  # A plugin may have lowering rules that a compiler process lacks.
        return processes.count > 0 or self.compilation.has_no_programs

    def _elsewhere(
        self, processes: CompilerProcesses, computation: str, exported: Exported, proof: Proof
    ) -> Verdict:
        environment = cache_key.environment(self.site, {}, flags())
        job = Job(
            self.model,
            computation,
            0,
            _NO_PARAMETERS,
            (),
            (),
            {},
            environment,
            self.is_niced,
            proof,
        )
        answer = processes.compile(job, lambda: bytes(exported.serialize()), self.check_cancelled)
        try:
            return msgspec.json.decode(answer, type=Verdict)
        except msgspec.MsgspecError as error:
            raise Refused(f"its verdict cannot be read: {error}") from error


def digest_of(exported: Exported) -> str:
    """Return the digest of an artifact's module, including names and line numbers."""
    return hashlib.sha256(exported.mlir_module_serialized).hexdigest()


def answered(exported: Exported, proof: Proof) -> Verdict:
    """Answer a question about rows in this process.

    For a question about loops only, the verdict contains no other findings.
    """
    if proof.of_loops:
        follows = loops_follow_inputs(exported, proof.sizes)
        return Verdict(Independence.UNKNOWN, loops_follow_inputs=follows)
    return prove(exported, proof.parameters, proof.outputs, proof.sizes, platforms=proof.platforms)
