"""`xlaserve warm`: compiles the models of a repository before a server starts."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xlaserve.cli.printable import printable
from xlaserve.cli.termination import unwinding_on_signals
from xlaserve.errors import InvalidModel, InvalidSettings, XlaserveError
from xlaserve.files.temporary import TemporaryDirectory
from xlaserve.language.text_settings import text_limits
from xlaserve.offline import warming
from xlaserve.offline.local_copy import LocalCopy, local_copy
from xlaserve.offline.targets.compiling import Compilers
from xlaserve.offline.targets.jobs import Job
from xlaserve.offline.targets.warming_plan import WarmingPlan
from xlaserve.offline.warming import Warmed
from xlaserve.process import log
from xlaserve.residence.host import compile_processes
from xlaserve.residence.repository.repositories import open_repositories
from xlaserve.residence.repository.repository import Repository
from xlaserve.residence.repository.sources import ModelSource, VersionSource
from xlaserve.runtime import loaders
from xlaserve.runtime.devices import device
from xlaserve.runtime.devices import target_kinds as kinds
from xlaserve.runtime.devices.target_kinds import Target
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.programs import compilation, program_store
from xlaserve.runtime.programs.compilation_cache import CompilationCache, name_of
from xlaserve.runtime.programs.program_store import ProgramStore
from xlaserve.settings import Settings

HERE = "here"
"""The target name for this machine's device."""

_FAILED = 1


def warm(
    repository: Annotated[
        Path, typer.Argument(help="Directory of the models, or a URL, as `serve` takes it.")
    ],
    cache: Annotated[
        str,
        typer.Option(
            help="The server's --compilation-cache-directory, or its --compilation-cache-url.",
            show_default=False,
        ),
    ],
    target: Annotated[
        str,
        typer.Option(
            help=f"The kind of device: here (this machine's device), {', '.join(kinds.TARGETS)}."
        ),
    ] = HERE,
    count: Annotated[
        int, typer.Option(help="Number of devices: 1, 2, 4 or 8; always 1 for cpu and here.")
    ] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON line per version.")
    ] = False,
) -> None:
    """Compile every model of a repository into a compilation cache, before servers start.

    Run it as the user that runs the server, which ignores files of other users. A URL is a store
    that servers share; with it, nothing remains on this machine.
    """
    log.configure("warning")
    outcomes: list[Warmed] = []
    with unwinding_on_signals(), _cached(repository, cache) as settings:
        for outcome in _filled(settings, target, count):
            outcomes.append(outcome)
            if as_json:
                typer.echo(json.dumps(asdict(outcome)))
    if not as_json:
        Console().print(_table(outcomes))
    if any(outcome.problem for outcome in outcomes):
        raise typer.Exit(_FAILED)


@contextmanager
def _cached(repository: Path, cache: str) -> Iterator[Settings]:
    """Yield settings for a cache in a directory, or in the store at a URL."""
    read = partial(Settings.read, repository=repository)
    if compilation.URL not in cache:
        directory = str(Path(cache).absolute())
        yield read(compilation_cache_directory=directory, compilation_cache_url="")
        return
    settings = read()
    with TemporaryDirectory(settings.scratch_directory) as folder:
        # The user of a command chooses its URLs, so allow this one's scheme.
        yield replace(
            settings,
            compilation_cache_directory=str(folder.path),
            compilation_cache_url=cache,
            remote_schemes=(cache.partition(":")[0],),
        )


def _filled(settings: Settings, target: str, count: int) -> Iterator[Warmed]:
    """Warm every version; raises InvalidSettings if programs cannot be uploaded to the store."""
    store = compilation.store_of(settings, is_waited_for=True)
    with local_copy(settings) as copy:
        yield from _warmed(copy, target, count, store)
    if store is None:
        return
    store.flush()
    if store.counts.failures:
        expected = (
            f"a store that takes {store.counts.failures} further programs ({store.last_problem})"
        )
        raise InvalidSettings(program_store.SETTING, expected, store.url)


