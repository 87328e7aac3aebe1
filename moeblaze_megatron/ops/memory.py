"""What the layer holds, in closed form, and the workspace that fits beneath its peak or nearly so.

T tokens, E experts, H hidden size, F ffn hidden size, R routed rows (the bound T*K).
"""

from dataclasses import dataclass

import torch

from moeblaze_megatron.ops.tiles import cdiv

SLICE = 128  # columns of a workspace slice come in multiples of this
MARGIN = 24  # workspaces may raise the peak by 1/MARGIN, or by one SLICE where that is more


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer's tensors; inputs and weights are the caller's and not counted."""

    output: int  # [T, H]; grad_x is as large
    fc1_output: int  # [R, 2F] or [R, F], saved for backward
    act: int  # [R, F]
    fc1_weight: int  # [E, 2F, H] or [E, F, H]; its gradient is as large
    fc2_weight: int  # [E, H, F]

    @property
    def peak(self) -> int:
        """Of forward and backward, without any workspace.

        With `fp8_store` too: its copy of fc1_output is alive while act is not.
        """
        return self.output + self.fc1_output + self._backward

    @property
    def _backward(self) -> int:
        return max(self.act + self.fc2_weight, self.fc1_weight + self.fc2_weight + self.output)

    @property
    def margin(self) -> int:
        return self.peak // MARGIN

    @property
    def forward_workspace(self) -> int:
        """Beside output, fc1_output and act."""
        return self._backward - self.act + self.margin

    @property
    def fc2_wgrad_workspace(self) -> int:
        """Beside output, fc1_output, act and the gradient of fc2_weight."""
        return max(self.fc1_weight + self.output - self.act, 0) + self.margin

    @property
    def dgrad_workspace(self) -> int:
        """Beside output, fc1_output, the gradient of fc2_weight and grad_x; act is freed."""
        return max(self.act - self.output, self.fc1_weight) + self.margin

    @property
    def fc1_wgrad_workspace(self) -> int:
        """Beside everything at the peak."""
        return self.margin


def layer_bytes(
    x: torch.Tensor, fc1_weight: torch.Tensor, fc2_weight: torch.Tensor, rows: int
) -> LayerBytes:
    """Of x [T, H], [E, 2F, H] or [E, F, H], [E, H, F] and so many routed rows."""
    size = x.element_size()
    return LayerBytes(
        output=x.numel() * size,
        fc1_output=rows * fc1_weight.shape[1] * size,
        act=rows * fc2_weight.shape[2] * size,
        fc1_weight=fc1_weight.numel() * size,
        fc2_weight=fc2_weight.numel() * size,
    )


def slice_columns(width: int, rows: int, element_size: int, workspace_bytes: int) -> int:
    """Columns of the equal slices into which [rows, width] is cut to fit the workspace."""
    most = max(SLICE, workspace_bytes // (rows * element_size) // SLICE * SLICE)
    slices = cdiv(width, most)
    return width if slices == 1 else cdiv(width, slices * SLICE) * SLICE
