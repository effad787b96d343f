"""Errors about the text input of language models."""

from xlaserve.errors import InvalidRequest, Unsupported, XlaserveError, repeatable


def _named(model: str) -> str:
    return f"model '{model}'" if model else "the model"


class ModelHasNoText(InvalidRequest):
    """A request contains text, but the model has no tokenizer: it only accepts token ids."""

    def __init__(self, model: str = "", reason: str = "") -> None:
        """`reason` replaces the default reason, a missing tokenizer file."""
        why = reason or "has no tokenizer.json"
        super().__init__(f"{_named(model)} {why}: it accepts no text, send token ids")


class ModelHasNoTemplate(InvalidRequest):
    """A request contains messages, but the model has no chat template."""

    def __init__(self, model: str = "") -> None:
        super().__init__(
            f"{_named(model)} has no chat template (chat_template.jinja, or 'chat_template' of "
            "tokenizer_config.json): it accepts text, not messages: send a prompt to"
            " /v1/completions"
        )


class TextNotInstalled(Unsupported):
    """Text input requires packages that are not installed."""

    def __init__(self, model: str, package: str) -> None:
        XlaserveError.__init__(
            self,
            f"{_named(model)}: text needs the package '{package}', which is not installed: "
            "pip install 'xlaserve[generation]'",
        )


class TextTooLong(InvalidRequest):
    """The text is too long to tokenize."""

    def __init__(self, model: str, limit: int, got: int) -> None:
        super().__init__(
            f"{_named(model)}: expected a text of at most {limit} characters, got {got}"
        )


class NotText(InvalidRequest):
    """A string contains a lone surrogate, so it is not valid Unicode."""

    def __init__(self, model: str) -> None:
        super().__init__(f"{_named(model)}: expected text in Unicode, got half of a surrogate pair")


class SpelledSpecialToken(InvalidRequest):
    """The text contains a special token, which only the model's template may produce."""

    def __init__(self, model: str, token: str) -> None:
        super().__init__(
            f"{_named(model)}: the text contains the special token '{repeatable(token)}', which"
            " its tokenizer cannot encode as plain text: leave it out"
        )


class TokenizerFailed(InvalidRequest):
    """The tokenizer fails on a text, or exceeds its limits."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"{_named(model)}: its tokenizer failed on the text: {repeatable(reason)}")


class MessagesRefused(InvalidRequest):
    """The model's chat template rejects the messages."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(
            f"{_named(model)}: its chat template rejected the request: {repeatable(reason)}"
        )


class TemplateFailed(XlaserveError):
    """The model's chat template is invalid or exceeds its limits."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"{_named(model)}: its chat template failed: {repeatable(reason)}")


class TextProcessLost(XlaserveError):
    """The process that handles text for a model was lost; the text is not at fault."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(
            f"{_named(model)}: the text process was lost: {repeatable(reason)}; try again"
        )


class TooManyTexts(XlaserveError):
    """Too many texts of one caller are waiting for their model's text thread."""

    def __init__(self, model: str, limit: int) -> None:
        super().__init__(
            f"{_named(model)}: {limit} texts of this caller are already queued: send more when"
            " those are answered"
        )
