"""Tests that DP-MAC in 3D is MAC: objective, Z-step and W-step equal those of a U-Net's five blocks written
by hand.

The oracle calls the blocks one after another, with plain autograd, one patient and one block at a time; it knows
nothing of hooks, vmap or surrogates. Each wrong version is a patch to the product's code and makes an oracle fail.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.func import functional_call

from client.training.private import mac
from client.training.private.blocks import Blocks, blocks_of
from client.training.private.clipped_sums import RADIUS_INT, ClippingPlan, integer_sum
from client.training.private.gradients import per_patient, plain_weights, segmentation_loss
from client.training.private.mac import Penalty, VolumeMac
from client.training.private.strategies_3d import Patients, StepTerms, layer_parts
from common.errors import InvalidInput
from common.models.fit import soft_dice_ce
from common.models.unet import build_unet

pytestmark = pytest.mark.slow

F64 = torch.float64
MU = 20.0
HOW = Penalty(MU, 1.0, 3, 0.5)
NETWORKS = {"unet": (3, 4, 5), "residual": (2, 3), "dynunet": (2, 3, 4), "paper-unet": (2, 2, 2, 2, 2)}

State = dict[str, torch.Tensor]


def network(kind: str = "unet") -> torch.nn.Module:
    return build_unet(NETWORKS[kind], in_channels=1, out_channels=3, seed=3, network=kind).double()


def patients(count: int, *, size: int = 8, scans: int = 1, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images [b, k, 1, x, y, z] of blocks in noise and their one-hot targets [b, k, 3, x, y, z]."""
    rng = torch.Generator().manual_seed(seed)
    label = torch.zeros(count, scans, size, size, size, dtype=torch.int64)
    label[..., 1:4, 2:5, 2:6], label[..., 4:7, 2:5, 2:6] = 1, 2
    x = label[:, :, None] + 0.5 * torch.randn(count, scans, 1, size, size, size, generator=rng, dtype=F64)
    return x, torch.nn.functional.one_hot(label, 3).movedim(-1, 2).to(F64)


# ---- the oracle: five blocks by hand ---------------------------------------------------------------------------------

D1, D2, BOTTOM, U2, U1 = (
    *("model.0", "model.1.submodule.0", "model.1.submodule.1.submodule"),
    *("model.1.submodule.2", "model.2"),
)
ORDER = (D1, D2, BOTTOM, U2, U1)


def block(net: torch.nn.Module, name: str, weights: State, given: torch.Tensor) -> torch.Tensor:
    own = {k.removeprefix(f"{name}."): w for k, w in weights.items() if k.startswith(f"{name}.")}
    output: torch.Tensor = functional_call(net.get_submodule(name), own, (given,))
    return output


def parents(name: str, x: torch.Tensor, z: State) -> torch.Tensor:
    """Return the input of a block of the three-level U-Net."""
    return {
        D1: lambda: x,
        D2: lambda: z[D1],
        BOTTOM: lambda: z[D2],
        U2: lambda: torch.cat([z[D2], z[BOTTOM]], dim=1),
        U1: lambda: torch.cat([z[D1], z[U2]], dim=1),
    }[name]()


def energy(net: torch.nn.Module, weights: State, x: torch.Tensor, y: torch.Tensor, z: State, mu: float) -> torch.Tensor:
    """Return E(W, Z) of one image: the last block's loss, and μ/2N times every hidden block's squared gap."""
    gaps = [(z[name] - block(net, name, weights, parents(name, x, z))).square().sum() for name in ORDER[:-1]]
    loss = soft_dice_ce(block(net, U1, weights, parents(U1, x, z)), y).sum()
    return loss + mu / (2 * x[0, 0].numel()) * torch.stack(gaps).sum()


def coordinates_by_hand(
    net: torch.nn.Module, weights: State, x: torch.Tensor, y: torch.Tensor, how: Penalty, mu: float
) -> State:
    """Return z = f + e, block after block, by descent over e."""
    e: State = {}

    def whole() -> State:
        z: State = {}
        for name in ORDER[:-1]:
            f = block(net, name, weights, parents(name, x, z))
            e.setdefault(name, torch.zeros_like(f))
            z[name] = f + e[name]
        return z

    whole()
    for _ in range(how.steps):
        e = {name: r.detach().requires_grad_() for name, r in e.items()}
        slopes = torch.autograd.grad(energy(net, weights, x, y, whole(), mu), list(e.values()))
        size = how.rate * x[0, 0].numel() / mu
        e = {name: (r - size * slope).detach() for (name, r), slope in zip(e.items(), slopes, strict=True)}
    return {name: value.detach() for name, value in whole().items()}


