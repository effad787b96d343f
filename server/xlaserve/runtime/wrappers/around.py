"""Base class of models that wrap another model and delegate to it."""

from collections.abc import Callable, Mapping

from xlaserve.runtime.loaded import LoadedModel, Stage


class AroundModel:
    """Delegates compilation and release to the wrapped model."""

    _inner: LoadedModel

    @property
    def next_bucket_bytes(self) -> Mapping[str, int]:
        """Return the wrapped model's bound for the next step of `compile_rest`, by device."""
        return self._inner.next_bucket_bytes

    def compile_rest(
        self,
        check_cancelled: Callable[[], None] = lambda: None,
        on_stage: Callable[[Stage], None] = lambda stage: None,
    ) -> None:
        """Compile and warm the programs that the load deferred. Blocks."""
        self._inner.compile_rest(check_cancelled, on_stage)

    def stop(self) -> None:
        """Stop compiling."""
        self._inner.stop()

    def close(self) -> None:
        """Release all buffers and executables."""
        self._inner.close()
