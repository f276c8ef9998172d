"""Memory pressure, smaller batches if memory runs out, and checkpointing of the controller."""

import pytest
import torch

from bem_oracle import VOCAB, make_host, randomise
from probemon.adapters.bem import BemConfig, ControllerState, attach_bem, memory, memory_pressure, with_batch_backoff
from probemon.adapters.bem.memory import is_out_of_memory
from probemon.adapters.routing.alerts import memory_of
from probemon.errors import ConfigError
from probemon.util import host_memory as of_host
from probemon.util.host_memory import host_memory

GIB = 2**30


# -- pressure --------------------------------------------------------------------------------------


def test_pressure_is_the_share_in_use():
    assert memory_pressure(lambda: (3 * GIB, 4 * GIB)) == 0.75
    used, whole = host_memory()
    assert 0 < used < whole and 0 < memory_pressure() < 1
    with pytest.raises(ConfigError, match=r"gives \(1, 0\)"):
        memory_pressure(lambda: (1, 0))


@pytest.mark.parametrize("version", [2, 1])
def test_cgroup_limits_count_without_the_file_cache(tmp_path, monkeypatch, version):
    _, controller, names = of_host._GROUPS[2 - version]
    folder = tmp_path / "inner"
    folder.mkdir()
    for name, text in zip(names, ("64000", "60000", None), strict=True):
        if text:
            (folder / name).write_text(text + "\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} 28000\n")
    own = tmp_path / "cgroup"
    own.write_text(f"9:cpu:/elsewhere\n0:{controller}:/inner\n")
    real = of_host.Path
    monkeypatch.setattr(of_host, "Path", lambda path: own if path == "/proc/self/cgroup" else real(path))
    assert of_host._of_group(tmp_path, controller, names, 10**9) == [(32000, 64000)]
    (folder / names[0]).write_text("max\n" if version == 2 else "9223372036854771712\n")
    assert of_host._of_group(tmp_path, controller, names, 10**9) == []


def test_memory_reserved_but_unused_by_torch_is_free(monkeypatch):
    for name, value in (
        ("mem_get_info", (2 * GIB, 10 * GIB)),
        ("memory_reserved", 5 * GIB),
        ("memory_allocated", 1 * GIB),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert memory_pressure(memory.gpu_memory("cuda:0")) == 0.4
    assert memory_of(torch.device("cuda:0"))() == (4 * GIB, 10 * GIB), "telemetry says the same"


def test_telemetry_and_memory_pressure_use_the_same_limit(monkeypatch):
    used, whole = memory_of(torch.device("cpu"))()
    assert 1e6 < used < whole <= host_memory()[1] or whole < host_memory()[1]
    limit = whole // 3
    monkeypatch.setattr(
        of_host, "_of_group", lambda top, controller, names, whole: [(limit - 1, limit)] if controller else []
    )
    assert memory_of(torch.device("cpu"))()[1] == host_memory()[1] == limit, "of cgroups 1 too"


# -- backoff ---------------------------------------------------------------------------------------


def calm():
    return 1, 10


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), None],
    ids=["gpu", "python", "torch on a CPU"],
)
@pytest.mark.parametrize("most, sizes", [(1, [1] * 11), (3, [2] * 5 + [1]), (5, [5, 5, 1]), (11, [11])])
def test_a_batch_is_halved_until_it_fits_and_results_are_in_order(monkeypatch, error, most, sizes):
    held, given_back = [], []
    monkeypatch.setattr(memory.gc, "collect", lambda: given_back.append(1))

    def call(rows):
        held.append(rows)
        if rows.stop - rows.start > most:
            if error is None:
                torch.empty(10**15)
            raise error
        return list(range(100))[rows]

    done = with_batch_backoff(call, 11, source=calm)
    assert [row for part in done.results for row in part] == list(range(11)) and list(done.sizes) == sizes
    assert (
        len(held) == len(sizes) + done.n_out_of_memory
        and done.n_pressed == 0
        and len(given_back) == done.n_out_of_memory
    )


