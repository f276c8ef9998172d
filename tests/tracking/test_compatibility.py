"""Every architecture is exact or refused with a reason in every mode; checks docs/compatibility.md.

PROBEMON_WRITE_TABLE=1 python -m pytest tests/tracking/test_compatibility.py        # writes the table anew
"""

import os
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, DynamicCache

import figures
from arrangements import ARRANGEMENTS
from conftest import OLDEST, PAD, make_pack
from oracle import check
from probemon import DynamicProbeManager
from probemon.adapters import ltm  # noqa: F401  # the automatic classes know it then
from probemon.errors import UnsupportedDecoding, UnsupportedModel
from probemon.util.files import write_text_atomically

SIZES = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": PAD,
    "initializer_range": 0.5,
}  # fmt: skip
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 4}
ARCHITECTURES = {
    "llama": {}, "qwen3": {}, "mistral": {"sliding_window": 4}, "gemma3_text": {"query_pre_attn_scalar": 8, **MIXED},
    "gpt2": {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 128}, "gpt_neox": {}, "phi3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.2, **MIXED},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16}, "bloom": {"n_layer": 3, "n_head": 2}, "mamba": {"state_size": 4},
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 2,
    "decoder_start_token_id": PAD, "initializer_factor": 0.5},
    "bart": {"d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
             "decoder_ffn_dim": 24, "decoder_start_token_id": 2, "forced_eos_token_id": None, "init_std": 0.5},
    "probemon_ltm": {"memory_slots": 7, "segment_size": 3, "sliding_window": 5, "memory_dim": 8},
}  # fmt: skip
PROMPT = torch.tensor([[1, 44, 3, 17, 8]])
BATCH = torch.tensor([[PAD, PAD, 1, 5, 9], [1, 44, 3, 17, 8], [PAD, 1, 21, 22, 23]])
GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True, "temperature": 1.5}
MODES = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "padded batch": {"batch": True, **GREEDY},
    "early end": {"batch": True, "eos": True, **GREEDY},
    "2 sequences": {"batch": True, "num_return_sequences": 2, **SAMPLED},
    "no cache": {"batch": True, "use_cache": False, **GREEDY},
    "second turn": {"turns": True, **GREEDY},
    "chunked": {"batch": True, "prefill_chunk_size": 2, **GREEDY},
    "beams": {"batch": True, "num_beams": 3, **GREEDY},
    "beam sample": {"batch": True, "num_beams": 3, **SAMPLED},
    "draft model": {"draft": True, **GREEDY},
    "prompt lookup": {"prompt_lookup_num_tokens": 3, "repetition_penalty": 0.2, "eos_token_id": 61, **GREEDY},
    "early exit": {"assistant_early_exit": 2, **GREEDY},
    "static cache": {"batch": True, "cache_implementation": "static", **GREEDY},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4, **GREEDY},
    "guidance": {"guidance_scale": 2.0, **GREEDY},
}  # fmt: skip
NEW = 8
HOST_ERRORS = (ValueError, NotImplementedError, RuntimeError, AttributeError, TypeError, IndexError)
TABLE: dict[str, dict[str, str]] = {}
FOUND: dict[str, str] = {}


def make(name, seed=0):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(name, **{**SIZES, **ARCHITECTURES[name]})
    return (AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM).from_config(config).eval()


@pytest.fixture(scope="module", params=ARCHITECTURES)
def host(request, tmp_path_factory):
    model = make(request.param)
    pack = make_pack(tmp_path_factory.mktemp("packs") / "random", model, sites=("resid_post.0", "resid_post.2"))
    return request.param, model, DynamicProbeManager(pack, keep_top_k=6)