def w_step_by_hand(
    net: torch.nn.Module, weights: State, x: torch.Tensor, y: torch.Tensor, how: Penalty, mu: float
) -> State:
    """Return a patient's gradient: each block's own term at fixed coordinates, averaged over the patient's images."""
    total = {name: torch.zeros_like(w) for name, w in weights.items()}
    for image in range(len(x)):
        one, target = x[image : image + 1], y[image : image + 1]
        z = coordinates_by_hand(net, weights, one, target, how, mu)
        for name in ORDER:
            own = {k: w.clone().requires_grad_() for k, w in weights.items() if k.startswith(f"{name}.")}
            f = block(net, name, {**weights, **own}, parents(name, one, z))
            term = (z[name] - f).square().sum() * mu / (2 * one[0, 0].numel()) if name in z else None
            value = soft_dice_ce(f, target).sum() if term is None else term
            for key, slope in zip(own, torch.autograd.grad(value, list(own.values())), strict=True):
                total[key] += slope / len(x)
    return total


def the_clipped_coefficients_are_macs() -> None:
    """Check that every block's vector, for three patients of two images, equals the one computed by hand."""
    net, (x, y) = network(), patients(3, scans=2)
    weights, blocks = plain_weights(net), blocks_of(net)
    found, _ = per_patient(mac.mac_loss(blocks, soft_dice_ce, mu=MU, how=HOW))(weights, x, y)
    for patient in range(3):
        wanted = w_step_by_hand(net, weights, x[patient], y[patient], HOW, MU)
        for name, entry in wanted.items():
            assert torch.allclose(found[name][patient], entry, rtol=1e-7, atol=1e-12), f"not MAC's in {name}"
        assert all(float(entry.norm()) > 0 for name, entry in wanted.items() if name.endswith("weight"))


def a_block_is_as_long_as_its_clip() -> None:
    """Check that a long gradient is released with length Θ in every block, so noise of σ·√(MK)·Θ covers all."""
    images, targets = (tensor[:, 0].float() for tensor in patients(1))
    strategy = made(Patients(images, targets, (0,)), clip=1e-4)
    total = strategy.total(np.array([0]))
    whole = sum(float(entry.double().square().sum()) for entry in total.values()) ** 0.5
    assert 0.999 < whole / RADIUS_INT <= 1, "a patient's whole vector is not as long as the noise is scaled to"
    for index, names in enumerate(strategy.parts.names):
        long = torch.cat([total[name].double().flatten() for name in names]).norm() * strategy.parts.scale(index)
        assert float(long) / RADIUS_INT == pytest.approx(1e-4, rel=1e-3), f"block {index} is not as long as its clip"


def made(people: Patients, *, clip: float = 1e-3, penalty: Penalty = HOW, steps: int = 10) -> VolumeMac:
    net = build_unet(NETWORKS["unet"], in_channels=1, out_channels=3, seed=3)
    return VolumeMac(net, people, StepTerms(lambda step, steps: 1e-2, clip), penalty=penalty, steps=steps)


# ---- wrong versions --------------------------------------------------------------------------------------------------


def forward_pass(
    blocks: Blocks, each: mac.Each, weights: State, patches: torch.Tensor, targets: torch.Tensor, *rest: object
) -> State:
    """Leave out the Z-step: coordinates stay where the forward pass puts them."""
    z: State = {}

    def visit(name: str, output: torch.Tensor) -> torch.Tensor:
        if name in blocks.hidden:
            z[name] = output
        return output

    blocks.run(weights, patches, visit)
    return z


