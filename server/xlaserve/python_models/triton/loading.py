"""`pb_utils.load_model`, `unload_model` and `is_model_ready`."""

from collections.abc import Mapping

from xlaserve.errors import XlaserveError
from xlaserve.python_models.triton.errors import TritonModelException
from xlaserve.runtime.calls import Calls, Change, current_request


class ModelLoading:
    """Lets a model's code load and unload models (Triton's model loading API)."""

    def __init__(self, model: str, calls: Calls) -> None:
        self._model = model
        self._calls = calls

    def is_model_ready(self, model_name: str, model_version: str = "") -> bool:
        """Tell whether a model can answer now."""
        return self._calls.is_ready(model_name, str(model_version), current_request())

    def load_model(
        self, model_name: str, config: str = "", files: Mapping[str, bytes] | None = None
    ) -> None:
        """Load or reload a model, and return once it is ready. Blocks.

        Raises TritonModelException.
        """
        given: dict[str, bool | int | str | bytes] = dict(files or {})
        if config:
            given["config"] = config
        self._change(Change(self._model, model_name, is_load=True, parameters=given))

    def unload_model(self, model_name: str, unload_dependents: bool = False) -> None:
        """Unload a model, and return once its memory is free. Blocks.

        Raises TritonModelException.
        """
        given = {"unload_dependents": True} if unload_dependents else {}
        self._change(Change(self._model, model_name, is_load=False, parameters=given))

    def _change(self, change: Change) -> None:
        try:
            self._calls.change(change, current_request()).result()
        except XlaserveError as error:
            raise TritonModelException(str(error)) from error
