"""The OpenAPI description as an HTML page."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from http import HTTPStatus
from shlex import quote
from urllib.parse import quote as percent_encoded

from xlaserve.http.dashboard.openapi import Object, errors_by_status
from xlaserve.http.dashboard.protos import Service, command
from xlaserve.http.messages import JSON_TYPE

_ORIGIN = "http://localhost:8000"
"""Placeholder in the examples, which the page replaces by its own origin."""

_REFERENCE = re.compile(r"#/components/schemas/(.+)")
_CODE = re.compile(r"`([^`]+)`")
_IN_BRACES = re.compile(r"(\{\w+\})")


_MOST_ROWS = 16
"""Lines of a body shown without a scroll bar."""


def render(
    description: Object, services: Sequence[Service] = (), grpc_address: str = "localhost:8001"
) -> str:
    """Return the page, with all texts escaped."""
    info = description["info"]
    groups = _groups(description)
    parts = [
        _HEAD.format(title=_text(info["title"]), version=_text(info["version"])),
        _navigation(description, groups),
        f'<main id="main" tabindex="-1"><h1>{_text(info["title"])}: HTTP routes</h1>',
        f'<p class="lead">{_prose(info["summary"])}</p>',
        f"<p>{_prose(info['description'])}</p>",
        *(_group(tag, groups[tag["name"]]) for tag in description["tags"]),
        _grpc(services, grpc_address),
        _errors(),
        _schemas(description["components"]["schemas"]),
        "</main></div></body></html>\n",
    ]
    return "\n".join(parts)


_HEAD = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title} {version}: HTTP routes</title>
<link rel="icon" href="../page/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="../page/base.css">
<link rel="stylesheet" href="../page/docs.css">
<script type="module" src="../page/docs.js"></script>
</head>
<body>
<a class="skip" href="#main">To the content</a>
<header class="top">
<a class="brand" href="../"><img src="../page/icon.svg" alt="" width="28" height="28">{title}</a>
<span class="quiet">{version}</span>
<nav aria-label="Pages"><a href="../">Status</a> <a href="../metrics">Metrics</a>
<a href="docs/openapi.json">openapi.json</a></nav>
</header>
<div class="columns">
"""


def _groups(description: Object) -> dict[str, list[tuple[str, str, Object]]]:
    groups: dict[str, list[tuple[str, str, Object]]] = {}
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            groups.setdefault(operation["tags"][0], []).append((method.upper(), path, operation))
    return groups


def _navigation(
    description: Object, groups: Mapping[str, Iterable[tuple[str, str, Object]]]
) -> str:
    parts = ['<nav class="side" aria-label="Routes">']
    for tag in description["tags"]:
        name = _text(tag["name"])
        label = "routes-" + name.replace(" ", "-")
        parts.append(f'<p class="group" id="{label}">{name}</p><ul aria-labelledby="{label}">')
        parts += [
            f'<li><a href="#{_text(operation["operationId"])}">{_method(method)} '
            f"{_path(path)}</a></li>"
            for method, path, operation in groups[tag["name"]]
        ]
        parts.append("</ul>")
    parts.append('<p class="group" id="routes-more">More</p><ul aria-labelledby="routes-more">')
    parts.append('<li><a href="#grpc">gRPC</a></li><li><a href="#errors">Errors</a></li>')
    parts.append('<li><a href="#schemas">Schemas</a></li></ul></nav>')
    return "\n".join(parts)


def _group(tag: Object, rows: Iterable[tuple[str, str, Object]]) -> str:
    head = f"<h2>{_text(tag['name'])}</h2><p>{_prose(tag['description'])}</p>"
    return head + "\n".join(_operation(*row) for row in rows)


# --- Operations ---


