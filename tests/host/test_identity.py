"""Whether a host is what it was, and the one that a pack was made on: weights, settings, and what is on it beside, by
value and not by name.
"""

import warnings

import peft
import pytest
import torch

from conftest import make_model, make_pack
from probemon.bem import BemConfig, attach_bem
from probemon.errors import HostMismatch
from probemon.host.changes import HostMarks
from probemon.host.compatibility import check_host, host_problems
from probemon.host.identity import changed, host_identity, stated_host
from probemon.host.model import unwrap
from probemon.models.ltm import LtmConfig, LtmForCausalLM, attach_memory

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def filled(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


def lora(seed):
    model = peft.get_peft_model(make_model(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).eval()
    filled([p for p in model.parameters() if p.requires_grad], seed)
    return model, model


def bem(seed):
    model = make_model()
    on = attach_bem(model, BemConfig(rank=2, sites=("o",)))
    filled(on.parameters(), seed)
    return model, on


def memory(seed):
    model = make_model()
    on = attach_memory(model, layer=0, slots=4, segment=3)
    filled(on.memory.parameters(), seed)
    return model, on


@pytest.mark.parametrize("put_on", [lora, bem, memory])
def test_another_adapter_of_the_same_name_is_another_host(put_on):
    (first, _on), (same, _same), (other, _other) = put_on(1), put_on(1), put_on(2)
    assert host_identity(first) == host_identity(same)
    [difference] = changed(host_identity(first), host_identity(other))
    assert difference.startswith("the weights of its adapters were adapter-samples:")
    [adapters] = changed(host_identity(make_model()), host_identity(first))
    assert adapters.startswith("its adapters were none, now ")


def test_adapters_that_are_off_and_another_dtype_do_not_count():
    model, _ = lora(1)
    before = host_identity(model)
    assert host_identity(unwrap(model)) == before
    model.add_adapter("beside", peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    assert host_identity(model) == before
    half = host_identity(model.to(torch.bfloat16))
    assert changed(before, half) == ["its dtype was float32, now bfloat16"]
    model.set_adapter("beside")
    assert host_identity(model)["adapter_weights"] != before["adapter_weights"]


def test_a_memory_that_adds_nothing_or_is_off_is_no_part_of_the_host():
    bare = host_identity(make_model())
    model, on = memory(1)
    with on:
        assert host_identity(model) != bare
        on.memory.closed = True
        assert host_identity(model) == bare
    assert host_identity(model) == bare


def test_a_memory_of_the_hosts_own_that_is_closed_makes_another_host():
    torch.manual_seed(0)
    model = LtmForCausalLM(LtmConfig()).eval()
    marks, before = HostMarks(model), host_identity(model)
    mark = marks.now()
    assert not marks.now().differs(mark)
    [held] = model.memories.values()
    held.closed = True
    assert marks.now().differs(mark)
    assert changed(before, host_identity(model)) == ["its adapters were none, now closed memory"]


@pytest.mark.parametrize("put_on", [lora, bem, memory])
def test_a_pack_tells_another_adapter_of_the_same_name(put_on, tmp_path):
    (first, _on), (same, _same), (other, _other) = put_on(1), put_on(1), put_on(2)
    pack = make_pack(tmp_path / "pack", make_model(), host=stated_host(first, "tiny"))
    assert host_problems(pack, same, strict=True) == host_problems(pack, first, strict=True) == []
    with pytest.raises(HostMismatch, match=r"others of these names \(adapter-samples:"):
        check_host(pack, other, strict=True)
    with pytest.warns(UserWarning, match="others of these names"):
        check_host(pack, other, strict=False)
    with pytest.raises(HostMismatch, match=r"adapters \[\] are active"):
        check_host(pack, make_model(), strict=True)
    named = {key: value for key, value in pack.manifest["host"].items() if key != "adapter_weights"}
    older = make_pack(tmp_path / "older", make_model(), host=named)
    assert host_problems(older, other, strict=True) == []


def with_settings(change):
    config = make_model().config
    change(config)
    model = type(make_model())(config).eval()
    model.load_state_dict(make_model().state_dict())
    return model


@pytest.mark.parametrize(
    "name, change",
    [
        ("rope_parameters.rope_theta is 1000000.0", lambda config: config.rope_parameters.update(rope_theta=1e6)),
        ("rms_norm_eps is 0.1", lambda config: setattr(config, "rms_norm_eps", 0.1)),
    ],
)
def test_a_pack_tells_other_settings_of_the_same_weights(name, change, tmp_path):
    model, other = make_model(), with_settings(change)
    pack = make_pack(tmp_path / "pack", model, host=stated_host(model, "tiny"))
    with pytest.raises(HostMismatch, match=name):
        check_host(pack, other, strict=True)
    with pytest.warns(UserWarning, match=name):
        check_host(pack, other, strict=False)
    model.config.pad_token_id, model.config.use_cache = 9, False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_host(pack, model.to(torch.bfloat16), strict=True)
    older = make_pack(tmp_path / "older", model)
    assert "settings" not in older.manifest["host"] and host_problems(older, other, strict=True) == []
