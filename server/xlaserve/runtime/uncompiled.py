"""Base class of models without compiled programs."""

from collections.abc import Callable, Mapping

from xlaserve.runtime.loaded import Stage


class UncompiledModel:
    """Accepts any number of rows without padding; has nothing to compile after its load."""

    on_demand = None
    dispatching = None

    def padded_rows(self, rows: int) -> int:
        """Return the rows unchanged."""
        return rows

    @property
    def next_bucket_bytes(self) -> Mapping[str, int]:
        """Return an empty mapping: there is nothing to compile."""
        return {}

    def compile_rest(
        self,
        check_cancelled: Callable[[], None] = lambda: None,
        on_stage: Callable[[Stage], None] = lambda stage: None,
    ) -> None:
        """Do nothing: there is nothing to compile."""

    def stop(self) -> None:
        """Do nothing: there is nothing to compile."""
