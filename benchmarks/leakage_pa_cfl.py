"""Gradient inversion against PA-CFL (Figure 10): what of one image can be rebuilt from what each party sees?

    python benchmarks/leakage_pa_cfl.py
    python benchmarks/leakage_pa_cfl.py --images 1 --restarts 1 --iterations 40 --top-k 0.01 --out /tmp/try
    python benchmarks/leakage_pa_cfl.py --network smooth

The attack is DLG (Zhu et al. 2019): a dummy image and a soft label are optimised by L-BFGS until their gradient fits.
The victim has one image and takes one step from the initial weights, so that what it shares derives from the gradient
of that image alone: the easiest case for an attacker. It is shuffled with --users − 1 others. The views are messages of
the library's own round. Every attacker knows the network, its initial weights, k and ε₀, and minimises:

whole      the squared distance of the gradients. No protection: does the attack work at all?
top_k      the same over the k largest coordinates, whose indices and exact values are known. No protection (Fig. 10a).
as_order   aggregation server (Fig. 10b): important values in the order of the secret π^g, shuffled noisy other values,
           no mapping. It takes the k values for coordinates 0 to k − 1 and the others for those after them, all in
           natural order: squared distance of the first, likelihood under Laplace noise of the second.
as_sorted  aggregation server, wiser: any order of the k values will do, so it fits the sorted values of the dummy's own
           k largest coordinates to the sorted important values. The noisy rest is left out.
ms         management server (Fig. 10c, which used the sequence alone): the user's sequence, π^g, the norm of the less
           important part, its noisy values at known coordinates. Magnitudes at the sequence's coordinates are unknown,
           but gradients of random dummies tell what they are like by rank: it maximises the cosine of the dummy's
           magnitudes and that profile, fits the norm, and adds the likelihood of the noisy values.

Likelihoods count a hundredth. Values are relative to the target's norm. Each restart starts from another dummy; the one
with the smallest attack loss counts, never the one nearest to the truth. `guess` is what an attacker has without any
gradient: the mean of the test images. Images are cut to [0, 1] before they are compared. `smooth` is a twin of the
network with Sigmoid and average pooling, for comparison. Noise is simulated (reproducible), of the secure law.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import common
import torch
from leakage_report import compare, draw, markdown
from leakage_views import VIEWS, Score, SmoothClient, observe, score
from torch import Tensor
from torch.nn import functional as F

from fedclust.data.sources import load_source
from fedclust.data.tables import Source
from fedclust.random import numpy_generator, torch_generator
from lightning_modules.pa_cfl import PrivateAdaptiveClient

Rows = list[dict[str, Any]]


def gradient(client: PrivateAdaptiveClient, image: Tensor, label: Tensor, graph: bool = False) -> Tensor:
    """Gradient (d,) of the cross-entropy of one image (1, c, h, w) with a soft label (1, classes)."""
    loss = -(label * client(image).log_softmax(1)).sum()
    parts = torch.autograd.grad(loss, list(client.parameters()), create_graph=graph)
    return torch.cat([part.flatten() for part in parts])


def attack(
    client: PrivateAdaptiveClient, loss_of: Score, draw_from: torch.Generator, iterations: int
) -> tuple[float, Tensor, Tensor]:
    """One start of the attack: the smallest loss met, and its dummy image and label scores."""
    assert client.input_shape is not None
    assert client.n_classes is not None
    image = torch.randn(1, *client.input_shape, generator=draw_from).requires_grad_()
    label = torch.randn(1, client.n_classes, generator=draw_from).requires_grad_()
    # No line search: it stops at the first kink of a ReLU.
    optimizer = torch.optim.LBFGS(
        [image, label], lr=1, max_iter=20, history_size=100, tolerance_grad=0, tolerance_change=0
    )
    best = (float("inf"), image.detach().clone(), label.detach().clone())

    def closure() -> Tensor:
        nonlocal best
        optimizer.zero_grad()
        loss = loss_of(gradient(client, image, label.softmax(1), graph=True))
        loss.backward(inputs=[image, label])
        if float(loss) < best[0]:
            best = (float(loss), image.detach().clone(), label.detach().clone())
        return loss

    for _ in range(max(1, iterations // 20)):
        if not bool(torch.isfinite(optimizer.step(closure))):
            break
    return best


def expected_magnitudes(client: PrivateAdaptiveClient, seed: int, draws: int = 8) -> Tensor:
    """Mean sorted magnitudes of the gradients of random dummies, which anybody who knows the weights can compute."""
    total = 0.0
    for number in range(draws):
        chance = torch_generator(seed, "leakage", "profile", number)
        image = torch.rand(1, *client.input_shape, generator=chance)
        label = F.one_hot(torch.randint(client.n_classes, (1,), generator=chance), client.n_classes).float()
        total = total + gradient(client, image, label).abs().sort(descending=True).values
    return total / draws


def victim(options: argparse.Namespace, source: Source) -> tuple[PrivateAdaptiveClient, Tensor]:
    """The network with the initial weights of every round that is observed, and the magnitudes expected of it."""
    client = SmoothClient() if options.network == "smooth" else PrivateAdaptiveClient("cnn")
    assert source.class_names is not None
    client.build(tuple(source.train.x.shape[1:]), len(source.class_names))
    client.initialize(options.seed)
    return client, expected_magnitudes(client, options.seed)


def attacks(
    options: argparse.Namespace, source: Source, client: PrivateAdaptiveClient, expected: Tensor, number: int
) -> tuple[Rows, dict[str, Tensor]]:
    """All attacks on one image; rows of figures, and images by "view/k"."""
    draw_rows = numpy_generator(options.seed, "leakage", "rows", number)
    rows = draw_rows.choice(len(source.train), options.users, replace=False).tolist()
    truth, label = source.train.x[rows[0]], int(source.train.y[rows[0]])
    assert source.test is not None
    found: dict[str, Tensor] = {"original": truth, "guess": source.test.x.mean(0)}
    results: Rows = [{"image": number, "label": label, "view": "guess", **compare(found["guess"], truth)}]
    for place, top_k in enumerate(options.top_k):
        seen = observe(source, rows, top_k, options.epsilon, options.seed, client)
        for view in ("whole", *VIEWS) if place == 0 else VIEWS:
            loss_of, start = score(view, seen, options.epsilon, expected), time.process_time()
            tries = [
                attack(client, loss_of, torch_generator(options.seed, "leakage", number, t), options.iterations)
                for t in range(options.restarts)
            ]
            loss, image, scores = min(tries, key=lambda one: one[0])
            row: dict[str, Any] = {"image": number, "label": label, "view": view, "loss": loss}
            row |= {} if view == "whole" else {"top_k": top_k, "k": len(seen.sequence)}
            row |= {**compare(image[0], truth), "label_found": int(scores.argmax()) == label}
            row["cpu_seconds"] = round(time.process_time() - start, 1)
            results.append(row)
            found[view if view == "whole" else f"{view}/{top_k}"] = image[0].clamp(0, 1)
            print(row, flush=True)
    return results, found


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="mnist", choices=("mnist", "fashion_mnist"))
    parser.add_argument("--network", default="cnn", choices=("cnn", "smooth"))
    parser.add_argument("--top-k", type=common.decimals, default=[0.001, 0.01, 0.05, 0.1], help="shares of d")
    parser.add_argument("--images", type=int, default=2)
    parser.add_argument("--restarts", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=200, help="of L-BFGS per restart, in steps of 20")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--users", type=int, default=4, help="in the shuffle group")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--root", help="folder of the data; default: where the library looks")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    parser.add_argument("--table", action="store_true", help="only write the Markdown from the JSON")
    return parser.parse_args()


def main() -> None:
    """Attacks, prints and writes."""
    options = parse()
    common.quiet()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / ("leakage_pa_cfl" + ("_smooth" if options.network == "smooth" else ""))
    if options.table:
        report = json.loads(stem.with_suffix(".json").read_text())
        stem.with_suffix(".md").write_text(markdown(report, stem.name))
        return
    source = load_source(options.dataset, root=options.root)
    settings = {name: value for name, value in vars(options).items() if name not in ("out", "root", "table")}
    client, expected = victim(options, source)
    report = {"settings": settings, "versions": common.versions(), "rows": []}
    pictures = []
    for number in range(options.images):
        rows, found = attacks(options, source, client, expected, number)
        report["rows"] += rows
        pictures.append(found)
        # After every image, so that a run that is stopped leaves what it has.
        common.write_json(stem.with_suffix(".json"), report)
        stem.with_suffix(".md").write_text(markdown(report, stem.name))
        draw(pictures, options.top_k, stem.with_suffix(".png"))
    print(markdown(report, stem.name))


if __name__ == "__main__":
    main()