def _warmed(
    copy: LocalCopy, target: str, count: int, store: ProgramStore | None
) -> Iterator[Warmed]:
    settings = copy.settings
    repository = open_repositories(settings)
    failed = [Warmed(name, "", problem=reason) for name, reason in copy.failures.items()]
    found = [*failed, *_sources(repository)]
    if not found:
        raise InvalidSettings("repository", "a directory of models", settings.repository)
    yield from (one for one in found if isinstance(one, Warmed))
    sources = [one for one in found if not isinstance(one, Warmed)]
    if _is_here(target):
        yield from _warmed_here(settings, sources, target, store)
    else:
        yield from _warmed_ahead(settings, repository, sources, kinds.named(target), count)
        if store is not None:
            _put_all(settings, store)


def _put_all(settings: Settings, store: ProgramStore) -> None:
    """Upload all programs that compiler processes wrote to the cache directory."""
    directory = Path(settings.compilation_cache_directory)
    cache = CompilationCache(directory, settings.compilation_cache_max_bytes)
    for path in directory.iterdir():
        cache.prepare(path.name)
    for target, entry in cache.entries():
        store.put(target, name_of({**entry.program, **entry.environment}), entry)


def _is_here(target: str) -> bool:
    """Tell whether a target is this machine's device or CPU."""
    return target == HERE or kinds.named(target).platform == "cpu"


def _warmed_here(
    settings: Settings,
    sources: Sequence[ModelSource],
    target: str,
    store: ProgramStore | None,
) -> Iterator[Warmed]:
    """Load every version on this machine's device."""
    # Lower models in separate processes, as a server does.
    wanted = compilation.of_settings(settings, processes=compile_processes(settings))
    made = replace(wanted, store=store)
    device_name = settings.device.value if target == HERE else target
    platform = device.start(device_name, made.cache, memory_fraction=settings.gpu_memory_fraction)
    with closing(replace(made, store=None)):
        for source, version in _versions(sources):
            context = LoadContext(
                model=source.name,
                version=str(version.number),
                config=source.config,
                device=platform,
                max_on_demand_shapes=settings.max_on_demand_shapes,
                max_sequences=settings.max_sequences_per_model,
                text_limits=text_limits(settings),
                roots=version.roots,
                compilation=made,
            )
            yield warming.warm_here(version.directory, context)
            device.release_memory()


def _versions(sources: Sequence[ModelSource]) -> Sequence[tuple[ModelSource, VersionSource]]:
    return [(source, version) for source in sources for version in source.versions]


def _warmed_ahead(
    settings: Settings,
    repository: Repository,
    sources: Sequence[ModelSource],
    target: Target,
    count: int,
) -> Iterator[Warmed]:
    """Compile every version for absent devices, in separate processes."""
    flags = compilation.flags()
    plan = WarmingPlan(
        settings.compilation_cache_directory,
        settings.compilation_cache_max_bytes,
        flags,
        compilation.XlaOptions.of(settings),
    )
    found = _versions(sources)
    jobs = [
        Job(
            source.name,
            str(version.directory),
            target.name,
            count,
            repository.url(source.name),
            flags=tuple(flags.split()),
        )
        for source, version in found
    ]
    with Compilers(command=plan.command) as compilers:
        done = compilers.compile(jobs)
    for (source, version), compiled in zip(found, done, strict=True):
        yield warming.warmed_ahead(source.name, str(version.number), compiled)


def _sources(repository: Repository) -> Iterator[ModelSource | Warmed]:
    """Yield the models that a server would load, or the errors of invalid ones."""
    for name in repository.names():
        try:
            source = repository.find(name)
        except XlaserveError as error:
            yield Warmed(name, "", problem=str(error))
            continue
        if _has_programs(source):
            yield source


def _has_programs(source: ModelSource) -> bool:
    """Tell whether a model has programs to compile; ensembles and Python models do not.

    An unrecognized model counts, so that its load reports the error.
    """
    if source.config.is_ensemble:
        return False
    try:
        found = {loaders.recognised(one.directory, source.config) for one in source.versions}
    except InvalidModel:
        return True
    return found != {loaders.PYTHON}


def _table(outcomes: list[Warmed]) -> Table:
    table = Table("model", "version")
    for column in ("compiled", "cached", "seconds"):
        table.add_column(column, justify="right")
    table.add_column("problem or notice", overflow="fold")
    for row in outcomes:
        counts = (
            ("", "", "")
            if row.problem
            else (str(row.compiled), str(row.cached), f"{row.seconds:.2f}")
        )
        table.add_row(
            Text(printable(row.model)),
            row.version,
            *counts,
            Text(printable(row.problem or row.notice)),
        )
    return table
