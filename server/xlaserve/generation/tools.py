"""The syntax in which a generator writes tool calls, by its template or configuration."""

import structlog

from xlaserve.errors import InvalidModel
from xlaserve.language.text import LanguageText
from xlaserve.language.tool_families import FAMILIES, recognised
from xlaserve.model_config.config import ModelConfig

PARAMETER = "tool_calls"
_NONE = "none"


def family(config: ModelConfig, text: LanguageText | None, model: str) -> str:
    """Return the name of a family, empty for none; the log says which one and why.

    Raises InvalidModel for a parameter that names no family, or that nothing can obey.
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