def generate(name, model, run_in, mode):
    """Runs one mode inside `run_in`; `(run, out, [(row, first column, turns, encoder's ids), ...])` where the oracle
    should look.
    """
    options = dict(MODES[mode])
    batch, eos, turns, draft = (options.pop(key, False) for key in ("batch", "eos", "turns", "draft"))
    common = {"max_new_tokens": NEW, "pad_token_id": PAD, "eos_token_id": options.pop("eos_token_id", None)}
    if draft:
        options["assistant_model"] = make(name, seed=0)
        options["assistant_model"].get_output_embeddings().weight.data.mul_(
            1 + 0.3 * torch.randn(61, 1, generator=torch.Generator().manual_seed(0))
        )
    # An encoder counts its positions from the left, padding included, so an encoder-decoder's batch is padded on the
    # right.
    rows = (
        torch.tensor([[*row[row != PAD], *row[row == PAD]] for row in BATCH])
        if model.config.is_encoder_decoder
        else BATCH
    )
    inputs = {"input_ids": rows, "attention_mask": (rows != PAD).long()} if batch else {"input_ids": PROMPT}
    if eos:
        bare = model.generate(**inputs, **common, **GREEDY)
        common["eos_token_id"] = int(bare[0, -6])
    torch.manual_seed(6)
    with run_in as run:
        if turns:
            cache = DynamicCache(config=model.config)
            first = model.generate(PROMPT, past_key_values=cache, **common, **options)
            ids = torch.cat([first, torch.tensor([[30, 31]])], dim=1)
            out = model.generate(ids, past_key_values=cache, **common, **options)
            return run, out, [(0, 0, [(5, NEW - 1), (3, NEW - 1)], None)]
        out = model.generate(**inputs, **common, **options)
    lines = []
    each = len(out) // len(inputs["input_ids"])
    for row, line in enumerate(out.tolist()):
        prompt = inputs["input_ids"][row // each]
        first, width, encoder = int((prompt == PAD).sum()), 5, None
        if model.config.is_encoder_decoder:
            first, width, encoder = 0, 1, prompt[prompt != PAD].tolist()
        generated = line[width:]
        n = generated.index(common["eos_token_id"]) + 1 if common["eos_token_id"] in generated else len(generated)
        lines.append((row, first, [(width - first, n - (n == len(generated)))], encoder))
    return run, out, lines


@pytest.mark.filterwarnings("ignore")  # some hosts warn of kernels that are not installed
@pytest.mark.parametrize("mode", MODES)
def test_mode_is_exact_or_refused_with_a_reason(host, mode):
    name, model, manager = host
    try:
        run, out, lines = generate(name, model, manager.attach(model), mode)
    except UnsupportedDecoding as refusal:
        entry = f"refused: {str(refusal).split(' is not supported')[0]}"
    except HOST_ERRORS as error:
        model.config.num_hidden_layers = SIZES[
            "num_hidden_layers"
        ]  # transformers leaves it changed where an early exit fails
        entry = f"refused by transformers: {str(error).splitlines()[0][:90]}"
        with pytest.raises(type(error)):  # without us too
            generate(name, model, Bare(), mode)
        model.config.num_hidden_layers = SIZES["num_hidden_layers"]
    else:
        result = run.result(out)
        for row, first, turns, encoder in lines:
            check(manager, model, result, row, out[row].tolist(), first, turns, encoder)
        assert len({row for row, *_ in lines}) == len(out)
        entry = "exact"
    TABLE.setdefault(name, {})[mode] = entry


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name, sites",
    [
        *((name, ("mlp_out.1", "attn_out.1", "resid_post.0")) for name in ARCHITECTURES),
        *((name, ("attn_out.2",)) for name in ("llama", "gemma3_text", "bart", "mamba")),  # of the last layer, alone
    ],
)
def test_sites_inside_a_layer_are_exact_or_refused(name, sites, tmp_path):
    model = make(name)
    # Not normalised: what attention gives can be near zero, and normalising would blow up the host's own last bits.
    pack = make_pack(tmp_path / "p", model, sites=sites, inputs=[{"site": site, "norm": "none"} for site in sites])
    manager = DynamicProbeManager(pack)
    lacking = {"opt": "mlp_out.1", "bart": "mlp_out.1", "bloom": "", "mamba": "", "t5": ""}.get(name)
    if lacking is not None and any(site.startswith(lacking) for site in sites):
        with pytest.raises(UnsupportedModel, match="|".join(sites)):
            manager.attach(model)
        return
    for mode in ("padded batch", "beams", "prompt lookup"):
        try:
            run, out, lines = generate(name, model, manager.attach(model), mode)
        except HOST_ERRORS as error:
            assert OLDEST or name == "probemon_ltm"  # whose memory takes no token back
            with pytest.raises(type(error)):  # without us too, as the other test says
                generate(name, model, Bare(), mode)
            continue
        for row, first, turns, encoder in lines:
            check(manager, model, run.result(out), row, out[row].tolist(), first, turns, encoder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_arrangement_is_exact_or_refused(name, tmp_path):
    try:
        ARRANGEMENTS[name](tmp_path)
    except UnsupportedDecoding as refusal:
        FOUND[name] = f"refused: {str(refusal).split(' is not supported')[0]}"
    else:
        FOUND[name] = "exact"


class Bare:
    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return None


def test_documented_table_matches_the_outcomes():
    path = Path(__file__).parents[2] / "docs/compatibility.md"
    if OLDEST:
        pytest.skip("the table is of the transformers that is pinned")
    if (
        set(TABLE) != set(ARCHITECTURES)
        or any(set(row) != set(MODES) for row in TABLE.values())
        or set(FOUND) != set(ARRANGEMENTS)
    ):
        pytest.skip("only a part of the table was run")
    notes: list[str] = []
    lines = []
    for name, row in TABLE.items():
        cells = []
        for mode in MODES:
            if row[mode] == "exact":
                cells.append("exact")
            else:
                if row[mode] not in notes:
                    notes.append(row[mode])
                cells.append(f"refused ({notes.index(row[mode]) + 1})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    version = transformers.__version__
    models = f"Tiny random models of three layers, watched at the first and the last, with transformers {version}:"
    head = ["| | " + " | ".join(MODES) + " |", "|---" * (len(MODES) + 1) + "|"]
    ways = [f"| {name} | {FOUND[name]} |" for name in ARRANGEMENTS]
    tables = {
        "modes": [models, "", *head, *lines, "", *(f"{i}. {note}" for i, note in enumerate(notes, 1))],
        "arrangements": ["| | |", "|---|---|", *ways],
    }
    page = path.read_text(encoding="utf-8")
    text = page
    for name, made in tables.items():
        before, mark, after = text.partition(f"<!-- tested: {name} -->\n")
        text = f"{before}{mark}\n{figures.wrapped(made)}\n\n{after[after.index('<!-- end of tested -->') :]}"
    if os.environ.get("PROBEMON_WRITE_TABLE"):
        write_text_atomically(path, text)
        page = text
    assert page == text
