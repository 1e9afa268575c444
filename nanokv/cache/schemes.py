"""How a quantized cache rounds keys or values: one small class per scheme.

    channel   one scale per channel of a block, as KIVI for keys (Liu et al. 2024, arXiv 2402.02750)
    token     one scale per token, as KIVI for values
    lloyd     a random rotation, then the levels of Lloyd and Max for every number: the first stage
              of TurboQuant (Zandieh et al. 2025, arXiv 2504.19874)
    qjl       lloyd with one bit less, then one bit per number for what it left: TurboQuant's second
              stage, whose inner products have no bias
    exact     as they are, so that the other half of the cache can be measured alone

Rotated and Outliers go around another scheme. options.py has the bits of each scheme.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanokv.cache import codes
from nanokv.cache.codes import pack, unpack

TINY = 1e-20  # the smallest norm that is divided by


class Scheme:
    """Codes and scales of blocks of tokens.

    Codes have one row per token, and `units` says what each scale has a row for: a "token" or a
    "block". So the cache can cut, copy and join them without knowing the scheme.
    """

    units: tuple[str, ...] = ()
    multiple = 1  # of which head_dim must be one

    def largest(self, x: Tensor) -> float:
        """The largest number of x (…,D) that fp16 would have to hold; NaN if x has one."""
        return x.abs().max().item()

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """(B,Hk,blocks,group,D) → codes (B,Hk,blocks·group,…) and scales (B,Hk,tokens or blocks,…)."""
        raise NotImplementedError

    def decode(self, *parts: Tensor) -> Tensor:
        """Codes and scales, all with a row per token → (B,Hk,tokens,D)."""
        raise NotImplementedError


class Exact(Scheme):
    """Numbers as they were appended."""

    def largest(self, x: Tensor) -> float:
        return 0.0

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x.flatten(2, 3).clone(),)

    def decode(self, *parts: Tensor) -> Tensor:
        return parts[0]


@dataclass(frozen=True)
class Token(Scheme):
    """One scale and one offset per token, in fp16."""

    bits: int
    units = ("token", "token")

    @property
    def multiple(self) -> int:  # type: ignore[override]  # read-only
        return 8 // self.bits

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        found, scale, low = codes.quantize(x, self.bits, dim=4)  # scale (B,Hk,blocks,group,1)
        return tuple(x.flatten(2, 3) for x in (pack(found, self.bits), scale, low))

    def decode(self, *parts: Tensor) -> Tensor:
        packed, scale, low = parts
        return codes.dequantize(unpack(packed, self.bits), scale, low)


@dataclass(frozen=True)
class Channel(Token):
    """One scale and one offset per channel of a block, in fp16."""

    units = ("block", "block")

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        found, scale, low = codes.quantize(x, self.bits, dim=3)  # scale (B,Hk,blocks,1,D)
        return pack(found.flatten(2, 3), self.bits), scale.squeeze(3), low.squeeze(3)


@dataclass(frozen=True)
class Rotated(Scheme):
    """A Hadamard rotation, which spreads large channels over all, before another scheme."""

    of: Scheme

    @property
    def units(self) -> tuple[str, ...]:  # type: ignore[override]  # read-only
        return self.of.units

    @property
    def multiple(self) -> int:  # type: ignore[override]  # read-only
        return self.of.multiple

    def largest(self, x: Tensor) -> float:
        return self.of.largest(turned(x))

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.of.encode(turned(x))

    def decode(self, *parts: Tensor) -> Tensor:
        return turned(self.of.decode(*parts))


def turned(x: Tensor) -> Tensor:
    """(…,D) in the other basis; the rotation is its own inverse."""
    return x.float() @ codes.hadamard(x.shape[-1], x.device)


@dataclass(frozen=True)
class Lloyd(Scheme):
    """A random rotation, then the nearest of 2^bits levels; the norm of each token in fp16.

    A rotated unit vector has coordinates that are nearly normal with variance 1/D, whatever the
    vector, so the levels need no data. Outliers within a vector cost nothing extra, but the error
    is proportional to the norm: a large constant part of all keys takes precision from the rest.
    """

    bits: int
    seed: int
    units = ("token",)

    @property
    def multiple(self) -> int:  # type: ignore[override]  # read-only
        return 8 // math.gcd(8, self.bits)

    def largest(self, x: Tensor) -> float:
        return x.float().norm(dim=-1).max().item()

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        unit, norm = self.split(x)
        return pack(self.nearest(unit, self.bits), self.bits), norm

    def decode(self, *parts: Tensor) -> Tensor:
        packed, norm = parts
        return self.joined(self.level(unpack(packed, self.bits), self.bits), norm)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B,Hk,blocks,group,D) → rotated unit vectors times √D (B,Hk,n,D), norms (B,Hk,n,1)."""
        D = x.shape[-1]
        x = x.float().flatten(2, 3)  # (B,Hk,n,D)
        norm = x.norm(dim=-1, keepdim=True)  # (B,Hk,n,1)
        unit = x / norm.clamp_min(TINY) @ codes.random_rotation(D, self.seed, x.device)
        return unit * D**0.5, norm.half()

    def joined(self, unit: Tensor, norm: Tensor) -> Tensor:
        """The inverse of `split`, up to the blocks."""
        D = unit.shape[-1]
        return unit @ codes.random_rotation(D, self.seed, unit.device).T * (norm.float() / D**0.5)

    def nearest(self, unit: Tensor, bits: int) -> Tensor:
        """The number of the nearest level, uint8."""
        levels = codes.lloyd_max(bits, unit.device)
        return torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)

    def level(self, found: Tensor, bits: int) -> Tensor:
        return codes.lloyd_max(bits, found.device)[found.int()]


