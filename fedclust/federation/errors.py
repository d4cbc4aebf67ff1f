"""Errors of federated rounds; every one names the client, the round and the action."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """One client's failed work.

    Attributes:
        client: Client id.
        round: Round in which it happened; 0 is the work before the first round.
        action: What was asked.
        message: The error's type and text.
        traceback: Where it happened.
    """

    client: int
    round: int
    action: str
    message: str
    traceback: str

    def __str__(self) -> str:
        return f"client {self.client}, round {self.round}, action {self.action!r}: {self.message}"


class FederationError(RuntimeError):
    """Base of the errors of federated rounds."""


class ClientError(FederationError):
    """A client's action raised; the round did not happen."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class RoundFailedError(FederationError):
    """Every client that was asked failed."""

    def __init__(self, failures: list[Failure]) -> None:
        shown = "; ".join(str(failure) for failure in failures[:3])
        more = f" (and {len(failures) - 3} more)" if len(failures) > 3 else ""
        super().__init__(f"all {len(failures)} clients that were asked failed: {shown}{more}")
        self.failures = failures


class RefusedReplyError(FederationError):
    """A client's reply does not fit and is not used; the client has failed then, as if its action had raised."""


class NonFiniteError(FederationError):
    """A model, or what it computes, is no longer made of finite numbers."""


class NonFiniteLossError(NonFiniteError):
    """A local loss, or the weights after the last step, became NaN or infinite and must not be averaged."""

    def __init__(
        self, who: str, round: int, epoch: int, value: float, last_finite: float, what: str = "loss"
    ) -> None:  # fmt: skip
        known = f"; the last finite mean loss was {last_finite:.6g}" if math.isfinite(last_finite) else ""
        super().__init__(
            f"{who}, round {round}: the {what} became {value} in local epoch {epoch}{known}. Lower the learning rate, "
            "use precision 32-true or bf16-mixed, or, where the method adds noise, less of it"
        )


class NonFiniteOutputsError(NonFiniteError):
    """A model that is to be evaluated gives NaN or infinite outputs, so that no figure of it would mean anything."""

    def __init__(self, who: str, round: int, bad: int, rows: int) -> None:
        super().__init__(
            f"{who}, round {round}: the model's outputs are not finite on {bad} of {rows} rows. Lower the learning "
            "rate, or, where the method adds noise, use less of it"
        )
