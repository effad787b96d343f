"""Errors of the text of language models, as facts. See errors.py."""

from xlaserve.errors import InvalidRequest, Unsupported, XlaserveError, repeatable


def _named(model: str) -> str:
    return f"model '{model}'" if model else "the model"


class ModelHasNoText(InvalidRequest):
    """Text is sent to a model that has no tokenizer: it takes token ids only."""

    def __init__(self, model: str = "", reason: str = "") -> None:
        """`reason` says why, where it is not that there is no such file."""
        why = reason or "has no tokenizer.json"
        super().__init__(f"{_named(model)} {why}: it accepts no text, send token ids")


class ModelHasNoTemplate(InvalidRequest):
    """Messages are sent to a model that has no chat template."""

    def __init__(self, model: str = "") -> None:
        super().__init__(
            f"{_named(model)} has no chat template (chat_template.jinja, or 'chat_template' of "
            "tokenizer_config.json): it accepts text, not messages: send a prompt to"
            " /v1/completions"
        )


class TextNotInstalled(Unsupported):
    """Text needs packages that are not installed."""

    def __init__(self, model: str, package: str) -> None:
        XlaserveError.__init__(
            self,
            f"{_named(model)}: text needs the package '{package}', which is not installed: "
            "pip install 'xlaserve[generation]'",
        )


class TextTooLong(InvalidRequest):
    """A text has more characters than are turned into tokens at once."""

    def __init__(self, model: str, limit: int, got: int) -> None:
        super().__init__(
            f"{_named(model)}: expected a text of at most {limit} characters, got {got}"
        )


class NotText(InvalidRequest):
    """A string with half of a surrogate pair, which is no valid Unicode."""

    def __init__(self, model: str) -> None:
        super().__init__(f"{_named(model)}: expected text in Unicode, got half of a surrogate pair")


class SpelledSpecialToken(InvalidRequest):
    """A client's text would become a special token, which only the model's template may write."""

    def __init__(self, model: str, token: str) -> None:
        super().__init__(
            f"{_named(model)}: the text contains the special token '{repeatable(token)}', which"
            " its tokenizer cannot encode as plain text: leave it out"
        )


class TokenizerFailed(InvalidRequest):
    """The tokenizer of a model makes no tokens of a text, or takes too much for it."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"{_named(model)}: its tokenizer failed on the text: {repeatable(reason)}")


class MessagesRefused(InvalidRequest):
    """The chat template of a model takes no such messages."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(
            f"{_named(model)}: its chat template rejected the request: {repeatable(reason)}"
        )


class TemplateFailed(XlaserveError):
    """The chat template of a model is at fault: it is none, or it took more than it may."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"{_named(model)}: its chat template failed: {repeatable(reason)}")


class TextProcessLost(XlaserveError):
    """A process that computes texts of clients for a model was lost, by no fault of the text."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(
            f"{_named(model)}: the text process was lost: {repeatable(reason)}; try again"
        )


class TooManyTexts(XlaserveError):
    """Too many texts of one caller wait for the one thread of their model."""

    def __init__(self, model: str, limit: int) -> None:
        super().__init__(
            f"{_named(model)}: {limit} texts of this caller are already queued: send more when"
            " those are answered"
        )
