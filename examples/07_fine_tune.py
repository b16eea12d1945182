"""Fine-tune a network on one H100. Needs an account at AWS, or at those named; costs about 7 USD an hour.

    python examples/07_fine_tune.py verda

AWS asked 6.88 USD/h on 2026-03-02. `skypool plan H100` says what each provider asks today. A run takes some minutes.
"""

import sys

import skypool as sky


@sky.compute
def fine_tune(steps: int) -> tuple[str, float, float]:
    import torch
    from sklearn.datasets import load_digits

    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, digits = load_digits(return_X_y=True)
    upright = torch.tensor(images / 16, dtype=torch.float32, device=device)
    turned = upright.reshape(-1, 8, 8).rot90(1, (1, 2)).reshape(-1, 64)
    answers = torch.tensor(digits, device=device)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).to(device)

    def train(inputs: torch.Tensor, rate: float) -> float:
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        for _ in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), answers).backward()
            optimizer.step()
        return float((model(turned).argmax(1) == answers).float().mean())

    return device, train(upright, 1e-3), train(turned, 1e-4)  # learn upright digits, then tune to turned ones


if __name__ == "__main__":
    image = sky.Image(pip=["torch", "scikit-learn"])
    with sky.ComputePool(sys.argv[1:] or "aws", accelerator="H100", image=image, max_lifetime="1h") as pool:
        device, before, after = fine_tune(200) >> pool
    print(f"on {device}: {before:.0%} of turned digits are right before fine-tuning, {after:.0%} after\n{pool.receipt}")
