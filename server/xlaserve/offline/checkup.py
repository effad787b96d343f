"""Checks each model of a repository by loading it without serving."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

from xlaserve.errors import InvalidModel, XlaserveError
from xlaserve.model_config import mlserver_settings
from xlaserve.model_config.config import EnsembleStep, ModelConfig
from xlaserve.residence.repository.repository import Repository
from xlaserve.residence.repository.sources import ModelSource, VersionSource
from xlaserve.runtime import loaders
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import LoadedModel, ModelInfo
from xlaserve.serving.ensemble import plan_ensemble

Load: TypeAlias = Callable[[Path, LoadContext], LoadedModel]
"""Loads a version directory; blocks."""

PYTHON = "python"
_NOT_RUN = "its code was not run: pass --allow-python-models, which servers need too"


class Finding(StrEnum):
    """The outcome of checking a model."""

    WORKS = "works"
    NOTES = "works, with notes"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The outcome for one model of a repository."""

    model: str
    kind: str = ""
    """Kind of model: `onnx`, `jax_export`, `python`, `identity` or `ensemble`; empty if unknown."""
    versions: tuple[str, ...] = ()
    """Versions that a server would serve."""
    notes: tuple[str, ...] = ()
    reason: str = ""
    """Why a server would refuse the model; empty if it would not."""
    configuration: str = ""
    """MLServer's settings, converted to a `config.pbtxt`."""

    @property
    def finding(self) -> Finding:
        if self.reason:
            return Finding.REFUSED
        return Finding.NOTES if self.notes else Finding.WORKS


@dataclass(slots=True)
class Checkup:
    """Loads every version of every model once, one after the other, and unloads it."""

    repository: Repository
    load: Load
    context: Callable[[ModelSource, VersionSource], LoadContext]
    """Returns the load arguments that depend on the model."""
    runs_python: bool = False
    _infos: dict[tuple[str, str], ModelInfo] = field(default_factory=dict)
    """Tensors of the loaded models, needed to check ensembles."""
    _reports: dict[str, ModelReport] = field(default_factory=dict)

    def run(self) -> Iterator[ModelReport]:
        """Yield a report on each model; ensembles follow their steps. Blocks."""
        ensembles: dict[str, ModelSource] = {}
        for name in self.repository.names():
            source = self._found(name)
            if isinstance(source, ModelReport):
                yield self._keep(source)
            elif source.config.is_ensemble:
                ensembles[name] = source
            else:
                yield self._keep(self._checked(source))
        while ensembles:
            ready = [name for name in ensembles if not self._waits(ensembles[name], ensembles)]
            # If every ensemble waits for another one, there is a cycle.
            for name in ready or list(ensembles):
                source = ensembles.pop(name)
                yield self._keep(self._joined(source, is_circle=not ready))

    def _keep(self, report: ModelReport) -> ModelReport:
        self._reports[report.model] = report
        return report

    def _found(self, name: str) -> ModelSource | ModelReport:
        home = Path(self.repository.url(name))
        configuration, notes = self._mlserver(home)
        try:
            return self.repository.find(name)
        except XlaserveError as error:
            kind = mlserver_settings.KIND if configuration else ""
            return ModelReport(
                name, kind, (), notes, _without_name(name, str(error)), configuration
            )

    def _mlserver(self, home: Path) -> tuple[str, tuple[str, ...]]:
        """Convert MLServer's settings to a configuration, with notes."""
        try:
            found = mlserver_settings.read(home, roots=self.repository.confines)
        except InvalidModel as error:
            return "", (str(error),)
        return ("", ()) if found is None else (found.pbtxt, found.notes)

    def _checked(self, source: ModelSource) -> ModelReport:
        configuration, more = self._mlserver(Path(self.repository.url(source.name)))
        notes = dict.fromkeys((*more, *_of_config(source)))
        kind = ""
        versions = tuple(str(version.number) for version in source.versions)
        try:
            for version in source.versions:
                kind = loaders.recognised(version.directory, source.config)
                version.verify(source.config, lambda: None)
                notes |= dict.fromkeys(self._tried(kind, source, version))
        except XlaserveError as error:
            reason = _without_name(source.name, str(error))
            return ModelReport(source.name, kind, versions, tuple(notes), reason, configuration)
        return ModelReport(source.name, kind, versions, tuple(notes), "", configuration)

    def _tried(self, kind: str, source: ModelSource, version: VersionSource) -> Iterator[str]:
        if kind == PYTHON and not self.runs_python:
            yield _NOT_RUN
            return
        context = replace(
            self.context(source, version),
            model=source.name,
            version=str(version.number),
            config=source.config,
            roots=version.roots,
            # Compile only the smallest and the largest batch size.
            background_compile=True,
        )
        model = self.load(version.directory, context)
        info = model.info
        model.close()
        # Versions are loaded in ascending order, so the latest overwrites the entry "".
        for number in (str(version.number), ""):
            self._infos[source.name, number] = info
        yield from filter(None, (info.training, info.notice))

    # --- Ensembles ---

    def _waits(self, source: ModelSource, ensembles: Mapping[str, ModelSource]) -> bool:
        return any(step.model_name in ensembles for step in source.config.steps)

    def _joined(self, source: ModelSource, *, is_circle: bool) -> ModelReport:
        versions = tuple(str(version.number) for version in source.versions)
        report = ModelReport(source.name, "ensemble", versions, tuple(_of_config(source)))
        unknown = []
        for step in source.config.steps:
            reason = self._reason(step, is_circle=is_circle)
            if reason:
                return replace(report, reason=f"its step '{step.model_name}' {reason}")
            if (step.model_name, step.model_version) not in self._infos:
                unknown.append(step.model_name)
        if unknown:
            names = ", ".join(f"'{name}'" for name in dict.fromkeys(unknown))
            note = f"its tensors were not compared with those of {names}, whose code was not run"
            return replace(report, notes=(*report.notes, note))
        try:
            plan = plan_ensemble(source.config, self._infos)
        except InvalidModel as error:
            return replace(report, reason=str(error))
        for number in ("", *versions):
            self._infos[source.name, number] = plan.info
        return report

    def _reason(self, step: EnsembleStep, *, is_circle: bool) -> str:
        """Explain why a model cannot be a step of an ensemble; empty if it can."""
        report = self._reports.get(step.model_name)
        if report is None:
            return "is a step of itself" if is_circle else "is not in the repository"
        if report.reason:
            return f"is refused: {report.reason}"
        version = step.model_version
        if version and version not in report.versions:
            return f"has no version {version} selected by its version_policy"
        return ""


def unused_fields(config: ModelConfig) -> tuple[str, ...]:
    """Return the configuration fields that have no effect."""
    kinds = ("platform (", "backend (")  # for ONNX models, which are converted to JAX
    return tuple(name for name in config.without_effect if not name.startswith(kinds))


def _of_config(source: ModelSource) -> Iterator[str]:
    unused = unused_fields(source.config)
    if unused:
        yield f"without effect: {', '.join(unused)}"


def _without_name(name: str, text: str) -> str:
    """Remove the model's name from an error text, since it is shown next to it."""
    return text.removeprefix(f"failed to load '{name}', ")
