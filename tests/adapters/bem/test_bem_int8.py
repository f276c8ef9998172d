"""An int8 adapter stays within its error bound and its limits; the controller keeps its precision."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bem_oracle import VOCAB, make_host, randomise
from probemon.adapters.bem import Bem, BemConfig, attach_bem, quantize
from probemon.adapters.bem.config import POLICIES
from probemon.adapters.bem.int8 import Int8Update
from probemon.adapters.bem.losses import recorded_codes
from probemon.adapters.bem.saved import SETTINGS, WEIGHTS
from probemon.errors import BemError, MissingExtra

CONFIG = BemConfig(sites=("q", "o", "down"), rank=3, width=6, chunk_tokens=4, prefix_tokens=8, spectral_cap=0.8)
LEVELS = {"chunk_tokens": 4, "prefix_tokens": 8, "auto_limits": (2, 64), "energy_limits": (0.3, 0.6)}
IDS = torch.randint(3, VOCAB, (2, 21), generator=torch.Generator().manual_seed(0))


def logits(model):
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def make_adapter(model):
    """Columns of very different sizes, and one of zeros: what a single scale would not hold."""
    bem = randomise(Bem(model, CONFIG), size=0.1)
    with torch.no_grad():
        for update in bem.updates.values():
            update.U.mul_(torch.tensor([3.0, 0.3, 0.03]))
        bem.updates["o_1"].U[:, 1] = 0
    return bem


def write(folder):
    """Run where torchao can be imported."""
    bem = make_adapter(make_host())
    bem.save_pretrained(folder / "wide")
    with bem:
        small = quantize(bem)
        assert small.impl_why == bem.impl_why and not small.open
    small.save_pretrained(folder / "int8")
    for dtype in (torch.bfloat16, torch.float64):
        other = make_adapter(make_host())
        with torch.no_grad():
            for parameter in other.controller.to(dtype).parameters():
                parameter.mul_(1.1)  # so that fp64 holds what fp32 has not
        other.save_pretrained(folder / f"wide {dtype}")
        small_other = quantize(other)
        small_other.save_pretrained(folder / f"int8 {dtype}")
        with small_other:
            torch.save(logits(small_other.host), folder / f"logits {dtype}.pt")
    write_levels(folder)
    try:
        quantize(small)
    except BemError as error:
        (folder / "said.json").write_text(json.dumps(str(error)))


def write_levels(folder):
    """An adapter of every level in bf16, and its int8 copy: what they say, take, let learn, and what comes back."""
    found = {}
    for level in POLICIES:
        bem = randomise(Bem(make_host(), BemConfig(sites=("v", "o", "down"), rank=3, width=6, level=level, **LEVELS)))
        if bem.levels is not None:
            with torch.no_grad():
                bem.levels.logits.copy_(4 * torch.eye(3).repeat(2, 1)[: len(bem.levels.logits)])
        bem.bfloat16().controller.query.requires_grad_(False)
        base, small = logits(bem.host), quantize(bem)
        small.save_pretrained(folder / level)
        said = {}
        for name, one in {"wide": bem, "small": small}.items():
            with one, torch.no_grad(), recorded_codes(one) as seen:
                said[name] = logits(one.host) - base, None if one.levels is None else one.levels.chosen(), seen[0].level
        with attach_bem(make_host(), folder / level) as again:
            said["again"] = (logits(again.host) - base,)
        said["frozen"] = [name for name, x in small.named_parameters() if not x.requires_grad]
        said["kept"] = [
            (name, x.dtype, bool(torch.equal(x, bem.state_dict()[name])))
            for name, x in small.state_dict().items()
            if not name.startswith("updates.")
        ]
        found[level] = said
    torch.save(found, folder / "levels.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Written in a process of its own: where torchao can be imported, every import of transformers does so, and talks
    about it.
    """
    made = tmp_path_factory.mktemp("int8")
    tests = Path(__file__).parents[2]
    folders = [tests / "adapters/bem", tests / "support", tests, tests.parent, Path(sys.prefix) / "torchao"]
    path = os.pathsep.join(map(str, folders))
    code = "import sys, pathlib, test_bem_int8; test_bem_int8.write(pathlib.Path(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(made)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return made


@pytest.fixture
def pair(folder):
    """The adapter, and its int8 form, each on a host of its own; loading needs no torchao."""
    with attach_bem(make_host(), folder / "wide") as wide, attach_bem(make_host(), folder / "int8") as small:
        yield wide, small
    assert "torchao" not in sys.modules


def test_values_are_within_half_a_quantisation_step_of_their_column(pair):
    wide, small = pair
    for key, update in small.updates.items():
        for name in "UV":
            exact, stored, scale = (
                getattr(wide.updates[key], name).detach().double(),
                getattr(update, f"{name}8"),
                getattr(update, f"{name}_scale").double(),
            )
            assert (
                stored.dtype == torch.int8
                and (
                    scale[exact.abs().amax(dim=0) > 0] <= exact.abs().amax(dim=0)[exact.abs().amax(dim=0) > 0] / 127
                ).all()
            )
            assert ((getattr(update, name).double() - exact).abs() <= 0.5001 * scale).all()
            assert set(stored.int().abs().amax(dim=0).tolist()) <= (
                {127, 128, 0} if (key, name) == ("o_1", "U") else {127, 128}
            )


