"""Random numbers that depend on a key and a position alone, not on what else ran before or beside.

A counter-based generator: a hash of (key, position, stream, index), the same on every device and in every process, so
a seeded request draws the same numbers alone, in any batch and after preemption, and unseeded tensor-parallel workers
agree without a message. The hash is murmur3's 32-bit finaliser, twice keyed; only wrapping multiplication, xor and
shifts are needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_runtime.verify.chunks import chunks

ACCEPT, PICK, RACE, DRAFT = range(4)
"""Streams: numbers of different use never coincide."""

_GOLDEN = 0x9E3779B9
_MASK = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """murmur3's finaliser on int64 values below 2^32."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def words(key: Tensor, position: Tensor, stream: int) -> tuple[Tensor, Tensor]:
    """Two 32-bit words (int64) for each pair of key and position, int64 of one shape.

    Two hashes of both, joined without loss: pairs coincide as seldom as 64 bits allow.
    """
    low = _mix((key & _MASK) ^ ((stream + 1) * 0x27D4EB2F & _MASK))  # + 1: zeros alone must not yield zeros
    low = _mix((low + (position & _MASK) * _GOLDEN) & _MASK)
    high = _mix(((key >> 32) + (key & _MASK) * 0x165667B1 + stream + _GOLDEN) & _MASK)
    high = _mix(high ^ (((position >> 32) + (position & _MASK) * 0x5BD1E995) & _MASK))
    first = _mix(low ^ _mix(high))
    return first, _mix((high + first) & _MASK)


def uniform(key: Tensor, position: Tensor, stream: int) -> Tensor:
    """float64 in [0, 1), 53 bits, one for each pair of key and position (int64 of one shape)."""
    a, b = words(key, position, stream)
    # double() first: an integer tensor times a Python float is float32, whose rounding reaches 1.
    return ((a >> 5).double() * 2.0**26 + (b >> 6)) * 2.0**-53


def race(probs: Tensor, key: Tensor, position: Tensor, stream: int = RACE) -> Tensor:
    """[N] int64: a token of each row of probs [N, V] in proportion (exponential race), keyed by key, position [N].

    Two distributions raced with the same key and position tend to the same token: that is what makes keyed drafts
    agree with the keyed target. A token of probability 0 never wins.
    """
    a, b = (_signed(word)[:, None] for word in words(key, position, stream))
    lead = probs.new_full((probs.shape[0],), -1.0)
    token = torch.zeros_like(key)
    for columns in chunks(*probs.shape, 256):
        index = torch.arange(columns.start, columns.stop, device=probs.device, dtype=torch.int32)
        bits = _mix32_((index * _signed_constant(_GOLDEN)) + a).bitwise_xor_(b)
        bits = _mix32_(bits).bitwise_right_shift_(1).bitwise_and_(0x7FFFFFFF)
        fraction = bits.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
        best, place = (probs[:, columns] / fraction.neg_().log1p_().neg_()).max(1)
        token = torch.where(best > lead, place + columns.start, token)
        lead = torch.maximum(lead, best)
    return token


def _mix32_(x: Tensor) -> Tensor:
    """`_mix` in place on int32, where multiplication wraps by itself and shifts must lose the sign."""
    for shift, mask, factor in ((16, 0xFFFF, 0x85EBCA6B), (13, 0x7FFFF, 0xC2B2AE35)):
        x ^= (x >> shift) & mask
        x *= _signed_constant(factor)
    x ^= (x >> 16) & 0xFFFF
    return x


def _signed_constant(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _signed(word: Tensor) -> Tensor:
    """int32 with the bits of a 32-bit word kept in int64."""
    return torch.where(word >= 1 << 31, word - (1 << 32), word).int()
