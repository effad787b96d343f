"""Compare imported models of torchvision and transformers with PyTorch: `tox run -e torch`.

    pip install torch torchvision transformers
    python tools/torch_models.py [resnet18 bert ...]

Each model has random weights, and is exported with a dynamic batch. The file is read as by an
import, without PyTorch, and executed on other inputs than those of the export. Prints a row for
each model, and fails if an output differs by more than 1e-5 of its largest value.
"""

# pyright: reportMissingImports=false, reportGeneralTypeIssues=false
# mypy: disable-error-code="misc,no-untyped-call,untyped-decorator"

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from xlaserve.importers.pt2 import archive, importing
from xlaserve.importers.pt2.importing import Options
from xlaserve.importers.pt2.inputs import resolve

TOLERANCE = 1e-5
_ROWS, _TOKENS, _SIZE, _DEVIATION = 2, 16, 224, 0.02
_VISION = (
    "resnet18",
    "mobilenet_v3_small",
    "efficientnet_b0",
    "vit_b_16",
    "convnext_tiny",
    "swin_t",
    "densenet121",
)
_Inputs = tuple[torch.Tensor, ...]


class Text(nn.Module):
    """A transformers model whose result is a dict of tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, Any]:
        """Return the model's outputs by name."""
        return dict(self.model(input_ids=input_ids, attention_mask=attention_mask))


def _texts() -> Mapping[str, Callable[[], nn.Module]]:
    import transformers as t

    return {
        "bert": lambda: t.BertModel(t.BertConfig(num_hidden_layers=4)),
        "distilbert": lambda: t.DistilBertForSequenceClassification(t.DistilBertConfig(n_layers=4)),
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(n_layer=4, use_cache=False)),
    }


def _made(name: str) -> tuple[nn.Module, Callable[[], _Inputs]]:
    """Return a model and a function that makes its inputs."""
    if name in _VISION:
        import torchvision

        return torchvision.models.get_model(name), _image
    return Text(_texts()[name]()), _tokens


def _image() -> _Inputs:
    return (torch.randn(_ROWS, 3, _SIZE, _SIZE),)


def _tokens() -> _Inputs:
    mask = torch.ones(_ROWS, _TOKENS, dtype=torch.int64)
    mask[1, _TOKENS - 4 :] = 0
    return torch.randint(1, 1000, (_ROWS, _TOKENS)), mask


def _randomise(model: nn.Module) -> None:
    """Randomise parameters and statistics that start as zeros or ones, so that they matter."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=_DEVIATION)


def _difference(name: str, directory: Path) -> float:
    """Return the largest error of an output, relative to its largest value."""
    torch.manual_seed(0)
    model, inputs = _made(name)
    model.eval()
    path = directory / f"{name}.pt2"
    with torch.no_grad():
        _randomise(model)
        example, asked = inputs(), inputs()
        batch = torch.export.Dim("batch")
        shapes = tuple({0: batch} for _ in example)
        program = torch.export.export(model, example, dynamic_shapes=shapes, strict=False)
        torch.export.save(program, path)
        answer = model(*asked)
    expected = list(answer.values()) if isinstance(answer, dict) else [answer]
    read = archive.open_file(path)
    with jax.enable_x64(True):
        made = importing.exportable(read, resolve(read.program, {}, None), Options())
        found: Any = jax.jit(made.fn)(made.params, *(value.numpy() for value in asked))
    pairs = zip(map(np.asarray, found.values()), expected, strict=True)
    return max(
        float(np.abs(got - want.numpy()).max() / np.abs(want.numpy()).max()) for got, want in pairs
    )


def main() -> None:
    """Compare all models, or the named ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    known = (*_VISION, "bert", "distilbert", "gpt2")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    failed = False
    with tempfile.TemporaryDirectory() as directory:
        for name in parser.parse_args().names or known:
            difference = _difference(name, Path(directory))
            failed |= not difference <= TOLERANCE
            print(f"| {name} | {difference:.1e} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
