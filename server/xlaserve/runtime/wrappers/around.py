"""The base of models that wrap another one, and delegate to it."""

from collections.abc import Callable, Mapping

from xlaserve.runtime.loaded import LoadedModel, Stage


class AroundModel:
    """Compiles and ends as the model within does."""

    _inner: LoadedModel

    @property
    def next_bucket_bytes(self) -> Mapping[str, int]:
        """Return an upper bound of the next step of `compile_rest`, in bytes by device."""
        return self._inner.next_bucket_bytes

    def compile_rest(
        self,
        check_cancelled: Callable[[], None] = lambda: None,
        on_stage: Callable[[Stage], None] = lambda stage: None,
    ) -> None:
        """Compile and warm what a load with `background_compile` left out. Blocks."""
        self._inner.compile_rest(check_cancelled, on_stage)

    def stop(self) -> None:
        """Compile nothing more."""
        self._inner.stop()

    def close(self) -> None:
        """Drop every buffer and executable."""
        self._inner.close()
