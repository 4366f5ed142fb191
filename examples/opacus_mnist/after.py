"""Digits, privately, with Opacus: a small CNN, DP-SGD in mode ghost, accuracy and epsilon at the end."""

from __future__ import annotations

import argparse

import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader

from fiberdp.integrations.opacus import make_private_with_epsilon
from mnist_data import train_and_test


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def accuracy(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in loader)
    model.train()
    return right / len(loader.dataset)


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--max-physical-batch-size", type=int, default=128)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    train, test = train_and_test()
    train_loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test, batch_size=1000)
    model, criterion = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002, weight_decay=0.0)
    privacy_engine = PrivacyEngine(accountant="rdp")
    model, optimizer, criterion, train_loader = make_private_with_epsilon(privacy_engine=privacy_engine, method="fiber",
        module=model, optimizer=optimizer, criterion=criterion, data_loader=train_loader, grad_sample_mode="ghost",
        target_epsilon=args.epsilon, target_delta=args.delta, epochs=args.epochs, max_grad_norm=args.max_grad_norm,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    for _ in range(args.epochs):
        with BatchMemoryManager(
            data_loader=train_loader, max_physical_batch_size=args.max_physical_batch_size, optimizer=optimizer
        ) as batches:
            for x, y in batches:
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
        scheduler.step()
    found = accuracy(model, test_loader), privacy_engine.get_epsilon(args.delta)
    print(f"accuracy {found[0]:.4f}, epsilon {found[1]:.4f} at delta {args.delta:g}")
    return found


if __name__ == "__main__":
    main()
