"""A language model that writes scripted answers, with one token per ASCII character."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from xlaserve import export_generator

VOCAB = 128
STOP = 5
SPECIAL = {1: "<|python_tag|>", STOP: "</s>"}
LENGTH = 512
HEIGHT = 20.0
"""Logit of the next token of the script; the others are 0."""
HERMES = "{# <tool_call> #}"
LLAMA = "{# <|python_tag|> #}"
MESSAGES = (
    "{% if tools %}[{{ tools | tojson }}]{% endif %}{% for message in messages %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    "({{ call.function.name }} {{ call.function.arguments | tojson }}){% endfor %}"
    "{% if message.tool_call_id %}={{ message.tool_call_id }}{% endif %}|{% endfor %}"
    "{{ messages[0].content[0] }}."
)
"""The chat template; the prompt ends with the first message's first digit, the script number."""


def export(
    path: Path,
    scripts: Sequence[str],
    template: str,
    *,
    added: Mapping[int, str] = MappingProxyType({}),
    **config: str,
) -> Path:
    """Export a model into `path`/1 that answers with the script that its prompt's end selects.

    `added` are further tokens, by id, that are not special.
    """
    table = np.full((len(scripts), LENGTH), STOP, np.int32)
    for row, text in zip(table, scripts, strict=True):
        row[: len(text)] = [ord(letter) for letter in text]

    def init_cache(params: Any, slots: int, length: int) -> Any:
        return [{"k": jnp.zeros((slots, length))}]

    def logits(params: Any, script: Any, at: Any) -> Any:
        token = params["table"][script, jnp.clip(at, 0, LENGTH - 1)]
        return HEIGHT * jax.nn.one_hot(token, VOCAB)

    def chunk(
        params: Any, cache: Any, window: Any, tokens: Any, slot: Any, start: Any, n: Any
    ) -> Any:
        script = jnp.clip(tokens[n - 1] - ord("0"), 0, len(scripts) - 1)
        held = cache[0]["k"].at[slot, 0].set((start + n).astype(jnp.float32), mode="drop")
        held = held.at[slot, 1].set(script.astype(jnp.float32), mode="drop")
        return logits(params, script, jnp.int32(0)), [{"k": held}]

    def decode(params: Any, cache: Any, window: Any, tokens: Any, positions: Any) -> Any:
        # Rows at the position are written as in every model, after the two reserved entries.
        slots = jnp.arange(tokens.shape[0])
        held = cache[0]["k"].at[slots, positions].set(tokens.astype(jnp.float32), mode="drop")
        begin, script = held[:, 0].astype(jnp.int32), held[:, 1].astype(jnp.int32)
        return logits(params, script, positions - begin), [{"k": held}]

    export_generator(
        decode,
        chunk,
        init_cache,
        {"table": table},
        path / "1",
        vocab=VOCAB,
        max_length=LENGTH,
        stop_tokens=[STOP],
    )
    tokenizer(added).save(str(path / "1" / "tokenizer.json"))
    (path / "1" / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "chat_template": template + MESSAGES})
    )
    sizes = {"slots": "2", "windows": "512", "chunk": "128", **config}
    written = {name: {"string_value": value} for name, value in sizes.items()}
    (path / "config.json").write_text(json.dumps({"parameters": written}))
    return path


def tokenizer(added: Mapping[int, str] = MappingProxyType({})) -> Tokenizer:
    """Return a tokenizer with one token per character, by code point."""
    made = Tokenizer(models.BPE(_vocabulary(added), []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL.values()])
    made.add_tokens([AddedToken(name, special=False) for name in added.values()])
    return made


def _vocabulary(added: Mapping[int, str]) -> dict[str, int]:
    # GPT-2's numbering of non-printable bytes.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [code for code in range(256) if code not in printable]
    letters = {code: chr(code) for code in printable}
    letters |= {code: chr(256 + index) for index, code in enumerate(others)}
    named = {**SPECIAL, **added}
    return {named.get(code, letters[code]): code for code in range(VOCAB)}
