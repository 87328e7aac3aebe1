"""One mixture-of-experts layer from `moeblaze_experts` alone: torch and triton, no Megatron.

    python examples/moe_operator.py

Trains the layer and its router to return |x|, on a GPU if there is one.
"""

import torch

from moeblaze_megatron import moeblaze_experts

T, H, F, E, K = 512, 64, 128, 8, 2  # tokens, hidden, ffn, experts, experts per token


class MoE(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(H, E, bias=False)
        self.fc1_weight = torch.nn.Parameter(torch.randn(E, 2 * F, H) * H**-0.5)  # gate half first
        self.fc2_weight = torch.nn.Parameter(torch.randn(E, H, F) * F**-0.5)

    def forward(self, x):
        probs = self.router(x).softmax(dim=-1)
        topk_probs, topk_indices = probs.topk(K)
        return moeblaze_experts(
            x, self.fc1_weight, self.fc2_weight, topk_indices=topk_indices, topk_probs=topk_probs
        )


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = MoE().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(51):
        x = torch.randn(T, H, device=device)
        loss = (model(x) - x.abs()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step:2d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