def reads_its_own_output(*which: str) -> Callable[..., torch.Tensor]:
    """Return the objective in which readers of these blocks get a block's output instead of its coordinate."""

    def objective(
        blocks: Blocks,
        each: mac.Each,
        weights: State,
        patches: torch.Tensor,
        targets: torch.Tensor,
        z: State,
        mu: float,
    ) -> torch.Tensor:
        gaps = []

        def visit(name: str, output: torch.Tensor) -> torch.Tensor:
            if name not in z:
                return output
            gaps.append((z[name] - output).square().flatten(1).sum(dim=1))
            return output if name in which else z[name]

        loss = each(blocks.run(weights, patches, visit), targets)
        return loss + mu / (2 * patches[0, 0].numel()) * torch.stack(gaps).sum(dim=0)

    return objective


def one_step_only(was: Callable[..., State]) -> Callable[..., State]:
    def coordinates(*given: object) -> State:
        *rest, how = given
        assert isinstance(how, Penalty)
        return was(*rest, Penalty(how.mu, how.growth, 1, how.rate))

    return coordinates


WRONG: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[object]], Callable[[], None]]] = {
    "the Z-step dropped": (
        lambda: patch.object(mac, "coordinates", forward_pass),
        the_clipped_coefficients_are_macs,
    ),
    "one step on coordinates for three": (
        lambda: patch.object(mac, "coordinates", one_step_only(mac.coordinates)),
        the_clipped_coefficients_are_macs,
    ),
    "the coordinate of a skip dropped": (
        lambda: patch.object(mac, "objective", reads_its_own_output(D1)),
        the_clipped_coefficients_are_macs,
    ),
    "the coordinate of the bottom dropped": (
        lambda: patch.object(mac, "objective", reads_its_own_output(BOTTOM)),
        the_clipped_coefficients_are_macs,
    ),
    "√(MK) dropped from the scale": (
        lambda: patch.object(ClippingPlan, "scale", lambda self, part: self.clips[part]),
        a_block_is_as_long_as_its_clip,
    ),
    "Θ doubled": (
        lambda: patch.object(Blocks, "parts", lambda self, clip, was=Blocks.parts: was(self, 2 * clip)),
        a_block_is_as_long_as_its_clip,
    ),
}


@pytest.mark.parametrize("oracle", [the_clipped_coefficients_are_macs, a_block_is_as_long_as_its_clip])
def test_the_oracle_of_mac_holds(oracle: Callable[[], None]) -> None:
    oracle()


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_mac_makes_its_oracle_fail(wrong: str) -> None:
    patched, oracle = WRONG[wrong]
    with patched(), pytest.raises(AssertionError, match=r"not MAC's|not as long"):
        oracle()


def test_shares_that_do_not_cover_every_block_are_refused() -> None:
    """Here √(MK) would be written as 1 for each block; the parts themselves refuse it."""
    blocks = blocks_of(network())
    with pytest.raises(InvalidInput, match="shares"):
        ClippingPlan(blocks.weights, (1.0,) * 5, (1.0,) * 5)


# ---- the objective ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NETWORKS)
def test_the_w_step_is_the_slope_of_the_objective_in_every_block_by_central_differences(kind: str) -> None:
    """E(W, Z) varies at fixed Z along a random direction of one block's weights. Small steps avoid most kinks."""
    net = network(kind)
    x, y = patients(1, size=32 if kind == "paper-unet" else 8)
    weights, blocks = plain_weights(net), blocks_of(net)
    z = mac.coordinates(blocks, soft_dice_ce, weights, x[0], y[0], MU, HOW)
    value = lambda w: mac.objective(blocks, soft_dice_ce, w, x[0], y[0], z, MU).mean()  # noqa: E731
    slopes = torch.func.grad(value)(weights)
    rng = torch.Generator().manual_seed(1)
    for names in blocks.weights:
        way = {name: torch.randn(weights[name].shape, generator=rng, dtype=F64) for name in names}
        ahead, behind = ({n: w + s * way[n] if n in way else w for n, w in weights.items()} for s in (3e-8, -3e-8))
        wanted = float(value(ahead) - value(behind)) / 6e-8
        found = sum(float((slopes[name] * way[name]).sum()) for name in names)
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-7), f"block {names[0]}"
        assert any(float(slopes[name].norm()) > 1e-6 for name in names), f"block {names[0]} does not move it"


