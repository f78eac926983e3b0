"""Operations are those that torch's own counter finds, without what it imports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from edgesplit.operations import Operations


def images() -> Tensor:
    return torch.ones(3, 4, 8, 8)


def words() -> Tensor:
    return torch.ones(3, 5, 8)


CASES: dict[str, tuple[Callable[[], Callable[[Tensor], Tensor]], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(8, 6), words),
    "without a bias": (lambda: nn.Linear(8, 6, bias=False), words),
    "convolution": (lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2), images),
    "transposed convolution": (lambda: nn.ConvTranspose2d(4, 6, 3), images),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), words),
    "recurrent": (lambda: lambda x: nn.GRU(8, 6, batch_first=True)(x)[0], words),
    "attention": (lambda: lambda x: F.scaled_dot_product_attention(x, x, x), words),
    "products": (lambda: lambda x: torch.einsum("bij,bkj->bik", x, x) + x @ x.transpose(1, 2), words),
    "in place": (lambda: lambda x: torch.zeros(3, 5, 5).baddbmm_(x, x.transpose(1, 2)), words),
    "nothing that counts": (lambda: nn.Sequential(nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.5)), words),
}


@pytest.mark.parametrize("name", CASES)
def test_they_are_those_of_torchs_counter(name: str) -> None:
    make, data = CASES[name]
    model, x = make(), data()
    torch.manual_seed(3)
    with Operations() as ours:
        out = model(x.requires_grad_())
        out.sum().backward()
    torch.manual_seed(3)
    with FlopCounterMode(display=False) as theirs:
        model(x).sum().backward()
    assert ours.total == theirs.get_total_flops()
    assert (ours.total > 0) == (name != "nothing that counts")


CODE = """
import sys, torch
from edgesplit.operations import Operations
model = torch.nn.TransformerEncoderLayer(8, 2, 16)
with Operations() as operations:
    model(torch.ones(3, 5, 8)).sum().backward()
assert operations.total
sys.exit("torch._dynamo" in sys.modules)
"""


def test_torchs_compiler_is_not_imported() -> None:
    assert subprocess.run([sys.executable, "-c", CODE]).returncode == 0