def _operation(method: str, path: str, operation: Object) -> str:
    name = _text(operation["operationId"])
    body = operation.get("requestBody")
    parts = [
        f'<section class="operation" id="{name}" aria-labelledby="{name}-title">',
        f'<h3 id="{name}-title"><a href="#{name}">{_method(method)} {_path(path)}</a></h3>',
        f"<p><strong>{_prose(operation['summary'])}.</strong> "
        f"{_prose(operation['description'])}</p>",
        _parameters(operation["parameters"]),
        _request(body) if body else "",
        _responses(operation["responses"]),
        _curl(method, path, operation),
        _trial(name, method, path, operation),
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def _parameters(parameters: Iterable[Object]) -> str:
    rows = [
        (
            f"<code>{_text(parameter['name'])}</code>",
            _text(parameter["in"]) + (", required" if parameter["required"] else ""),
            _kind(parameter["schema"]),
            _prose(parameter["description"]),
        )
        for parameter in parameters
    ]
    return _table("Parameters", ("Name", "In", "Type", "Meaning"), rows) if rows else ""


def _request(body: Object) -> str:
    rows = [
        (f"<code>{_text(media_type)}</code>", _media(media))
        for media_type, media in body["content"].items()
    ]
    caption = "Body" if body["required"] else "Body (optional)"
    return _table(caption, ("Content-Type", "Form"), rows)


def _responses(responses: Object) -> str:
    rows: list[tuple[str, str, str]] = []
    for status, response in responses.items():
        if "$ref" in response:
            rows.append((_status(status), "", '<a href="#schema-Error">Error</a>'))
            continue
        forms = [
            f"<code>{_text(media_type)}</code> {_media(media)}"
            for media_type, media in response["content"].items()
        ]
        forms += [
            f"header <code>{_text(name)}</code>: {_prose(header['description'])}"
            for name, header in response.get("headers", {}).items()
        ]
        rows.append((_status(status), _prose(response["description"]), "<br>".join(forms)))
    return _table("Answers", ("Status", "Meaning", "Body"), rows)


def _status(status: str) -> str:
    return f"<code>{_text(status)}</code> {_text(HTTPStatus(int(status)).phrase)}"


def _media(media: Object) -> str:
    return _kind(media["schema"]) if "schema" in media else "bytes"


def _curl(method: str, path: str, operation: Object) -> str:
    words = ["curl"] if method == "GET" else ["curl", "-X", method]
    origin = f'<span class="origin">{_ORIGIN}</span>'
    lines = [" ".join(words) + f" '{origin}{_example(operation, path)}'"]
    media = operation.get("requestBody", {}).get("content", {}).get(JSON_TYPE, {})
    if "example" in media:
        lines.append(f"  -H {_text(quote('Content-Type: ' + JSON_TYPE))}")
        lines.append(f"  -d {_text(quote(json.dumps(media['example'])))}")
    return '<pre class="curl" tabindex="0"><code>' + " \\\n".join(lines) + "</code></pre>"


def _example(operation: Object, path: str) -> str:
    for parameter in operation["parameters"]:
        if parameter["in"] == "path":
            example = percent_encoded(parameter["example"], safe="")
            path = path.replace("{" + parameter["name"] + "}", example)
    return _text(path)


# --- Forms ---


def _trial(name: str, method: str, path: str, operation: Object) -> str:
    body = operation.get("requestBody")
    fields = [*map(_field, operation["parameters"]), *(_body_fields(body) if body else ())]
    return (
        f'<form class="try" data-method="{_text(method)}" data-path="{_text(path)}" '
        f'aria-label="Try {name}">'
        + "".join(fields)
        + f'<button type="submit">Send {_text(method)}</button>'
        '<div class="answer" role="status" aria-live="polite"></div></form>'
    )


def _field(parameter: Object) -> str:
    name = _text(parameter["name"])
    return (
        f'<label>{name} <input name="{name}" data-in="{_text(parameter["in"])}" '
        f'value="{_text(str(parameter.get("example", "")))}" autocomplete="off" spellcheck="false"'
        f"{' required' if parameter['required'] else ''}></label>"
    )


def _body_fields(body: Object) -> Iterable[str]:
    content = body["content"]
    options = "".join(f"<option>{_text(media_type)}</option>" for media_type in content)
    yield f'<label>Content-Type <select data-in="type">{options}</select></label>'
    example = content.get(JSON_TYPE, {}).get("example")
    text = "" if example is None else json.dumps(example, indent=2)
    rows = min(text.count("\n") + 1, _MOST_ROWS)
    yield (
        f'<label class="body">Body <textarea data-in="body" rows="{rows}" autocomplete="off" '
        f'spellcheck="false">{_text(text)}</textarea></label>'
    )
    yield '<label>or a file <input type="file" data-in="file"></label>'


# --- gRPC ---


def _grpc(services: Sequence[Service], address: str) -> str:
    parts = [
        '<h2 id="grpc">gRPC</h2><p><a href="docs/protos.zip" download>protos.zip</a> has the '
        "protos of all services, and these lines as <code>grpcurl.txt</code>. They run from the"
        " unpacked directory; over TLS leave out <code>-plaintext</code>.</p>"
    ]
    shown = _text(address)
    for service in services:
        lines = "\n".join(
            _text(command(service, method, address)).replace(
                f" {shown} ", f' <span class="grpc-address">{shown}</span> '
            )
            for method in service.methods
        )
        parts.append(f"<h3>{_text(service.name)}</h3>")
        parts.append(f'<pre class="curl" tabindex="0"><code>{lines}</code></pre>')
    return "\n".join(parts)


# --- Errors and schemas ---


def _errors() -> str:
    rows = [
        (_status(str(status)), "<br>".join(map(_prose, texts)))
        for status, texts in errors_by_status().items()
    ]
    return '<h2 id="errors">Errors</h2>' + _table(
        "Meanings of each status", ("Status", "Meanings"), rows
    )


def _schemas(schemas: Object) -> str:
    return '<h2 id="schemas">Schemas</h2>' + "\n".join(
        _schema(name, schema) for name, schema in schemas.items()
    )


def _schema(name: str, schema: Object) -> str:
    required = schema.get("required", ())
    rows = [
        (
            f"<code>{_text(member)}</code>",
            _kind(of) + (", required" if member in required else ""),
            _prose(of.get("description", "")),
        )
        for member, of in schema.get("properties", {}).items()
    ]
    table = _table("Members", ("Name", "Type", "Meaning"), rows) if rows else ""
    return (
        f'<section class="schema" id="schema-{_text(name)}"><h3>{_text(name)}</h3>'
        f"<p>{_prose(schema.get('description', ''))}</p>{table}</section>"
    )


def _kind(schema: Object) -> str:
    """Describe a schema in words, with links to other schemas."""
    if "$ref" in schema:
        found = _REFERENCE.fullmatch(schema["$ref"])
        name = _text(found[1]) if found else ""
        return f'<a href="#schema-{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        return f"array of {_kind(schema.get('items', {}))}"
    if kind == "object" and "additionalProperties" in schema:
        return f"object of {_kind(schema['additionalProperties'])}"
    return _text(kind)


# --- Text ---


def _table(caption: str, heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Render a table of HTML cells."""
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><caption>{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _method(method: str) -> str:
    return f'<span class="method {_text(method.lower())}">{_text(method)}</span>'


def _path(path: str) -> str:
    """Render a path with line break opportunities between segments, and highlighted parameters."""
    parts = _IN_BRACES.split(path)
    marked = [f"<em>{_text(p)}</em>" if p[:1] == "{" else _text(p) for p in parts]
    return "<code>" + "".join(marked).replace("/", "<wbr>/").replace("<<wbr>/", "</") + "</code>"


def _prose(text: str) -> str:
    """Escape a text, with backticks as code."""
    return _CODE.sub(r"<code>\1</code>", _text(" ".join(text.split())))


def _text(text: str) -> str:
    return escape(text, quote=True)
