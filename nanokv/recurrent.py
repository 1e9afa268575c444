"""Recurrent layers: a state of fixed size instead of keys and values. Read it after model.py.

    B batch · T tokens in this call · C hidden size or channels · K width of the convolution
    H value heads · Hk key heads · Dk, Dv width of a key and of a value

An attention layer keeps keys and values of every token. A recurrent layer keeps two tensors:

    conv  (B,C,K−1)     the last inputs of a short convolution, in the model's dtype
    S     (B,H,Dk,Dv)   per head a matrix that maps keys to values, in fp32

The gated delta rule (Yang et al. 2024, arXiv 2412.06464) writes v at k, then reads at q:

    S ← exp(g)·S                     g ≤ 0: forget, as in Mamba 2
    S ← S + k·(beta·(v − Sᵀk))ᵀ      replace the value at k by v, by the share beta
    y = Sᵀq

S is in fp32 because every token rounds it: bf16 loses a change that is below 1/512 of a number.
Bytes per layer and row in Qwen3.5's default text config (H 32, Hk 16, Dk and Dv 128, K 4): S takes
4·H·Dk·Dv = 2,097,152, conv 2·(2·Hk·Dk + H·Dv)·(K−1) = 49,152 in bf16, together 2,146,304.
transformers keeps K inputs of the convolution instead of the K−1 that it needs: 2,162,688. A state
cannot be truncated: going back to an earlier token needs a copy from that time.

Reference: modeling_qwen3_5.py and modeling_lfm2.py in transformers; equal to 3e-5 in fp32. Module
names match Hugging Face's, so loading a checkpoint only strips a prefix.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64  # tokens that gated_delta_chunks takes at once
Pair = tuple[Tensor, Tensor]


class Written(NamedTuple):
    """What T tokens write: with the S before them it gives the state after any of them.

    (K−1+T)·C + T·H·(Dk + Dv + 2) numbers per row.
    """

    T: int
    window: Tensor  # (B,C,K−1+T): the inputs of the convolution, the past in front
    k: Tensor | None = None  # (B,H,T,Dk); None: a layer without S
    v: Tensor | None = None  # (B,H,T,Dv)
    g: Tensor | None = None  # (B,H,T)
    beta: Tensor | None = None  # (B,H,T)

    def conv(self, n: int) -> Tensor:
        """The last inputs of the convolution after n of the tokens, (B,C,K−1)."""
        before = self.window.shape[2] - self.T
        return self.window[:, :, n : n + before].clone()  # a view would keep the window alive

    def first(self, n: int) -> "Written":
        """What the first n of the tokens have written; views."""
        end = self.window.shape[2] - self.T + n
        whole = self._replace(T=n, window=self.window[:, :, :end])
        if self.k is None or self.v is None or self.g is None or self.beta is None:
            return whole
        return whole._replace(
            k=self.k[:, :, :n],
            v=self.v[:, :, :n],
            g=self.g[:, :, :n],
            beta=self.beta[:, :, :n],
        )

    def last(self, n: int) -> "Written":
        """What the last n of the tokens have written; copies, so that the rest can be freed."""
        parts: dict[str, Any] = {name: x[:, :, self.T - n :] for name, x in self.tensors().items()}
        return self._replace(T=n, **{name: x.clone() for name, x in parts.items()})

    @staticmethod
    def joined(parts: Sequence["Written"]) -> "Written":
        """What appends in turn have written, as if it were one; copies."""
        first = parts[0]
        before = first.window.shape[2] - first.T  # inputs that the append before has too
        windows = [first.window, *(part.window[:, :, before:] for part in parts[1:])]
        named: dict[str, Any] = {
            name: torch.cat([part.tensors()[name] for part in parts], 2)
            for name in first.tensors()
            if name != "window"
        }
        T = sum(part.T for part in parts)
        return Written(T, torch.cat(windows, 2), **named)

    def rows(self, index: Any) -> "Written":
        """Row b becomes row index[b]."""
        parts: dict[str, Any] = {name: x[index] for name, x in self.tensors().items()}
        return self._replace(**parts)

    def tensors(self) -> dict[str, Tensor]:
        """All of them by name."""
        return {name: x for name, x in self._asdict().items() if isinstance(x, Tensor)}

    def state(self, n: int, S: Tensor | None) -> Tensor | None:
        """S after n ≥ 1 of the tokens, from the S before them."""
        if self.k is None or self.v is None or self.g is None or self.beta is None:
            return None
        k = self.k[:, :, :n]  # (B,H,n,Dk)
        v = self.v[:, :, :n]  # (B,H,n,Dv)
        if S is None:
            S = k.new_zeros(*k.shape[:2], k.shape[3], v.shape[3])
        # The queries do not change S.
        return gated_delta_chunks(k, k, v, self.g[:, :, :n], self.beta[:, :, :n], S)[1]


class State(Protocol):
    """What a layer below calls of its cache: `read` before it computes, `keep` after."""

    def read(self, T: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """conv, S and `real` of the next T tokens; conv and S are None before the first.

        `real`, bool (B,T), is False for the padding that rows begin with. None: no padding.
        """

    def keep(self, written: Written, S: Tensor | None) -> None:
        """Take the state after these tokens. S may be the tensor of `read`, changed in place."""


def causal_conv(x: Tensor, past: Tensor | None, conv: nn.Conv1d, real: Tensor | None) -> Pair:
    """Per channel a weighted sum of an input and the K−1 before it: x (B,C,T) → (B,C,T), window.

    `past` (B,C,K−1) has the inputs before x; None: zeros. The window (B,C,K−1+T) has both. `real`
    is as in State.read.
    """
    B, C, _ = x.shape
    before = conv.kernel_size[0] - 1
    if past is None:
        past = x.new_zeros(B, C, before)
    window = torch.cat((past, x), 2)  # (B,C,K−1+T)
    if real is not None:
        window = window.gather(2, behind_padding(real, before)[:, None].expand_as(window))
    return conv(window), window


def behind_padding(real: Tensor, before: int) -> Tensor:
    """Columns (B,before+T) that move a row's past behind its padding, next to its first token.

    Raises ValueError for padding on the right.
    """
    if (real[:, :-1] & ~real[:, 1:]).any():
        raise ValueError("padding follows a real token: pad the rows on the left")
    pads = (~real).sum(1, keepdim=True)  # (B,1)
    column = torch.arange(before + real.shape[1], device=real.device)  # (before+T,)
    return torch.where(column < pads + before, column - pads, column).clamp(min=0)


def delta_keys(q: Tensor, k: Tensor, H: int) -> Pair:
    """q, k (B,Hk,T,Dk) → unit vectors in fp32, q over √Dk, repeated for H heads: (B,H,T,Dk) ×2.

    The rule multiplies S by 1 − beta·k·kᵀ, which enlarges nothing if k has length 1 and beta ≤ 1.
    """
    both = torch.stack((q, k)).float()  # (2,B,Hk,T,Dk)
    both = both * torch.rsqrt(both.pow(2).sum(-1, keepdim=True) + 1e-6)
    # One by one: a cache keeps k, and views of one tensor would keep q with it.
    q, k = (x.repeat_interleave(H // k.shape[1], 1) for x in both)  # (B,H,T,Dk) ×2
    return q / q.shape[-1] ** 0.5, k


def gated_delta_steps(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """The rule token by token → y (B,H,T,Dv) and the new S. All tensors are fp32.

    q, k (B,H,T,Dk) from delta_keys, v (B,H,T,Dv), g and beta (B,H,T), S (B,H,Dk,Dv). A token with
    g = 0 and beta = 0 does not change S: that is how padding is passed.
    """
    outputs = []
    for t in range(q.shape[2]):
        key = k[:, :, t, :, None]  # (B,H,Dk,1)
        S = S * g[:, :, t, None, None].exp()
        found = (S * key).sum(2)  # (B,H,Dv): the value that S has at k
        change = beta[:, :, t, None] * (v[:, :, t] - found)  # (B,H,Dv)
        S = S + key * change[:, :, None]  # (B,H,Dk,Dv)
        outputs.append((S * q[:, :, t, :, None]).sum(2))  # (B,H,Dv)
    return torch.stack(outputs, 2), S


def gated_delta_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Pair:
    """gated_delta_steps in matrix products, CHUNK tokens at once: same arguments, same results.

    What token i writes at its key, u_i (Dv,), depends on the tokens j < i of its chunk:

        u_i = beta_i·(v_i − exp(c_i)·Sᵀk_i − sum over j < i of exp(c_i − c_j)·(k_i·k_j)·u_j)

    S is the state before the chunk, c the running sum of g. These linear equations are triangular.
    """
    chunks = zip(*(x.split(CHUNK, 2) for x in (q, k, v, g, beta[..., None])), strict=True)
    outputs = []
    for q, k, v, g, beta in chunks:  # n tokens each, the last fewer
        c = g.cumsum(2)[..., None]  # (B,H,n,1)
        # tril first: above the diagonal c_i − c_j is positive, and exp may overflow.
        decay = (c - c.mT).tril().exp().tril()  # (B,H,n,n): from token j to token i
        overlap = beta * decay * (k @ k.mT)  # (B,H,n,n)
        missing = beta * (v - c.exp() * (k @ S))  # (B,H,n,Dv)
        # unitriangular: the solver takes the diagonal as 1
        u = torch.linalg.solve_triangular(overlap, missing, upper=False, unitriangular=True)
        outputs.append(c.exp() * (q @ S) + (decay * (q @ k.mT)) @ u)  # (B,H,n,Dv)
        end = c[:, :, -1:]  # (B,H,1,1)
        S = end.exp() * S + ((end - c).exp() * k).mT @ u  # (B,H,Dk,Dv)
    return torch.cat(outputs, 2), S  # y (B,H,T,Dv)


class ShortConv(nn.Module):
    """LFM2's layer (arXiv 2511.23404): a convolution between two gates. There is no S."""

    def __init__(self, C: int, K: int, bias: bool):
        super().__init__()
        self.in_proj = nn.Linear(C, 3 * C, bias)
        self.conv = nn.Conv1d(C, C, K, groups=C, bias=bias)
        self.out_proj = nn.Linear(C, C, bias)

    def forward(self, x: Tensor, state: State) -> Tensor:
        T = x.shape[1]
        past, _, real = state.read(T)
        before, after, x = self.in_proj(x).mT.chunk(3, dim=1)  # (B,C,T) ×3
        y, window = causal_conv(before * x, past, self.conv, real)
        state.keep(Written(T, window), None)
        return self.out_proj((after * y).mT)  # (B,T,C)


