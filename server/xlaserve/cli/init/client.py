"""Source code of the clients that `xlaserve init` generates, each for one model."""

import json

from xlaserve.artifact.generator_record import Record
from xlaserve.artifact.manifest import Manifest
from xlaserve.tensors import BYTES, Datatype

_HEAD = '''"""Asks the model that `xlaserve serve --config xlaserve.toml` serves."""

'''
_SHOWN = """for name, value in answer.tensors.items():
    print(name, value)
"""
_GENERATED = """with Client("127.0.0.1:8001", timeout=300) as client:
    answer = client.infer({quoted}, {inputs}, outputs=[{output}], parameters={parameters})
    print(answer[{output}])
"""
_TOKENIZER = "tokenizer.json"


def of_model(model: str, described: Manifest) -> str:
    """Return a client for a model that sends arrays of ones."""
    inputs, _ = described.known
    quoted = _quoted(model)
    shapes = dict(
        zip((spec.name for spec in described.inputs), described.named_shapes, strict=True)
    )
    lines, modules = [], {"numpy as np"}
    for spec in inputs:
        sizes = [_size(described, size) for size in shapes[spec.name]]
        shape = f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"
        value, module = _ones(spec.datatype, shape)
        modules.add(module)
        lines.append(f"    {_quoted(spec.name)}: {value},\n")
    imports = "".join(f"import {module}\n" for module in sorted(modules))
    head = (
        f"{_HEAD}{imports}\nfrom xlaserve.client import Client\n\ninputs = {{\n{''.join(lines)}}}\n"
    )
    if described.steps is not None:
        return (
            f'{head}with Client("127.0.0.1:8001") as client:\n'
            f"    for answer in client.stream({quoted}, inputs):\n"
            "        print(dict(answer.tensors))\n"
        )
    return (
        f'{head}with Client("127.0.0.1:8001") as client:\n'
        f"    answer = client.infer({quoted}, inputs)\n{_SHOWN}"
    )


def of_generator(model: str, described: Record) -> str:
    """Return a client for a language model, which sends text if it has a tokenizer, else tokens."""
    is_text = _TOKENIZER in described.files
    text = 'np.array([b"Once upon a time"], object)'
    call = _GENERATED.format(
        quoted=_quoted(model),
        inputs=f'{{"text": {text}}}' if is_text else '{"tokens": np.array([1, 2, 3], np.int32)}',
        output=_quoted("text" if is_text else "tokens"),
        parameters='{"max_tokens": 32}',
    )
    return f"{_HEAD}import numpy as np\n\nfrom xlaserve.client import Client\n\n{call}"


def _quoted(text: str) -> str:
    """Return a string literal with double quotes, as formatters write it."""
    return json.dumps(text)


def _size(described: Manifest, size: str) -> int:
    """Return a valid size of a dimension: one that is compiled, or 1."""
    if size in described.compiled_shapes:
        return described.compiled_shapes[size][0]
    return int(size) if size.isdecimal() else 1


def _ones(datatype: Datatype, shape: str) -> tuple[str, str]:
    """Return an expression for an array of ones, and the module that defines its dtype."""
    if datatype is BYTES:
        return f'np.full({shape}, b"text", object)', "numpy as np"
    name = datatype.dtype.name
    if not datatype.has_buffer:
        return f"np.ones({shape}, ml_dtypes.{name})", "ml_dtypes"
    return f"np.ones({shape}, np.{datatype.dtype.type.__name__})", "numpy as np"
