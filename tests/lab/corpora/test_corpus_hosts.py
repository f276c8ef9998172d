"""A corpus is scored by the given model with its adapters, whatever the batching, and resumed only with it."""

import threading

import accelerate
import pandas
import peft
import pytest
import torch
from tokenizers import Tokenizer, models, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    ConvBertConfig,
    ConvBertForMaskedLM,
    DogeConfig,
    DogeForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    FNetConfig,
    FNetForMaskedLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
)

from conftest import HIDDEN, make_model, make_pack
from corpora import LETTERS, make_tokenizer, random_texts
from probemon import DynamicProbeManager
from probemon.adapters.bem import BemConfig, attach_bem
from probemon.adapters.ltm import attach_memory
from probemon.errors import ConfigError, ModelMismatch, UnsupportedModel
from probemon.host.abilities import Abilities
from probemon.host.fingerprint import adapters_fingerprint, fingerprint
from probemon.host.model import longest_input, unwrap
from probemon.lab.corpora.analysis_folder import Analysis
from probemon.lab.corpora.corpus import CorpusScorer, score_documents
from probemon.lab.corpora.documents import read_documents
from probemon.lab.corpora.windows import Reading, Window, encode, shards

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*adapters.*are active:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*weights are others:UserWarning"),
]

TEXT, LONG = "quick brown", "the whale sang under the ship and sank it."
TARGETS = ["q_proj", "v_proj"]


def ids_of(text):
    return [1, *(LETTERS.index(letter) + 4 for letter in text)]


def loud(model, part, seed=3):
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.normal_(std=0.6)
    return model.eval()


def lora(seed=3, **settings):
    return loud(
        peft.get_peft_model(
            make_model(), peft.LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM", **settings)
        ),
        "lora_",
        seed,
    )


def xlora(folder):
    folders = {}
    for name in "01":
        torch.manual_seed(int(name))
        one = peft.get_peft_model(
            make_model(), peft.LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM", init_lora_weights=False)
        )
        one.save_pretrained(folder / name)
        folders[name] = str(folder / name)
    base = make_model()
    base.config.use_cache = False
    config = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=HIDDEN, xlora_depth=1, adapters=folders)
    return loud(peft.get_peft_model(base, config), "internal_xlora_classifier")


KINDS = {
    "bare": lambda folder: make_model(),
    "lora": lambda folder: lora(),
    "activated lora": lambda folder: lora(alora_invocation_tokens=ids_of(LONG)[5:8]),
    "ia3": lambda folder: loud(
        peft.get_peft_model(
            make_model(), peft.IA3Config(target_modules=TARGETS, feedforward_modules=[], task_type="CAUSAL_LM")
        ),
        "ia3_",
    ),
    "road": lambda folder: loud(
        peft.get_peft_model(make_model(), peft.RoadConfig(target_modules=TARGETS, group_size=4, task_type="CAUSAL_LM")),
        "road_",
    ),
    "xlora": xlora,
}


@pytest.mark.parametrize("kind", KINDS)
def test_corpus_is_scored_by_the_given_model_with_its_adapters(kind, tmp_path):
    """Against `output_hidden_states` of that very model, one document at a time; several lengths share its batches."""
    model, manager = (
        KINDS[kind](tmp_path),
        DynamicProbeManager(
            make_pack(tmp_path / "pack", make_model(), rule="independent"), load_threshold=0.0, keep_top_k=0
        ),
    )
    texts = [LONG, TEXT, LONG[4:], LONG[::-1]]
    analysis = manager.analyze(model, make_tokenizer(), texts, out=tmp_path / "out", floor=0.0)
    for at, text in enumerate(texts):
        ids = torch.tensor([ids_of(text)])
        with torch.no_grad():
            truth = model(input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True).hidden_states[
                2
            ][0, 1:]
        expected = manager.score_all(truth)
        rows = analysis.scores(document=at).to_pylist()
        number = {concept["id"]: i for i, concept in enumerate(manager.pack.concepts)}
        assert len(rows) == expected.numel()
        assert max(abs(row["score"] - float(expected[row["position"], number[row["concept"]]])) for row in rows) < 2e-5


