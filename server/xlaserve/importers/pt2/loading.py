"""Loads torch.export programs of a repository, which are converted at their first load."""

from pathlib import Path

from xlaserve.artifact.onnx_source import OnnxSource
from xlaserve.importers.onnx import loading
from xlaserve.importers.pt2.importing import Options, import_program
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import LoadedModel, Stage


def load(directory: Path, context: LoadContext) -> LoadedModel:
    """Load the .pt2 file of a version directory, converting it unless a conversion is cached.

    Blocks. Raises InvalidModel, OutOfMemory, or the exception of `context.check_cancelled`.
    """
    return loading.load_with(converted, directory, context)


def converted(source: OnnxSource, target: Path, context: LoadContext) -> None:
    """Convert a program to a version directory; raises InvalidModel that names it. Blocks."""

    def on_stage(stage: Stage) -> None:
        context.check_cancelled()
        context.on_stage(stage)

    options = Options(
        version=1,
        max_batch_size=0 if source.is_unbatched else None,
        sizes=source.sizes,
        limit_bytes=context.compilation.conversions.limits.model_bytes,
        is_mapped=False,
        roots=context.roots,
    )
    holder = target.with_name(f"{target.name}-import")
    with loading.named(source, context):
        made = import_program(source.path, holder, options, on_stage)
    made.path.rename(target)
