"""Choice of a generator's tool call format, by configuration or chat template."""

import structlog

from xlaserve.errors import InvalidModel
from xlaserve.language.text import LanguageText
from xlaserve.language.tool_families import FAMILIES, recognised
from xlaserve.model_config.config import ModelConfig

PARAMETER = "tool_calls"
_NONE = "none"


def family(config: ModelConfig, text: LanguageText | None, model: str) -> str:
    """Return the name of the tool call format, empty if there is none; log the choice.

    Raises InvalidModel if the parameter `tool_calls` names an unknown format, or names a format
    although the model has no chat template.
    """
    log = structlog.get_logger("generation")
    template = None if text is None else text.tools_template
    wanted = config.parameters.get(PARAMETER)
    if wanted is not None:
        known = (*FAMILIES, _NONE)
        if wanted not in known:
            expected = ", ".join(known)
            raise InvalidModel(
                f"parameter '{PARAMETER}': expected one of {expected}, got '{wanted[:64]}'"
            )
        if wanted == _NONE:
            return ""
        if template is None:
            raise InvalidModel(
                f"parameter '{PARAMETER}': expected '{_NONE}' for a model without a chat"
                f" template, got '{wanted}'"
            )
        found = FAMILIES[wanted].name
        log.info("tool-call parsing enabled", model=model, family=found, reason="configured")
        if "tools" not in template:
            log.warning("chat template without tools", model=model, family=found)
        return found
    known_by = None if template is None else recognised(template)
    if known_by is None:
        return ""
    found, sign = known_by[0].name, known_by[1]
    log.info("tool-call parsing enabled", model=model, family=found, reason=f"template has {sign}")
    return found
