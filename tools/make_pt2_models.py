"""Write small torch.export programs, with PyTorch's answers, for the tests.

    pip install torch
    python tools/make_pt2_models.py

Each file in tests/data/pt2 is a program as torch.export.save writes it, without the source
locations of its nodes, stored with inputs and PyTorch's answers. The tests read these files without
PyTorch, so they are written only once.
"""

# pyright: reportMissingImports=false, reportGeneralTypeIssues=false
# mypy: disable-error-code="misc,no-untyped-call,untyped-decorator"

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

TARGET = Path(__file__).parents[1] / "tests" / "data" / "pt2"
_TRACES = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn")
_Made = tuple[nn.Module, tuple[Any, ...], Any]


class Block(nn.Module):
    """A transformer layer with a causal mask."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projected, self.merged = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to [batch,tokens,width]."""
        batch, tokens, width = x.shape
        parts = self.projected(self.first(x)).view(batch, tokens, 3, 2, width // 2)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merged(seen.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.narrow(nn.functional.gelu(self.wide(self.second(x))))


class Transformer(nn.Module):
    """Two layers over tokens, with an attention mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedded, self.placed = nn.Embedding(50, 16), nn.Embedding(12, 16)
        self.blocks = nn.ModuleList([Block(16), Block(16)])
        self.head = nn.Linear(16, 50)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a number per token, and the mean over the unmasked ones."""
        x = self.embedded(ids) + self.placed(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        kept = mask.unsqueeze(-1).to(x.dtype)
        pooled = (x * kept).sum(1) / kept.sum(1).clamp(min=1)
        return {"logits": self.head(x), "pooled": pooled}


class InPlace(nn.Module):
    """Modifies views of tensors in place."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a tensor assembled by in-place writes, and one of its parts."""
        y = torch.zeros(x.shape[0], 4, 6)
        y[:, 1:3, ::2] = x[:, :2, :3]
        y[:, 0].add_(2)
        part = y.transpose(1, 2)[:, 1]
        part.mul_(3)
        first, second = y.split(2, dim=1)
        second.sub_(1)
        nn.functional.relu_(first)
        return y, part + 1


class ByNumber(nn.Module):
    """Indexes rows with an arange of row numbers, as transformers' models do."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's last unmasked element, and x with masked elements set to zero."""
        rows, places = torch.arange(x.shape[0]), torch.arange(x.shape[1])
        seen = mask[rows[:, None], places[None, :]].bool()
        last = x[rows, mask.cumsum(1).argmax(1)]
        return last, x * seen[..., None].to(x.dtype)


def _convnet() -> nn.Module:
    made = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        nn.Conv2d(8, 8, 3, padding="same", groups=4),
        nn.Hardswish(inplace=True),
        nn.AvgPool2d(2, ceil_mode=True, padding=1),
        nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        nn.Upsample(scale_factor=1.5, mode="bilinear"),
        nn.GroupNorm(3, 6),
        nn.AdaptiveAvgPool2d((3, 2)),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(36, 5),
        nn.Softmax(1),
    )
    nn.init.normal_(made[1].running_mean, std=0.1)
    nn.init.uniform_(made[1].running_var, 0.5, 1.5)
    return made


def _models() -> Mapping[str, Callable[[], _Made]]:
    batch, tokens = torch.export.Dim("batch"), torch.export.Dim("tokens", min=2, max=12)
    few = torch.export.Dim("batch", max=8)
    image, rows = torch.randn(2, 3, 17, 17), torch.randn(2, 4, 6)
    ids = torch.randint(0, 50, (2, 7))
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, 4:] = 0

    def mlp(dtype: torch.dtype) -> _Made:
        made = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
        return made.to(dtype), (torch.randn(3, 4, dtype=dtype),), ({0: few},)

    return {
        "mlp": lambda: mlp(torch.float32),
        "mlp-fp16": lambda: mlp(torch.float16),
        "mlp-bf16": lambda: mlp(torch.bfloat16),
        "convnet": lambda: (_convnet(), (image,), ({0: batch},)),
        "transformer": lambda: (
            Transformer(),
            (ids, mask),
            ({0: batch, 1: tokens}, {0: batch, 1: tokens}),
        ),
        "in-place": lambda: (InPlace(), (rows,), ({0: batch},)),
        "by-number": lambda: (
            ByNumber(),
            (torch.randn(2, 7, 3), mask),
            ({0: batch}, {0: batch}),
        ),
        "fixed": lambda: (nn.Linear(6, 2), (torch.randn(4, 6),), None),
    }


def _numpy(tensor: torch.Tensor) -> Any:
    """Return an array; bfloat16, which numpy lacks, becomes FP32."""
    wide = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    return wide.detach().numpy()


def _write(name: str, made: _Made, *, decomposed: bool) -> None:
    module, inputs, shapes = made
    with torch.no_grad():
        module.eval()
        answer = module(*inputs)
        program = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)
        if decomposed:
            program = program.run_decompositions({})
    for node in program.graph.nodes:
        for trace in _TRACES:
            node.meta.pop(trace, None)
    answers = answer.values() if isinstance(answer, dict) else answer
    listed = [answer] if isinstance(answer, torch.Tensor) else list(answers)
    torch.export.save(program, TARGET / f"{name}.pt2")
    np.savez(
        TARGET / f"{name}.npz",
        **{f"input{place}": _numpy(value) for place, value in enumerate(inputs)},
        **{f"output{place}": _numpy(value) for place, value in enumerate(listed)},
    )


def main() -> None:
    """Export and write all programs."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    TARGET.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(3)
    for name, make in _models().items():
        _write(name, make(), decomposed=False)
    for name in ("convnet", "transformer", "in-place"):
        _write(f"{name}-decomposed", _models()[name](), decomposed=True)


if __name__ == "__main__":
    main()
