"""Loads ONNX models of a repository, which are converted at their first load."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from xlaserve.artifact import manifest, onnx_source
from xlaserve.artifact.onnx_source import OnnxSource
from xlaserve.errors import InvalidModel, XlaserveError
from xlaserve.files import files
from xlaserve.files.roots import Roots
from xlaserve.importers.onnx import importing, texts
from xlaserve.importers.onnx.importing import Options
from xlaserve.importers.onnx.text_model import TextModel, with_numbers
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime.exported import jax_export
from xlaserve.runtime.failures import raise_if_exhausted
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import LoadedModel, Stage

Convert: TypeAlias = Callable[[OnnxSource, Path, LoadContext], None]
"""Converts a model to a version directory; raises InvalidModel that names the model."""


def load(directory: Path, context: LoadContext) -> LoadedModel:
    """Load the ONNX model of a version directory, converting it unless a conversion is cached.

    Blocks. Raises InvalidModel, OutOfMemory, or the exception of `context.check_cancelled`.
    """
    return load_with(converted, directory, context)


def load_with(converted: Convert, directory: Path, context: LoadContext) -> LoadedModel:
    """Load a model like `load`, with `converted` as the conversion function."""
    source = found(directory, context.config)
    conversions = context.compilation.conversions
    before = onnx_source.marks(source)
    name = onnx_source.key(
        source,
        limit_bytes=conversions.limits.model_bytes,
        roots=context.roots,
        check_cancelled=context.check_cancelled,
    )

    def convert(target: Path) -> None:
        converted(source, target, context)
        if onnx_source.marks(source) != before:
            raise InvalidModel(f"{source.path.name} changed during the conversion")

    try:
        for _attempt in range(2):
            with conversions.version(name, convert) as version:
                try:
                    return _loaded(version, replace(context, roots=Roots.of((version,))))
                except InvalidModel:
                    # Convert again, once, if another process evicted the cached files or they are
                    # damaged.
                    if _is_intact(version):
                        raise
                    conversions.drop(name)
    except OSError as error:
        reason = f"{source.path.name} cannot be converted: {error.strerror or error}"
        raise InvalidModel(reason) from error
    raise InvalidModel(f"{source.path.name}: its cached conversion keeps changing; try again")


def found(directory: Path, config: ModelConfig) -> OnnxSource:
    """Return the model of a version directory; raises InvalidModel if missing."""
    source = onnx_source.find(directory, config)
    if source is None:
        name = config.default_model_filename or onnx_source.DEFAULT_FILE
        raise InvalidModel(f"{name} is missing")
    return source


def converted(source: OnnxSource, target: Path, context: LoadContext) -> None:
    """Convert a model to a version directory; raises InvalidModel that names it. Blocks."""

    def on_stage(stage: Stage) -> None:
        context.check_cancelled()
        context.on_stage(stage)

    options = Options(
        version=1,
        max_batch_size=0 if source.is_unbatched else None,
        sizes=source.sizes,
        check=context.compilation.conversions.compare,
        limit_bytes=context.compilation.conversions.limits.model_bytes,
        with_texts=True,
        roots=context.roots,
    )
    holder = target.with_name(f"{target.name}-import")
    with named(source, context):
        made = importing.import_model(source.path, holder, options, on_stage)
    if made.texts:
        texts.write(made.path, made.texts)
    made.path.rename(target)


@contextmanager
def named(source: OnnxSource, context: LoadContext) -> Iterator[None]:
    """Turn errors of a conversion into InvalidModel with the file's name."""
    problem = f"{source.path.name} cannot be converted"
    try:
        yield
    except InvalidModel as error:
        raise InvalidModel(f"{problem}: {error}") from error.__cause__
    except (XlaserveError, OSError):
        raise
    # JAX may raise anything for a model that it cannot convert.
    except Exception as error:
        raise_if_exhausted(context.model, error)
        lines = str(error).strip().splitlines() or [""]
        raise InvalidModel(f"{problem}: {type(error).__name__}: {lines[0][:300]}") from error


def _loaded(version: Path, context: LoadContext) -> LoadedModel:
    found = texts.read(version, context.roots)
    if not found:
        return jax_export.load(version, context)
    config = with_numbers(context.config, found, manifest.read(version, context.roots))
    inner = jax_export.load(version, replace(context, config=config))
    try:
        return TextModel(context.model, inner, found)
    except InvalidModel:
        inner.close()
        raise


def _is_intact(directory: Path) -> bool:
    """Tell whether the files of a version directory match its manifest."""
    try:
        described = manifest.read(directory)
        for name, record in described.files.items():
            files.read_checked(directory, name, limit_bytes=record.size_bytes, record=record)
        texts.read(directory)
    except InvalidModel:
        return False
    return True