@dataclass(frozen=True)
class QJL(Lloyd):
    """Lloyd with one bit less, and the signs of a random projection of the rest (QJL).

    With r the rest and S a normal matrix, √(π/2)/D · |r| · Sᵀ sign(S r) has the mean r over all S
    (Zandieh et al. 2024, arXiv 2406.03482). So inner products have no bias, but more variance.
    """

    # The norm, the signs, the norm of the rest.
    units = ("token", "token", "token")  # type: ignore[assignment]  # a longer tuple
    multiple = 8

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        unit, norm = self.split(x)
        found = self.nearest(unit, self.bits - 1)
        rest = unit - self.level(found, self.bits - 1)  # (B,Hk,n,D)
        seen = rest @ codes.random_projection(rest.shape[-1], self.seed, rest.device).T
        signs = pack((seen > 0).to(torch.uint8), 1)
        return pack(found, self.bits - 1), norm, signs, rest.norm(dim=-1, keepdim=True).half()

    def decode(self, *parts: Tensor) -> Tensor:
        packed, norm, signs, length = parts
        unit = self.level(unpack(packed, self.bits - 1), self.bits - 1)
        D = unit.shape[-1]
        seen = unpack(signs, 1).float() * 2 - 1  # (B,Hk,n,D)
        rest = seen @ codes.random_projection(D, self.seed, unit.device)
        return self.joined(unit + rest * length.float() * (math.sqrt(math.pi / 2) / D), norm)


@dataclass(frozen=True)
class Outliers(Scheme):
    """The `n` largest channels of each block in 8 bits, a scale per channel; another scheme for the
    rest, in which they are 0. Their numbers are stored per block."""

    of: Scheme
    n: int

    @property
    def units(self) -> tuple[str, ...]:  # type: ignore[override]  # read-only
        return *self.of.units, "token", "block", "block", "block"

    @property
    def multiple(self) -> int:  # type: ignore[override]  # read-only
        return self.of.multiple

    def largest(self, x: Tensor) -> float:
        return max(self.of.largest(x), x.abs().max().item())

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        index = x.abs().amax(3).topk(self.n).indices  # (B,Hk,blocks,n)
        where = index[:, :, :, None].expand(*x.shape[:4], self.n)  # (B,Hk,blocks,group,n)
        large = Channel(8).encode(x.gather(4, where))
        return *self.of.encode(x.scatter(4, where, 0)), *large, index.to(torch.int16)

    def decode(self, *parts: Tensor) -> Tensor:
        *rest, packed, scale, low, index = parts
        large = Channel(8).decode(packed, scale, low)  # (B,Hk,q,n)
        return self.of.decode(*rest).scatter(3, index.long(), large)


SCALED = {"channel": Channel, "token": Token}
DRAWN = {"lloyd": Lloyd, "qjl": QJL}


def make_scheme(
    name: str, bits: int, seed: int = 0, rotate: str = "none", outliers: int = 0
) -> Scheme:
    """The scheme of these options, which options.py has checked."""
    scheme: Scheme = Exact()
    if name in SCALED:
        scheme = SCALED[name](bits)
    if name in DRAWN:
        scheme = DRAWN[name](bits, seed)
    if rotate == "hadamard":
        scheme = Rotated(scheme)
    if outliers:
        scheme = Outliers(scheme, outliers)
    return scheme
