"""Sums of vectors that nobody sees: pairwise masks that cancel, with recovery of clients that drop out.

The protocol is that of K. Bonawitz et al., Practical secure aggregation for privacy-preserving machine learning, 2017,
Figure 4, in its form against an honest-but-curious server, in four steps:

1. ``advertise``: each client sends two fresh X25519 public keys.
2. ``share_keys``: it splits its private mask key and a random seed into shares of which t are needed, and sends each
   other client one share of either, sealed with ChaCha20-Poly1305 under a key that only the two of them can derive.
3. ``input``: it sends its vector in fixed point, plus the mask of its seed, plus or minus one mask for each pair that
   it is part of. All arithmetic is modulo 2⁶⁴ (or 2³²), so a masked vector is uniformly random.
4. ``reveal``: told who has sent a vector, it gives for each of them a share of the seed, for each that has dropped out
   a share of the mask key, never both, and once only. The server removes the masks that are left.

The second mask, of the seed, protects a client whose vector comes late: by then its mask key may have been recovered,
but nobody gives shares of its seed.

Trusted: the server to run the protocol and to pass public keys on unchanged. It may look at all that it gets, together
with up to t − 1 clients. Not covered: a server that swaps public keys or invents clients (keys are not signed), clients
that send wrong vectors (wrong shares are noticed), and what the sum itself tells, most of all with two clients or if
the sums of two cohorts that differ in one client are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedclust.privacy.secure_sum_client import SecureSumClient
from fedclust.privacy.secure_sum_server import SecureSumServer
from fedclust.privacy.values import Value


@dataclass(frozen=True)
class SecureSum:
    """Masked sums; the sum is exact for whole multiples of the step and within n half steps otherwise.

    Attributes:
        threshold: t, how many clients must stay until the end; more than half of those asked. Half of them plus one if
            None.
        bits: 64, or 32 for half the bytes and a coarser step (n · bound / 2³¹ instead of n · bound / 2⁵³).
    """

    threshold: int | None = None
    bits: int = 64
    mode: ClassVar[str] = SecureSumServer.mode
    steps: ClassVar[tuple[str, ...]] = SecureSumServer.steps

    def server(self, clients: Iterable[int], length: int, bound: float, round: int = 0) -> SecureSumServer:
        """The server's side of one sum.

        Raises:
            ValueError: as :class:`fedclust.privacy.secure_sum_server.SecureSumServer`.
        """
        return SecureSumServer(clients, length, bound, round, self.threshold, self.bits)

    def client(self, client: int, state: Mapping[str, Value] | None = None) -> SecureSumClient:
        """A client's side, with what it remembers from the step before."""
        return SecureSumClient(client, state)