@pytest.mark.parametrize("kind", ["xlora", "activated lora"])
def test_adapters_without_their_peft_wrapper_are_refused(kind, tmp_path):
    model, manager = KINDS[kind](tmp_path), DynamicProbeManager(make_pack(tmp_path / "pack", make_model()))
    host = model.get_base_model()
    with pytest.raises(UnsupportedModel, match="PeftModel"):
        manager.analyze(host, make_tokenizer(), [TEXT], out=tmp_path / "out")
    with pytest.raises(UnsupportedModel, match="PeftModel"):
        manager.attach(host)
    with pytest.warns(UserWarning, match="active"):
        manager.attach(model)


SMALL = dict(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    max_position_embeddings=128,
    pad_token_id=0,
    initializer_range=0.5,
)
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [9.0] * 4,
    "original_max_position_embeddings": 24,
}
PADDED_IN = {
    "fnet": lambda: FNetForMaskedLM(FNetConfig(**SMALL)),
    "convbert": lambda: ConvBertForMaskedLM(ConvBertConfig(**SMALL, num_attention_heads=2, embedding_size=16)),
    "doge": lambda: DogeForCausalLM(DogeConfig(**SMALL, num_attention_heads=2, keep_window_size=8)),
    "longrope": lambda: Phi3ForCausalLM(
        Phi3Config(
            **SMALL,
            num_attention_heads=2,
            num_key_value_heads=2,
            original_max_position_embeddings=24,
            rope_parameters=LONGROPE,
        )
    ),
}


@pytest.mark.parametrize("kind", PADDED_IN)
def test_batch_composition_does_not_change_scores(kind, tmp_path):
    torch.manual_seed(0)
    model = PADDED_IN[kind]().eval()
    manager = DynamicProbeManager(
        make_pack(tmp_path / "pack", model, rule="independent"), load_threshold=0.0, keep_top_k=0
    )

    def scores(name, texts):
        rows = (
            manager.analyze(model, make_tokenizer(), texts, out=tmp_path / name, floor=0.0)
            .scores(document=0)
            .to_pylist()
        )
        return torch.tensor([row["score"] for row in rows])

    alone, beside = scores("alone", [TEXT]), scores("beside", [TEXT, LONG, TEXT[::-1]])
    assert len(alone) == len(beside) > 0
    assert (alone - beside).abs().max() < 2e-5


def test_models_that_ignore_padding_are_batched_with_it():
    assert Abilities(make_model()).takes_padding(1024)


def test_windows_fit_the_models_positions(tmp_path):
    """RoBERTa has none for the numbers up to that of its padding; XLNet says -1 for no limit."""
    model = RobertaForMaskedLM(
        RobertaConfig(**{**SMALL, "max_position_embeddings": 34, "pad_token_id": 1}, num_attention_heads=2)
    ).eval()
    assert longest_input(model) == 32
    manager = DynamicProbeManager(make_pack(tmp_path / "pack", model))
    analysis = manager.analyze(model, make_tokenizer(), [LONG], out=tmp_path / "out")
    assert analysis.manifest["totals"]["tokens"] == len(LONG) and analysis.manifest["totals"]["unseen"] == 0
    model.config.max_position_embeddings = -1
    assert longest_input(model) is None


