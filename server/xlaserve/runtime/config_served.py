"""The complete configuration of a loaded model: configured fields plus derived defaults."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import betterproto

from xlaserve.errors.access import HIDDEN
from xlaserve.model_config.config import ModelConfig
from xlaserve.model_config.message import ENSEMBLE
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.runtime.programs.served_rows import BATCH_ROWS
from xlaserve.tensors import TensorSpec
from xlaserve_proto import inference

ConfigTensor = TypeVar("ConfigTensor", inference.ModelInput, inference.ModelOutput)


@dataclass(frozen=True, slots=True)
class ServedConfig:
    """A loaded model, with the configuration that it was loaded with."""

    name: str
    config: ModelConfig
    info: ModelInfo
    sees: Callable[[str], bool] = lambda model: True
    """Tells whether the caller may see a model that the configuration names."""

    def message(self) -> inference.ModelConfig:
        """Return the configuration as written, with missing fields filled in from the model.

        Clients may send the result back as the `config` of a load request. The message shares its
        submessages with the written configuration: do not modify it.
        """
        written = self.config.message
        if written is None:  # A message with only empty fields is falsy, so test for None.
            written = inference.ModelConfig()
        message = copy.copy(written)
        message.name = self.name
        message.platform = written.platform or self.info.platform
        if self.info.platform != ENSEMBLE:
            message.backend = written.backend or self.info.platform
        if not betterproto.which_one_of(message.version_policy, "policy_choice")[0]:
            message.version_policy = inference.ModelVersionPolicy(
                latest=inference.ModelVersionPolicyLatest(num_versions=1)
            )
        message.max_batch_size = self.info.max_batch_size
        if self.info.is_decoupled:
            message.model_transaction_policy = inference.ModelTransactionPolicy(decoupled=True)
        if self.info.verdict is not None:
            verdict = inference.ModelParameter(string_value=str(self.info.verdict))
            message.parameters = {**written.parameters, BATCH_ROWS: verdict}
        hidden = [step for step in self.config.steps if not self.sees(step.model_name)]
        if hidden:
            message.ensemble_scheduling = self._without_hidden(written.ensemble_scheduling)
        batched = bool(self.info.max_batch_size)
        message.input = _tensors(self.info.inputs, written.input, inference.ModelInput, batched)
        message.output = _tensors(self.info.outputs, written.output, inference.ModelOutput, batched)
        return message

    def _without_hidden(self, scheduling: inference.ModelEnsembling) -> inference.ModelEnsembling:
        found = copy.copy(scheduling)
        found.step = [copy.copy(step) for step in scheduling.step]
        for step in found.step:
            if not self.sees(step.model_name):
                step.model_name = HIDDEN
        return found


def _tensors(
    specs: Sequence[TensorSpec],
    written: Sequence[ConfigTensor],
    kind: type[ConfigTensor],
    batched: bool,
) -> list[ConfigTensor]:
    by_name = {tensor.name: tensor for tensor in written}
    tensors = []
    for spec in specs:
        tensor = copy.copy(by_name.get(spec.name) or kind())
        tensor.name = spec.name
        tensor.data_type = inference.DataType[spec.datatype.config_name]
        # Without max_batch_size, the configured dims may include the batch dimension.
        tensor.dims = list(spec.shape[batched:])
        tensors.append(tensor)
    return tensors