def test_pressure_halves_a_batch_early_and_never_stops_a_single_sequence(monkeypatch):
    monkeypatch.setattr(memory.gc, "collect", lambda: None)
    pressure = iter([0.5, 0.95, 0.95, 0.2] + [0.99] * 99)
    done = with_batch_backoff(
        lambda rows: rows, 16, size=8, limit=0.9, source=lambda: (int(1000 * next(pressure)), 1000)
    )
    assert done.sizes == (8, 2, 1, 1, 1, 1, 1, 1) and done.n_pressed == 3 and done.n_out_of_memory == 0
    assert [done.results[1], done.results[-1]] == [slice(8, 10), slice(15, 16)]


def test_single_sequence_out_of_memory_and_other_errors_are_raised():
    def never(rows):
        raise MemoryError("one row")

    def broken(rows):
        raise RuntimeError("something else")

    with pytest.raises(MemoryError, match="one row"):
        with_batch_backoff(never, 4, source=calm)
    with pytest.raises(RuntimeError, match="something else"):
        with_batch_backoff(broken, 4, source=calm)
    assert not is_out_of_memory(RuntimeError("x")) and with_batch_backoff(never, 0, source=calm).results == ()
    for wrong, words in (
        ({"n": -1}, "n is -1"),
        ({"n": 2, "size": 0}, "size is 0"),
        ({"n": 2, "limit": 0.0}, "limit is"),
    ):
        with pytest.raises(ConfigError, match=words):
            with_batch_backoff(never, source=calm, **wrong)


# -- checkpointing ---------------------------------------------------------------------------------

CONFIG = BemConfig(
    rank=3, width=6, chunk_tokens=4, prefix_tokens=8, sites=("q", "o", "down"), level="auto", auto_limits=(10, 15)
)
IDS = torch.randint(3, VOCAB, (2, 19), generator=torch.Generator().manual_seed(0))


def trained(checkpointed):
    """Gradients by name, the loss, and what was written to the state, each time."""
    model, appended, append = make_host(), [], ControllerState.append
    with (
        pytest.MonkeyPatch.context() as patch,
        randomise(attach_bem(model, CONFIG, checkpoint_controller=checkpointed)) as bem,
    ):
        patch.setattr(
            ControllerState, "append", lambda state, *given: appended.append(given[0].detach()) or append(state, *given)
        )
        out = model(IDS, labels=IDS)
        out.loss.backward()
        return {name: p.grad for name, p in bem.named_parameters()}, out.loss.detach(), appended


def test_checkpointed_controller_has_equal_gradients_and_reads_once():
    (grads, loss, [read]), (expected, plain, [whole]) = trained(True), trained(False)
    assert torch.equal(loss, plain) and sum(grad is not None for grad in grads.values()) > 20
    for name, grad in expected.items():
        assert (grad is None) == (grads[name] is None) and (grad is None or torch.equal(grads[name], grad)), name
    assert torch.equal(read, whole) and read.shape[1] == 19


def test_checkpointed_controller_saves_less_for_backward():
    """Values that are saved for the backward pass by the controller, with what a checkpoint keeps instead: its hidden
    states.
    """
    kept = {}
    for checkpointed in (False, True):
        model = make_host()
        with randomise(attach_bem(model, CONFIG, checkpoint_controller=checkpointed)) as bem:
            saved, hidden, parameters = {}, [], {p.data_ptr() for p in bem.parameters()}
            bem.controller.register_forward_pre_hook(lambda controller, args, hidden=hidden: hidden.append(args[0]))

            def pack(x, saved=saved, parameters=parameters):
                if x.data_ptr() not in parameters:
                    saved[x.untyped_storage().data_ptr(), x.shape] = x  # held, so that no other takes its place
                return x

            ran = bem.controller.route
            bem.controller.route = lambda *args, ran=ran, pack=pack: run_under(pack, ran, *args)
            model(IDS, use_cache=False)
            kept[checkpointed] = sum(x.numel() for x in saved.values()) + (hidden[0].numel() if checkpointed else 0)
    assert 0 < kept[True] < kept[False] / 3


def run_under(pack, call, *args):
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        return call(*args)


def test_checkpointed_controller_generates_the_same_without_gradients():
    model = make_host()
    with randomise(attach_bem(model, CONFIG, checkpoint_controller=True)) as bem:
        out = model.generate(IDS, max_new_tokens=5, do_sample=False)
    with randomise(attach_bem(model, CONFIG)):
        assert torch.equal(out, model.generate(IDS, max_new_tokens=5, do_sample=False))
    assert bem.controller.checkpointed