def test_trailing_special_tokens_are_added_only_for_bidirectional_models(tmp_path):
    """As the tokenizer gives it, and as it is watched; documents longer than a window have it after each."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(adds_bos=True)  # <s> text </s>
    for model, ids in (
        (BertForMaskedLM(BertConfig(**SMALL, num_attention_heads=2)).eval(), [*ids_of(TEXT), 2]),
        (make_model(), ids_of(TEXT)),
    ):
        manager = DynamicProbeManager(
            make_pack(tmp_path / type(model).__name__, model, rule="independent"), load_threshold=0.0, keep_top_k=0
        )
        with torch.no_grad():
            expected = manager.score_all(
                model(torch.tensor([ids]), output_hidden_states=True).hidden_states[2][0, 1 : len(TEXT) + 1]
            )
        [scored] = score_documents(manager, model, tokenizer, read_documents([TEXT]), exhaustive=True)
        assert (scored.everything - expected).abs().max() < 2e-5
        scorer = CorpusScorer(manager, model, tokenizer, Reading(Window(8, 2)))
        [shard] = shards(read_documents([LONG]))
        planned = scorer.reader.plan(shard)
        rows, mask, _ = scorer.reader.arrays(planned.batches[0], planned.tokens)
        assert (
            all(
                (row[int(n) - 1] == 2) == (model.config.model_type == "bert")
                for row, n in zip(rows, mask.sum(1), strict=True)
            )
            and rows.shape[1] <= 8
        )


def test_corpus_reads_only_the_forwards_of_its_own_thread(tmp_path):
    """Another thread generates meanwhile, and is between the two layers that are read while a document runs through
    both of them.
    """
    model, tokenizer = make_model(), make_tokenizer()
    manager = DynamicProbeManager(
        make_pack(tmp_path / "pack", model, sites=("resid_post.2", "resid_post.0"), rule="independent")
    )
    alone = manager.analyze(
        model, tokenizer, [TEXT, LONG], out=tmp_path / "alone", floor=0.0, reading=Reading(batch_rows=1)
    )
    between, go_on, done = threading.Event(), threading.Event(), threading.Event()
    ours, n_begun, made = threading.current_thread(), iter(range(99)), []

    def first(module, args):
        if (
            threading.current_thread() is ours and next(n_begun) == 1
        ):  # the second document: its forward may be left early
            go_on.set()
            assert done.wait(60)

    def second(module, args):
        if threading.current_thread() is not ours and not between.is_set():
            between.set()
            assert go_on.wait(60)

    def generate():
        ids = torch.tensor([ids_of(TEXT)]).flip(1)  # as long as the document, and other states
        made.append(model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0))
        done.set()

    handles = (
        model.model.layers[0].register_forward_pre_hook(first),
        model.model.layers[1].register_forward_pre_hook(second),
    )
    other = threading.Thread(target=generate)
    other.start()
    assert between.wait(60)
    beside = manager.analyze(
        model, tokenizer, [TEXT, LONG], out=tmp_path / "beside", floor=0.0, reading=Reading(batch_rows=1)
    )
    other.join()
    for handle in handles:
        handle.remove()
    assert made[0].shape[1] > len(TEXT) + 1
    assert [alone.scores(document=at).to_pylist() for at in (0, 1)] == [
        beside.scores(document=at).to_pylist() for at in (0, 1)
    ]


def test_adapter_with_active_dropout_is_refused(tmp_path):
    manager = DynamicProbeManager(make_pack(tmp_path / "pack", make_model()))
    model = peft.get_peft_model(
        make_model(), peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=TARGETS, task_type="CAUSAL_LM")
    )  # the host itself is in eval mode
    with pytest.raises(ConfigError, match=r"lora_dropout.*model\.eval\(\)"):
        manager.analyze(model, make_tokenizer(), [TEXT], out=tmp_path / "out")
    manager.analyze(model.eval(), make_tokenizer(), [TEXT], out=tmp_path / "out")


ADAPTERS = {
    "ia3": lambda: peft.IA3Config(target_modules=TARGETS, feedforward_modules=[], task_type="CAUSAL_LM"),
    "loha": lambda: peft.LoHaConfig(r=2, target_modules=TARGETS, task_type="CAUSAL_LM"),
    "vera": lambda: peft.VeraConfig(r=2, target_modules=TARGETS[:1], task_type="CAUSAL_LM"),
    "oft": lambda: peft.OFTConfig(oft_block_size=4, target_modules=TARGETS[:1], task_type="CAUSAL_LM"),
    "a part that is saved whole": lambda: peft.LoraConfig(
        r=2, target_modules=TARGETS, modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    ),
    "tokens": lambda: peft.LoraConfig(r=2, target_modules=TARGETS, trainable_token_indices=[5], task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapter_fingerprint_covers_every_adapter_value_and_no_model_value(kind):
    bare, model = make_model(), peft.get_peft_model(make_model(), ADAPTERS[kind]()).eval()
    host = unwrap(model)
    before = adapters_fingerprint(model, host)
    assert before and fingerprint(host) == fingerprint(bare) and not adapters_fingerprint(bare, bare)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert trained
    for parameter in trained:
        with torch.no_grad():
            parameter.view(-1)[-1] += 1e-3
        after = adapters_fingerprint(model, host)
        assert after != before and fingerprint(host) == fingerprint(bare)
        before = after


def test_fingerprints_of_offloaded_models_and_adapters_are_unchanged():
    """Its tensors lie elsewhere, and are others while they are looked at."""
    bare, model = make_model(), lora()
    expected = adapters_fingerprint(model, unwrap(model))
    accelerate.cpu_offload(model)
    assert any(parameter.device.type == "meta" for parameter in model.parameters())
    assert adapters_fingerprint(model, unwrap(model)) == expected and fingerprint(unwrap(model)) == fingerprint(bare)


class Killed(Exception):
    pass


def begun(manager, model, out, texts, **how):
    def kill(n_documents, n_tokens):
        if (out / "shards" / "00000.json").exists():
            raise Killed

    with pytest.raises(Killed):
        manager.analyze(model, make_tokenizer(), texts, out=out, floor=0.0, progress=kill, **how)


def steered(seed):
    model = make_model()
    bem = attach_bem(model, BemConfig(rank=4, spectral_cap=None))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in bem.updates.parameters():
            parameter.normal_(std=0.5)
    return model, bem


def remembering(seed):
    model = make_model()
    attached = attach_memory(model, layer=0, slots=4, segment=3)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in attached.memory.parameters():
            parameter.normal_()
    return model, attached


def test_resume_refuses_another_adapter(tmp_path):
    manager, texts = (
        DynamicProbeManager(make_pack(tmp_path / "pack", make_model(), rule="independent")),
        random_texts(1100, longest=12),
    )
    begun(manager, lora(1), tmp_path / "lora", texts)
    for other in (lora(2), lora(1, lora_alpha=9), make_model()):
        with pytest.raises(ConfigError, match="host"):
            manager.analyze(other, make_tokenizer(), texts, out=tmp_path / "lora", floor=0.0, resume=True)
    assert manager.analyze(lora(1), make_tokenizer(), texts, out=tmp_path / "lora", floor=0.0, resume=True).manifest[
        "complete"
    ]


OURS = {"bem": steered, "memory": remembering}


@pytest.mark.parametrize("name", OURS)
def test_resume_refuses_another_bem_or_memory_adapter(name, tmp_path, monkeypatch):
    monkeypatch.setattr("probemon.lab.corpora.windows.SHARD_DOCUMENTS", 5)
    manager = DynamicProbeManager(make_pack(tmp_path / "pack", make_model(), rule="independent"))
    texts, put_on, out = random_texts(15, longest=12), OURS[name], tmp_path / "out"
    how = {"floor": 0.0, "reading": Reading(batch_rows=1)}  # a memory takes no padding after a row
    model, ours = put_on(1)
    with ours:
        begun(manager, model, out, texts, reading=how["reading"])
    with pytest.raises(ConfigError, match="host"):
        manager.analyze(model, make_tokenizer(), texts, out=out, resume=True, **how)
    other, others = put_on(2)
    with others, pytest.raises(ConfigError, match="host"):
        manager.analyze(other, make_tokenizer(), texts, out=out, resume=True, **how)
    same, again = put_on(1)
    with again:
        assert manager.analyze(same, make_tokenizer(), texts, out=out, resume=True, **how).complete


@pytest.mark.parametrize("name", OURS)
def test_bem_and_memory_adapters_are_detected_online(name, tmp_path):
    manager = DynamicProbeManager(make_pack(tmp_path / "pack", make_model()))
    model, ours = OURS[name](1)
    with ours:
        with pytest.raises(ModelMismatch, match=name):
            manager.attach(model, strict=True)
        with pytest.warns(UserWarning, match=rf"adapters \['{name}'\] are active"), manager.attach(model) as run:
            out = model.generate(torch.tensor([ids_of(TEXT)]), max_new_tokens=2, do_sample=False)
    assert run.result(out).host.adapters == (name,)
    with manager.attach(model, strict=True):
        pass


def test_resume_refuses_another_site_or_other_special_tokens(tmp_path):
    model, texts = make_model(), random_texts(1100, longest=12)
    first, second = (
        DynamicProbeManager(make_pack(tmp_path / site, model, sites=(site,), rule="independent"))
        for site in ("resid_post.1", "resid_post.2")
    )
    begun(first, model, tmp_path / "out", texts)
    with pytest.raises(ConfigError, match="pack"):
        second.analyze(model, make_tokenizer(), texts, out=tmp_path / "out", floor=0.0, resume=True)
    otherwise = make_tokenizer()
    otherwise.bos_token = "q"
    with pytest.raises(ConfigError, match="around"):
        first.analyze(model, otherwise, texts, out=tmp_path / "out", floor=0.0, resume=True)


def test_tokenizer_that_drops_letters_is_aligned_correctly(tmp_path):
    """Its template is seen on a text that it does not leave out: "a" is none of these letters."""
    backend = Tokenizer(
        models.BPE(
            vocab={"<pad>": 0, "<s>": 1, "</s>": 2}
            | {letter: 4 + i for i, letter in enumerate("ACDEFGHIKLMNPQRSTVWY")},
            merges=[],
        )
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    for letters in ("ACDEFG", "WYW"):
        tokens = encode(tokenizer, letters, after=True)
        assert (
            tokens.prefix == (1,)
            and tokens.suffix == (2,)
            and tokens.ids.tolist() == [tokenizer.convert_tokens_to_ids(letter) for letter in letters]
        )
        assert tokens.start.tolist() == list(range(len(letters)))
    backend.model = models.BPE(vocab={"<pad>": 0, "<s>": 1, "</s>": 2}, merges=[])
    with pytest.raises(ConfigError, match="is unknown"):
        encode(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>"), "ACD")


def test_ranks_with_different_documents_are_refused(tmp_path):
    model, manager = make_model(), DynamicProbeManager(make_pack(tmp_path / "pack", make_model()))
    texts = [f"{text}{i % 7}" for i, text in enumerate(random_texts(512, longest=12))]
    manager.analyze(model, make_tokenizer(), texts, out=tmp_path / "out", rank=0, world_size=2)
    with pytest.raises(ConfigError, match=r"document 0 .* has changed .* every rank the same documents"):
        manager.analyze(model, make_tokenizer(), texts[::-1], out=tmp_path / "out", rank=1, world_size=2, resume=True)
    assert not Analysis.open(tmp_path / "out", unfinished=True).manifest.get("complete")


def test_data_frame_is_refused_as_documents():
    with pytest.raises(ConfigError, match=r"df\.to_dict"):
        read_documents(pandas.DataFrame({"id": ["a"], "text": ["the whale sang"]}))


@pytest.mark.parametrize("site", ["mlp_out.1", "attn_out.1"])
def test_later_in_place_additions_do_not_change_read_states(site, tmp_path):
    """Falcon's layers add what attention gave to the very tensor that the feed-forward block gave."""
    torch.manual_seed(0)
    host = loud(FalconForCausalLM(FalconConfig(**SMALL, num_attention_heads=2, parallel_attn=True)), "weight")
    pack = make_pack(tmp_path / "pack", host, rule="independent", sites=(site,))
    manager, tokenizer = DynamicProbeManager(pack, load_threshold=0.0, keep_top_k=0), make_tokenizer()
    ids, seen = torch.tensor([ids_of(TEXT)]), []
    layer = host.transformer.h[1]
    block = layer.mlp if site == "mlp_out.1" else layer.self_attention
    handle = block.register_forward_hook(
        lambda module, args, output: seen.append((output[0] if isinstance(output, tuple) else output).clone())
    )
    with torch.no_grad(), manager.attach(host) as run:
        host(ids, use_cache=False)
    handle.remove()
    states = seen[0].flatten(0, -2)
    oracle = manager.score_all(states[1:])
    [scored] = score_documents(manager, host, tokenizer, read_documents([TEXT]), exhaustive=True)
    assert (scored.everything - oracle).abs().max() < 2e-5
    online = run.result(ids).scores
    assert abs(online.active_scores(1) - oracle[0].numpy()[online.active(1)]).max() < 2e-5
    collected = manager.collect(host, tokenizer, [{"text": TEXT, "labels": []}], tmp_path / "states")
    assert (
        collected.states(site)[torch.arange(len(TEXT))].float() - states[1:]
    ).abs().max() < 2e-3 * states.abs().max()
