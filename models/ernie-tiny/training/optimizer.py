"""Muon for the matrices, AdamW for everything else.

Muon replaces the momentum of a matrix by the nearest orthogonal matrix, so that all directions
are learned at the same pace; small models learn exact skills with it in far fewer steps.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn


def orthogonal(matrices: Tensor) -> Tensor:
    """Drive the singular values of a batch of matrices towards one (Newton-Schulz iteration)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(torch.bfloat16)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Momentum with orthogonal updates, for parameters of two or three dimensions.

    Parameters of one shape are handled together; a stack of experts counts as so many matrices.
    """

    def __init__(self, parameters: list[nn.Parameter], decay: float, compiled: bool) -> None:
        self.decay = decay
        self.orthogonal = torch.compile(orthogonal, dynamic=False) if compiled else orthogonal
        self.groups: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            self.groups[parameter.shape].append(parameter)
        self.momenta = {
            shape: torch.zeros(len(group), *shape, device=group[0].device)
            for shape, group in self.groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float, momentum: float = 0.95) -> None:
        """Apply the gradients and drop them."""
        for shape, group in self.groups.items():
            gradients = torch.stack([p.grad for p in group if p.grad is not None])
            memory = self.momenta[shape]
            memory.lerp_(gradients, 1 - momentum)
            update = self.orthogonal(gradients.lerp(memory, momentum).flatten(0, -3)).view_as(
                memory
            )
            scale = max(1.0, shape[-2] / shape[-1]) ** 0.5
            torch._foreach_mul_(group, 1 - rate * self.decay)
            torch._foreach_add_(group, list(update.to(memory.dtype).unbind(0)), alpha=-rate * scale)
            for parameter in group:
                parameter.grad = None


def build(model: nn.Module, compiled: bool) -> tuple[Muon, torch.optim.AdamW]:
    """Split the parameters of a model over the two optimizers."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        plain = parameter.ndim < 2 or "embed_tokens" in name or name.endswith("mlp.gate")
        (others if plain else matrices).append(parameter)
    adam = torch.optim.AdamW(
        others, lr=1e-3, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=compiled
    )
    return Muon(matrices, decay=0.05, compiled=compiled), adam