def test_the_objective_is_the_one_written_out_by_hand_and_the_z_step_lowers_it() -> None:
    net, (x, y) = network(), patients(1)
    weights, blocks = plain_weights(net), blocks_of(net)
    values = []
    for steps in (1, 2, 3, 6):
        z = mac.coordinates(blocks, soft_dice_ce, weights, x[0], y[0], MU, Penalty(MU, 1, steps, 0.5))
        values.append(float(mac.objective(blocks, soft_dice_ce, weights, x[0], y[0], z, MU)))
        assert values[-1] == pytest.approx(float(energy(net, weights, x[0], y[0], z, MU)), rel=1e-12)
    forward = float(soft_dice_ce(net(x[0]), y[0]).detach())
    assert forward > values[0] > values[1] > values[2] > values[3]


def test_the_first_step_on_coordinates_is_against_back_propagations_gradient_at_every_block() -> None:
    """The step from the forward pass has size rate·N/μ; autograd gives the gradients at the blocks' outputs."""
    net, (x, y) = network(), patients(1)
    weights, blocks = plain_weights(net), blocks_of(net)
    z = mac.coordinates(blocks, soft_dice_ce, weights, x[0], y[0], MU, Penalty(MU, 1, 1, 0.25))
    h: State = {}
    for name in ORDER[:-1]:
        h[name] = block(net, name, weights, parents(name, x[0], h)).requires_grad_()
    sent = torch.autograd.grad(
        soft_dice_ce(block(net, U1, weights, parents(U1, x[0], h)), y[0]).sum(), list(h.values())
    )
    moved: State = {}
    for (name, output), slope in zip(h.items(), sent, strict=True):
        moved[name] = block(net, name, weights, parents(name, x[0], moved)) - 0.25 * x[0, 0, 0].numel() / MU * slope
        torch.testing.assert_close(z[name], moved[name].detach(), rtol=1e-9, atol=1e-12)
        assert output.shape == z[name].shape


@pytest.mark.parametrize("kind", NETWORKS)
def test_under_a_stiff_penalty_every_block_is_back_propagation_times_what_the_steps_reach(kind: str) -> None:
    """For μ → ∞, hidden blocks reach 1 − (1 − rate)^steps of DP-SGD's gradient of a layer, and the last block all of
    it.
    """
    net = network(kind)
    x, y = patients(2, size=32 if kind == "paper-unet" else 8)
    weights, blocks = plain_weights(net), blocks_of(net)
    plain, _ = per_patient(segmentation_loss(net, soft_dice_ce))(weights, x, y)
    found, _ = per_patient(mac.mac_loss(blocks, soft_dice_ce, mu=1e9, how=HOW))(weights, x, y)
    for names in blocks.weights:
        reached = 1.0 if names == blocks.weights[-1] else 1 - 0.5**3
        own, whole = (torch.cat([entry[name].flatten() for name in names]) for entry in (found, plain))
        assert float((own - reached * whole).norm()) < 1e-3 * float(whole.norm())


def test_clipped_sums_are_not_those_of_dp_sgd_with_a_clip_a_layer() -> None:
    """At a penalty where coordinates move, each hidden block's sum differs by 5 % or more; at 1e9 by less than 1 %."""
    net, (x, y) = network(), patients(4)
    weights, blocks = plain_weights(net), blocks_of(net)
    parts = blocks.parts(1e-4)
    assert [set(names) for names in parts.names] == [set(names) for names in layer_parts(net, 1e-4).names]
    plain = integer_sum(per_patient(segmentation_loss(net, soft_dice_ce))(weights, x, y)[0], parts)
    gaps = {}
    for mu in (MU, 1e9):
        loss = mac.mac_loss(blocks, soft_dice_ce, mu=mu, how=HOW)
        own = integer_sum(per_patient(loss)(weights, x, y)[0], parts)
        gaps[mu] = [
            float(torch.cat([(own[n] - plain[n]).double().flatten() for n in names]).norm())
            / float(torch.cat([plain[n].double().flatten() for n in names]).norm())
            for names in parts.names
        ]
    assert min(gaps[MU][:-1]) > 0.05, gaps
    assert max(gaps[1e9]) < 0.01, gaps


# ---- one patient alone -----------------------------------------------------------------------------------------------