def test_int8_update_is_within_its_bound_and_a_cast_is_far_worse(pair):
    """`|dW' - dW|_2 <= s |c| (|E_u| |V| + |U| |E_v| + |E_u| |E_v|)`, with `|E| <= sqrt(n sum (scale / 2)^2)`."""
    wide, small = pair
    code, s = np.array([0.7, -1.1, 0.9]), CONFIG.scale
    for key, update in small.updates.items():
        U, V = (getattr(wide.updates[key], name).detach().double().numpy() for name in "UV")
        exact = s * (U * code) @ V.T
        found = s * (update.U.double().numpy() * code) @ update.V.double().numpy().T
        cast = s * (np.trunc(U) * code) @ np.trunc(V).T
        e_u, e_v = (
            np.sqrt(len(given) * ((getattr(update, f"{name}_scale").double().numpy() / 2) ** 2).sum())
            for name, given in (("U", U), ("V", V))
        )
        norm = lambda x: np.linalg.norm(x, 2)  # noqa: E731
        bound = s * np.abs(code).max() * (e_u * norm(V) + norm(U) * e_v + e_u * e_v)
        error = norm(found - exact)
        assert 0 < error <= bound and error < 0.01 * norm(exact)
        assert norm(cast - exact) > 50 * error and norm(cast - exact) > 0.9 * norm(exact)


def test_int8_adapter_gives_nearly_equal_logits_within_the_same_limits(pair):
    wide, small = pair
    base, exact, found = logits(make_host()), logits(wide.host), logits(small.host)
    assert 0 < (found - exact).norm() < 0.02 * (exact - base).norm()
    codes = 3 * torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    applied = small.governor.apply({True: codes, False: codes})
    for site in small.sites:
        U, V = (getattr(small.updates[site.key], name).double().numpy() for name in "UV")
        largest = [np.linalg.norm(CONFIG.scale * (U * code.double().numpy()) @ V.T, 2) for code in applied[site.key]]
        assert max(largest) <= CONFIG.spectral_cap * (1 + 1e-5)


def test_the_controller_keeps_its_precision_and_the_file_is_smaller(pair, folder):
    wide, small = pair
    for name, parameter in wide.controller.state_dict().items():
        assert (
            torch.equal(parameter, small.controller.state_dict()[name])
            and small.controller.state_dict()[name].dtype == torch.float32
        )
    assert not [name for name, _ in small.updates.named_parameters()]
    n_values = sum(update.U.numel() + update.V.numel() for update in wide.updates.values())
    stored = sum(x.numel() * x.element_size() for x in small.updates.state_dict().values())
    assert stored == n_values + 4 * 2 * 3 * len(small.sites)
    assert (
        json.loads((folder / "int8" / SETTINGS).read_text())["config"]
        == json.loads((folder / "wide" / SETTINGS).read_text())["config"]
    )
    assert (folder / "int8" / WEIGHTS).stat().st_size < (folder / "wide" / WEIGHTS).stat().st_size


def test_int8_adapter_can_be_saved_again_and_runs_with_a_cache(pair, tmp_path):
    _, small = pair
    expected = logits(small.host)
    out = small.host.generate(IDS, max_new_tokens=6, do_sample=False)
    assert torch.equal(out, small.host.generate(IDS, max_new_tokens=6, do_sample=False, use_cache=False))
    small.save_pretrained(tmp_path)
    with attach_bem(make_host(), tmp_path) as again:
        assert torch.equal(logits(again.host), expected) and all(
            isinstance(update, Int8Update) for update in again.updates.values()
        )


@pytest.mark.parametrize("level", POLICIES)
def test_int8_copy_differs_only_in_rounded_matrices_at_every_level(folder, level):
    said = torch.load(folder / "levels.pt")[level]
    (wide, chosen, at), (small, small_chosen, small_at), (again,) = said["wide"], said["small"], said["again"]
    assert chosen == small_chosen and torch.equal(at, small_at)
    assert 0 < (small - wide).norm() < 0.05 * wide.norm() and torch.equal(again, small)
    assert said["frozen"] == ["controller.query"]
    assert len(said["kept"]) > 8 and all(dtype == torch.bfloat16 and same for _, dtype, same in said["kept"])
    if level == "learned":
        assert len(set(chosen.values())) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_controller_dtype_survives_saving_and_loading(folder, dtype):
    with (
        attach_bem(make_host(), folder / f"int8 {dtype}") as small,
        attach_bem(make_host(), folder / f"wide {dtype}") as wide,
    ):
        for name, x in wide.controller.state_dict().items():
            assert (
                x.dtype == dtype
                and torch.equal(small.controller.state_dict()[name], x)
                and small.controller.state_dict()[name].dtype == dtype
            )
        assert all(update.U_scale.dtype == torch.float32 for update in small.updates.values())
        assert torch.equal(logits(small.host), torch.load(folder / f"logits {dtype}.pt"))


def test_int8_adapter_cannot_be_quantised_again(folder):
    assert "are int8 already" in json.loads((folder / "said.json").read_text())


def test_without_torchao_the_error_says_what_to_install():
    with pytest.raises(MissingExtra, match="pip install torchao"):
        quantize(make_adapter(make_host()))
