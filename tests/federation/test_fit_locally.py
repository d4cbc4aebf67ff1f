"""The one local training loop, against loops written by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedclust.federation.batches import shuffled_batches
from fedclust.federation.client import ClientModule, action, parameter_count
from fedclust.federation.errors import NonFiniteLossError

X = torch.rand(40, 5, generator=torch.Generator().manual_seed(1))


class Net(ClientModule):
    """A small network with dropout and BatchNorm that learns to reproduce its input."""

    def __init__(self, dropout: float = 0.0, lr: float = 0.05) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(dropout), nn.Linear(4, 5))
        self.lr = lr
        self.made = 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.made += 1
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        error = (self.net(batch["x"]) - batch["x"]).square().mean()
        return {"loss": 2 * error, "error": error}


def batches_of(size: int, seed: int = 0) -> Callable[[int], Any]:
    generator = torch.Generator().manual_seed(seed)
    return lambda epoch: ({"x": X[rows]} for rows in shuffled_batches(len(X), size, generator))


def fresh(**options: Any) -> Net:
    module = Net(**options)
    module.initialize(3)
    return module


def by_hand(module: Net, epochs: int, batches: Callable[[int], Any], clip: float | None, precision: str) -> int:
    """The same training as a bare PyTorch loop."""
    optimizer, steps = torch.optim.Adam(module.parameters(), lr=module.lr), 0
    module.train()
    for epoch in range(epochs):
        for batch in batches(epoch):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                loss = 2 * (module.net(batch["x"]) - batch["x"]).square().mean()
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            steps += 1
    return steps


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("clip", [None, 1.0, 0.05])
def test_equals_a_bare_loop_bit_for_bit(context: Any, clip: float | None, precision: str) -> None:
    ours, bare = fresh(), fresh()
    ours.max_grad_norm = clip
    fit = ours.fit_locally(context(precision=precision), 3, batches=batches_of(16))
    steps = by_hand(bare, 3, batches_of(16), clip, precision)
    assert fit.n_steps == steps == 9
    for name, value in bare.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    assert not torch.equal(ours.net[0].weight, fresh().net[0].weight)


def test_clipping_bounds_the_step_that_plain_gradient_descent_makes(context: Any) -> None:
    class Descent(Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    moves = []
    for clip in (None, 0.01):
        module = Descent()
        module.initialize(3)
        module.max_grad_norm = clip
        before = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
        module.fit_locally(context(), 1, batches=batches_of(40))
        moves.append(float((nn.utils.parameters_to_vector(module.parameters()).detach() - before).norm()))
    assert moves[0] > 0.1
    assert moves[1] == pytest.approx(0.01, rel=1e-3)


def test_every_call_has_a_new_optimiser_and_makes_its_steps(context: Any) -> None:
    module, bare = fresh(), fresh()
    batches, again = batches_of(10), batches_of(10)
    counts = [module.fit_locally(context(), epochs, batches=batches).n_steps for epochs in (2, 1, 3)]
    assert counts == [8, 4, 12]
    assert module.made == 3
    for epochs in (2, 1, 3):
        by_hand(bare, epochs, again, None, "32-true")
    assert torch.equal(module.net[0].weight, bare.net[0].weight)


@pytest.mark.parametrize(("n", "size", "steps"), [(5, 8, 1), (33, 32, 1), (34, 32, 2), (1, 8, 1), (8, 8, 1), (9, 4, 2)])
def test_steps_per_epoch(n: int, size: int, steps: int) -> None:
    sizes = [len(rows) for rows in shuffled_batches(n, size, torch.Generator().manual_seed(0))]
    assert len(sizes) == steps
    assert sum(sizes) == n
    assert n == 1 or min(sizes) > 1


def test_zero_epochs_and_zero_batches_make_no_step(context: Any) -> None:
    module = fresh()
    before = copy.deepcopy(module.state_dict())
    assert module.fit_locally(context(), 0, batches=batches_of(8)).n_steps == 0
    nothing = module.fit_locally(context(), 2, batches=lambda epoch: [])
    assert (nothing.n_steps, nothing.terms) == (0, {})
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_terms_are_the_unweighted_means_of_the_last_epoch(context: Any) -> None:
    values = iter([1.0, 2.0, 3.0, 5.0, 8.0, 10.0])
    module = fresh()

    def loss(batch: Any) -> dict[str, Tensor]:
        value = next(values)
        zero = 0 * module.net(batch["x"]).sum()
        return {"loss": zero + value, "recon": torch.tensor(10 * value)}

    fit = module.fit_locally(context(), 2, batches=lambda epoch: [{"x": X[:8]}] * 3, loss=loss)
    assert fit.terms == pytest.approx({"loss": 23 / 3, "recon": 230 / 3}, rel=1e-6)


def test_a_plain_loss_is_a_term_and_other_outputs_are_refused(context: Any) -> None:
    class Plain(Net):
        output: Any = None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.output if self.output is not None else (self.net(batch["x"]) - 1).square().mean()

    module = Plain()
    assert module.fit_locally(context(), 1, batches=batches_of(40)).terms.keys() == {"loss"}
    for module.output in ({"error": torch.zeros(())}, 3.0, []):
        with pytest.raises(TypeError, match=r"'loss'"):
            module.fit_locally(context(), 1, batches=batches_of(40))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_stops_with_who_round_epoch_and_last_loss(context: Any, bad: float) -> None:
    module = fresh()

    def loss(batch: Any) -> dict[str, Tensor]:
        value = 0.25 if module.epoch < 2 else bad
        return {"loss": 0 * module.net(batch["x"]).sum() + value}

    def count(epoch: int) -> None:
        module.epoch = epoch + 1

    module.epoch = 0
    with pytest.raises(NonFiniteLossError, match=rf"server, round 4: the loss became {bad} in local epoch 2.*0\.25"):
        module.fit_locally(context(round=4), 5, batches=batches_of(20), loss=loss, after_epoch=count)


def test_weights_that_are_not_finite_are_never_handed_back(context: Any) -> None:
    module = fresh()

    def loss(batch: Any) -> dict[str, Tensor]:
        return {"loss": torch.where(torch.tensor(True), torch.zeros(()), module.net(batch["x"]).sum() / 0)}

    with pytest.raises(NonFiniteLossError, match=r"server, round 1: the weights became nan"):
        module.fit_locally(context(), 1, batches=batches_of(40), loss=loss)


def test_training_mode_returns_every_epoch_even_if_after_epoch_left_it(context: Any) -> None:
    module, modes = fresh(dropout=0.5), []

    def loss(batch: Any) -> dict[str, Tensor]:
        modes.append(module.training)
        return {"loss": module.net(batch["x"]).square().mean()}

    module.fit_locally(context(), 3, batches=lambda e: [{"x": X}], loss=loss, after_epoch=lambda e: module.eval())
    assert modes == [True, True, True]


def test_layer_noise_comes_from_the_context_and_leaves_the_global_generator_alone(context: Any) -> None:
    results = []
    for global_seed, seed in ((1, 0), (2, 0), (1, 9)):
        module = fresh(dropout=0.5)
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        module.fit_locally(context(seed=seed), 2, batches=batches_of(10))
        assert torch.equal(torch.get_rng_state(), before)
        results.append(module.net[0].weight.detach().clone())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_gradients_flow_even_where_the_caller_switched_them_off(context: Any) -> None:
    module = fresh()
    with torch.no_grad():
        assert module.fit_locally(context(), 1, batches=batches_of(20)).n_steps == 2
    assert not torch.equal(module.net[0].weight, fresh().net[0].weight)


def test_initial_weights_are_a_function_of_the_seed_alone() -> None:
    torch.manual_seed(1)
    one = fresh()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    two, other = fresh(), Net()
    assert not torch.equal(torch.get_rng_state(), before)  # building draws; initialising must not depend on it
    state = torch.get_rng_state()
    other.initialize(4)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in one.state_dict().items():
        assert torch.equal(two.state_dict()[name], value)
    assert not torch.equal(one.net[0].weight, other.net[0].weight)
    assert parameter_count(one) == 5 * 4 + 4 + 4 + 4 + 4 * 5 + 5


def test_loading_exchanged_weights_checks_names_and_shapes() -> None:
    module = fresh()
    good = module.snapshot()
    assert set(good) == {name for name, _ in module.named_parameters()} | {
        "net.1.running_mean", "net.1.running_var", "net.1.num_batches_tracked"
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"Net: missing \['net.0.weight'\], unknown \['other'\]"):
        module.load_exchanged({**{n: v for n, v in good.items() if n != "net.0.weight"}, "other": torch.ones(1)})
    with pytest.raises(ValueError, match=r"'net.0.bias' has shape \(9,\), the module has \(4,\)"):
        module.load_exchanged({**good, "net.0.bias": torch.ones(9)})
    changed = {name: value + 1 for name, value in good.items()}
    module.load_exchanged(changed)
    changed["net.0.bias"] += 5
    assert torch.equal(module.snapshot()["net.0.bias"], good["net.0.bias"] + 1)
    assert module.net[1].num_batches_tracked.dtype == torch.int64
    assert module.net[1].num_batches_tracked.shape == ()


def test_actions_must_not_replace_methods_of_lightning() -> None:
    def train(self: Any, message: Any, ctx: Any) -> Any:
        return {}

    with pytest.raises(TypeError, match=r"Odd: actions \['train'\]"):
        type("Odd", (ClientModule,), {"train": action(train)})
    assert type("Fine", (ClientModule,), {"train_locally": action(train)}).actions() == ["train_locally"]