class GatedRMSNorm(nn.Module):
    """RMSNorm of x, then times silu(gate)."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        y = self.weight * y.to(x.dtype)
        return (y * F.silu(gate.float())).to(x.dtype)


class GatedDeltaNet(nn.Module):
    """Qwen3.5's layer: a short convolution over q, k and v, the gated delta rule, a gated norm."""

    def __init__(self, C: int, *, Hk: int, H: int, Dk: int, Dv: int, K: int, eps: float):
        super().__init__()
        self.sizes = H, Dk, Dv
        self.widths = Hk * Dk, Hk * Dk, H * Dv  # of q, k and v
        channels = sum(self.widths)
        self.in_proj_qkv = nn.Linear(C, channels, bias=False)
        self.in_proj_z = nn.Linear(C, H * Dv, bias=False)
        self.in_proj_b = nn.Linear(C, H, bias=False)
        self.in_proj_a = nn.Linear(C, H, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, K, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.zeros(H))
        self.dt_bias = nn.Parameter(torch.ones(H))
        self.norm = GatedRMSNorm(Dv, eps)
        self.out_proj = nn.Linear(H * Dv, C, bias=False)
        self.one_token = gated_delta_steps  # a fast model has a kernel here
        self.more_tokens = gated_delta_chunks  # training in bf16 keeps this one in fp32

    def forward(self, x: Tensor, state: State) -> Tensor:
        B, T, _ = x.shape
        H, Dk, Dv = self.sizes
        past, S, real = state.read(T)
        y, window = causal_conv(self.in_proj_qkv(x).mT, past, self.conv1d, real)
        q, k, v = F.silu(y).split(self.widths, 1)  # (B,Hk·Dk,T) ×2, (B,H·Dv,T)
        q, k, v = (x.unflatten(1, (-1, D)).mT for x, D in ((q, Dk), (k, Dk), (v, Dv)))
        q, k = delta_keys(q, k, H)  # (B,H,T,Dk) ×2; v is (B,H,T,Dv)
        beta = self.in_proj_b(x).sigmoid().float()  # (B,T,H)
        g = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        if real is not None:
            g, beta = (x * real[..., None] for x in (g, beta))
        if S is None:
            S = q.new_zeros(B, H, Dk, Dv)
        v = v.to(torch.float32, copy=True)  # the cache keeps it: not as a view of y
        g, beta = g.mT, beta.mT  # (B,H,T) ×2
        rule = self.one_token if T == 1 else self.more_tokens
        y, S = rule(q, k, v, g, beta, S)  # (B,H,T,Dv)
        written = Written(T, window, k, v, g, beta)
        state.keep(written, S)
        y = y.transpose(1, 2).to(x.dtype)  # (B,T,H,Dv)
        y = self.norm(y, self.in_proj_z(x).view(y.shape))
        return self.out_proj(y.flatten(2))  # (B,T,C)