def test_a_patients_coordinates_are_its_own_whoever_else_is_in_the_chunk() -> None:
    net, (x, y) = network(), patients(3)
    weights, blocks = plain_weights(net), blocks_of(net)
    of = per_patient(mac.mac_loss(blocks, soft_dice_ce, mu=MU, how=HOW))
    found, _ = of(weights, x, y)
    others = x.clone()
    others[1:] = 1e3 * torch.randn(others[1:].shape, generator=torch.Generator().manual_seed(5), dtype=F64)
    others[2, 0, 0, 0, 0, 0] = float("nan")
    again, _ = of(weights, others, y)
    for name in weights:
        assert torch.equal(found[name][0], again[name][0])
        assert not bool(torch.isfinite(again[name][2]).all())


def test_images_of_a_patient_are_averaged_before_the_clip() -> None:
    net, (x, y) = network(), patients(1, scans=3)
    weights, blocks = plain_weights(net), blocks_of(net)
    of = per_patient(mac.mac_loss(blocks, soft_dice_ce, mu=MU, how=HOW))
    together, _ = of(weights, x, y)
    apart, _ = of(weights, x.transpose(0, 1), y.transpose(0, 1))
    for name in weights:
        torch.testing.assert_close(together[name][0], apart[name].mean(dim=0), rtol=1e-9, atol=1e-12)


def test_the_penalty_grows_to_its_end_and_a_restored_run_goes_on_where_it_was() -> None:
    images, targets = (tensor[:, 0].float() for tensor in patients(3))
    people, grown = Patients(images, targets, (0, 1, 2)), Penalty(1.0, 100.0, 2, 0.5)
    assert [grown.at(step, 3) for step in (0, 1, 2, 9)] == pytest.approx([1, 10, 100, 100])
    assert Penalty(2.0, 1.0, 1, 1.0).at(0, 1) == 2
    first, again = (made(people, penalty=grown, steps=3) for _ in range(2))
    mean = {name: torch.zeros(entry.shape) for name, entry in first.total(np.arange(3)).items()}
    first.apply(mean, step=0, steps=3)
    again.restore(first.state())
    one, other = first.total(np.arange(3)), again.total(np.arange(3))
    assert all(torch.equal(one[name], other[name]) for name in one)
    still = made(people, penalty=grown, steps=3).total(np.arange(3))
    assert any(not torch.equal(one[name], still[name]) for name in one)


# ---- networks and settings that are refused --------------------------------------------------------------------------


def test_every_network_a_study_may_name_is_a_graph_in_which_every_weight_has_one_block() -> None:
    counts = {}
    for kind in NETWORKS:
        net = network(kind)
        blocks = blocks_of(net)
        assert sorted(blocks.parts(1.0).order) == sorted(name for name, _ in net.named_parameters())
        counts[kind] = len(blocks.names)
    assert counts == {"unet": 5, "residual": 4, "dynunet": 8, "paper-unet": 14}


class Odd(torch.nn.Module):
    """Combines two convolutions with one feature that keeps them from being a graph of blocks."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.first, self.last, self.what = torch.nn.Conv3d(2, 2, 3, padding=1), torch.nn.Conv3d(2, 2, 1), what
        if what == "weights outside":
            self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.first(x)
        h = self.first(h) if self.what == "used 2 times" else h
        logits: torch.Tensor = self.last(h)
        if self.what == "not its output":
            return logits + h
        return logits * self.scale if self.what == "weights outside" else logits


@pytest.mark.parametrize("what", ["weights outside", "used 2 times", "not its output"])
def test_a_network_that_is_no_graph_of_blocks_is_refused_by_name(what: str) -> None:
    assert blocks_of(Odd("")).names == ("first", "last")
    with pytest.raises(InvalidInput, match=f"Odd.*{what}"):
        blocks_of(Odd(what))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ((0.0, 1.0, 3, 0.5), "--mu"),
        ((float("nan"), 1.0, 3, 0.5), "--mu"),
        ((float("inf"), 1.0, 3, 0.5), "--mu"),
        ((1.0, 0.5, 3, 0.5), "--mu-growth"),
        ((1.0, float("inf"), 3, 0.5), "--mu-growth"),
        ((1.0, 1.0, 0, 0.5), "dp-sgd --per-layer"),
        ((1.0, 1.0, 3, 0.0), "--z-rate"),
        ((1.0, 1.0, 3, 1.5), "--z-rate"),
        ((1.0, 1.0, 3, float("nan")), "--z-rate"),
    ],
)
def test_a_penalty_that_makes_no_sense_is_refused(changed: tuple[float, float, int, float], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        Penalty(*changed)
