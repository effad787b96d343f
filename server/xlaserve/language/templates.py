"""Chat templates, rendered in a sandboxed subprocess."""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from xlaserve.errors import InvalidModel
from xlaserve.errors.language import MessagesRefused, TemplateFailed, TextNotInstalled
from xlaserve.language import files
from xlaserve.language.limited import Limited, Limits, TookTooMuch
from xlaserve.language.text_limits import DEFAULT_TEXT_LIMITS

_PROGRAM = ("-m", "xlaserve.language.template_process")

DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names of templates; a model may have a separate one for messages with tools."""

OWN_VARIABLES = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
"""Variables set by the server, which clients cannot override."""


def sources(config: Mapping[str, Any], file: str | None) -> Mapping[str, str]:
    """Return a model's templates by name, empty if it has none; raises InvalidModel."""
    found = file if file is not None else config.get("chat_template")
    if found is None:
        return {}
    if isinstance(found, str):
        return {DEFAULT: found}
    listed = found if isinstance(found, list) else [found]
    named: dict[str, str] = {}
    for one in listed:
        name, text = (one.get("name"), one.get("template")) if isinstance(one, dict) else (0, 0)
        if not isinstance(name, str) or not isinstance(text, str):
            raise InvalidModel(
                f"{files.CONFIG}: expected chat_template as text, or as a list of templates with "
                "'name' and 'template'"
            )
        named[name] = text
    return named


class Template:
    """The chat template of a model; thread-safe."""

    def __init__(
        self,
        found: Mapping[str, str],
        variables: Mapping[str, Any],
        model: str = "",
        limits: Limits = DEFAULT_TEXT_LIMITS.template,
    ) -> None:
        """`variables` are available in addition to messages and tools. Raises TextNotInstalled."""
        if find_spec("jinja2") is None:
            raise TextNotInstalled(model, "jinja2")
        self._sources = found
        self._variables = variables
        self._model = model
        self._process = Limited(
            _PROGRAM, limits, {"sources": found}, called="chat template", model=model
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        marked: Callable[[Any], Any] = lambda data: data,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Render messages as a prompt, up to the start of the answer. Blocks.

        `marked` is applied to messages, tools and `variables` before they are passed to the
        template. Raises MessagesRefused and TemplateFailed.
        """
        name = self._name(has_tools=bool(tools))
        try:
            given = {
                **self._variables,
                **marked(dict(variables)),
                "messages": marked(list(messages)),
                "tools": marked(list(tools)) if tools else None,
                "documents": None,
                "add_generation_prompt": True,
            }
            found = self._process.ask({"name": name, "given": given})
        except (ValueError, TypeError, RecursionError) as error:
            raise MessagesRefused(self._model, f"they are not JSON: {error}") from None
        except OSError as error:
            raise TemplateFailed(self._model, f"its process was lost: {error}") from None
        except TookTooMuch as error:
            raise TemplateFailed(self._model, str(error)) from None
        if "refused" in found:
            raise MessagesRefused(self._model, found["refused"])
        if "text" not in found:
            raise TemplateFailed(self._model, found.get("failed") or found["lost"])
        text: str = found["text"]
        return text

    @property
    def source_with_tools(self) -> str:
        """Return the source of the template for messages with tools."""
        return self._sources[self._name(has_tools=True)]

    def _name(self, *, has_tools: bool) -> str:
        name = WITH_TOOLS if has_tools and WITH_TOOLS in self._sources else DEFAULT
        return name if name in self._sources else min(self._sources)

    def close(self) -> None:
        """End the subprocess for good."""
        self._process.close()
