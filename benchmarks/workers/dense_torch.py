"""One process of benchmarks/dense.py under PyTorch: DistributedDataParallel over Gloo, the same networks."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from timing import parser, time_steps
from torch import nn

RATE, WEIGHT_DECAY = 0.01, 0.004
SHAPES = {"cifar10": (3, 24, 24), "resnet50": (3, 32, 32), "mlp": (2048,)}


def main() -> None:
    """Train, and write this process's median milliseconds per step."""
    options = parser(__doc__)
    options.add_argument("--model", choices=SHAPES, default="cifar10")
    options.add_argument("--batch", type=int, default=64)
    args = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    network, decayed = build(args.model)
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    images, labels = torch.randn(args.batch, *SHAPES[args.model]), torch.randint(0, 10, (args.batch,))
    if images.dim() == 4:
        images = images.to(memory_format=torch.channels_last)  # the fastest layout here

    def step(_: int) -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        for weight in decayed:
            loss = loss + WEIGHT_DECAY / 2 * weight.square().sum()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    time_steps(args, step, dist.get_rank())
    os._exit(0)  # Gloo sometimes aborts at exit if another process has closed its connections first


def build(name: str) -> tuple[nn.Module, list[nn.Parameter]]:
    """Return a network by its name, and the weights in its L2 loss."""
    if name == "mlp":
        hidden = [layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(2048, 10)), []
    if name == "resnet50":
        return resnet50(10).to(memory_format=torch.channels_last), []
    local3, local4 = nn.Linear(64 * 6 * 6, 384), nn.Linear(384, 192)
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True), norm()]
    layers += [nn.Conv2d(64, 64, 5, padding=2), nn.ReLU(), norm(), nn.MaxPool2d(3, 2, ceil_mode=True), nn.Flatten()]
    layers += [local3, nn.ReLU(), local4, nn.ReLU(), nn.Linear(192, 10)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last), [local3.weight, local4.weight]


def norm() -> nn.Module:
    """Return the tutorial's normalization: four neighbors on either side, alpha 0.001 / 9 for each of the nine."""
    return nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0)


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut; the stride is in the first, as in Keras's ResNet50."""

    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *convolution(given, width, 1, stride), nn.ReLU(),
            *convolution(width, width, 3), nn.ReLU(),
            *convolution(width, 4 * width, 1),
        )  # fmt: skip
        direct = given == 4 * width
        self.shortcut = nn.Identity() if direct else nn.Sequential(*convolution(given, 4 * width, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activated sum of both branches."""
        return torch.relu(self.body(x) + self.shortcut(x))


def convolution(given: int, width: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    """Return a convolution with its batch normalization."""
    return nn.Conv2d(given, width, kernel, stride, kernel // 2), nn.BatchNorm2d(width, eps=1.001e-5, momentum=0.01)


def resnet50(classes: int) -> nn.Module:
    """Return ResNet-50 as keras.applications builds it."""
    layers = [*convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    given = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(blocks):
            layers.append(Bottleneck(given, width, stride if number == 0 else 1))
            given = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, classes))


if __name__ == "__main__":
    main()
